"""`simulate` and `simulate_together`: all nodes and all columns advance together, as tensors (M, C, d)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.arguments import whole
from klatsch.clock import Clock
from klatsch.clock.rounds import check_meets, scheduled
from klatsch.native import kept_memory
from klatsch.problems import Problem
from klatsch.problems import checked as checked_problem
from klatsch.rules import Rule
from klatsch.rules.base import checked, each, rate
from klatsch.sealed import digest
from klatsch.simulation.driver import Advance, Run, Saver, Watch, logged, progress_bar
from klatsch.simulation.fused import FusedStack, KernelStack
from klatsch.simulation.record import Facts, Network, Result, record_points
from klatsch.simulation.roster import Event, Graphs, Roster
from klatsch.simulation.stack import GraphStack, PairwiseStack, Prepared, Rates, Stack, StaleStack
from klatsch.topology import Topology, make
from klatsch.watch.events import Given
from klatsch.wire.carried import carried
from klatsch.wire.program import NotTraceableError
from klatsch.wire.rehearsal import NotAlikeError, Rehearsal

PARTS = ("problem", "rule", "topology")
ENGINES = ("auto", *(kind.name for kind in (Stack, FusedStack, KernelStack, GraphStack)))


def simulate(
    problem: Problem,
    rule: Rule,
    topology: Topology | Graphs,
    steps: int,
    record: int | Sequence[int] = 50,
    *,
    crew: Sequence[Event] = (),
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
    log: Given = None,
) -> Result:
    """Run an update rule on a problem over a topology, all nodes and columns at once.

        >>> from klatsch import problems, rules, simulate
        >>> rule = rules.make("dat", lr=[1e-3, 1e-2])  # two columns
        >>> result = simulate(problems.LeastSquares(8), rule, "ring", steps=200)
        >>> [f"{distance:.4f}" for distance in result.metrics["distance"][-1]]
        ['0.0064', '0.0011']

    Args:
        problem: what the nodes minimise.
        rule: the update rule; lists of hyper-parameters make columns.
        topology: who talks to whom: a graph of as many nodes as the problem has, or its name, such as "ring/4". If the
            crew changes, a name or a function of the number of nodes, since it is made anew for each.
        steps: total number of rounds T, including those done before (`after`, `checkpoint`).
        record: number of log-spaced steps at which metrics are taken, or the steps themselves.
        crew: who comes and goes: (round, "join" or "leave", node), ... From its round on a node takes part, or does
            not. A node whose first event is a join is not there at the start. Metrics are of those who are there;
            `result.members` says whose the rows of the output and the state are. And who talks to whom, and when:
            (round, "graph", "ring/4"), ...
        dtype: torch.float64, or torch.float32 (faster; mixing does not drift).
        device: "cpu", "cuda", "cuda:1"...
        checkpoint: a file where the run is saved; after a kill the same call continues from it.
        checkpoint_every: seconds between two saves.
        after: continue from an earlier result of the same problem, rule and topology.
        progress: a bar (True, False, or None for one on a terminal), or a function of the rounds just done.
        any_graph: run even where the rule refuses the graph.
        engine: "auto" (the fastest that can run this), "torch" (plain operations), "fused", "cuda kernel" or "cuda
            graph".
        meets: "pairwise TIMES over NETWORK": nodes do not wait for each other; each averages with one neighbour at a
            time while it computes (AD-PSGD). "stale TIMES over NETWORK": a pull arrives as soon as it is there, at most
            `topology.late` rounds late. TIMES of gradients and NETWORK are those of a `Clock`, which makes the schedule
            and decides `elapsed`.
        clock: how long gradients and messages take; the result then has `elapsed`, the seconds to each step.
        params: parameters of the model that the clock sends, by default those of the problem.
        per_node: record metrics of every node, too: `result.per_node["distance"]` is (len(steps), M, C).
        watch: called after each step that is recorded with the round, the state and the metrics per column; if it
            returns something true, the run ends there, and the result has what was recorded.
        log: where events of steps that are recorded go, as in `Gossip`: a folder, "tensorboard:FOLDER", ...

    Returns:
        Steps, metrics per step and column, and every node's final x.

    References:
        Lian et al., "Asynchronous decentralized parallel stochastic gradient descent", 2018, for pairwise gossip.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name not in PARTS}
    if isinstance(topology, str) and not crew:
        topology = make(topology, checked_problem(problem).nodes)
    return simulate_together([problem], rule, [topology], **given)[0]  # type: ignore[list-item]


