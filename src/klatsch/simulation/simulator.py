"""The simulator: all nodes and all columns advance together, as tensors (M, C, d)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from klatsch.problems import Problem, adopted
from klatsch.rules import Rule
from klatsch.simulation.checkpoint import Saver
from klatsch.simulation.choice import fastest
from klatsch.simulation.driver import Network, Run, Snapshot, unharmed
from klatsch.simulation.gradients import Gradients
from klatsch.simulation.mixing import StackedMix
from klatsch.simulation.preparation import check_parts, check_place, check_steps, continued, identity, length
from klatsch.simulation.progress import Advance, progress_bar
from klatsch.simulation.record import Result, record_points
from klatsch.simulation.stack import Rates, Rounds, TorchRounds, placed
from klatsch.topology import Topology


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
) -> Result:
    """Run an update rule on a problem over a topology, all nodes and columns at once.

    Args:
        problem: what the nodes minimise.
        rule: the update rule; lists of hyper-parameters make columns.
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
    problem = adopted(problem)
    (rule, C), steps = check_parts(problem, rule, topology, any_graph), check_steps(steps)
    points, where = record_points(record, steps), check_place(dtype, device)
    here = problem.to(dtype, where)
    local, rates = placed(rule, dtype, where), Rates(rule, steps, C, dtype, where)
    start = torch.as_tensor(here.start()).to(where, dtype).expand(topology.size, C, problem.dim)
    state = local.init(start.contiguous())
    mix = StackedMix(topology, dtype=dtype, device=where)
    plain = TorchRounds(Gradients(here, where.type), local, rates, mix)
    rounds = fastest(engine, plain, rule, topology, state)

    origin = identity(problem, rule, topology, C, dtype)
    run = Run(Snapshot(state, *unharmed(C)), [])
    if after is not None:
        run = continued(after, origin, state, steps)
        points = [*after.steps, *(p for p in points if p > after.rounds)]
    if checkpoint is not None and origin["problem"] is None:
        raise ValueError(
            f"a checkpoint needs to tell problems apart: give {type(problem).__name__} a method fingerprint() that "
            "returns a text which differs where the gradients differ"
        )
    saver = Saver(checkpoint, checkpoint_every, origin | length(rule, steps, points, run, where.type, rounds.name))
    run = saver.restored(state) or run

    network = Network(here, slice(0, topology.size))
    title = f"{rule.name} on {topology.name}, {topology.size} nodes"
    with progress_bar(progress, steps, run.now.rounds, title) as tell:
        drive(run, plain, rounds, [network], points, steps, saver, tell)
    return result(run.now, run.metrics, local, network, points, rounds.name, origin)


def drive(
    run: Run,
    plain: TorchRounds,
    rounds: Rounds,
    networks: Sequence[Network],
    points: list[int],
    steps: int,
    saver: Saver,
    tell: Advance,
) -> None:
    """Bring a run to its end: fast from point to point, and with plain operations where it is measured."""
    with torch.no_grad():
        try:
            for point in [p for p in dict.fromkeys([*points, steps]) if p > run.now.rounds]:
                while run.now.rounds < point - 1:
                    run.piece(plain, rounds, networks, point - 1, tell)
                    saver.perhaps(run)
                run.one(plain, networks, point in points, tell)
                saver.perhaps(run)
        except KeyboardInterrupt:
            saver.now(run)
            raise
    saver.now(run)


def result(
    now: Snapshot, metrics: Any, rule: Rule, network: Network, points: list[int], engine: str, origin: Any
) -> Result:
    """What one network came to; `now` and `metrics` hold its columns only."""
    state = {name: v[network.nodes] for name, v in now.state.items()}
    output = rule.output(state)
    return Result(
        steps=points,
        metrics=metrics,
        output=output.masked_fill(now.diverged.to(output.device)[:, None], torch.inf),
        diverged=now.diverged,
        diverged_at=now.diverged_at.where(now.diverged[:, None], -1),
        seconds=now.seconds,
        engine=engine,
        state=state,
        rounds=now.rounds,
        origin=origin,
    )
