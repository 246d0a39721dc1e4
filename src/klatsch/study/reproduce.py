"""The paper's figures and tables from what a store holds, with verdicts on what the paper says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from klatsch.study import figures, tables, verdicts
from klatsch.study.cases import Case, LeftOut, expand
from klatsch.study.pages import Page, edge_note, table_of
from klatsch.study.paper import FIGURE_OF
from klatsch.study.spec import Study
from klatsch.study.store import Remembered, Store
from klatsch.study.summary import Row, summarize

TABLES: dict[str, Callable[[], Page]] = {"table1": tables.table_1, "table2": tables.table_2}
TARGETS = ("fig1", *FIGURE_OF, "beyond", *TABLES)
CURVES = (4, 9, 25, 49, 100)  # sizes whose course is drawn: all nine would hide each other

NOISE = "sigma is noise, zeta is heterogeneity; bands reach from the smallest to the largest seed."


def page_of(remembered: Remembered, store: Store) -> Page:
    """The page of a study, from the runs that the store holds."""
    study = remembered.study
    cases, left_out = expand(study)
    rows = summarize(cases, store)
    if not rows:
        raise ValueError(f"{store.path} holds no finished row of {study.name}; run it first: {remembered.command}")
    facts = (*_facts(study), _when_and_where(cases, store))
    return _page(remembered, rows, left_out, facts)


def _page(remembered: Remembered, rows: Sequence[Row], left_out: Sequence[LeftOut], facts: tuple[str, ...]) -> Page:
    study, kind = remembered.study, remembered.kind
    header, table = table_of(rows)
    drawn, said, title = [], [], study.name
    if kind == "fig1":
        title = f"Figure 1: final error against the number of machines ({remembered.scale} scale)"
        drawn = [(study.name, figures.error_against_nodes(rows, _subtitle(study), figures.colour_of_topology(rows)))]
        said = verdicts.figure_1(rows)
    elif kind in FIGURE_OF:
        shown = [row for row in rows if row.nodes in CURVES]
        title = f"Figure {kind[-1]}: convergence on {FIGURE_OF[kind]} ({remembered.scale} scale)"
        drawn = [(study.name, figures.error_against_rounds(shown, _subtitle(study), figures.colour_of_size(shown)))]
        said = verdicts.figures_4_to_6(rows, FIGURE_OF[kind])
    elif kind == "beyond":
        title = f"Beyond the paper: other rules on the same axes ({remembered.scale} scale)"
        drawn = [(study.name, figures.error_against_nodes(rows, _subtitle(study)))]
        said = verdicts.beyond(rows)
    else:
        title = f"Study {study.name}"
        if len(study.nodes) > 1:
            drawn.append((f"{study.name}-nodes", figures.error_against_nodes(rows, _subtitle(study))))
        drawn.append((f"{study.name}-rounds", figures.error_against_rounds(rows, _subtitle(study))))
    reasons = dict.fromkeys(item.reason for item in left_out)
    return Page(
        name=study.name,
        title=title,
        facts=facts,
        figures=tuple(drawn),
        header=header,
        table=table,
        verdicts=tuple(said),
        notes=(*edge_note(rows), *(f"Left out: {reason}" for reason in reasons)),
        command=remembered.command,
    )


def _facts(study: Study) -> tuple[str, ...]:
    rates = ", ".join(f"{lr:g}" for lr in study.lr)
    return (
        f"{study.problem.name}, {study.steps:,} rounds, {len(study.seeds)} seeds, {study.dtype}. Learning rates "
        f"{rates}: the one with the smallest mean final error over the seeds is chosen for each rule, graph, size and "
        "setting.",
        f"Error: squared distance to the optimum, mean over the nodes; {NOISE}",
    )


def _when_and_where(cases: Sequence[Case], store: Store) -> str:
    keys = {case.key for case in cases}
    runs = [facts for _, facts in store.runs() if facts["key"] in keys]
    places = {(json.loads(run["environment"])["processor"], json.loads(run["environment"])["torch"]) for run in runs}
    done = f"{len(runs):,} runs" if len(runs) == len(cases) else f"{len(runs):,} of {len(cases):,} runs"
    where = " and ".join(f"{processor}, torch {torch}" for processor, torch in sorted(places))
    seconds, last = sum(run["seconds"] for run in runs), max(run["finished"] for run in runs)
    return f"{done} on {where}: {seconds:,.0f} s of simulation, finished {clock(last)}."


def clock(moment: str) -> str:
    """A moment of the store for people."""
    return f"{moment[:16].replace('T', ' ')} UTC"


def _subtitle(study: Study) -> str:
    count = len(study.lr)
    return f"{study.problem.name}, {study.steps:,} rounds, {len(study.seeds)} seeds, best of {count} learning rates"
