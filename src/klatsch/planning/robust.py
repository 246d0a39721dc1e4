"""How much a plan depends on constants that are known in part only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

from klatsch.planning.planner import Plan, plan

Ranges = Mapping[str, tuple[float, float]]


def within_a_factor(found: Plan, factor: float = 2.0) -> dict[str, tuple[float, float]]:
    """Every constant of a plan, and what it is when off by a factor."""
    return {name: (value / factor, value * factor) for name, value in asdict(found.task.constants).items()}


class Span(NamedTuple):
    """From how many machines to how many a recommendation may move."""

    low: int
    high: int
    out_of_reach: bool  # whether the target may be beyond the samples


def machines_between(found: Plan, ranges: Ranges) -> Span:
    """The smallest and the largest best M of the recommended rule and graph, with one constant at a time elsewhere.

    Args:
        found: the plan.
        ranges: from where to where a constant may lie, by name (sigma, zeta, L, D1).
    """
    best, task = found.best, found.task
    if best.machines == 1:
        return Span(1, 1, False)
    seen, out_of_reach = [best.machines], False
    for name, ends in ranges.items():
        for value in ends:
            other = replace(task, constants=replace(task.constants, **{name: value}))
            try:
                again = plan(other, rules=[best.rule], families=[best.topology] if best.topology else None)
            except ValueError:  # there the samples do not bring the target
                out_of_reach = True
                continue
            seen.append(again.best.machines)
    return Span(min(seen), max(seen), out_of_reach)
