"""Options and output that the commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console


def whole(text: str | int) -> int:
    """A whole number from the command line."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str | float) -> float:
    """A number from the command line."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def option(help_: str, *names: str, parser: Callable[[str], Any] = whole) -> Any:
    """An option that takes a number."""
    return typer.Option(*names, help=help_, parser=parser, metavar="X" if parser is number else "N")


def console() -> Console:
    """Where tables go."""
    # Into a pipe or a file rich would squeeze everything into 80 columns.
    return Console(width=None if sys.stdout.isatty() else 140)


def print_json(content: dict[str, Any]) -> None:
    """Print for programs."""
    print(json.dumps(content, indent=2, allow_nan=False))