def simulate_together(
    problems: Sequence[Problem],
    rule: Rule | list[Rule],
    topologies: Sequence[Topology],
    steps: int,
    record: int | Sequence[int] = 50,
    *,
    crew: Sequence[Event] = (),
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
    log: Given = None,
) -> list[Result]:
    """Run one rule on several problems, each over its own topology, all in one stack.

    The problems are of one kind that can be joined (`LeastSquares`), with the same number of parameters and the same
    noise per column. The rule may also be a list with one for each problem, which differ only in numbers. Without
    `checkpoint_at_end` a finished run is not saved. The other arguments are those of `simulate`; `after` and `crew`
    are for a single problem.

    Returns:
        One result per problem; `seconds` is the time of all of them.
    """

    def stack(some: Sequence[Problem], graphs: Sequence[Topology]) -> Stack:
        return _fastest(engine, prepared(some, rule, graphs, steps, record, dtype, device, any_graph, meets))

    roster = None
    if crew:
        if len(problems) > 1 or meets or clock is not None:
            other = f"{len(problems)} problems" if len(problems) > 1 else "meets" if meets else "a clock"
            raise ValueError(f"crew does not go together with {other}; leave one of them out")
        roster = Roster(crew, problems[0], topologies[0], steps, stack)
        for graph in () if any_graph else roster.graphs:  # before the run, which the last one would waste
            checked(rule).check_graph(graph)
    nodes = stack(problems, topologies) if roster is None else roster.stack(0)
    parts, where = nodes.parts, f"{len(problems)} networks"
    rates, origins = parts.rates, [own.origin for own in parts.networks]
    if len(problems) == 1:
        where = f"{nodes.topologies[0].name}, {nodes.topologies[0].size} nodes"
    elif after is not None:
        raise ValueError(f"after continues one result, but there are {len(problems)} problems; give one problem")
    run = Run(nodes, parts.points, rates.steps, per_node, watch, roster)
    if after is not None:
        run.go_on(after)
    identity: Facts = origins[0] if len(origins) == 1 else {"networks": digest({}, {"each": origins})}
    if checkpoint is not None:  # hashing large states takes seconds
        if any(origin["problem"] is None for origin in origins):
            raise ValueError(
                f"a checkpoint needs to tell problems apart: give {type(parts.problem).__name__} a method "
                "fingerprint() that returns a text which differs where the gradients differ"
            )
        identity = identity | _length(run, rates) | ({"per node": True} if per_node else {})
        identity |= {} if roster is None else roster.facts(len(crew))
    if params is None and clock is not None:
        params = clock.params
    sent = None if params is None else whole(params, "params", 1)
    # Before the run, which a clock that does not fit would waste.
    elapsed = [_seconds(clock, own, sent or own.problem.dim, run.points, parts.meets) for own in parts.networks]
    saver = Saver(checkpoint, checkpoint_every, identity, checkpoint_at_end)
    saver.restore(run)
    title = f"{parts.rule.name} on {where}"
    state = next(iter(run.now.state.values()))
    with progress_bar(progress, rates.steps, run.now.rounds, title) as tell, logged(log, run), kept_memory(state):
        run.drive(saver, tell)
    results = zip(run.results(), elapsed, strict=True)
    return [replace(result, elapsed=seconds[: len(result.steps)]) for result, seconds in results]


