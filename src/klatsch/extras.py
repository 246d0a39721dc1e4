"""The version of klatsch, and the libraries that training does without, with the commands that install them."""

from importlib.util import find_spec

VERSION = "0.2.0"
EXTRAS = {
    **dict.fromkeys(("typer", "rich", "pydantic", "matplotlib", "jinja2"), "klatsch[cli]"),
    "distributed": "klatsch[dask]",
    "pandas": "klatsch[pandas]",
    "pyarrow": "klatsch[parquet]",
    "tensorboard": "klatsch[tensorboard]",
}


class MissingError(ImportError, ValueError):
    """A library is not installed; the message has the command that installs it."""


def need(what: str, *libraries: str) -> None:
    """Refuse what works with libraries of which some are not installed."""
    if missing := [name for name in libraries if find_spec(name) is None]:
        install = EXTRAS.get(missing[0], missing[0])
        raise MissingError(f"{what} needs {', '.join(missing)}: pip install '{install}'", name=missing[0])
