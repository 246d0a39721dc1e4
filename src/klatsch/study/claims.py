"""Sentences about errors, checked: whether they grow, fall, turn or stay, panel by panel.

A verdict looks at every panel (sigma, zeta) by itself and holds if it holds in all of them. Errors are means over the
seeds at the chosen learning rate. "Grows" and "falls" allow a step in the other direction of up to SLACK, since
neighbouring sizes differ by less than seeds do; a change counts from CHANGE on; "about the same" is within FLAT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from klatsch.study.summary import Row

SLACK, CHANGE, FLAT = 1.05, 1.25, 2.0

Errors = dict[int, float]  # by number of machines
Found = tuple[bool | None, str]  # whether it holds in a panel (None: cannot be told), and the figures that decide


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


def grows_from(first: int) -> Callable[[Errors], Found]:
    """Whether the error grows from a number of machines on."""

    def found(errors: Errors) -> Found:
        values = [errors[M] for M in sorted(errors) if first <= M]
        steady = all(later >= earlier / SLACK for earlier, later in pairwise(values))
        return steady and values[-1] >= CHANGE * values[0], _course(errors)

    return found


def falls(last: int | None = None) -> Callable[[Errors], Found]:
    """Whether the error falls up to a number of machines."""

    def found(errors: Errors) -> Found:
        values = [errors[M] for M in sorted(errors) if last is None or last >= M]
        steady = all(later <= earlier * SLACK for earlier, later in pairwise(values))
        return steady and values[-1] <= values[0] / CHANGE, _course(errors)

    return found


def flat(errors: Errors) -> Found:
    """Whether the error is about the same for all sizes."""
    ratio = max(errors.values()) / min(errors.values())
    return ratio <= FLAT, f"largest over smallest {ratio:.3g}; {_course(errors)}"


def turns(low: int, high: int) -> Callable[[Errors], Found]:
    """Whether the error is smallest somewhere between two sizes, and grows beyond."""

    def found(errors: Errors) -> Found:
        best, last = best_size(errors), max(errors)
        text = f"smallest at M = {best}, {errors[last] / errors[best]:.3g} times that at {last}; {_course(errors)}"
        return low <= best < high and errors[last] >= CHANGE * errors[best], text

    return found


def never_helps(errors: Errors) -> Found:
    """Whether the most machines are no better than the fewest."""
    return errors[max(errors)] >= errors[min(errors)] / SLACK, _course(errors)


def step_down(low: int, high: int) -> Callable[[Errors], Found]:
    """Whether the error falls from one size to another."""
    return lambda errors: (errors[high] < errors[low], f"{errors[low]:.3g} at {low}, {errors[high]:.3g} at {high}")


def step_up(low: int, high: int) -> Callable[[Errors], Found]:
    """Whether the error grows from one size to another."""
    return lambda errors: (errors[high] > errors[low], f"{errors[low]:.3g} at {low}, {errors[high]:.3g} at {high}")


def no_ceiling(errors: Errors) -> Found:
    """Whether the error at the most machines is about the smallest of all."""
    best, last = best_size(errors), max(errors)
    text = f"smallest at M = {best}, {errors[last] / errors[best]:.3g} times that at {last}; {_course(errors)}"
    return errors[last] <= CHANGE * errors[best], text


# --- panels ---------------------------------------------------------------------------------------------------------


def per_panel(
    claim: str, source: str, rows: Sequence[Row], find: Callable[[Sequence[Row]], Found], rounds: int = 1
) -> Verdict:
    """A sentence, checked in every panel; not decided where the runs have fewer rounds than it is about."""
    steps = min(row.steps[-1] for row in rows)
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(", ".join(f"{name} {value:g}" for name, value in row.setting.items()), []).append(row)
    found = {panel: find(mine) for panel, mine in panels.items()}
    known = [holds for holds, _ in found.values() if holds is not None]
    figures = [
        f"{panel}: {'' if holds is None else 'yes' if holds else 'no'}{', ' * (holds is not None)}{text}"
        for panel, (holds, text) in found.items()
    ]
    if steps < rounds:
        figures.insert(0, f"needs {rounds:,} rounds, these are {steps:,}")
    if not known or steps < rounds:
        return Verdict(claim, source, None, tuple(figures))
    if 0 < sum(known) < len(known):
        figures.insert(0, f"yes in {sum(known)} of {len(known)} panels")
    return Verdict(claim, source, all(known), tuple(figures))


def errors_of(rule: str, topology: str, find: Callable[[Errors], Found]) -> Callable[[Sequence[Row]], Found]:
    """Look at the errors of one rule on one topology."""

    def found(rows: Sequence[Row]) -> Found:
        errors = {row.nodes: row.error for row in rows if (row.rule, row.topology) == (rule, topology)}
        if not all(math.isfinite(error) for error in errors.values()) or len(errors) < 2:
            return None, f"{rule} has no finite error at every size" if errors else f"{rule} was not run"
        try:
            return find(errors)
        except (KeyError, IndexError):
            return None, f"sizes {', '.join(map(str, sorted(errors)))} are not those that the sentence is about"

    return found


def best_size(errors: Errors) -> int:
    """The number of machines with the smallest error."""
    return min(errors, key=lambda M: errors[M])


def _course(errors: Errors) -> str:
    return "  ".join(f"{M}: {errors[M]:.3g}" for M in sorted(errors))
