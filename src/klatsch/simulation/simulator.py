"""`simulate` and `simulate_together`: all nodes and all columns advance together, as tensors (M, C, d)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from klatsch.arguments import whole as whole_number
from klatsch.clock import Clock
from klatsch.clock.rounds import scheduled
from klatsch.problems import Problem
from klatsch.rules import Rule
from klatsch.sealed import digest
from klatsch.simulation.driver import Advance, Run, Saver, Watch, progress_bar
from klatsch.simulation.fused import FusedStack
from klatsch.simulation.preparation import Prepared, length, prepared
from klatsch.simulation.record import Result, Snapshot
from klatsch.simulation.stack import GraphStack, PairwiseStack, Stack, StaleStack
from klatsch.topology import Topology
from klatsch.wire.program import NotTraceableError
from klatsch.wire.rehearsal import NotAlikeError

PARTS = ("problem", "rule", "topology")
ENGINES = ("auto", *(kind.name for kind in (Stack, FusedStack, GraphStack)))


def simulate(
    problem: Problem,
    rule: Rule,
    topology: Topology,
    steps: int,
    record: int | Sequence[int] = 50,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 30.0,
    after: Result | None = None,
    progress: bool | Advance | None = None,
    any_graph: bool = False,
    engine: str = "auto",
    meets: str = "",
    clock: Clock | None = None,
    params: int | None = None,
    per_node: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Run an update rule on a problem over a topology, all nodes and columns at once.

    Args:
        problem: what the nodes minimise.
        rule: the update rule; lists of hyper-parameters make columns.
        topology: who talks to whom; as many nodes as the problem has.
        steps: total number of rounds T, including those done before (`after`, `checkpoint`).
        record: number of log-spaced steps at which metrics are taken, or the steps themselves.
        dtype: torch.float64, or torch.float32 (faster; mixing does not drift).
        device: "cpu", "cuda", "cuda:1"...
        checkpoint: a file where the run is saved; after a kill the same call continues from it.
        checkpoint_every: seconds between two saves.
        after: continue from an earlier result of the same problem, rule and topology.
        progress: a bar (True, False, or None for one on a terminal), or a function of the rounds just done.
        any_graph: run even where the rule refuses the graph.
        engine: "auto" (the fastest that can run this), "torch" (plain operations), "fused" or "cuda graph".
        meets: "pairwise TIMES over NETWORK": nodes do not wait for each other; each averages with one neighbour at a
            time while it computes (AD-PSGD). "stale TIMES over NETWORK": a pull arrives as soon as it is there, at most
            `topology.late` rounds late. TIMES of gradients and NETWORK are those of a `Clock`, which makes the schedule
            and decides `elapsed`.
        clock: how long gradients and messages take; the result then has `elapsed`, the seconds to each step.
        params: parameters of the model that the clock sends, by default those of the problem.
        per_node: record metrics of every node, too: `result.per_node["distance"]` is (len(steps), M, C).
        watch: called after each step that is recorded with the round, the state and the metrics per column; if it
            returns something true, the run ends there, and the result has what was recorded.

    Returns:
        Steps, metrics per step and column, and every node's final x.

    References:
        Lian et al., "Asynchronous decentralized parallel stochastic gradient descent", 2018, for pairwise gossip.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name not in PARTS}
    return simulate_together([problem], rule, [topology], **given)[0]


def simulate_together(
    problems: Sequence[Problem],
    rule: Rule | list[Rule],
    topologies: Sequence[Topology],
    steps: int,
    record: int | Sequence[int] = 50,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 30.0,
    checkpoint_at_end: bool = True,
    after: Result | None = None,
    progress: bool | Advance | None = None,
    any_graph: bool = False,
    engine: str = "auto",
    meets: str = "",
    clock: Clock | None = None,
    params: int | None = None,
    per_node: bool = False,
    watch: Watch | None = None,
) -> list[Result]:
    """Run one rule on several problems, each over its own topology, all in one stack.

    The problems are of one kind that can be joined (`LeastSquares`), with the same number of parameters and the same
    noise per column. The rule may also be a list with one for each problem, which differ only in numbers. Without
    `checkpoint_at_end` a finished run is not saved. The other arguments are those of `simulate`; `after` is for a
    single problem.

    Returns:
        One result per problem; `seconds` is the time of all of them.
    """
    if not problems or len(problems) != len(topologies):
        raise ValueError(f"{len(problems)} problems and {len(topologies)} topologies; give one topology per problem")
    rules = [*rule] if isinstance(rule, list) else [rule]
    if len(rules) not in (1, len(problems)):
        raise ValueError(f"{len(rules)} rules for {len(problems)} problems; give one rule, or one for each problem")
    meets = meets.strip() if isinstance(meets, str) else meets
    parts = prepared(problems, rules, topologies, steps, record, dtype, device, any_graph, meets)
    rates, points, origins, whole = parts.rates, parts.points, parts.origins, parts.networks[0].problem
    identity, title = origins[0], f"{parts.rule.name} on {topologies[0].name}, {topologies[0].size} nodes"
    if len(problems) > 1:
        kinds = {type(problem) for problem in problems}
        if len(kinds) > 1 or whole.joined is None:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"problems of type {names} cannot be run in one stack; call simulate for each of them")
        if after is not None:
            raise ValueError(f"after continues one result, but there are {len(problems)} problems; give one problem")
        whole = whole.joined(problems).to(dtype, rates.device)
        identity, title = {"networks": digest({}, {"each": origins})}, f"{parts.rule.name} on {len(problems)} networks"
    nodes = _fastest(engine, whole, parts)
    run = Run(Snapshot(nodes.start, torch.full((len(origins) * rates.columns, 2), -1)))
    if after is not None:
        run = Run.continued(after, origins[0], nodes.start, rates.steps, per_node)
        points = [*after.steps, *(p for p in points if p > after.rounds)]
    if checkpoint is not None and any(origin["problem"] is None for origin in origins):
        raise ValueError(
            f"a checkpoint needs to tell problems apart: give {type(whole).__name__} a method fingerprint() that "
            "returns a text which differs where the gradients differ"
        )
    if checkpoint is not None:  # hashing large states takes seconds
        identity = identity | length(rates, points, run.now, nodes.name) | ({"per node": True} if per_node else {})
    each = rules if len(rules) > 1 else rules * len(problems)
    sent = None if params is None else whole_number(params, "params", 1)
    told = [  # before the run, which a clock that does not fit would waste
        _seconds(clock, one, graph, sent or problem.dim, points, parts.meets)
        for one, graph, problem in zip(each, topologies, problems, strict=True)
    ]
    saver = Saver(checkpoint, checkpoint_every, identity, checkpoint_at_end)
    run = saver.restored(nodes.start) or run
    run.per_node, run.watch = per_node, watch
    with progress_bar(progress, rates.steps, run.now.rounds, title) as tell:
        run.drive(nodes, points, rates.steps, saver, tell)
    results = zip(run.results(nodes, points, origins), told, strict=True)
    return [replace(result, elapsed=seconds[: len(result.steps)]) for result, seconds in results]


def _seconds(
    clock: Clock | None, rule: Rule, graph: Topology, params: int, points: list[int], meets: str
) -> list[float]:
    """When all nodes have done so many rounds; nodes that do not meet in rounds have a clock of their own."""
    if clock is None:
        return []
    if not meets:
        return clock.seconds(rule, graph, params, points)
    clock.seconds(rule, graph, params, [1])  # it must fit, all the same
    schedule = scheduled(rule, graph, params, meets)
    return [schedule.seconds(step) for step in points]


def _fastest(engine: str, problem: Problem, parts: Prepared) -> Stack:
    """The nodes with this engine; for "auto", with the fastest that can run them."""
    if engine not in ENGINES:
        raise ValueError(f"engine = {engine!r}; choose from {', '.join(ENGINES)}")
    if parts.meets:
        if engine not in ("auto", "torch"):
            raise ValueError(f"engine = {engine!r} cannot run meets = {parts.meets!r}; use engine='auto'")
        return (PairwiseStack if parts.meets.startswith("pairwise") else StaleStack)(problem, parts)
    for kind in (FusedStack, GraphStack):
        if engine == kind.name or (engine == "auto" and parts.rates.device.type == kind.place):
            try:
                return kind(problem, parts)
            except (ValueError, OSError, RuntimeError, NotTraceableError) as reason:
                if engine == kind.name:
                    raise ValueError(f"engine = {engine!r} cannot run this: {reason}; use engine='auto'") from None
                if isinstance(reason, NotAlikeError):  # others, such as push-sum, are no surprise
                    warnings.warn(f"it runs with plain operations: {reason}", RuntimeWarning, stacklevel=4)
    return Stack(problem, parts)
