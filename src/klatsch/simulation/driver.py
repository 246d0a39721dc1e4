"""The loop that runs every simulation, here or on ranks: advance the nodes, measure, save, show progress."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from klatsch.problems import Problem
from klatsch.rules import Rule, State
from klatsch.rules.base import each
from klatsch.simulation.record import Facts, Result, measure, measure_nodes

if TYPE_CHECKING:
    from klatsch.simulation.checkpoint import Saver

PIECE_SECONDS = 0.2  # how often the bar moves and the clock for checkpoints is looked at

Advance = Callable[[int], object]  # called with the number of rounds just done
Watch = Callable[[int, State, dict[str, Tensor]], object]  # of a round, its state and metrics: whether to stop there
NODES = "@nodes"


class Network(NamedTuple):
    """One network of a run: its problem, and its rows of the state."""

    problem: Problem
    nodes: slice

    def part(self, state: State) -> State:
        return each(lambda v: v[self.nodes], state)


class Snapshot(NamedTuple):
    """Where a run stands; replaced as a whole, so that an interrupt always finds it consistent."""

    state: State
    diverged_at: Tensor  # (columns of all networks, 2): the first node and round that were not finite, or -1
    rounds: int = 0
    seconds: float = 0.0
    points: int = 0  # rows of metrics so far

    @property
    def diverged(self) -> Tensor:
        return self.diverged_at[:, 1] >= 0


class Nodes(ABC):
    """What a run advances: all nodes as one stack of tensors, or each in its own process."""

    name: ClassVar[str]
    rule: Rule
    networks: Sequence[Network]  # measured by this process
    brief: bool = False  # whether nothing is measured of gradients
    device: torch.device

    @abstractmethod
    def advance(self, state: State, done: int, until: int) -> State:
        """The state after `until` rounds, from the state after `done` rounds."""

    @abstractmethod
    def one(self, state: State, t: int) -> tuple[State, Tensor]:
        """Round t: the next state and its gradients."""

    @abstractmethod
    def beginnings(self, now: Snapshot, state: State, rounds: int) -> Tensor:
        """`diverged_at` of a later state, after `rounds` rounds."""


@dataclass
class Run:
    """A run in progress: where it stands, and what was measured."""

    now: Snapshot
    rows: list[dict[str, Tensor]] = field(default_factory=list)  # one number per column; `now.points` rows count
    size: int = 64  # rounds per piece, doubled until a piece takes PIECE_SECONDS
    per_node: bool = False  # whether metrics of every node are kept, too, as "name@nodes"
    watch: Watch | None = None

    @classmethod
    def resumed(cls, now: Snapshot, metrics: dict[str, Tensor]) -> Self:
        """A run that continues from a snapshot and its metrics, (points, columns) each."""
        return cls(now, [{name: values[k] for name, values in metrics.items()} for k in range(now.points)])

    @property
    def metrics(self) -> dict[str, Tensor]:
        rows = self.rows[: self.now.points]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}

    def drive(self, nodes: Nodes, points: list[int], steps: int, saver: Saver, tell: Advance) -> None:
        """Finish the run: in large pieces between points; in a single round at each, unless gradients do not matter."""
        with torch.no_grad():
            try:
                for point in [p for p in dict.fromkeys([*points, steps]) if p > self.now.rounds]:
                    while (done := self.now.rounds) < point:
                        if nodes.brief or done < point - 1:
                            new, grad = self._piece(nodes, point if nodes.brief else point - 1), None
                        else:
                            new, grad = self._round(nodes)
                        if new.rounds == point and point in points and len(nodes.networks) > 0:
                            self.rows[new.points :] = [_row(nodes, new, grad, self.per_node)]
                            new = new._replace(points=new.points + 1)
                        measured, self.now = new.points > self.now.points, new
                        tell(self.now.rounds - done)
                        saver.perhaps(self)
                        if measured and self.watch is not None and self.watch(point, dict(new.state), self._last()):
                            saver.end(self)
                            return
            except KeyboardInterrupt:
                saver.now(self)
                raise
        saver.end(self)

    def _last(self) -> dict[str, Tensor]:
        return {name: v for name, v in self.rows[self.now.points - 1].items() if NODES not in name}

    def results(self, nodes: Nodes, points: list[int], origins: Sequence[Facts]) -> list[Result]:
        """The result of each network; `seconds` is the time of all of them."""
        now, found = self.now, []
        C, outputs = len(now.diverged) // len(origins), nodes.rule.output(now.state)
        for k, network in enumerate(nodes.networks):
            own = slice(k * C, (k + 1) * C)
            output = outputs[network.nodes]
            found.append(
                Result(
                    steps=points[: now.points],
                    metrics={name: v[:, own] for name, v in self.metrics.items() if NODES not in name},
                    per_node={
                        name.removesuffix(NODES): v[:, network.nodes]
                        for name, v in self.metrics.items()
                        if NODES in name
                    },
                    headline=network.problem.headline.metric,
                    large_is_good=network.problem.large_is_good,
                    output=output.masked_fill(now.diverged[own, None].to(output.device), torch.inf),
                    diverged=now.diverged[own],
                    diverged_at=now.diverged_at[own],
                    seconds=now.seconds,
                    engine=nodes.name,
                    state=network.part(now.state),
                    rounds=now.rounds,
                    origin=origins[k],
                )
            )
        return found

    def _piece(self, nodes: Nodes, until: int) -> Snapshot:
        now, began = self.now, time.perf_counter()
        goal = min(until, now.rounds + self.size)
        state = nodes.advance(now.state, now.rounds, goal)
        took = _since(began, nodes.device)
        if took < PIECE_SECONDS and goal - now.rounds == self.size:
            self.size *= 2
        return Snapshot(state, nodes.beginnings(now, state, goal), goal, now.seconds + took, now.points)

    def _round(self, nodes: Nodes) -> tuple[Snapshot, Tensor]:
        now, t, began = self.now, self.now.rounds + 1, time.perf_counter()
        state, grad = nodes.one(now.state, t)
        took = _since(began, nodes.device)
        return Snapshot(state, nodes.beginnings(now, state, t), t, now.seconds + took, now.points), grad


def _row(nodes: Nodes, now: Snapshot, grad: Tensor | None, per_node: bool) -> dict[str, Tensor]:
    """The metrics of a step; where a column diverged, the worst value: inf, unless the problem has another."""
    rule, state, diverged = nodes.rule, now.state, now.diverged  # numbers may differ between the networks
    points = [rule.output(state)]
    if grad is not None:
        points += [rule.query(state), rule.iterate(state), grad]
    found = [measure(n.problem, *(v[n.nodes] for v in points)) for n in nodes.networks]
    worst_of = nodes.networks[0].problem.worst_of
    row = {name: torch.cat([metrics[name] for metrics in found]) for name in found[0]}
    row = {name: v.masked_fill(diverged, worst_of(name)) for name, v in row.items()}
    if per_node:
        each = [measure_nodes(n.problem, points[0][n.nodes]) for n in nodes.networks]
        lost = diverged.view(len(each), -1)
        for name in each[0]:
            parts = [one[name].masked_fill(lost[k], worst_of(name)) for k, one in enumerate(each)]
            row[name + NODES] = torch.cat(parts)
    return row


def _since(began: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the clock must not run ahead of the GPU
    return time.perf_counter() - began


@contextmanager
def progress_bar(wanted: bool | Advance | None, total: int, done: int, title: str) -> Iterator[Advance]:
    """A function to call with the rounds just done: the user's, one that moves a bar, or one that does nothing."""
    if callable(wanted):
        wanted(done)
        yield wanted
    elif wanted or (wanted is None and sys.stderr.isatty()):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}")
        left = TimeRemainingColumn(compact=True)
        with Progress(*columns, left, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total, completed=done, pace="")

            def tell(rounds: int) -> None:
                bar.advance(task, rounds)
                bar.update(task, pace=f"{bar.tasks[0].speed or 0:,.0f} rounds/s")

            yield tell
    else:
        yield lambda rounds: None
