"""`klatsch list`: everything that has a name."""

from __future__ import annotations

from rich.table import Table

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.cli.app import app


@app.command(name="list", help="List the rules (with their options beside lr), topologies and problems.")
def list_() -> None:
    """List everything that has a name."""
    console = terminal.console()
    tables = {"rules": catalogue.RULES, "topologies": catalogue.TOPOLOGIES, "problems": catalogue.PROBLEMS}
    for title, lines in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        table.add_column(style="dim")
        for name, line in lines.items():
            table.add_row(name, line, ", ".join(catalogue.OPTIONS[name]) if lines is catalogue.RULES else "")
        console.print(table, "")
    console.print(catalogue.SILENCE, style="dim", markup=False, highlight=False)
