"""Studies on real ranks: rank 0 drives, writes the store as usual, and hands every batch to the other ranks.

Batches travel as JSON, never as pickles. A network of M nodes runs on the first M ranks, one process per node, and rank
0 gathers the measurements.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch import own
from klatsch.problems import Problem
from klatsch.ranks.agreement import broadcast
from klatsch.ranks.failures import reason
from klatsch.ranks.gloo import GlooLinks
from klatsch.ranks.message import Block
from klatsch.ranks.node import Given, Node
from klatsch.rules import Rule, State
from klatsch.rules.base import each
from klatsch.simulation import Result
from klatsch.simulation.checkpoint import Saver
from klatsch.simulation.driver import Network, Nodes, Run, Snapshot
from klatsch.simulation.preparation import Rates, prepared
from klatsch.simulation.stack import Watched
from klatsch.study.batches import Batch, Finished, finished, simulation_arguments
from klatsch.study.cases import Case
from klatsch.study.workers import Open, Workers
from klatsch.topology import Topology
from klatsch.wire.carried import bare

PATIENCE = timedelta(days=30)  # idle ranks of a small network wait for the next batch
TIMEOUT = 300.0  # seconds to wait for a neighbour in a round
MOST_STEPS = 1000  # within a round: a moment of a run is its round times this, plus the step
NEVER = torch.iinfo(torch.int64).max  # a moment that does not come


def join() -> int:
    """Join the ranks that torchrun started; returns this process's rank."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--engine ranks needs several processes; start it with "
            "torchrun --nproc-per-node 4 -m klatsch run STUDY.toml --engine ranks"
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
    if dist.get_rank() == 0:
        atexit.register(_dismiss)  # also after an error: the others wait for batches
    return dist.get_rank()


def ranks_for(nodes: Sequence[int], *others: object) -> Open:
    """The ranks as workers for networks of these sizes; `others` are further workers, which are refused."""
    if any(other is not None for other in others):
        raise ValueError("--engine ranks has its own workers, the ranks; leave --workers and --dask out")
    if max(nodes) > dist.get_world_size():
        raise ValueError(
            f"the study has networks of {max(nodes)} nodes, but there are {dist.get_world_size()} ranks; start one per "
            f"node (torchrun --nproc-per-node {max(nodes)}), or leave out the larger networks"
        )
    return ranks


@contextmanager
def ranks() -> Iterator[Workers]:
    """On rank 0: all ranks as one worker, which does a batch at a time."""
    with ThreadPoolExecutor(1) as executor:  # stores a batch while the next one runs
        try:
            yield Workers(executor, hand_out, 1, shares_files=False, losses=())
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


_failures: list[str] = []


def hand_out(batch: Batch, _: Path | None = None) -> Finished:
    """On rank 0: run a batch on all ranks, unless a rank is gone."""
    if not _failures:
        try:
            _shared(json.dumps(asdict(batch)))
            results = run_together(batch)
            return finished(batch, results, sum(result.seconds for result in results))
        except RuntimeError as error:
            _failures.append(reason(error))
    raise ValueError(f"{_failures[0]}; what was stored is safe, start again to continue")


def serve() -> None:
    """On all other ranks: run batches from rank 0 until there are no more."""
    try:
        while text := _shared():
            facts = json.loads(text)
            networks = tuple(tuple(Case(**case) for case in network) for network in facts["networks"])
            run_together(Batch(networks, facts["device"]))
    except RuntimeError as error:
        raise ValueError(reason(error)) from None
    finally:
        dist.destroy_process_group()  # at the end of the process, its threads may be torn down first


def run_together(batch: Batch) -> list[Result]:
    """Do one rank's part of a batch; only rank 0 has the results."""
    torch.set_num_threads(1)
    problems, (rule,), graphs, steps, choices = simulation_arguments(batch)
    choices["device"], results = _device(batch.device), []
    for problem, graph in zip(problems, graphs, strict=True):
        group = _first_ranks(graph.size)
        if dist.get_rank() < graph.size:
            with own.explained(*batch.names):
                results.append(simulate_on_ranks(problem, rule, graph, steps, group=group, **choices))
    return [result for result in results if result is not None]


