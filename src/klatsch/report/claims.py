"""Sentences about errors and accuracies: each is checked panel by panel, and holds if it holds in every panel.

A panel is one setting of the problem: (sigma, zeta) or alpha. Values are means over the seeds at the chosen learning
rate. "Grows" and "falls" allow a step in the other direction within SLACK, or within the scatter of the seeds (their
ranges overlap); the overall change must be CHANGE or more. "About the same" is within FLAT. For accuracies, "ahead" is
by more than LEVEL and more than the seeds scatter; "level" is within LEVEL. Diverged runs decide nothing,
unless a check says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Concatenate, ParamSpec, TypeVar

from klatsch.study.choices import BESIDE, Row

SLACK, CHANGE, FLAT = 1.05, 1.25, 2.0
LEVEL = 0.01  # of accuracy: one percent of the test images
EPOCHS, SEEDS = 20, 2  # fewer decide nothing about accuracies

Points = dict[int, Row]  # one rule on one graph, by number of machines
Answer = tuple[bool | None, str]  # whether it holds in a panel (None: unknown), and the figures that decide
OfPoints = Callable[[Points], Answer]
OfRows = Callable[[Sequence[Row]], Answer]
Looked = TypeVar("Looked")
Options = ParamSpec("Options")


def asks(find: Callable[Concatenate[Looked, Options], Answer]) -> Callable[Options, Callable[[Looked], Answer]]:
    """Let a check take its options first, and its rows or points later."""
    return lambda *args, **kwargs: lambda looked: find(looked, *args, **kwargs)


@dataclass(frozen=True)
class Verdict:
    """A sentence, whether it holds, and the figures that decide."""

    claim: str
    source: str
    holds: bool | None  # None: these runs do not decide
    figures: tuple[str, ...]

    @property
    def word(self) -> str:
        """The verdict in words."""
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Sentence:
    """A statement about a figure, its source, how to check it in one panel, and the rounds that this takes."""

    claim: str
    find: OfRows
    source: str
    rounds: int = 1
    about: Callable[[Row], bool] = lambda row: True

    def check(self, rows: Sequence[Row]) -> Verdict:
        """Check it in every panel; {most} stands for the largest number of machines."""
        rows = [row for row in rows if self.about(row)]
        if not rows:
            return Verdict(self.claim, self.source, None, ("was not run",))
        claim = self.claim.format(most=max(row.nodes for row in rows))
        images, alpha = rows[0].largest, "alpha" in rows[0].setting
        panels: dict[str, list[Row]] = {}
        for row in rows:
            panels.setdefault(f"alpha {row.setting['alpha']:g}" if alpha else row.setting_text, []).append(row)
        found = {panel: self.find(mine) for panel, mine in panels.items()}
        known = [holds for holds, _ in found.values() if holds is not None]
        words = {None: "", True: "yes, ", False: "no, "} if not images else {}  # accuracies speak for themselves
        figures = [f"{panel}: {words.get(holds, '')}{text}" for panel, (holds, text) in found.items()]
        short = self._too_short(rows, images)
        if short or (all(known) and len(known) < len(found)):  # nothing contradicts it, but not all is known
            return Verdict(claim, self.source, None, (*short, *figures))
        if 0 < sum(known) < len(found) and not images:
            figures.insert(0, f"yes in {sum(known)} of {len(found)} panels")
        return Verdict(claim, self.source, all(known), tuple(figures))

    def _too_short(self, rows: Sequence[Row], images: bool) -> list[str]:
        epochs, seeds = min(row.epochs or 0 for row in rows), min(len(row.curves) for row in rows)
        if images and (epochs < EPOCHS or seeds < SEEDS):
            return [f"needs {EPOCHS} epochs and {SEEDS} seeds, these are {epochs} and {seeds}"]
        steps = min(row.steps[-1] for row in rows)
        return [f"needs {self.rounds:,} rounds, these are {steps:,}"] if steps < self.rounds else []


# --- errors of one rule on one graph, by number of machines ---------------------------------------------------------


@asks
def points_of(rows: Sequence[Row], rule: str, topology: str, find: OfPoints) -> Answer:
    """Check one rule on one topology."""
    points = _points(rows, rule, topology)
    if len(points) < 2 or not all(math.isfinite(row.value) for row in points.values()):
        return None, f"{rule} has no finite error at every size" if points else f"{rule} was not run"
    try:
        return find(points)
    except (KeyError, IndexError):
        return None, _other_sizes(points)


def _points(rows: Sequence[Row], rule: str, topology: str) -> Points:
    return {row.nodes: row for row in rows if (row.rule, row.topology) == (rule, topology)}


@asks
def grows_from(points: Points, first: int) -> Answer:
    """Whether the error grows from this number of machines on."""
    return _grows([points[M] for M in sorted(points) if first <= M]), _course(points)


@asks
def falls(points: Points, last: float = math.inf) -> Answer:
    """Whether the error falls up to this number of machines."""
    return _grows([points[M] for M in sorted(points, reverse=True) if last >= M]), _course(points)


def _grows(line: list[Row]) -> bool:
    if len(line) < 2:
        raise IndexError("a trend needs two sizes")
    back = any(clearly_above(earlier, later) for earlier, later in combinations(line, 2))
    return not back and line[-1].value >= CHANGE * line[0].value


def flat(points: Points) -> Answer:
    """Whether the error is about the same for all sizes."""
    errors = [row.value for row in points.values()]
    ratio = max(errors) / min(errors)
    return ratio <= FLAT, f"largest over smallest {ratio:.3g}; {_course(points)}"


@asks
def turns(points: Points, low: int, high: int) -> Answer:
    """Whether the error is smallest between two sizes, and grows beyond."""
    flat_beyond, text = no_ceiling(points)
    return low <= best_size(points) < high and not flat_beyond, text


@asks
def never_helps(points: Points, first: int) -> Answer:
    """Whether no number of machines above the first is better."""
    better = any(clearly_above(points[first], row) for M, row in points.items() if first < M)
    return not better, _course(points)


def last_is_worse(points: Points) -> Answer:
    """Whether the error is larger with the most machines than with the fewest."""
    return step(min(points), max(points), up=True)(points)


@asks
def step(points: Points, low: int, high: int, up: bool) -> Answer:
    """Whether the error grows, or falls, from one size to another."""
    first, last = points[low], points[high]
    text = f"{first.value:.3g} at {low}, {last.value:.3g} at {high}"
    return clearly_above(last, first) if up else clearly_above(first, last), text


def no_ceiling(points: Points) -> Answer:
    """Whether the error with the most machines is about the smallest of all."""
    best, last = best_size(points), max(points)
    ratio = points[last].value / points[best].value
    beyond = "" if best == last else f", {factor(ratio)} times that at {last}"
    return ratio <= CHANGE, f"smallest at M = {best}{beyond}; {_course(points)}"


def best_size(points: Points) -> int:
    """The number of machines with the smallest error."""
    return min(points, key=lambda M: points[M].value)


def clearly_above(one: Row, other: Row) -> bool:
    """Whether an error exceeds another by more than the seeds scatter."""
    return one.value > SLACK * other.value and one.low > other.high


def _course(points: Points) -> str:
    return ", ".join(f"{M}: {points[M].value:.3g}" for M in sorted(points))


def _other_sizes(points: Points) -> str:
    return f"the sentence is about other sizes than {', '.join(map(str, sorted(points)))}"


# --- errors of several rules ----------------------------------------------------------------------------------------


def larger_best_size(rows: Sequence[Row]) -> Answer:
    """Whether dat is best at more machines than dsgd, on every graph."""
    texts, holds = [], True
    for topology in dict.fromkeys(row.topology for row in rows):
        dat, dsgd = _points(rows, "dat", topology), _points(rows, "dsgd", topology)
        if not dat or not dsgd:
            return None, f"dat or dsgd was not run on {topology}"
        holds = holds and best_size(dat) > best_size(dsgd)
        texts.append(f"{topology}: dat is best at M = {best_size(dat)}, dsgd at {best_size(dsgd)}")
    return holds, "; ".join(texts)


@asks
def first_rounds(rows: Sequence[Row], relative: bool) -> Answer:
    """Whether dsgd is ahead with the most machines at some early round, each size at its own learning rate."""
    mine = {row.nodes: row for row in rows if row.rule == "dsgd"}
    if len(mine) < 2:
        return None, "dsgd was not run at two sizes"
    few, many = mine[min(mine)], mine[max(mine)]
    first, last = few.curve.mean(axis=0), many.curve.mean(axis=0)
    if relative:
        first, last = first / first[0], last / last[0]
    better = [t for t, a, b in zip(few.steps, first, last, strict=True) if b < a / SLACK]
    text = f"M = {many.nodes} against {few.nodes}: "
    if not better:
        return False, text + "never better"
    return better[0] <= few.steps[-1] // 10, text + f"better from round {better[0]:,} to {better[-1]:,}"


def cta_is_worse(rows: Sequence[Row]) -> Answer:
    """Whether dat (cta) has a larger error than dat."""
    if not (ratios := _ratios(rows, "dat (cta)", "dat")):
        return None, "was not run"
    middle, (high, where) = median(ratio for ratio, _ in ratios), max(ratios, key=lambda pair: pair[0])
    return middle > SLACK, f"{middle:.3g} times dat's error in the middle, at most {high:.3g} ({where})"


@asks
def smaller(rows: Sequence[Row], one: str, other: str, share: float = 1.0) -> Answer:
    """Whether a rule has a smaller error than another in the middle of all points, after a share of the rounds."""
    if not (ratios := _ratios(rows, one, other, share)):
        return None, "was not run"
    middle, low, high = median(ratio for ratio, _ in ratios), min(ratios), max(ratios)
    range_ = f"from {factor(low[0])} ({low[1]}) to {factor(high[0])} ({high[1]})"
    return middle < 1, f"{factor(middle)} times in the middle, {range_}"


def factor(times: float) -> str:
    """A factor in words: 1.13, 2,290, 4.5e+06."""
    if times < 100:
        return f"{times:.3g}"
    return f"{times:,.0f}" if times < 1e6 else f"{times:.2g}"


def _ratios(rows: Sequence[Row], above: str, below: str, share: float = 1.0) -> list[tuple[float, str]]:
    """The ratio of two rules' errors, and where, on every graph and size that both have."""
    error = {(row.rule, row.topology, row.nodes): row.at(share) for row in rows}
    both = [(t, M) for rule, t, M in error if rule == below and (above, t, M) in error]
    pairs = ((error[above, t, M] / error[below, t, M], f"{t}, M = {M}") for t, M in both)
    return [(ratio, where) for ratio, where in pairs if math.isfinite(ratio)]


