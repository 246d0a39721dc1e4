"""A page of results: figures, the table of their numbers, verdicts; as files, and as parts of a report."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from klatsch import pictures
from klatsch.files import save
from klatsch.paper.claims import Verdict
from klatsch.study.grids import shown
from klatsch.study.summary import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Page:
    """What there is to say about one study, figure or table."""

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
    files = []
    for name, figure in page.figures:
        for suffix in FORMATS:
            files.append(folder / f"{name}{suffix}")
            pictures.save(figure, files[-1], dpi=160)
    for suffix, text, kind in ((".csv", as_csv(page), "CSV"), (".md", as_markdown(page), "Markdown")):
        files.append(folder / f"{page.name}{suffix}")
        save(files[-1], text.encode(), kind)
    return files


def as_csv(page: Page) -> str:
    """The table of numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(page.header)
    writer.writerows(page.table)
    return text.getvalue()


def as_markdown(page: Page) -> str:
    """The whole page."""
    parts = [f"# {page.title}", "\n".join(page.facts)]
    parts += [f"    {page.command}"] if page.command else []
    parts += [f"![{page.title}]({name}.png)" for name, _ in page.figures]
    if page.verdicts:
        lines = []
        for verdict in page.verdicts:
            lines.append(f"- **{verdict.word}**: {verdict.claim} ({verdict.source})")
            lines += [f"  - {figures}" for figures in verdict.figures]
        parts += ["## Verdicts", "\n".join(lines)]
    if page.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in page.notes)]
    rule = "|" + "|".join("---" for _ in page.header) + "|"
    rows = ["| " + " | ".join(row) + " |" for row in (page.header, *page.table)]
    parts += ["## Numbers", "\n".join([rows[0], rule, *rows[1:]])]
    return "\n\n".join(parts) + "\n"


def table_of(rows: Sequence[Row]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The numbers of a study: the header and a line per row."""
    settings = list(dict.fromkeys(name for row in rows for name in row.setting))
    header = ("topology", *settings, "M", "rule", rows[0].title, "from", "to", "lr", "lr at the edge")
    lines = [
        (
            row.topology,
            *(shown(row.setting.get(name, "-")) for name in settings),
            str(row.nodes),
            row.rule,
            *(f"{value:.4g}" for value in (row.value, row.low, row.high)),
            f"{row.lr:g}",
            "yes" if row.at_edge else "no",
        )
        for row in rows
    ]
    return header, tuple(lines)


def edge_note(rows: Sequence[Row]) -> tuple[str, ...]:
    """Which rules would want a learning rate beyond the grid."""
    counts = {
        rule: (sum(row.at_edge for row in rows if row.rule == rule), sum(row.rule == rule for row in rows))
        for rule in dict.fromkeys(row.rule for row in rows)
    }
    texts = [f"{rule} in {edge} of {of}" for rule, (edge, of) in counts.items() if edge]
    if not texts:
        return ()
    return (
        "The chosen learning rate is the smallest or largest of the grid, so that a better one may lie beyond: "
        f"{', '.join(texts)} points.",
    )
