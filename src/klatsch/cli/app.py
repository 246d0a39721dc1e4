"""The command line: thin commands over the library. A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from klatsch.version import VERSION

app = typer.Typer(
    name="klatsch",
    help="Train models over a network of machines that talk only to their neighbours.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """Run the command line; every error that a user can cause ends in one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except (ValueError, OSError) as error:
        code = _complain(str(error))
    except MemoryError:
        code = _complain("not enough memory for a graph of that size; choose fewer nodes")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:  # a usage error; typer brings its own copy of click, or click's, so ask what it can do
        if not hasattr(error, "format_message"):
            raise
        code = _complain(f"{error.format_message()} (see {_command_of(error)} --help)")
    sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train models over a network of machines that talk only to their neighbours."""
    if version:
        print(f"klatsch {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


# --- errors -------------------------------------------------------------------------------------------------------


def _complain(message: str) -> int:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)  # names of files may hold anything
    print(f"klatsch: error: {line}", file=sys.stderr)
    return 2


def _command_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "klatsch"