def prepared(
    problems: Sequence[Problem],
    rule: Rule | list[Rule],
    topologies: Sequence[Topology],
    steps: int,
    record: int | Sequence[int],
    dtype: torch.dtype,
    device: str | torch.device,
    any_graph: bool,
    meets: str = "",
) -> Prepared:
    """Check that the parts of a run, of one network or several, fit together."""
    if not problems or len(problems) != len(topologies):
        raise ValueError(f"{len(problems)} problems and {len(topologies)} topologies; give one topology per problem")
    given = [*rule] if isinstance(rule, list) else [rule]
    if len(given) not in (1, len(problems)):
        raise ValueError(f"{len(given)} rules for {len(problems)} problems; give one rule, or one for each problem")
    several, given = len(given) > 1, given if len(given) > 1 else given * len(problems)
    meets = meets.strip() if isinstance(meets, str) else meets
    problems = [checked_problem(problem) for problem in problems]
    fitted = [_fitted(*trio, any_graph, meets) for trio in zip(problems, given, topologies, strict=True)]
    rules, columns, nodes = [own for own, _, _ in fitted], max(C for _, C, _ in fitted), [p.nodes for p in problems]
    if not several and len({str(cols.flattened("rule", own)) for own in rules}) > 1:
        name = rules[0].name
        raise ValueError(f"{name} differs between these graphs; give graphs with the same every, late and wire")
    if len({problem.brief for problem in problems}) > 1:
        raise ValueError("some of these problems measure their headline alone, others more; give all or none `briefly`")
    if len({graph.every for graph in topologies if graph.encoding.remembers}) > 1:  # copies rest in silent rounds
        wire = topologies[0].wire
        raise ValueError(f"graphs with wire = {wire!r} differ in every; give those that run together the same")
    if meets and len(problems) > 1:
        raise ValueError(f"meets = {meets!r} is for one network, but there are {len(problems)}; call simulate for each")
    steps = whole(steps, "steps", 1)
    points, where = record_points(record, steps), check_place(dtype, device)
    origins = [
        {
            "problem": None if (told := problem.fingerprint()) is None else f"{problem!r} {told}",
            **cols.flattened("rule", own),
            "topology": f"{graph!r} {graph.fingerprint}",
            "columns": columns,
            "dtype": str(dtype),
            **({"meets": meets} if meets else {}),
            **({"choice of metrics": "headline"} if problem.brief else {}),
        }
        for problem, own, graph in zip(problems, rules, topologies, strict=True)
    ]
    placed = [problem.to(dtype, where) for problem in problems]
    rows = [slice(*own) for own in pairwise(accumulate(nodes, initial=0))]
    members = [tuple(range(M)) for M in nodes]
    networks = [Network(*own) for own in zip(placed, given, topologies, origins, rows, members, strict=True)]
    together = placed[0]
    if len(problems) > 1:
        kinds = {type(problem) for problem in problems}
        if len(kinds) > 1 or together.joined is None:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"problems of type {names} cannot be run in one stack; call simulate for each of them")
        together = together.joined(problems).to(dtype, where)
    rates = Rates([own.lr for own in (rules if several else rules[:1])], nodes, steps, columns, dtype, where)
    joined = cols.joined(rules, nodes) if several else rules[0]
    return Prepared(together, networks, joined, rates, points, fitted[0][2], meets)


