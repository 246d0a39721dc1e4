"""`python -m klatsch` is the command `klatsch`."""

import sys
from typing import NoReturn

from klatsch.extras import MissingError


def main() -> NoReturn:
    """Run the command line, or say what it lacks."""
    try:
        from klatsch import cli
    except MissingError as error:
        print(f"klatsch: error: {error}", file=sys.stderr)
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
