"""Stragglers: what it brings not to wait for each other, if gradients take now longer, now shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from klatsch.clock import Clock
from klatsch.report import figures
from klatsch.report.claims import Answer, Sentence, asks, clearly_above, factor
from klatsch.report.entries import Content, Sentences, Target
from klatsch.study.choices import Row
from klatsch.study.traffic import elapsed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Seconds of a gradient, 0.1 in the mean.
TIMES = {
    "busy machines": "lognormal(0.1, 0.5)",
    "exponential": "exponential(0.1)",
    "hiccups": "slow(0.05, 11, 0.1)",
    "one slow node": "15*0.08, 0.4",
}
NODES, NETWORK, LATE = 16, "10gbe", 2
ROUNDS = 10_000
RATES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)

SYNCHRONOUS, DELAYED, STALE, PAIRWISE, REDUCED = "in rounds", f"late {LATE}", "stale", "pairwise", "all-reduce"
RINGS: list[Content] = [
    {"name": "ring"},
    {"name": "ring", "late": LATE},
    {"name": "ring", "late": LATE, "meets": [f"stale {times} over {NETWORK}" for times in TIMES.values()]},
    {"name": "ring", "meets": [f"pairwise {times} over {NETWORK}" for times in TIMES.values()]},
]
STUDY: Content = {
    "problem": {"name": "least-squares", "noise": 10.0, "heterogeneity": [0.0, 10.0]},
    "nodes": NODES,
    "record": 100,
    "rules": (
        {"name": "dsgd", "lr": [1e-6, *RATES], "topologies": [*RINGS, "complete"]},
        {"name": "dat", "beta": 0.9, "lr": RATES, "topologies": RINGS},
        {"name": "dat-d2", "beta": 0.9, "lr": RATES, "topologies": RINGS[:3]},  # its correction needs rounds
    ),
}


def way(row: Row) -> str:
    """How its nodes meet."""
    assert row.case is not None, f"{row.rule} on {row.topology} has no runs"
    if row.case.topology == "complete":
        return REDUCED
    meets = row.case.meets
    return meets.split()[0] if meets else DELAYED if row.case.channel.late else SYNCHRONOUS


def timed(rows: Sequence[Row], name: str) -> list[Row]:
    """Rows beside a clock whose gradients take such times; those that do not wait are of these times alone."""
    times = TIMES[name]
    clock, found = Clock(times, NETWORK), []
    for row in rows:
        case = row.case
        if case is not None and (not case.meets or times in case.meets):
            setting = {**row.setting, "gradients": name}
            when = elapsed(case, row.exchange, clock, row.steps)
            found.append(replace(row, topology=way(row), setting=setting, elapsed=when))
    return found


def first_done(rows: Sequence[Row]) -> float:
    """The seconds of the run that is done first, at which all are compared."""
    return min(row.elapsed[-1] for row in rows if row.elapsed is not None)


def points_within(row: Row, seconds: float) -> int:
    """How many recorded points of a row lie within some seconds."""
    return sum(when <= seconds * (1 + 1e-9) for when in row.elapsed or ())


def chosen_for(row: Row, seconds: float) -> Row:
    """The row with the learning rate that is best after some seconds, at the last point before, or the first one."""
    known = max(1, points_within(row, seconds))
    best = replace(row, curves=row.curves[:, :known]).best
    return replace(
        row,
        lrs=(row.lrs[best],),
        tried=row.lrs,
        curves=row.curves[:, :, [best]],
        consensus=row.consensus[:, :, [best]],
        merged=None,
        worst=None,
    )


def course(rows: Sequence[Row], title: str) -> Figure:
    """The error against seconds: a panel per setting and kind of times, a line per rule and way to meet."""
    panels: dict[str, list[Row]] = {}
    for row in (row for name in TIMES for row in timed(rows, name)):
        panels.setdefault(row.setting_text, []).append(row)
    placed = [chosen_for(row, first_done(mine)) for mine in panels.values() for row in mine]
    placed = sorted(placed, key=lambda row: row.setting["heterogeneity"])
    return figures.error_against_seconds(placed, title, len(TIMES))


@asks
def ahead(rows: Sequence[Row], name: str, one: str, other: str) -> Answer:
    """Whether one way has a smaller error than another, or is level, when the first of all is done; for every rule."""
    placed = timed(rows, name)
    if not {one, other} <= {row.topology for row in placed}:
        return None, "was not run"
    seconds = first_done(placed)
    if late := [row.topology for row in placed if row.topology in (one, other) and not points_within(row, seconds)]:
        return None, f"the first point of {late[0]} lies beyond {seconds:.3g} s"
    now = {}
    for row in placed:
        share = row.steps[max(1, points_within(row, seconds)) - 1] / row.steps[-1]
        now[row.topology, row.rule] = chosen_for(row, seconds).stopped(share)
    met, texts = [], []
    for rule in dict.fromkeys(row.rule for row in placed if row.topology == one):
        ours, theirs = now[one, rule], now[other, "dsgd" if other == REDUCED else rule]
        met.append(not clearly_above(ours, theirs))
        ratio = factor(max(ours.value, theirs.value) / min(ours.value, theirs.value))
        than = "smaller" if ours.value < theirs.value else "larger"
        texts.append(
            f"{rule} {ours.value:.3g} (lr {ours.lr:g}) against {theirs.value:.3g} ({theirs.lr:g}), {ratio} times {than}"
        )
    return all(met), f"after {seconds:,.0f} s: {'; '.join(texts)}"


def _said(claim: str, one: str, other: str) -> Sentences:
    return tuple(
        Sentence(f"{claim}: {name}", ahead(name, one, other), "the study of stragglers", ROUNDS) for name in TIMES
    )


STRAGGLERS = Target(
    "Stragglers: error against seconds, in rounds, with late messages, in pairs and with an all-reduce",
    STUDY,
    {"quick": {"steps": 1_000, "seeds": 1}, "paper": {"steps": ROUNDS, "seeds": 3}},
    course,
    (
        *_said("Gossip in rounds is level with an all-reduce at equal seconds, or ahead", SYNCHRONOUS, REDUCED),
        *_said("Messages that may be late are level with gossip in rounds, or ahead", DELAYED, SYNCHRONOUS),
        *_said("Messages used as soon as they are there are level with late ones, or ahead", STALE, DELAYED),
        *_said("Pairwise gossip is level with gossip in rounds, or ahead", PAIRWISE, SYNCHRONOUS),
        *_said("Pairwise gossip is level with an all-reduce, or ahead", PAIRWISE, REDUCED),
    ),
    (
        f"A gradient takes 0.1 s in the mean, on {NODES} nodes: "
        + "; ".join(f"{name} {times}" for name, times in list(TIMES.items())[:3])
        + "; one slow node 0.4 s, the 15 others 0.08 s. Seconds are those of a clock (docs/clock.md); messages are "
        f"small, and travel over {NETWORK}.",
        "In rounds nodes wait for their neighbours, with an all-reduce for all nodes. late: a message is used "
        f"{LATE} rounds later; stale: as soon as it is there, at most {LATE} rounds late, with the same weights. In "
        "pairs (AD-PSGD) nodes wait for nobody: each averages with one neighbour at a time, and a round counts as many "
        "gradients as there are nodes, whoever takes them.",
        "Compared are the errors when the first of all runs is done, those of others at their last recorded point "
        "before, each at the learning rate that is best for that moment. The figure shows the courses at these rates; "
        "the numbers below are those after all rounds, at the rates that are best then.",
        "All seeds share one schedule of each kind, so that bands show the noise of gradients, not that of times.",
        "Where one node is slow, the others take more steps in pairs: the network minimises a sum in which their data "
        "weigh more. On data that differ (heterogeneity 10) that is another optimum.",
    ),
)