def has_no_decay(row: Row) -> bool:
    """Whether its learning rate does not fall towards an end that is known in advance."""
    return "cosine" not in row.rule


# --- accuracies -----------------------------------------------------------------------------------------------------


def family(row: Row) -> str:
    """The name of a rule without the paper's momentum and averaging: "dat", "dat (cta)", "d2"."""
    return row.rule.partition(" (")[0] + (" (cta)" if "cta" in row.rule else "")


def at_its_best(rows: Sequence[Row]) -> list[Row]:
    """The best row of every rule, graph, size and setting: options such as a schedule are chosen, as learning rates."""
    best: dict[tuple[str, str, int, str], Row] = {}
    for row in rows:
        place = family(row), row.topology, row.nodes, row.setting_text
        better = max if row.largest else min
        best[place] = better(best.get(place, row), row, key=lambda row: row.value)
    return list(best.values())


@asks
def shown(rows: Sequence[Row], which: str, find: OfRows) -> Answer:
    """Check the merged model, or the worst node, in place of the mean of nodes."""
    if any(math.isnan(row.beside(which)) for row in rows):
        return None, f"{which} was not measured"
    return find([row.showing(which) for row in rows])


@asks
def ahead(rows: Sequence[Row], one: str, other: str) -> Answer:
    """Whether one rule is ahead of another on every graph and at every size."""
    of = {(family(row), row.topology, row.nodes): row for row in rows}
    pairs = [(a, of[other, t, M]) for (name, t, M), a in of.items() if name == one and (other, t, M) in of]
    if not pairs:
        return None, f"{one} and {other} were not run on the same graph"
    texts = [f"{_place(a)}: {percent(a)} against {percent(b)}" for a, b in pairs]
    met = [a.value > b.value + LEVEL and a.low > b.high for a, b in pairs if not a.diverged and not b.diverged]
    return all(met) if met else None, f"yes in {sum(met)} of {len(met)}: {'; '.join(texts)}"