def _device(name: str) -> torch.device:
    """Where this rank computes: the ranks of a machine take turns on its GPUs."""
    device = torch.device(name)
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device  # `simulate_on_ranks` refuses one that is missing
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


@cache
def _first_ranks(size: int) -> dist.ProcessGroup:
    """The group of the first ranks; all ranks must ask for it together."""
    group: dist.ProcessGroup = dist.new_group(list(range(size)), timeout=PATIENCE, backend="gloo")
    return group


def _shared(text: str = "") -> str:
    """The text of rank 0, on all ranks."""
    message = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
    length = torch.tensor([len(message)])
    broadcast(dist.group.WORLD, length)
    if dist.get_rank() != 0:
        message = torch.zeros(int(length), dtype=torch.uint8)
    broadcast(dist.group.WORLD, message)
    return bytes(message.tolist()).decode().strip()


def _dismiss() -> None:
    with suppress(RuntimeError):  # the others are already gone
        _shared()
    dist.destroy_process_group()


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
    any_graph: bool = False,
) -> Result | None:
    """Run an update rule on a problem, every node in its own process; all ranks of the gloo `group` call it together.

    Arguments and numbers are those of `simulate`, up to rounding. Rank 0 returns the result, the others None. A
    neighbour that is gone or late is a LinkError.
    """
    parts = prepared([problem], [rule], [topology], steps, record, dtype, device, any_graph)
    rates, size = parts.rates, dist.get_world_size(group)
    if topology.meets:
        raise ValueError(f"meets = {topology.meets!r} is for simulations; ranks meet in rounds: leave it out")
    if topology.size != size:
        raise ValueError(f"{topology.name} has {topology.size} nodes but the group has {size} ranks; use one per node")
    with closing(GlooLinks(group, topology, rates.device, TIMEOUT, "raise")) as links:
        here = parts.networks[0].problem
        node = Node(rates.placed(bare(parts.rule)), rates.start(here).contiguous(), links)
        nodes = RankNodes(node, here, rates, group)
        run = Run(Snapshot({}, nodes.begun))
        run.drive(nodes, parts.points, rates.steps, Saver(None, 0.0, {}), lambda rounds: None)
    return next(iter(run.results(nodes, parts.points, parts.origins)), None)


class RankNodes(Nodes):
    """The node of this rank. When a run is measured, rank 0 sees all states, the others nothing."""

    name = "ranks"

    def __init__(self, node: Node, problem: Problem, rates: Rates, group: dist.ProcessGroup) -> None:
        self.node, self.rule, self.problem, self.rates, self.group = node, node.rule, problem, rates, group
        self.device, self.rank = rates.device, dist.get_rank(group)
        self.networks = [Network(problem, slice(None))] if self.rank == 0 else []
        self.begun = torch.full((rates.columns, 2), -1)
        self._watched = Watched(self.rule)
        self._lost = torch.full((rates.columns,), NEVER)  # by column: when this node was first not finite

    def advance(self, state: State, done: int, until: int) -> State:
        """Rounds done + 1 to until; `state` stays what the last measurement saw."""
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
        given = Given(self._watched, self.problem.grad_with_autograd(x[None], t, [self.rank])[0], self.rates(t))

        def whole(_: Block) -> Given:
            return given  # a state of columns is not a plain vector, and is not cut into slices

        self.node.exchange(whole)
        self.node.advance(whole, last=t == self.rates.steps)
        lost = ~torch.isfinite(self.rule.output(self.node.state)).all(-1).cpu() & (self._lost == NEVER)
        if lost.any():
            self._lost[lost] = t * MOST_STEPS + self._watched.finite_steps()[lost]
        return given.grad

    def _gathered(self, mine: Tensor) -> Tensor:
        """The tensors of all ranks, stacked, on rank 0; the rank's own on the others."""
        first = dist.get_process_group_ranks(self.group)[0]
        here = mine.detach().cpu().contiguous()
        rows = [torch.empty_like(here) for _ in range(dist.get_world_size(self.group))] if self.rank == 0 else None
        dist.gather(here, rows, first, group=self.group)
        return torch.stack(rows or [here]).to(mine.device)
