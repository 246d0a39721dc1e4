"""`Page`: the figures, numbers and verdicts of one study, figure or table; and how it is written to a folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from klatsch import pictures
from klatsch.files import save
from klatsch.report.claims import Verdict
from klatsch.study.choices import BESIDE, Row
from klatsch.study.export import save_csv
from klatsch.units import compact

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Page:
    """The content of one page: a study, figure or table."""

    name: str
    title: str
    facts: tuple[str, ...]  # what was run
    figures: tuple[tuple[str, Figure], ...]  # with the names of their files
    header: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""


def write(page: Page, folder: Path) -> list[Path]:
    """Write a page into a folder: every figure as PNG, SVG and PDF, its numbers as CSV, and all of it as Markdown."""
    drawn = {folder / f"{name}{suffix}": figure for name, figure in page.figures for suffix in FORMATS}
    for file, figure in drawn.items():
        pictures.save(figure, file, dpi=160)
    numbers, text = folder / f"{page.name}.csv", folder / f"{page.name}.md"
    save_csv((page.header, *page.table), numbers)
    save(text, as_markdown(page).encode(), "Markdown")
    return [*drawn, numbers, text]


def as_markdown(page: Page) -> str:
    """The whole page."""
    parts = [f"# {page.title}", "\n".join(page.facts)]
    parts += [f"    {page.command}"] if page.command else []
    parts += [f"![{page.title}]({name}.png)" for name, _ in page.figures]
    if page.verdicts:
        lines = [
            "\n  - ".join((f"- **{verdict.word}**: {verdict.claim} ({verdict.source})", *verdict.figures))
            for verdict in page.verdicts
        ]
        parts += ["## Verdicts", "\n".join(lines)]
    if page.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in page.notes)]
    header, *rows = ("| " + " | ".join(row) + " |" for row in (page.header, *page.table))
    parts += ["## Numbers", "\n".join([header, "|---" * len(page.header) + "|", *rows])]
    return "\n\n".join(parts) + "\n"


def table_of(rows: Sequence[Row]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The numbers of a study: the header and a line per row, with what a node sends over the run."""
    settings = list(dict.fromkeys(name for row in rows for name in row.setting))
    measured = [name for name in BESIDE if not all(math.isnan(row.beside(name)) for row in rows)]
    values = (rows[0].title, "from", "to", *measured)
    clocked = any(row.elapsed is not None for row in rows)
    header = ("topology", *settings, "M", "rule", *values, "lr", "lr at the edge", "MB sent", *["seconds"] * clocked)

    def line(row: Row) -> tuple[str, ...]:
        setting = (compact(row.setting.get(name, "-")) for name in settings)
        values = map(known, (row.value, row.low, row.high, *map(row.beside, measured)))
        edge = "yes" if row.at_edge else "no"
        costs = [known(row.megabytes)] + [known(row.elapsed[-1] if row.elapsed else math.nan)] * clocked
        return row.topology, *setting, str(row.nodes), row.rule, *values, f"{row.lr:g}", edge, *costs

    def known(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.4g}"

    return header, tuple(map(line, rows))


def edge_note(rows: Sequence[Row]) -> tuple[str, ...]:
    """A note on rules that may need a learning rate beyond the grid."""
    points, edges = Counter(row.rule for row in rows), Counter(row.rule for row in rows if row.at_edge)
    texts = [f"{rule} in {edges[rule]} of {count}" for rule, count in points.items() if edges[rule]]
    note = "The chosen learning rate is the smallest or largest of the grid, so that a better one may lie beyond: "
    return (f"{note}{', '.join(texts)} points.",) if texts else ()
