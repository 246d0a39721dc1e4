"""The simulator: all nodes and all columns advance together, as tensors (M, C, d)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import klatsch.columns as cols
from klatsch.algorithms import Algorithm
from klatsch.algorithms.core import hyper_rate
from klatsch.engine import checkpoint as checkpoints
from klatsch.engine.checkpoint import Saver, Snapshot
from klatsch.engine.choice import fastest
from klatsch.engine.gradients import Gradients
from klatsch.engine.mixing import StackedMix
from klatsch.engine.progress import Advance, progress_bar
from klatsch.engine.record import Result, measure, record_points
from klatsch.engine.rounds import Rounds, TorchRounds, placed
from klatsch.problems import Problem
from klatsch.topology import Topology

PIECE_SECONDS = 0.2  # how often the bar moves and the clock for checkpoints is looked at


def simulate(
    problem: Problem,
    algorithm: Algorithm,
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
) -> Result:
    """Run an update rule on a problem over a topology, all nodes and columns at once.

    Args:
        problem: what the nodes minimise.
        algorithm: the update rule; lists of hyper-parameters make columns.
        topology: who talks to whom; as many nodes as the problem has.
        steps: number of rounds T in all, those done before (`after`, `checkpoint`) included.
        record: number of log-spaced steps at which metrics are taken, or the steps themselves.
        dtype: torch.float64, or torch.float32 (faster; mixing is kept free of drift).
        device: "cpu", "cuda", "cuda:1"...
        checkpoint: a file; the run is saved there, and the same call goes on from it after a kill.
        checkpoint_every: seconds between two saves.
        after: go on from the end of an earlier result of the same problem, rule and topology.
        progress: a bar: True, False, or None for one if a terminal is attached; or a function told of rounds done.
        any_graph: run also where the rule refuses the graph.
        engine: "auto" (the fastest that can run this), "torch" (plain operations), "fused" or "cuda graph".

    Returns:
        Steps, metrics per step and column, and every node's final x.

    Raises:
        ValueError: something does not fit; the message says what, and how to put it right.
    """
    C = _check(problem, algorithm, topology, steps, dtype, any_graph)
    points = record_points(record, steps)
    where = _device(device)
    here = problem.to(dtype, where) if hasattr(problem, "to") else problem
    rule = placed(algorithm, dtype, where)
    state = rule.init(here.start().to(where, dtype).expand(topology.size, C, problem.dim).contiguous())
    plain = TorchRounds(Gradients(here), rule, StackedMix(topology, dtype, where))
    rounds = fastest(engine, plain, algorithm, topology, state)

    run = Snapshot(state, torch.zeros(C, dtype=torch.bool))
    if after is not None:
        points = [*after.steps, *(p for p in points if p > after.rounds)]
        run = _continued(after, state, steps)
    saver = Saver(None if checkpoint is None else Path(checkpoint), {}, checkpoint_every)
    if saver.path is not None:
        saver.run = _described(problem, algorithm, topology, steps, points, state, rounds, run.rounds)
        run = checkpoints.load(saver.path, saver.run, state) or run

    title = f"{type(algorithm).__name__} on {topology.name}, {topology.size} nodes"
    with torch.no_grad(), progress_bar(progress, steps, run.rounds, title) as tell:
        try:
            for point in [p for p in dict.fromkeys([*points, steps]) if p > run.rounds]:
                _advance(run, rounds, point - 1, saver, tell)
                began = time.perf_counter()
                run.state, grad = plain.one(run.state, point)  # in the open, since the gradient is measured as well
                run.seconds += time.perf_counter() - began
                run.rounds = point
                tell(1)
                run.diverged |= ~torch.isfinite(rule.output(run.state)).all(-1).all(0).cpu()
                if point in points:
                    for name, values in measure(here, rule, run.state, grad).items():
                        run.metrics.setdefault(name, []).append(values.expand(C).masked_fill(run.diverged, torch.inf))
                saver.perhaps(run)
        except KeyboardInterrupt:
            saver.now(run)
            raise
    saver.now(run)
    return Result(
        steps=points,
        metrics={name: torch.stack(values) for name, values in run.metrics.items()},
        output=rule.output(run.state).masked_fill(run.diverged.to(where)[:, None], torch.inf),
        diverged=run.diverged,
        seconds=run.seconds,
        engine=rounds.name,
        state=run.state,
        rounds=run.rounds,
    )


def _advance(run: Snapshot, rounds: Rounds, until: int, saver: Saver, tell: Advance) -> None:
    """Bring a run to `until` rounds, in pieces that take a fraction of a second each."""
    while run.rounds < until:
        goal = min(until, run.rounds + run.piece)
        began = time.perf_counter()
        run.state = rounds.advance(run.state, run.rounds, goal)
        if run.state[0].is_cuda:
            torch.cuda.synchronize()  # the clock must not run ahead of the GPU
        took = time.perf_counter() - began
        tell(goal - run.rounds)
        run.rounds, run.seconds = goal, run.seconds + took
        saver.perhaps(run)
        if took < PIECE_SECONDS:
            run.piece *= 2


def _check(
    problem: Problem, algorithm: Algorithm, topology: Topology, steps: int, dtype: torch.dtype, any_graph: bool
) -> int:
    if not isinstance(topology, Topology):
        raise ValueError(f"topology is a {type(topology).__name__}; give a Topology, such as topology.make('ring', 16)")
    if not hasattr(algorithm, "update"):
        raise ValueError(
            f"algorithm is a {type(algorithm).__name__}; give a rule, such as algorithms.make('dat', lr=0.01)"
        )
    if not hasattr(problem, "grad"):
        raise ValueError(f"problem is a {type(problem).__name__}; give a problem, such as problems.LeastSquares(16)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps = {steps!r}; give a whole number of rounds from 1 up")
    if topology.size != problem.nodes:
        raise ValueError(
            f"{topology.name} has {topology.size} nodes but the problem has {problem.nodes}; give both the same number"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype = {dtype}; choose torch.float32 or torch.float64")
    if not any_graph and hasattr(algorithm, "check_graph"):
        algorithm.check_graph(topology)
    lr = getattr(algorithm, "lr", None)
    C, own = cols.count(algorithm, hyper_rate("lr(1)", lr(1)) if callable(lr) else None), getattr(problem, "columns", 1)
    if own != C and 1 not in (C, own):
        raise ValueError(f"the rule has {C} columns but the problem has {own}; give both the same number, or one")
    return max(C, own)


def _device(device: str | torch.device) -> torch.device:
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device = {device!r} cannot be used ({reason}); choose cpu, or cuda where there is one"
        ) from None
    return where


def _continued(after: Result, state: Any, steps: int) -> Snapshot:
    if type(after.state) is not type(state) or any(
        (a is None) != (b is None) or (a is not None and a.shape != b.shape)
        for a, b in zip(after.state, state, strict=True)
    ):
        raise ValueError("after is a result of another rule, size or number of columns; give one of the same run")
    if steps <= after.rounds:
        raise ValueError(f"steps = {steps}, but {after.rounds} rounds are done; steps counts all rounds, give more")
    fields = [None if old is None else old.to(new) for old, new in zip(after.state, state, strict=True)]
    metrics = {name: list(values) for name, values in after.metrics.items()}
    return Snapshot(type(state)(*fields), after.diverged.clone(), after.rounds, after.seconds, metrics=metrics)


def _described(
    problem: Any,
    algorithm: Algorithm,
    topology: Topology,
    steps: int,
    points: list[int],
    state: Any,
    rounds: Rounds,
    begun: int,
) -> dict[str, Any]:
    """What determines the result to the last bit, as plain data."""
    if not hasattr(problem, "fingerprint"):
        raise ValueError(
            f"a checkpoint needs to tell problems apart: give {type(problem).__name__} a method fingerprint() that "
            "returns a text which differs where the gradients differ"
        )
    lr = getattr(algorithm, "lr", None)
    return {
        "problem": problem.fingerprint(),
        "lr": [cols.described(torch.as_tensor(lr(t))) for t in sorted({1, *points, steps})] if callable(lr) else None,
        "algorithm": cols.described(algorithm),
        "topology": topology.fingerprint,
        "steps": steps,
        "record": points,
        "begun": begun,
        "dtype": str(state[0].dtype),
        "device": state[0].device.type,
        "engine": rounds.name,
    }
