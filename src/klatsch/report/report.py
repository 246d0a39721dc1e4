"""`klatsch report`: one HTML file of all that a store holds, a `Page` for each study."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from klatsch import files, pictures
from klatsch.clock import Clock
from klatsch.report import figures
from klatsch.report.pages import Page, edge_note, table_of
from klatsch.report.targets import TARGETS
from klatsch.study.cases import Case, headline_of
from klatsch.study.choices import BESIDE, Row, screened, timed
from klatsch.study.spec import Study
from klatsch.study.store import Remembered, Store
from klatsch.units import counted
from klatsch.version import VERSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BANDS = "bands reach from the smallest to the largest seed"


def page_of(
    remembered: Remembered,
    store: Store,
    showing: str | None = None,
    clock: Clock | None = None,
    across: str = "rounds",
) -> Page:
    """The page of a study, from the runs that the store holds so far.

    Figures, numbers and verdicts are those of the mean of nodes, or of what is `showing`: "merged" or "worst". With a
    clock the numbers have seconds, too, and one more figure shows the course against seconds or bytes (`across`).
    """
    study, origin, target = remembered.study, remembered.origin, TARGETS.get(remembered.origin.kind)
    title = study.name if target is None else f"{target.title} ({origin.scale} scale)"
    runs = screened(study, remembered.cases, store)
    rows, name = timed(runs.rows(store), clock), study.name
    if showing is not None:
        rows, name = [row.showing(showing) for row in rows], f"{study.name}-{showing}"
    facts = (*_facts(remembered), *_shown(showing), _when_and_where(runs.cases, store))
    if not rows:
        return Page(name, title, facts, (), (), (), command=origin.command)
    above = f"{study.problem.label}, {study.length}, {counted(len(study.seeds), 'seed')}, {study.choice}"
    if target is None:
        drawn, verdicts = _figures_of_any(study, rows, above), []
    else:
        draw = {name: target.figure, **{f"{name}-{more}": each for more, each in target.more.items()}}
        drawn = [(file, each(rows, above)) for file, each in draw.items()]
        verdicts = [sentence.check(rows) for sentence in target.sentences]
    if across != "rounds":
        most = [row for row in rows if row.nodes == max(row.nodes for row in rows)]
        drawn = [*drawn, (f"{name}-{across}", figures.error_against_rounds(most, above, across=across))]
    if not {case.key for case in runs.cases} <= store.done():
        verdicts = [replace(v, holds=None, figures=("not all of its runs are finished", *v.figures)) for v in verdicts]
    # The remedy that follows a reason is for studies of one's own.
    reasons = dict.fromkeys(item.reason.partition(";")[0] if target else item.reason for item in remembered.left_out)
    notes = (*edge_note(rows), *(target.notes if target else ()), *(f"Left out: {reason}" for reason in reasons))
    return Page(name, title, facts, tuple(drawn), *table_of(rows), tuple(verdicts), notes, command=origin.command)


def _figures_of_any(study: Study, rows: Sequence[Row], title: str) -> list[tuple[str, Figure]]:
    """The figures of a custom study, with the names of their files."""
    most = max(row.nodes for row in rows)
    largest = [row for row in rows if row.nodes == most]  # all sizes would need too many panels
    rounds = [(f"{study.name}-rounds", figures.error_against_rounds(largest, title))]
    if {row.nodes for row in rows} == {most}:
        return rounds
    return [(f"{study.name}-nodes", figures.error_against_nodes(rows, title)), *rounds]


def _facts(remembered: Remembered) -> tuple[str, str]:
    study = remembered.study
    grids: dict[tuple[float, ...], dict[str, None]] = {}  # with names of rules, once each
    for rule, grid in study.grids:
        grids.setdefault(grid, {})[rule] = None
    rates = "; ".join(
        (f"{', '.join(names)}: " if len(grids) > 1 else "") + ", ".join(f"{lr:g}" for lr in grid)
        for grid, names in grids.items()
    )
    headline = headline_of(study.problem.name, remembered.sources.get(study.problem.name))
    best = f"largest mean final {headline.metric}" if headline.largest else "smallest mean final error"
    chosen_by = "over the seeds" if study.screen is None else f"of short runs ({study.screen.text})"
    chosen = f" The one with the {best} {chosen_by} is chosen for each rule, graph, size and setting."
    shown = f"{headline.text[:1].upper()}{headline.text[1:]}" if headline.largest else f"Error: {headline.text}"
    letters = ["sigma is noise, zeta is heterogeneity"] if study.problem.name == "least-squares" else []
    bands = [BANDS] if len(study.seeds) > 1 else []
    return (
        f"{study.problem.label}, {study.length}, {counted(len(study.seeds), 'seed')}, {study.dtype}. Learning rates "
        f"{rates}.{chosen * any(len(grid) > 1 for grid in grids)}",
        f"{'; '.join([shown, *letters, *bands])}.",
    )


def _shown(showing: str | None) -> tuple[str, ...]:
    if showing is None:
        return ()
    return (f"Shown is the {BESIDE[showing]}, at the learning rates that are chosen for the mean of nodes.",)


def _when_and_where(cases: Sequence[Case], store: Store) -> str:
    keys = {case.key for case in cases}
    runs = [facts for _, facts in store.runs() if facts["key"] in keys]
    if not runs:
        return f"None of its {len(cases):,} runs is finished."
    environments = [json.loads(run["environment"]) for run in runs]
    places = sorted({f"{environment['processor']}, torch {environment['torch']}" for environment in environments})
    done = f"{len(runs):,} runs" if len(runs) == len(cases) else f"{len(runs):,} of {len(cases):,} runs"
    seconds, last = sum(run["seconds"] for run in runs), max(run["finished"] for run in runs)
    return f"{done} on {' and '.join(places)}: {seconds:,.0f} s of simulation, finished {_clock(last)}."


def _clock(moment: str) -> str:
    return f"{moment[:16].replace('T', ' ')} UTC"


# --- HTML -----------------------------------------------------------------------------------------------------------


def report(
    store: Store, path: Path, title: str | None = None, clock: Clock | None = None, across: str = "rounds"
) -> list[Page]:
    """Write the report of everything in a store; returns its pages."""
    from jinja2 import Environment, PackageLoader

    studies = store.studies()
    if not studies:
        raise ValueError(f"{store.path} holds no study; klatsch run and klatsch reproduce put them there")
    pages = [_page(study, store, clock, across) for study in studies]
    runs = [facts for _, facts in store.runs()]
    needed = (screened(each.study, each.cases, store).cases for each in studies)
    shown = {case.key for cases in needed for case in cases}
    times = sorted(facts["finished"] for facts in runs)
    summary = {
        "runs": len(runs),
        "replaced": sum(facts["key"] not in shown for facts in runs),
        "diverged": sum(facts["diverged"] for facts in runs),
        "seconds": sum(facts["seconds"] for facts in runs),
        "first": _clock(times[0]) if times else "",
        "last": _clock(times[-1]) if times else "",
        "engines": sorted({f"{facts['engine']} on {facts['device']}" for facts in runs}),
    }
    drawn = {
        page.name: [
            inline_svg(pictures.render(figure, ".svg").decode(), f"{page.name}-{name}") for name, figure in page.figures
        ]
        for page in pages
    }
    loader = PackageLoader("klatsch.report")
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = templates.get_template("report.html").render(
        title=title or f"klatsch: {Path(store.path).name}",
        pages=pages,
        pictures=drawn,
        environments=store.environments(),
        summary=summary,
        version=VERSION,
    )
    files.save(path, html.encode(), "HTML")
    return pages


def _page(remembered: Remembered, store: Store, clock: Clock | None, across: str) -> Page:
    """The page of a study; a store may say of any study that it is a figure of the paper."""
    try:
        return page_of(remembered, store, clock=clock, across=across)
    except (LookupError, TypeError) as error:
        name, kind = remembered.study.name, remembered.origin.kind
        raise ValueError(f"{name} says that it is {kind}, but its runs do not fit ({error}); run it again") from error


def inline_svg(text: str, prefix: str) -> str:
    """An SVG file as part of a page: with unique ids, tooltips, and as wide as the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    svg = re.sub(rf'<g id="{figures.VALUE}([^"]*)">', r'<g class="value"><title>\1</title>', svg)
    prefix = re.sub(r"\W", "-", prefix)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\1{prefix}-", svg)
    tag, rest = svg.split(">", 1)
    width = re.search(r'width="([\d.]+)pt"', tag)
    # On a phone a figure scrolls instead of shrinking until it is illegible.
    least = f' style="min-width: {0.72 * float(width.group(1)):.0f}pt"' if width else ""
    tag = re.sub(r' (width|height)="[\d.]+pt"', "", tag)
    return f"{tag}{least}>{rest}"
