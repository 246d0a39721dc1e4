"""Options and output that the commands share."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from klatsch.files import finite

# Headings of words; all others are of numbers.
LEFT = ("topology", "rule", "engine", "property", "meaning", "term", "paper", "klatsch.theory")
STRONG = ("rule", "property")
_stdout: list[TextIO] = []  # that programs read


def whole(text: str | int) -> int:
    """A whole number from the command line, also written as 1e8."""
    try:
        return int(text)
    except ValueError:
        with suppress(ValueError):
            if (value := float(text)).is_integer():
                return int(value)
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str | float) -> float:
    """A number from the command line."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def words(text: str) -> list[str]:
    """The parts of a list from the command line; commas inside brackets are theirs, as in lognormal(0.05, 0.5)."""
    return [word.strip() for word in re.split(r",(?![^(]*\))", text) if word.strip()]


def option(help_: str, *names: str, parser: Callable[[str], object] = whole) -> Any:
    """An option that takes a number."""
    return typer.Option(*names, help=help_, parser=parser, metavar="X" if parser is number else "N")


def text(help_: str, *names: str, metavar: str = "NAME") -> Any:
    """An option that takes a text."""
    return typer.Option(*names, help=help_, metavar=metavar)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Data = Annotated[Path | None, text("Folder with Fashion-MNIST's four files (or search).", "--data", metavar="DIR")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the curves to FILE.png, .svg or .pdf.")]


def console() -> Console:
    """Where tables go."""
    # Into a pipe or a file rich would squeeze everything into 80 columns.
    return Console(width=None if sys.stdout.isatty() else 140, emoji=False)


def note(line: str, style: str = "dim") -> None:
    """Print a line as it is."""
    console().print(line, style=style, markup=False, highlight=False)


def complain(message: str) -> None:
    """Print an error, wrapped on a terminal; logs and programs get one line."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)  # names of files may hold anything
    screen = Console(stderr=True, emoji=False, soft_wrap=not sys.stderr.isatty())
    screen.print(f"klatsch: error: {line}", markup=False, highlight=False)


@contextmanager
def for_programs() -> Iterator[None]:
    """Leave stdout to `print_json`: whatever else is said goes to stderr."""
    _stdout.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout.pop()


def print_json(content: Mapping[str, object]) -> None:
    """Print JSON, in which null is what diverged: it has no infinity."""
    print(json.dumps(finite(content), indent=2, allow_nan=False), file=_stdout[-1])


@contextmanager
def bar() -> Iterator[Callable[[str, float], None] | None]:
    """A function that shows on a terminal what is done, and which share of all; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda text, share: shown.update(task, completed=share, description=text)


def print_table(
    title: str, lines: Sequence[Mapping[str, str]], expendable: Sequence[str] = (), section: str = ""
) -> list[str]:
    """Print lines of texts by their headings; a narrow terminal loses columns, not digits. Returns the headings shown.

    Headings that are `expendable` may go, the first one first; where the text of `section` changes, a line is drawn.
    """
    kept, screen = list(lines[0]), console()

    def table() -> Table:
        shown = Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in kept:
            align: JustifyMethod = "left" if heading in LEFT else "right"
            style = "bold" if heading in STRONG else ""
            shown.add_column(Text(heading), justify=align, style=style, no_wrap=heading != "meaning")
        for line, following in zip(lines, [*lines[1:], lines[-1]], strict=True):
            last = line.get(section) != following.get(section)
            shown.add_row(*(Text(line[heading]) for heading in kept), end_section=last)  # not markup
        return shown

    unlimited = screen.options.update(max_width=10_000)
    for heading in expendable:
        if Measurement.get(screen, unlimited, table()).maximum > screen.width and heading in kept:
            kept.remove(heading)
    screen.print(table())
    if len(kept) < len(lines[0]):
        note("a wider terminal shows more columns")
    return kept
