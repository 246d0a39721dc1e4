"""Options and output that the commands share."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

Thing = TypeVar("Thing")

LEFT = ("topology", "rule", "study", "engine")  # headings of words; all others are of numbers
STRONG = {"rule": "bold"}
WIDER = "a wider terminal, or --json, shows more columns"


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


def words(text: str) -> list[str]:
    """The parts of a list from the command line."""
    return [word.strip() for word in text.split(",") if word.strip()]


def option(help_: str, *names: str, parser: Callable[[str], object] = whole) -> Any:
    """An option that takes a number."""
    return typer.Option(*names, help=help_, parser=parser, metavar="X" if parser is number else "N")


def text(help_: str, *names: str, metavar: str = "NAME") -> Any:
    """An option that takes a text."""
    return typer.Option(*names, help=help_, metavar=metavar)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Data = Annotated[Path | None, text("Folder of Fashion-MNIST's four files (else looked for).", "--data", metavar="DIR")]


def console() -> Console:
    """Where tables go."""
    # Into a pipe or a file rich would squeeze everything into 80 columns.
    return Console(width=None if sys.stdout.isatty() else 140)


def note(console: Console, line: str, style: str = "dim") -> None:
    """Print a line as it is."""
    console.print(line, style=style, markup=False, highlight=False)


def command_line() -> str:
    """What was typed, to be kept with the results."""
    return shlex.join(["klatsch", *sys.argv[1:]])


def print_json(content: Mapping[str, object]) -> None:
    """Print for programs."""
    print(json.dumps(content, indent=2, allow_nan=False))


def print_table(
    console: Console,
    title: str,
    columns: Mapping[str, Callable[[Thing], str]],
    things: Sequence[Thing],
    expendable: Sequence[str],
    section: Callable[[Thing], object] | None = None,
) -> list[str]:
    """Print a line per thing; returns the headings shown, since a narrow terminal loses columns, not digits.

    Headings that are `expendable` may go, the first one first; where `section` changes, a line is drawn.
    """
    kept, gone = list(columns), list(expendable)

    def table() -> Table:
        shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in kept:
            left = heading in LEFT
            shown.add_column(heading, justify="left" if left else "right", style=STRONG.get(heading, ""), no_wrap=True)
        for thing, following in zip(things, [*things[1:], None], strict=True):
            last = section is not None and following is not None and section(following) != section(thing)
            shown.add_row(*(columns[heading](thing) for heading in kept), end_section=last)
        return shown

    unlimited = console.options.update(max_width=10_000)
    while gone and Measurement.get(console, unlimited, table()).maximum > console.width:
        if (heading := gone.pop(0)) in kept:
            kept.remove(heading)
    console.print(table())
    return kept