@asks
def ring_is_level(rows: Sequence[Row], nodes: int) -> Answer:
    """Whether dat on the ring is level with the other rules on the Base-2 graph."""
    mine = [row for row in rows if (family(row), row.topology, row.nodes) == ("dat", "ring", nodes)]
    base = [row for row in rows if (row.topology, row.nodes) == ("base_graph", nodes) and family(row) != "dat"]
    if not mine or not base:
        return None, "ring and base_graph were not both run"
    texts = [f"{family(row)} on base_graph {percent(row)}" for row in base]
    level = [mine[0].value >= row.value - LEVEL for row in base if not row.diverged]
    return all(level) if level else None, f"dat on ring {percent(mine[0])}; {', '.join(texts)}"


@asks
def largest_drop(rows: Sequence[Row], rule: str, low: int, high: int) -> Answer:
    """Whether a rule on the ring loses most accuracy between two sizes."""
    points = {row.nodes: row for row in rows if (family(row), row.topology) == (rule, "ring")}
    if not {low, high, 16} <= set(points):
        return None, _other_sizes(points)
    drops = {(a, b): points[a].value - points[b].value for a, b in pairwise(sorted(points))}
    worst = max(drops, key=lambda pair: drops[pair])
    if drops[worst] <= LEVEL:
        return None, f"no drop of more than {LEVEL:.0%}"
    course = ", ".join(f"{M}: {points[M].value:.1%}" for M in sorted(points))
    return worst == (low, high), f"largest drop from {worst[0]} to {worst[1]}; {course}"


def _place(row: Row) -> str:
    return f"{row.topology}, M = {row.nodes}"


def percent(row: Row) -> str:
    """An accuracy with the range of its seeds, and what else is known of it."""
    if row.diverged:
        return "diverged"
    seeds = [f"{row.low:.1%} to {row.high:.1%}"] if len(row.curves) > 1 else []
    beside = [f"{name} {value:.1%}" for name in BESIDE if not math.isnan(value := row.beside(name))]
    return f"{row.value:.1%}" + (f" ({', '.join(seeds + beside)})" if seeds + beside else "")
