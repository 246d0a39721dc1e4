"""Sentences about errors, checked: whether they grow, fall, turn or stay, panel by panel.

A verdict looks at every panel (sigma, zeta) by itself and holds if it holds in all of them. Errors are means over the
seeds at the chosen learning rate. "Grows" and "falls" forgive a step in the other direction that is within SLACK, or
within the scatter of the seeds (their ranges overlap); in all, the change must be CHANGE or more. "About the same" is
within FLAT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from klatsch.study.summary import Row

SLACK, CHANGE, FLAT = 1.05, 1.25, 2.0

Points = dict[int, Row]  # of one rule on one graph, by number of machines
Answer = tuple[bool | None, str]  # whether it holds in a panel (None: cannot be told), and the figures that decide


@dataclass(frozen=True)
class Verdict:
    """A sentence, whether it holds, and the figures that decide."""

    claim: str
    source: str
    holds: bool | None  # None: not decided by these runs
    figures: tuple[str, ...]

    @property
    def word(self) -> str:
        """The verdict in words."""
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


# --- what can be said of errors by number of machines ---------------------------------------------------------------


def grows_from(first: int) -> Callable[[Points], Answer]:
    """Whether the error grows from a number of machines on."""

    def found(points: Points) -> Answer:
        line = _at_least_two([points[M] for M in sorted(points) if first <= M])
        steady = not any(clearly_above(earlier, later) for earlier, later in combinations(line, 2))
        return steady and line[-1].value >= CHANGE * line[0].value, _course(points)

    return found


def falls(last: int | None = None) -> Callable[[Points], Answer]:
    """Whether the error falls up to a number of machines."""

    def found(points: Points) -> Answer:
        line = _at_least_two([points[M] for M in sorted(points) if last is None or last >= M])
        steady = not any(clearly_above(later, earlier) for earlier, later in combinations(line, 2))
        return steady and line[-1].value <= line[0].value / CHANGE, _course(points)

    return found


def flat(points: Points) -> Answer:
    """Whether the error is about the same for all sizes."""
    errors = [row.value for row in points.values()]
    ratio = max(errors) / min(errors)
    return ratio <= FLAT, f"largest over smallest {ratio:.3g}; {_course(points)}"


def turns(low: int, high: int) -> Callable[[Points], Answer]:
    """Whether the error is smallest somewhere between two sizes, and grows beyond."""

    def found(points: Points) -> Answer:
        return low <= best_size(points) < high and not no_ceiling(points)[0], no_ceiling(points)[1]

    return found


def never_helps(first: int) -> Callable[[Points], Answer]:
    """Whether no number of machines above the first is better than that."""

    def found(points: Points) -> Answer:
        return not any(clearly_above(points[first], row) for M, row in points.items() if first < M), _course(points)

    return found


def last_is_worse(points: Points) -> Answer:
    """Whether the most machines end worse than the fewest."""
    return step(min(points), max(points), up=True)(points)


def step(low: int, high: int, up: bool) -> Callable[[Points], Answer]:
    """Whether the error grows, or falls, from one size to another."""

    def found(points: Points) -> Answer:
        first, last = points[low], points[high]
        text = f"{first.value:.3g} at {low}, {last.value:.3g} at {high}"
        return clearly_above(last, first) if up else clearly_above(first, last), text

    return found


def no_ceiling(points: Points) -> Answer:
    """Whether the error at the most machines is about the smallest of all."""
    best, last = best_size(points), max(points)
    ratio = points[last].value / points[best].value
    return ratio <= CHANGE, f"smallest at M = {best}, {ratio:.3g} times that at {last}; {_course(points)}"


def _at_least_two(line: list[Row]) -> list[Row]:
    if len(line) < 2:
        raise IndexError("one size is no course")
    return line


def clearly_above(one: Row, other: Row) -> bool:
    """Whether an error is above another by more than the seeds scatter."""
    return one.value > SLACK * other.value and one.low > other.high


# --- panels ---------------------------------------------------------------------------------------------------------


def per_panel(
    claim: str, source: str, rows: Sequence[Row], find: Callable[[Sequence[Row]], Answer], rounds: int = 1
) -> Verdict:
    """A sentence, checked in every panel; not decided where the runs have fewer rounds than it is about."""
    steps = min(row.steps[-1] for row in rows)
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.setting_text, []).append(row)
    found = {panel: find(mine) for panel, mine in panels.items()}
    known = [holds for holds, _ in found.values() if holds is not None]
    figures = [
        f"{panel}: {'' if holds is None else 'yes' if holds else 'no'}{', ' * (holds is not None)}{text}"
        for panel, (holds, text) in found.items()
    ]
    if steps < rounds:
        figures.insert(0, f"needs {rounds:,} rounds, these are {steps:,}")
    if steps < rounds or (all(known) and len(known) < len(found)):  # nothing speaks against it, but not all is known
        return Verdict(claim, source, None, tuple(figures))
    if 0 < sum(known) < len(found):
        figures.insert(0, f"yes in {sum(known)} of {len(found)} panels")
    return Verdict(claim, source, all(known), tuple(figures))


def points_of(rule: str, topology: str, find: Callable[[Points], Answer]) -> Callable[[Sequence[Row]], Answer]:
    """Look at one rule on one topology."""

    def found(rows: Sequence[Row]) -> Answer:
        points = {row.nodes: row for row in rows if (row.rule, row.topology) == (rule, topology)}
        if len(points) < 2 or not all(math.isfinite(row.value) for row in points.values()):
            return None, f"{rule} has no finite error at every size" if points else f"{rule} was not run"
        try:
            return find(points)
        except (KeyError, IndexError):
            return None, f"sizes {', '.join(map(str, sorted(points)))} are not those that the sentence is about"

    return found


def best_size(points: Points) -> int:
    """The number of machines with the smallest error."""
    return min(points, key=lambda M: points[M].value)


def _course(points: Points) -> str:
    return ", ".join(f"{M}: {points[M].value:.3g}" for M in sorted(points))
