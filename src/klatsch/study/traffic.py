"""Bytes that a node sends over a run, computed from what the run is: nothing is counted while it runs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from klatsch import problems, rules
from klatsch.channels.rehearsal import vectors
from klatsch.rules import Flow, Rule
from klatsch.rules.base import Tensors
from klatsch.study.cases import Case
from klatsch.topology.channel import CHANNEL, encoded_bytes


def sent(case: Case) -> float | None:
    """Bytes that a node sends over a run, mean over the nodes; None with a custom part, whose file may be gone.

    Messages count as they travel: float32, whatever the simulation computes in, unless the graph has another `wire`.
    Nodes that all talk to each other would use an all-reduce, so the complete graph counts as a ring all-reduce: 2
    (M - 1) / M vectors per node, in float32. Where that makes all nodes equal in every round, one vector is enough,
    the gradient, whatever else the rule keeps.
    """
    dim_of = problems.declared(case.problem).dim_of if not case.sources else None
    if dim_of is None:
        return None
    every, late, wire = (case.topology_options.get(name, default) for name, default in CHANNEL.items())
    whole, equal = _rehearsed(
        case.rule, tuple((k, v) for k, v in case.rule_options.items() if k not in ("lr", "schedule"))
    )
    if case.topology == "complete" and wire == "float32":
        copies = 2 * (case.nodes - 1) / case.nodes
        whole = 1 if equal and every == 1 and not late and not case.lazy else whole
    else:
        copies = case.make_graph().messages * every
    mixes = case.steps // every
    vector = encoded_bytes(wire, int(dim_of(case.nodes, **case.problem_options)))
    return float(vector * whole * copies * mixes)


@cache
def _rehearsed(name: str, options: tuple[tuple[str, object], ...]) -> tuple[int, bool]:
    """How many vectors a node sends to each neighbour whenever it speaks, and whether `equal`; for every lr."""
    rule = rules.make(name, lr=1.0, **dict(options))
    return sum(vectors(rule)), equal(rule)


def equal(rule: Rule) -> bool:
    """Whether an average over all nodes in every round leaves them with one model, where they take their gradients."""
    nodes, rounds = 2, 3
    state = rule.init(torch.zeros(nodes, 1, dtype=torch.float64))
    for t in range(1, rounds + 1):
        gradients = torch.tensor([[1.0], [t]], dtype=torch.float64) - 5.0  # of nodes whose data differ
        state = rule.update(state, gradients, Flow(_to_the_mean), t, 1.0)
    return all(torch.allclose(point[0], point[1]) for point in (rule.query(state), rule.output(state)))


def _to_the_mean(*tensors: Tensor) -> Tensors:
    return tuple(v.mean(0) - v for v in tensors)
