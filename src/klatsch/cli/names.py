"""`klatsch list`: everything that has a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from klatsch import algorithms, problems
from klatsch import topology as topologies
from klatsch.cli import terminal
from klatsch.cli.app import app


@app.command(name="list", help="List the rules, topologies and problems, with a line on each.")
def list_() -> None:
    """List everything that has a name."""
    console = terminal.console()
    tables: dict[str, dict[str, Callable[..., Any]]] = {
        "rules": dict(algorithms.ALGORITHMS),
        "topologies": dict(topologies.TOPOLOGIES),
        "problems": dict(problems.PROBLEMS),
    }
    for title, entries in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, thing in entries.items():
            table.add_row(name, (thing.__doc__ or "").strip().splitlines()[0])
        console.print(table, "")
