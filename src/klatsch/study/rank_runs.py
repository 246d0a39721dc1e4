"""A problem of the simulator on real ranks: one process is one node, and rank 0 gathers what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.problems import Problem
from klatsch.ranks.gloo import GlooLinks
from klatsch.ranks.node import Block, Given, Node
from klatsch.rules import Rule, State
from klatsch.rules.base import each
from klatsch.simulation.checkpoint import Saver
from klatsch.simulation.driver import Advance, Network, Nodes, Run, Snapshot
from klatsch.simulation.preparation import Rates, prepared
from klatsch.simulation.record import Result
from klatsch.simulation.stack import Watched
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
    group: dist.ProcessGroup,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    timeout: float = 300.0,
    any_graph: bool = False,
    progress: Advance | None = None,
) -> Result | None:
    """Run an update rule on a problem, every node in its own process; all ranks of the group call it together.

    It takes the arguments of `simulate` and computes the same numbers up to rounding, since randomness is a function of
    (seed, round, node). Rank 0 returns the result, the others None. `group` is a gloo process group with one rank per
    node. A neighbour that is gone, or keeps a rank waiting for more than `timeout` seconds, is a LinkError.
    """
    parts = prepared([problem], rule, [topology], steps, record, dtype, device, any_graph)
    rates, size = parts.rates, dist.get_world_size(group)
    if topology.size != size:
        raise ValueError(f"{topology.name} has {topology.size} nodes but the group has {size} ranks; one for each")
    with closing(GlooLinks(group, topology, rates.device, timeout, "raise")) as links:
        here = parts.networks[0].problem
        node = Node(rates.placed(parts.rule), rates.start(here).contiguous(), links)
        nodes = RankNodes(node, here, rates, group)
        run = Run(Snapshot({}, nodes.begun))
        run.drive(nodes, parts.points, rates.steps, Saver(None, 0.0, {}), progress or (lambda rounds: None))
    return next(iter(run.results(nodes, parts.points, parts.origins)), None)


class RankNodes(Nodes):
    """The node of this rank. Where a run is measured, rank 0 sees the states of all; the others see nothing."""

    name = "ranks"

    def __init__(self, node: Node, problem: Problem, rates: Rates, group: dist.ProcessGroup) -> None:
        self.node, self.rule, self.problem, self.rates, self.group = node, node.rule, problem, rates, group
        self.device, self.rank = rates.device, dist.get_rank(group)
        self.networks = [Network(problem, slice(None))] if self.rank == 0 else []
        self.begun = torch.full((rates.columns, 2), -1)
        self._watched = Watched(self.rule)
        self._lost = torch.full((rates.columns,), NEVER)  # by column: the moment at which this node was not finite

    def advance(self, state: State, done: int, until: int) -> State:
        """Rounds done + 1 to until, after which `state` is still what was seen of the last one measured."""
        for t in range(done + 1, until + 1):
            self._round(t)
        return state

    def one(self, state: State, t: int) -> tuple[State, Tensor]:
        """Round t: the states and gradients of all nodes, on rank 0."""
        grad = self._round(t)
        first, nodes = self._gathered(self._lost).min(0)
        self.begun = torch.stack([nodes, first // MOST_STEPS], -1).where(first[:, None] < NEVER, -1)
        return each(self._gathered, self.node.state), self._gathered(grad)

    def beginnings(self, now: Snapshot, state: State, rounds: int) -> Tensor:
        return self.begun

    def _round(self, t: int) -> Tensor:
        x = self.rule.query(self.node.state)
        given = Given(self._watched, self.problem.grad(x[None], t, [self.rank])[0], self.rates(t))

        def whole(_: Block) -> Given:
            return given  # a state of columns is not a plain vector, and is not cut into slices

        self.node.exchange(whole)
        self.node.advance(whole, last=t == self.rates.steps)
        lost = ~torch.isfinite(self.rule.output(self.node.state)).all(-1).cpu() & (self._lost == NEVER)
        if lost.any():
            self._lost[lost] = t * MOST_STEPS + self._watched.finite_steps()[lost]
        return given.grad

    def _gathered(self, mine: Tensor) -> Tensor:
        """A tensor of all ranks, stacked, on rank 0; on the others this rank's own."""
        first = dist.get_process_group_ranks(self.group)[0]
        here = mine.detach().cpu().contiguous()
        rows = [torch.empty_like(here) for _ in range(dist.get_world_size(self.group))] if self.rank == 0 else None
        dist.gather(here, rows, first, group=self.group)
        return torch.stack(rows or [here]).to(mine.device)
