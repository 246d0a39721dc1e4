"""A store as one self-contained HTML page: figures, tables, verdicts, the environment, and how to do it again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klatsch import files, pictures
from klatsch.paper.figures import VALUE
from klatsch.paper.pages import Page
from klatsch.paper.reproduce import clock, found, page_of
from klatsch.study.store import Store
from klatsch.version import VERSION


def report(store: Store, path: Path, title: str | None = None) -> list[Page]:
    """Write the report of everything that a store holds; gives the pages that it shows.

    Raises:
        ValueError: the store holds no study that was begun, or the file cannot be written.
    """
    studies = store.studies()
    if not studies:
        raise ValueError(f"{store.path} holds no study; klatsch run and klatsch reproduce put them there")
    expanded = [found(study, store) for study in studies]
    pages = [page_of(study, store, known) for study, known in zip(studies, expanded, strict=True)]
    runs = store.runs()
    shown = {case.key for cases, _ in expanded for case in cases}
    times = sorted(facts["finished"] for _, facts in runs)
    summary = {
        "runs": len(runs),
        "replaced": sum(facts["key"] not in shown for _, facts in runs),
        "diverged": sum(facts["diverged"] for _, facts in runs),
        "seconds": sum(facts["seconds"] for _, facts in runs),
        "first": clock(times[0]) if times else "",
        "last": clock(times[-1]) if times else "",
        "engines": sorted({f"{facts['engine']} on {facts['device']}" for _, facts in runs}),
    }
    html = render(pages, store.environments(), summary, title or f"klatsch: {Path(store.path).name}")
    files.save(path, html.encode(), "HTML")
    return pages


def render(pages: Sequence[Page], environments: Sequence[dict[str, str]], summary: dict[str, Any], title: str) -> str:
    """The page as HTML."""
    try:
        from jinja2 import Environment, PackageLoader
    except ModuleNotFoundError as error:
        raise ValueError("a report needs Jinja: pip install jinja2") from error
    templates = Environment(
        loader=PackageLoader("klatsch.paper"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    pictures_of = {
        page.name: [
            inline_svg(pictures.render(figure, ".svg").decode(), f"{page.name}-{name}") for name, figure in page.figures
        ]
        for page in pages
    }
    return templates.get_template("report.html").render(
        title=title,
        pages=pages,
        pictures=pictures_of,
        environments=environments,
        summary=summary,
        version=VERSION,
    )


def inline_svg(text: str, prefix: str) -> str:
    """An SVG file as part of a page: ids of its own, values to point at, and as wide as the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    svg = re.sub(rf'<g id="{VALUE}([^"]*)">', r'<g class="value"><title>\1</title>', svg)
    prefix = re.sub(r"\W", "-", prefix)
    for pattern in (r'(\bid=")', r'(xlink:href="#)', r"(url\(#)"):
        svg = re.sub(pattern, rf"\1{prefix}-", svg)
    tag, rest = svg.split(">", 1)
    width = re.search(r'width="([\d.]+)pt"', tag)
    # On a phone a figure may be scrolled, and does not shrink below what can be read.
    least = f' style="min-width: {0.72 * float(width.group(1)):.0f}pt"' if width else ""
    tag = re.sub(r' (width|height)="[\d.]+pt"', "", tag)
    return f"{tag}{least}>{rest}"
