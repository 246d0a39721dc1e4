"""The paper's figures and tables from what a store holds, with verdicts on what the paper says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from klatsch.paper import figures, image_figures, image_verdicts, tables, verdicts
from klatsch.paper.claims import Verdict
from klatsch.paper.pages import Page, edge_note, table_of
from klatsch.paper.targets import FIGURE_OF, IMAGE_TARGETS
from klatsch.study.cases import Case, LeftOut, expand, headline_of
from klatsch.study.grids import counted
from klatsch.study.spec import Study
from klatsch.study.store import Remembered, Store
from klatsch.study.summary import Row, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES: dict[str, Callable[[], Page]] = {"table1": tables.table_1, "table2": tables.table_2}
TARGETS = ("fig1", "fig2", "fig3", *FIGURE_OF, "beyond", "images-beyond", *TABLES)
CURVES = (4, 9, 25, 49, 100)  # sizes whose course is drawn: all nine would hide each other

IMAGE_TITLES = {
    "fig2": "Figure 2: test accuracy on Fashion-MNIST over the epochs",
    "fig3": "Figure 3: final test accuracy on Fashion-MNIST against the number of machines",
    "images-beyond": "Beyond the paper: other rules on Fashion-MNIST",
}
IMAGE_NOTES = (
    "Where the paper is silent: 32 images per node and round, every node goes through its own images in a new order in "
    "every epoch, constant learning rate, LeNet with GroupNorm after each convolution, all nodes start equal.",
    "D2 mixes with (I + P) / 2, which suits it on every symmetric graph; on the Base-2 graph, which changes from round "
    "to round, it is not defined and run all the same. An accuracy of 0 means that a run diverged.",
)
BANDS = "bands reach from the smallest to the largest seed."
NOISE = f"sigma is noise, zeta is heterogeneity; {BANDS}"


def page_of(remembered: Remembered, store: Store, expanded: tuple[list[Case], list[LeftOut]] | None = None) -> Page:
    """The page of a study, from the runs that the store holds so far; `expanded` where that was done already."""
    study = remembered.study
    cases, left_out = expanded or found(remembered, store)
    rows = summarize([(case.key, case) for case in cases], store)
    facts = (*_facts(remembered), _when_and_where(cases, store))
    if not rows:
        return Page(study.name, _title(remembered), facts, (), (), (), command=remembered.origin.command)
    drawn, said = _drawn(remembered, rows)
    if not {case.key for case in cases} <= store.done():
        said = [replace(v, holds=None, figures=("not all of its runs are finished", *v.figures)) for v in said]
    header, table = table_of(rows)
    reasons = dict.fromkeys(item.reason for item in left_out)
    return Page(
        name=study.name,
        title=_title(remembered),
        facts=facts,
        figures=tuple(drawn),
        header=header,
        table=table,
        verdicts=tuple(said),
        notes=(
            *edge_note(rows),
            *(IMAGE_NOTES if remembered.origin.kind in IMAGE_TARGETS else ()),
            *(f"Left out: {reason}" for reason in reasons),
        ),
        command=remembered.origin.command,
    )


def found(remembered: Remembered, store: Store) -> tuple[list[Case], list[LeftOut]]:
    """The runs of a study, and what is left out."""
    study = remembered.study
    if remembered.sources is None:  # of 0.1, where D2 could be lazy on some graphs and not on others: see `before`
        cases, left_out = expand(study.model_copy(update={"leave_out": True}))
        done = store.done()
        cases = [case for case in cases if case.key in done or "lazy" not in case.rule_options]
        return cases, left_out if study.leave_out else []
    return expand(study, remembered.sources)


def _title(remembered: Remembered) -> str:
    kind, scale = remembered.origin.kind, remembered.origin.scale
    if kind in IMAGE_TITLES:
        return f"{IMAGE_TITLES[kind]} ({scale} scale)"
    if kind == "fig1":
        return f"Figure 1: final error against the number of machines ({scale} scale)"
    if kind in FIGURE_OF:
        return f"Figure {kind[-1]}: convergence on {FIGURE_OF[kind]} ({scale} scale)"
    return (
        f"Beyond the paper: other rules on the same axes ({scale} scale)" if kind == "beyond" else remembered.study.name
    )


def _drawn(remembered: Remembered, rows: Sequence[Row]) -> tuple[list[tuple[str, Figure]], list[Verdict]]:
    """The figures of a study, with the names of their files, and what is said of them."""
    study, kind, title = remembered.study, remembered.origin.kind, _subtitle(remembered.study)
    if kind == "fig1":
        look = figures.colour_of_topology(rows)
        return [(study.name, figures.error_against_nodes(rows, title, look))], verdicts.figure_1(rows)
    if kind in FIGURE_OF:
        shown = [row for row in rows if row.nodes in CURVES] or rows
        drawn = figures.error_against_rounds(shown, title, figures.colour_of_size(shown))
        return [(study.name, drawn)], verdicts.figures_4_to_6(rows, FIGURE_OF[kind])
    if kind == "fig2":
        return [(study.name, image_figures.accuracy_against_epochs(rows, title))], image_verdicts.figure_2(rows)
    if kind == "fig3":
        return [(study.name, image_figures.accuracy_against_nodes(rows, title))], image_verdicts.figure_3(rows)
    if kind == "images-beyond":
        return [(study.name, image_figures.accuracy_against_epochs(rows, title))], image_verdicts.beyond(rows)
    if kind == "beyond":
        return [(study.name, figures.error_against_nodes(rows, title))], verdicts.beyond(rows)
    found = []
    if len({row.nodes for row in rows}) > 1:
        found.append((f"{study.name}-nodes", figures.error_against_nodes(rows, title)))
    most = max(row.nodes for row in rows)
    curves = [row for row in rows if row.nodes == most]  # of the largest size: all of them would be too many panels
    found.append((f"{study.name}-rounds", figures.error_against_rounds(curves, title)))
    return found, []


def _facts(remembered: Remembered) -> tuple[str, ...]:
    study = remembered.study
    grids: dict[tuple[float, ...], list[str]] = {}
    for rule, grid in study.grids:
        grids.setdefault(grid, []).append(rule)
    rates = "; ".join(
        (f"{', '.join(names)}: " if len(grids) > 1 else "") + ", ".join(f"{lr:g}" for lr in grid)
        for grid, names in grids.items()
    )
    headline = headline_of(study.problem.name, (remembered.sources or {}).get(study.problem.name))
    best = f"largest mean final {headline.metric}" if headline.largest else "smallest mean final error"
    shown = f"{headline.text[:1].upper()}{headline.text[1:]}" if headline.largest else f"Error: {headline.text}"
    return (
        f"{study.problem.label}, {study.length}, {counted(len(study.seeds), 'seed')}, {study.dtype}. Learning rates "
        f"{rates}. The one with the {best} over the seeds is chosen for each rule, graph, size and setting.",
        f"{shown}; {NOISE if study.problem.name == 'least-squares' else BANDS}",
    )


def _when_and_where(cases: Sequence[Case], store: Store) -> str:
    keys = {case.key for case in cases}
    runs = [facts for _, facts in store.runs() if facts["key"] in keys]
    if not runs:
        return f"None of its {len(cases):,} runs is finished."
    places = {(json.loads(run["environment"])["processor"], json.loads(run["environment"])["torch"]) for run in runs}
    done = f"{len(runs):,} runs" if len(runs) == len(cases) else f"{len(runs):,} of {len(cases):,} runs"
    where = " and ".join(f"{processor}, torch {torch}" for processor, torch in sorted(places))
    seconds, last = sum(run["seconds"] for run in runs), max(run["finished"] for run in runs)
    return f"{done} on {where}: {seconds:,.0f} s of simulation, finished {clock(last)}."


def clock(moment: str) -> str:
    """A moment of the store for people."""
    return f"{moment[:16].replace('T', ' ')} UTC"


def _subtitle(study: Study) -> str:
    return f"{study.problem.label}, {study.length}, {counted(len(study.seeds), 'seed')}, {study.choice}"
