"""`simulate` on real ranks, one process per node, to hold simulation and ranks together."""

from contextlib import closing

import numpy as np
import torch
import torch.distributed as dist

from klatsch.ranks.agreement import everyone_of
from klatsch.ranks.edges import Edges
from klatsch.ranks.links import GlooLinks
from klatsch.ranks.node import Given, Node
from klatsch.rules import Rule
from klatsch.rules.base import each
from klatsch.simulation.driver import Run, Saver
from klatsch.simulation.simulator import prepared
from klatsch.wire.carried import bare

TIMEOUT = 300.0  # seconds to wait for a neighbour in a round
MOST_STEPS = 1000  # within a round: a moment of a run is its round times this, plus the step
NEVER = torch.iinfo(torch.int64).max  # a moment that does not come


def study(folder, file):
    """The metrics of all runs of a study whose networks have as many nodes as there are ranks, by key."""
    from klatsch.study import expand, load
    from klatsch.study.batches import pack, simulation_arguments

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    outcomes = {}
    for batch in pack(expand(load(file))[0], "cpu"):
        (problem,), (rule,), (graph,), steps, choices = simulation_arguments(batch)
        result = simulate_on_ranks(problem, rule, graph, steps, group=dist.group.WORLD, **choices)
        if result is not None:
            curves = {name: values.expand(-1, len(batch.cases)) for name, values in result.metrics.items()}
            for k, case in enumerate(batch.cases):
                outcomes[case.key] = {name: values[:, k].clone() for name, values in curves.items()}
    if dist.get_rank() == 0:
        torch.save(outcomes, folder / "study")
    dist.destroy_process_group()


def assert_same_as_in(store, ranks, tolerances=None):
    """Ranks that run `study` find what a store holds of it; `tolerances` are by metric, all of them by default."""
    from klatsch.study import Store

    ranks.succeed()
    on_ranks = torch.load(ranks.folder / "study")
    with Store(store, read_only=True) as opened:
        outcomes = opened.outcomes(opened.done())
    assert on_ranks.keys() == outcomes.keys()
    for key, outcome in outcomes.items():
        assert on_ranks[key].keys() == outcome.metrics.keys()
        exact = {name: {"rtol": 1e-8, "atol": 1e-12} for name in outcome.metrics}
        for name, tolerance in (tolerances or exact).items():
            np.testing.assert_allclose(on_ranks[key][name], outcome.metrics[name], **tolerance, err_msg=name)


def simulate_on_ranks(
    problem, rule, topology, steps, record=50, *, group, dtype=torch.float64, device="cpu", any_graph=False
):
    """Run an update rule on a problem, every node in its own process; all ranks of the gloo `group` call it together.

    Arguments and numbers are those of `simulate`, up to rounding. Rank 0 returns the result, the others None. A
    neighbour that is gone or late is a LinkError.
    """
    parts = prepared([problem], rule, [topology], steps, record, dtype, device, any_graph)
    rates, size = parts.rates, dist.get_world_size(group)
    if topology.size != size:
        raise ValueError(f"{topology.name} has {topology.size} nodes but the group has {size} ranks; use one per node")
    everyone = everyone_of(group, TIMEOUT)
    edges = Edges(everyone.store, everyone.rank, TIMEOUT)
    with closing(GlooLinks(edges, topology, rates.device, TIMEOUT, "raise")) as links:
        problem = parts.networks[0].problem
        node = Node(rates.placed(bare(parts.rule)), rates.start(problem).contiguous(), links)
        nodes = RankNodes(node, parts.networks, rates, group)
        run = Run(nodes, parts.points, rates.steps)
        run.drive(Saver(None, 0.0, {}), lambda rounds: None)
    return next(iter(run.results()), None)


class Watched(Rule):
    """A rule that remembers what its last round computed, in order: the gradient, everything mixed, the output.

    Numbers that are not finite spread to neighbours within a round; the node that began failed first in this order.
    """

    def __init__(self, rule):
        self.rule, self.lr = rule, rule.lr
        self._seen = []

    def query(self, s):
        return self.rule.query(s)

    def update(self, s, grad, flow, t, lr):
        seen = [grad]

        def watched(function, *tensors):
            seen.extend(tensors)
            return function(*tensors)

        new = self.rule.update(s, grad, flow.inside(watched), t, lr)
        self._seen = [*seen, self.rule.output(new)]
        return new

    def finite_steps(self, *outputs):
        """How many steps of the round, and then of `outputs`, were finite before one was not, per node and column."""
        steps = [*self._seen, *outputs]
        finite = [torch.isfinite(v).all(-1).expand(steps[-1].shape[:-1]) for v in steps]
        return torch.stack(finite).int().cumprod(0).sum(0).cpu()


class RankNodes:
    """The node of this rank, driven like a `Stack`. Rank 0 sees all states where they are measured, others nothing."""

    name, brief = "ranks", False

    def __init__(self, node, networks, rates, group):
        self.node, self.rule, self.rates, self.group = node, node.rule, rates, group
        self.problem = networks[0].problem
        self.device, self.rank = rates.device, dist.get_rank(group)
        self.networks = networks if self.rank == 0 else []
        self.start = {}
        self.begun = torch.full((rates.columns, 2), -1)
        self._watched = Watched(self.rule)
        self._lost = torch.full((rates.columns,), NEVER)  # by column: when this node was first not finite

    def advance(self, state, done, until):
        """Rounds done + 1 to until; `state` stays what the last measurement saw."""
        for t in range(done + 1, until + 1):
            self._round(t)
        return state

    def one(self, state, t):
        """Round t: the states and gradients of all nodes, on rank 0."""
        grad = self._round(t)
        first, nodes = self._gathered(self._lost).min(0)
        self.begun = torch.stack([nodes, first // MOST_STEPS], -1).where(first[:, None] < NEVER, -1)
        return each(self._gathered, self.node.state), self._gathered(grad)

    def beginnings(self, now, state, rounds):
        return self.begun

    def _round(self, t):
        x = self.rule.query(self.node.state)
        given = Given(self._watched, self.problem.grad_with_autograd(x[None], t, [self.rank])[0], self.rates(t))

        def whole(*_):
            return given  # a state of columns is not a plain vector, and is not cut into slices

        self.node.exchange(whole)
        self.node.advance(whole, last=t == self.rates.steps)
        lost = ~torch.isfinite(self.rule.output(self.node.state)).all(-1).cpu() & (self._lost == NEVER)
        if lost.any():
            self._lost[lost] = t * MOST_STEPS + self._watched.finite_steps()[lost]
        return given.grad

    def _gathered(self, tensor):
        """The tensors of all ranks, stacked, on rank 0; the rank's own on the others."""
        first = dist.get_process_group_ranks(self.group)[0]
        own = tensor.detach().cpu().contiguous()
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))] if self.rank == 0 else None
        dist.gather(own, rows, first, group=self.group)
        return torch.stack(rows or [own]).to(tensor.device)
