"""What a node sends over a run, computed from what the run is: nothing is counted while it runs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from klatsch import problems, rules
from klatsch.channels.rehearsal import vectors
from klatsch.rules import Flow, Rule
from klatsch.rules.base import Tensors
from klatsch.study.cases import Case
from klatsch.topology.channel import encoded_bytes


def sent(case: Case) -> float | None:
    """Bytes that a node sends over a run, mean over the nodes; None with a custom part, whose file may be gone.

    Messages count as they travel: float32, whatever the simulation computes in, unless the graph has another `wire`.
    Nodes that all talk to each other would use an all-reduce, so the complete graph counts as a ring all-reduce: 2
    (M - 1) / M vectors per node, in float32. Where that makes all nodes equal in every round, one vector is enough,
    the gradient, whatever else the rule keeps.
    """
    numbers = numbers_of(case)
    if numbers is None:
        return None
    every, _, wire, meets = case.channel
    copies = 2 * (case.nodes - 1) / case.nodes if is_all_reduce(case) else case.make_graph().messages * every
    if meets.startswith("pairwise"):
        copies = 2.0 * (case.nodes > 1)  # to the neighbour that it asks, and to the one that asks it, on average
    return float(encoded_bytes(wire, numbers) * sum(vectors_of(case)) * copies * (case.steps // every))


def sent_by(case: Case, step: int, total: float) -> float:
    """What a node has sent after some rounds, of a total over the run: silent rounds send nothing."""
    every = case.channel.every
    return total * (step // every) / max(1, case.steps // every)


def numbers_of(case: Case) -> int | None:
    """How many numbers a vector has; None with a custom part, whose file may be gone."""
    return None if case.sources else _numbers(case.problem, case.nodes, tuple(case.problem_options.items()))


@cache
def _numbers(problem: str, nodes: int, options: tuple[tuple[str, object], ...]) -> int | None:
    """Counted once: a model is built for it."""
    dim_of = problems.declared(problem).dim_of
    return None if dim_of is None else int(dim_of(nodes, **dict(options)))


def is_all_reduce(case: Case) -> bool:
    """Whether nodes all talk to each other, and would use an all-reduce."""
    return case.topology == "complete" and case.channel.wire == "float32" and not case.channel.meets


def vectors_of(case: Case) -> tuple[int, int]:
    """How many vectors a node sends to each neighbour whenever it speaks: early, and once there is a gradient."""
    options = tuple((k, v) for k, v in case.rule_options.items() if k not in ("lr", "schedule"))
    early, after, stay_equal = _rehearsed(case.rule, options)
    in_every_round = case.channel.every == 1 and not case.channel.late and not case.lazy
    return (0, 1) if stay_equal and in_every_round and is_all_reduce(case) else (early, after)


@cache
def _rehearsed(name: str, options: tuple[tuple[str, object], ...]) -> tuple[int, int, bool]:
    """What `vectors` finds, and whether `equal`; for every lr."""
    rule = rules.make(name, lr=1.0, **dict(options))
    return *vectors(rule), equal(rule)


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
