"""What the paper says of its image study (Section 5.2), checked against the accuracies that came out.

Accuracies are means over the seeds at the chosen learning rate. "Ahead" is by more than LEVEL and more than the seeds
scatter; "level" is within LEVEL. What diverged is named, and decides nothing. Short runs, or a single seed, do not
decide either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from klatsch.paper.claims import Answer, Verdict
from klatsch.paper.image_figures import name_of
from klatsch.study.summary import Row

LEVEL = 0.01  # of accuracy: one percent of the test images
MIDDLE = 1.0  # alphas below are heterogeneous data, above nearly homogeneous
EPOCHS, SEEDS = 20, 2  # that a sentence needs at least
HERE = "Section 5.2"


def figure_2(rows: Sequence[Row]) -> list[Verdict]:
    """On the accuracy with 8 and 16 machines."""
    skewed = [row for row in rows if row.setting["alpha"] < MIDDLE]
    alike = [row for row in rows if row.setting["alpha"] > MIDDLE]
    return [
        _each("Under heterogeneous data DAT is ahead of D-SGD", skewed, _ahead("dat", "dsgd")),
        _each("Under heterogeneous data DAT is ahead of D2", skewed, _ahead("dat", "d2")),
        _each("DAT on the ring is level with the baselines on the Base-2 graph for M = 8", skewed, _ring_level(8)),
        _each("Under homogeneous data D-SGD is ahead of DAT", alike, _ahead("dsgd", "dat")),
        _each("Under homogeneous data D2 is ahead of DAT", alike, _ahead("d2", "dat")),
    ]


def figure_3(rows: Sequence[Row]) -> list[Verdict]:
    """On the final accuracy against the number of machines, on the ring under heterogeneous data."""
    return [
        _each(f"{name} loses most between M = {low} and {high}", rows, _largest_drop(rule, low, high))
        for name, rule, low, high in (("DAT", "dat", 8, 16), ("D-SGD", "dsgd", 4, 8), ("D2", "d2", 4, 8))
    ]


def beyond(rows: Sequence[Row]) -> list[Verdict]:
    """Beyond the paper: what our trials before had suggested."""
    skewed = [row for row in rows if row.setting["alpha"] < MIDDLE]
    return [
        _each("D2 done right (lazy on the ring) is ahead of plain DAT", skewed, _ahead("d2", "dat"), "a trial of ours"),
        _each("dat-d2 leads or is level with the best in every setting", rows, _leads("dat-d2"), "a trial of ours"),
        _each("cta costs accuracy: dat is ahead of dat (cta)", rows, _ahead("dat", "dat (cta)"), "beyond the paper"),
    ]


def _each(claim: str, rows: Sequence[Row], find: Callable[[Sequence[Row]], Answer], source: str = HERE) -> Verdict:
    """A sentence, checked for every alpha by itself."""
    if not rows:
        return Verdict(claim, source, None, ("was not run",))
    found = {alpha: find([row for row in rows if row.setting["alpha"] == alpha]) for alpha in _alphas(rows)}
    known = [holds for holds, _ in found.values() if holds is not None]
    figures = [f"alpha {alpha:g}: {text}" for alpha, (_, text) in found.items()]
    epochs, seeds = min(row.epochs or 0 for row in rows), min(len(row.curves) for row in rows)
    if epochs < EPOCHS or seeds < SEEDS:
        figures.insert(0, f"needs {EPOCHS} epochs and {SEEDS} seeds, these are {epochs} and {seeds}")
        return Verdict(claim, source, None, tuple(figures))
    undecided = all(known) and len(known) < len(found)  # nothing speaks against it, but not all is known
    return Verdict(claim, source, None if undecided else all(known), tuple(figures))


def _alphas(rows: Sequence[Row]) -> list[float]:
    return sorted({row.setting["alpha"] for row in rows})


def _ahead(one: str, other: str) -> Callable[[Sequence[Row]], Answer]:
    """Whether one rule is ahead of another on every graph and at every size."""

    def found(rows: Sequence[Row]) -> Answer:
        of = {(name_of(row), row.topology, row.nodes): row for row in rows}
        pairs = [
            (row, of[other, graph, M])
            for (name, graph, M), row in of.items()
            if name == one and (other, graph, M) in of
        ]
        if not pairs:
            return None, f"{one} and {other} were not run on the same graph"
        texts = [f"{a.topology}, M = {a.nodes}: {_text(a)} against {_text(b)}" for a, b in pairs]
        met = [_clearly_above(a, b) for a, b in pairs if not a.diverged and not b.diverged]
        return all(met) if met else None, f"yes in {sum(met)} of {len(met)}: {'; '.join(texts)}"

    return found


def _ring_level(nodes: int) -> Callable[[Sequence[Row]], Answer]:
    def found(rows: Sequence[Row]) -> Answer:
        mine = [row for row in rows if (name_of(row), row.topology, row.nodes) == ("dat", "ring", nodes)]
        base = [row for row in rows if row.topology == "base_graph" and row.nodes == nodes and name_of(row) != "dat"]
        if not mine or not base:
            return None, "ring and base_graph were not both run"
        texts = [f"{name_of(row)} on base_graph {_text(row)}" for row in base]
        level = [mine[0].value >= row.value - LEVEL for row in base if not row.diverged]
        return all(level) if level else None, f"dat on ring {_text(mine[0])}; {', '.join(texts)}"

    return found


def _largest_drop(rule: str, low: int, high: int) -> Callable[[Sequence[Row]], Answer]:
    def found(rows: Sequence[Row]) -> Answer:
        points = {row.nodes: row.value for row in rows if (name_of(row), row.topology) == (rule, "ring")}
        if not {low, high, 16} <= set(points):
            return None, f"sizes {', '.join(map(str, sorted(points)))} are not those that the sentence is about"
        drops = {(a, b): points[a] - points[b] for a, b in pairwise(sorted(points))}
        worst = max(drops, key=lambda pair: drops[pair])
        if drops[worst] <= LEVEL:
            return None, f"no drop of more than {LEVEL:.0%}"
        course = ", ".join(f"{M}: {value:.1%}" for M, value in sorted(points.items()))
        return worst == (low, high), f"largest drop from {worst[0]} to {worst[1]}; {course}"

    return found


def _leads(rule: str) -> Callable[[Sequence[Row]], Answer]:
    def found(rows: Sequence[Row]) -> Answer:
        texts, holds = [], True
        for graph, nodes in dict.fromkeys((row.topology, row.nodes) for row in rows):
            here = [row for row in rows if (row.topology, row.nodes) == (graph, nodes)]
            best = max(here, key=lambda row: row.value)
            mine = [row for row in here if name_of(row) == rule]
            if not mine:
                continue
            holds = holds and mine[0].value >= best.value - LEVEL
            texts.append(f"{graph}, M = {nodes}: {_text(mine[0])}, best is {name_of(best)} {_text(best)}")
        return (holds, "; ".join(texts)) if texts else (None, f"{rule} was not run")

    return found


def _clearly_above(one: Row, other: Row) -> bool:
    return one.value > other.value + LEVEL and one.low > other.high


def _text(row: Row) -> str:
    return "diverged" if row.diverged else f"{row.value:.1%} ({row.low:.1%} to {row.high:.1%})"
