"""A problem of the simulator on real ranks: one process is one node, and rank 0 gathers what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.problems import Problem, adopted
from klatsch.ranks.gloo import GlooLinks
from klatsch.ranks.node import Block, Given, Node
from klatsch.rules import Rule, State
from klatsch.simulation.divergence import Watched
from klatsch.simulation.driver import without_diverged
from klatsch.simulation.preparation import check_parts, check_place, check_steps, identity
from klatsch.simulation.record import Result, measure, record_points
from klatsch.simulation.stack import Rates, placed
from klatsch.topology import Topology

MOST_STEPS = 1000  # within a round: a moment of a run is its round times this, plus the step
NEVER = torch.iinfo(torch.int64).max  # a moment that does not come


def simulate_on_ranks(
    problem: Problem,
    rule: Rule,
    topology: Topology,
    steps: int,
    record: int | Sequence[int] = 50,
    *,
    group: Any,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    timeout: float = 300.0,
    any_graph: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Result | None:
    """Run an update rule on a problem, every node in a process of its own; all ranks of the group call it together.

    The same numbers as `simulate` up to rounding: randomness is a function of (seed, round, node).

    Args:
        problem: what the nodes minimise, the same on all ranks.
        rule: the update rule; lists of hyper-parameters make columns, which travel together.
        topology: who talks to whom; one node per rank.
        steps: number of rounds T.
        record: number of log-spaced steps at which metrics are taken, or the steps themselves.
        group: a gloo process group of as many ranks as there are nodes.
        dtype: torch.float64 or torch.float32.
        device: where this rank computes.
        timeout: seconds that a neighbour may keep a rank waiting.
        any_graph: run also where the rule refuses the graph.
        progress: is told of rounds done.

    Returns:
        On rank 0 the same as `simulate`; on the others None.

    Raises:
        ValueError: something does not fit.
        LinkError: a neighbour is gone or late.
    """
    problem = adopted(problem)
    (rule, C), steps = check_parts(problem, rule, topology, any_graph), check_steps(steps)
    points, where = record_points(record, steps), check_place(dtype, device)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if topology.size != size:
        raise ValueError(f"{topology.name} has {topology.size} nodes but the group has {size} ranks; one for each")
    here = problem.to(dtype, where)
    local, rates = placed(rule, dtype, where), Rates(rule, steps, C, dtype, where)
    x = torch.as_tensor(here.start()).to(where, dtype).expand(C, problem.dim).contiguous()
    links = GlooLinks(group, topology, where, timeout, "raise")
    node = Node(local, x, links)
    rows: list[dict[str, Tensor]] = []
    diverged = torch.zeros(C, dtype=torch.bool)
    watched: Any = Watched(local)
    mine = torch.full((C,), NEVER)  # by column: the moment at which this node was no longer finite
    stacked: Any = None
    began = time.perf_counter()
    with torch.no_grad(), closing(links):
        for t in range(1, steps + 1):
            given = Given(watched, here.grad(local.query(node.state)[None], t, [rank])[0], rates(t))
            node.exchange(partial(_whole, given))
            node.advance(partial(_whole, given), last=t == steps)
            lost = ~torch.isfinite(local.output(node.state)).all(-1).cpu() & (mine == NEVER)
            if lost.any():
                mine[lost] = t * MOST_STEPS + watched.finite_steps()[lost]
            if t in points or t == steps:
                stacked, grads = _stacked(node.state, given.grad, group)
                if rank == 0:
                    diverged |= ~torch.isfinite(local.output(stacked)).all(-1).all(0).cpu()
            if t in points and rank == 0:
                row = {name: v.expand(C) for name, v in measure(here, local, stacked, grads).items()}
                rows.append(without_diverged(row, diverged, here))
            if progress is not None:
                progress(1)
        moments = _gathered(mine, group)
    if moments is None:
        return None
    first, nodes = moments.min(0)
    return Result(
        steps=points,
        metrics={name: torch.stack([row[name] for row in rows]) for name in rows[0]},
        output=local.output(stacked).masked_fill(diverged.to(where)[:, None], torch.inf),
        diverged=diverged,
        diverged_at=torch.stack([nodes, first // MOST_STEPS], -1).where(diverged[:, None], -1),
        seconds=time.perf_counter() - began,
        engine="ranks",
        state=stacked,
        rounds=steps,
        origin=identity(problem, rule, topology, C, dtype),
    )


def _whole(given: Given, _: Block) -> Given:
    return given  # a state of columns is no plain vector, and is not cut into slices


def _stacked(state: State, grad: Tensor, group: Any) -> tuple[Any, Any]:
    """The states and gradients of all ranks as (M, C, d), on rank 0; there is nothing on the others."""
    return {name: _gathered(v, group) for name, v in state.items()}, _gathered(grad, group)


def _gathered(mine: Tensor, group: Any) -> Tensor | None:
    first = dist.get_process_group_ranks(group)[0]
    here = mine.detach().cpu().contiguous()
    if dist.get_rank(group) != 0:
        dist.gather(here, None, first, group=group)
        return None
    rows = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.gather(here, rows, first, group=group)
    return torch.stack(rows).to(mine.device)