def _fitted(
    problem: Problem, rule: Rule, topology: Topology, any_graph: bool, meets: str
) -> tuple[Rule, int, Rehearsal]:
    """The rule as it runs on the graph, the number of columns C, and its rehearsal; refuse parts that do not fit."""
    if not isinstance(topology, Topology):
        raise ValueError(f"topology is a {type(topology).__name__}; give a Topology, such as topology.make('ring', 16)")
    rule = checked(rule)
    if topology.size != problem.nodes:
        raise ValueError(
            f"{topology.name} has {topology.size} nodes but the problem has {problem.nodes}; give both the same number"
        )
    check_meets(topology.name, meets, topology.every, topology.late, topology.wire, topology.loss)
    if not any_graph:
        rule.check_graph(topology)
    C, own = cols.count(rule, rate(rule.lr, 1)), problem.columns
    if own != C and 1 not in (C, own):
        raise ValueError(f"the rule has {C} columns but the problem has {own}; give both the same number, or one")
    kind, matrices = type(problem).__name__, problem.matrices
    if rule.needs_shapes and matrices is None:
        raise ValueError(
            f"{rule.name} treats matrices as such, and {kind} does not say where they are in its {problem.dim} "
            f"parameters; give it `matrices`, such as [problems.WeightMatrix(0, outputs=4, inputs=3)], or [] for none"
        )
    for matrix in matrices or ():
        if matrix.start < 0 or matrix.end > problem.dim:
            raise ValueError(f"{kind} has {matrix}, but {problem.dim} parameters; let matrices lie inside of these")
    rehearsal = Rehearsal(rule, torch.zeros(1, C, problem.dim, dtype=torch.float64))
    return carried(rule.on(topology).shaped(matrices or ()), topology, meets), max(C, own), rehearsal


def check_place(dtype: torch.dtype, device: str | torch.device) -> torch.device:
    """The device; refuse a dtype or device that this machine does not have."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype = {dtype}; choose torch.float32 or torch.float64")
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):  # torch's own error is long
            raise RuntimeError(f"{where.type} is not supported")
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        remedy = "choose cpu, or cuda where there is one"
        raise ValueError(f"device = {device!r} cannot be used ({reason}); {remedy}") from None
    return where


def _length(run: Run, rates: Rates) -> Facts:
    """What else determines a result to the last bit: length, schedule, points, start, device and engine."""
    rounds = sorted({1, *run.points, rates.steps})
    told = [[cols.described(torch.as_tensor(lr(t))) for t in rounds] if callable(lr) else None for lr in rates.lrs]
    return {
        "steps": rates.steps,
        "record": run.points,
        "learning rates": told[0] if len(told) == 1 else told,
        "begun": digest(each(Tensor.cpu, run.now.state), {"rounds": run.now.rounds}),
        "device": rates.device.type,
        "engine": run.nodes.name,
    }


def _seconds(clock: Clock | None, network: Network, params: int, points: list[int], meets: str) -> list[float]:
    """When all nodes have done so many rounds; nodes that do not meet in rounds have a clock of their own."""
    if clock is None:
        return []
    given = network.rule, network.topology, params
    if not meets:
        return clock.seconds(*given, points)
    clock.seconds(*given, [1])  # it must fit, all the same
    schedule = scheduled(*given, meets)
    return [schedule.seconds(step) for step in points]


def _fastest(engine: str, parts: Prepared) -> Stack:
    """The nodes with this engine; for "auto", with the fastest that can run them."""
    if engine not in ENGINES:
        raise ValueError(f"engine = {engine!r}; choose from {', '.join(ENGINES)}")
    if parts.meets:
        if engine not in ("auto", "torch"):
            raise ValueError(f"engine = {engine!r} cannot run meets = {parts.meets!r}; use engine='auto'")
        return (PairwiseStack if parts.meets.startswith("pairwise") else StaleStack)(parts)
    surprise = ""
    for kind in (FusedStack, KernelStack, GraphStack):
        pays = engine == "auto" and parts.rates.device.type == kind.place and parts.rates.steps >= kind.pays_from
        if engine == kind.name or pays:
            try:
                return kind(parts)
            except (ValueError, OSError, RuntimeError, NotTraceableError) as reason:
                if engine == kind.name:
                    raise ValueError(f"engine = {engine!r} cannot run this: {reason}; use engine='auto'") from None
                if isinstance(reason, NotAlikeError):  # others, such as push-sum, are none
                    surprise = str(reason)
    if surprise:
        warnings.warn(f"it runs with plain operations: {surprise}", RuntimeWarning, stacklevel=5)
    return Stack(parts)
