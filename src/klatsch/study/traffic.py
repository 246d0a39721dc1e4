"""Bytes that a node sends over a run, computed from what the run is: nothing is counted while it runs."""

from __future__ import annotations

from functools import cache

from klatsch import problems, rules
from klatsch.channels.rehearsal import vectors
from klatsch.study.cases import Case

BYTES = 4  # of a number: messages are float32, whatever the simulation computes in


def sent(case: Case) -> float | None:
    """Bytes that a node sends over a run, mean over the nodes; None with a custom part, whose file may be gone.

    Nodes that all talk to each other would use an all-reduce, so the complete graph counts as a ring all-reduce: 2
    (M - 1) / M vectors per node. If they do so in every round, all nodes are equal, and one vector is enough, the
    gradient, whatever else the rule keeps.
    """
    dim_of = problems.declared(case.problem).dim_of if not case.sources else None
    if dim_of is None:
        return None
    every = int(case.topology_options.get("every", 1))
    if case.topology == "complete":
        copies, whole = 2 * (case.nodes - 1) / case.nodes, 1 if every == 1 else _vectors(case)
    else:
        copies, whole = case.make_graph().messages * every, _vectors(case)
    mixes = case.steps // every
    return BYTES * float(dim_of(case.nodes, **case.problem_options)) * whole * copies * mixes


def _vectors(case: Case) -> int:
    """How many vectors a node sends to each neighbour whenever it speaks; the learning rate does not matter."""
    return _rehearsed(case.rule, tuple((k, v) for k, v in case.rule_options.items() if k not in ("lr", "schedule")))


@cache
def _rehearsed(rule: str, options: tuple[tuple[str, object], ...]) -> int:
    return sum(vectors(rules.make(rule, lr=1.0, **dict(options))))
