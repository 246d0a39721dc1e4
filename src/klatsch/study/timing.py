"""How long a run would take on machines and links: computed from what the run is, beside its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from klatsch import rules
from klatsch.clock import Clock
from klatsch.study.cases import Case
from klatsch.study.choices import Row
from klatsch.study.traffic import numbers_of
from klatsch.topology import Topology


def elapsed(case: Case, clock: Clock, steps: Sequence[int]) -> tuple[float, ...] | None:
    """Seconds by a clock after which all nodes have done so many rounds; None with a custom part, as for bytes."""
    if (numbers := numbers_of(case)) is None:
        return None
    options = tuple((k, v) for k, v in sorted(case.rule_options.items()) if k not in ("lr", "schedule"))
    graph = case.make_graph()
    return _elapsed(clock, case.rule, options, graph, graph.name, numbers, tuple(steps))


@lru_cache(maxsize=4096)
def _elapsed(
    clock: Clock,
    rule: str,
    options: tuple[tuple[str, object], ...],
    graph: Topology,
    name: str,
    numbers: int,
    steps: Sequence[int],
) -> tuple[float, ...]:
    """Computed once for all learning rates and seeds. Equal graphs may have different names, which the clock knows."""
    return tuple(clock.seconds(rules.make(rule, lr=1.0, **dict(options)), graph, numbers, steps))


def timed(rows: Sequence[Row], clock: Clock | None) -> list[Row]:
    """Rows that know how long they take by a clock, if there is one."""
    if clock is None:
        return list(rows)
    return [row if row.case is None else replace(row, elapsed=elapsed(row.case, clock, row.steps)) for row in rows]
