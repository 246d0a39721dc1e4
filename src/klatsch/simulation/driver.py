"""A run in progress: where it stands, what it has measured, and how it moves on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.problems import Problem
from klatsch.rules import State
from klatsch.simulation.divergence import Moment, beginnings, diverged
from klatsch.simulation.progress import Advance
from klatsch.simulation.record import measure
from klatsch.simulation.stack import Rounds, TorchRounds, device_of

PIECE_SECONDS = 0.2  # how often the bar moves and the clock for checkpoints is looked at


class Network(NamedTuple):
    """One of the networks that a run advances: its problem, and which rows of the state are its nodes."""

    problem: Problem
    nodes: slice


class Snapshot(NamedTuple):
    """Where a run stands. It is replaced as a whole, so that an interrupt at any moment finds it consistent."""

    state: State
    diverged: Tensor  # bool, the columns of every network, one network after the other
    diverged_at: Tensor  # (columns, 2), the first node and round that were not finite; -1 as long as all are
    rounds: int = 0
    seconds: float = 0.0
    points: int = 0  # how many rows of metrics belong to it


def unharmed(columns: int) -> tuple[Tensor, Tensor]:
    """What a snapshot says of divergence where there is none."""
    return torch.zeros(columns, dtype=torch.bool), torch.full((columns, 2), -1)


class Run:
    """A run in progress.

    Args:
        now: where it stands.
        rows: the metrics so far, one row of tensors like `now.diverged` per point; `now` says how many count.
    """

    def __init__(self, now: Snapshot, rows: list[dict[str, Tensor]]) -> None:
        self.now, self.rows = now, rows
        self._piece = 64  # rounds at a time; found as the run goes

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics so far, (points, columns) each."""
        rows = self.rows[: self.now.points]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}

    def piece(self, plain: TorchRounds, rounds: Rounds, networks: Sequence[Network], until: int, tell: Advance) -> None:
        """Advance towards `until` rounds, by what takes a fraction of a second."""
        now = self.now
        goal = min(until, now.rounds + self._piece)
        began = time.perf_counter()
        state = rounds.advance(now.state, now.rounds, goal)
        took = _since(began, state)
        _, begun = self._losses(plain, rounds, networks, state, goal)
        self.now = now._replace(state=state, diverged_at=begun, rounds=goal, seconds=now.seconds + took)
        if took < PIECE_SECONDS and goal - now.rounds == self._piece:
            self._piece *= 2
        tell(goal - now.rounds)

    def one(self, plain: TorchRounds, networks: Sequence[Network], measured: bool, tell: Advance) -> None:
        """One round with plain operations, which show the gradient; measured if wanted."""
        now, rule = self.now, plain.rule
        began = time.perf_counter()
        state, grad = plain.one(now.state, now.rounds + 1)
        took = _since(began, state)
        lost, begun = self._losses(plain, plain, networks, state, now.rounds + 1)
        lost |= now.diverged
        if measured:
            parts = [{name: v[network.nodes] for name, v in state.items()} for network in networks]
            found = [
                measure(network.problem, rule, part, grad[network.nodes])
                for network, part in zip(networks, parts, strict=True)
            ]
            C = len(lost) // len(networks)
            row = {name: torch.cat([each[name].expand(C) for each in found]) for name in found[0]}
            self.rows[now.points :] = [without_diverged(row, lost, networks[0].problem)]
        self.now = Snapshot(state, lost, begun, now.rounds + 1, now.seconds + took, now.points + measured)
        tell(1)

    def _losses(
        self, plain: TorchRounds, rounds: Rounds, networks: Sequence[Network], state: State, reached: int
    ) -> tuple[Tensor, Tensor]:
        """The columns that are not finite in a later state, and where they and earlier ones began to be so."""
        now, nodes = self.now, [network.nodes for network in networks]
        lost = diverged(plain.rule.output(state), nodes)
        new = lost & (now.diverged_at[:, 1] < 0)
        if not new.any():
            return lost, now.diverged_at
        early, late = Moment(now.state, now.rounds), Moment(state, reached)
        begun = beginnings(plain, rounds, nodes, early, late, new)
        return lost, begun.where(new[:, None], now.diverged_at)


def without_diverged(row: dict[str, Tensor], diverged: Tensor, problem: Problem) -> dict[str, Tensor]:
    """Metrics in which a column that diverged has the worst value there is: inf, unless the problem knows another."""
    return {name: v.masked_fill(diverged, problem.worst.get(name, torch.inf)) for name, v in row.items()}


def _since(began: float, state: State) -> float:
    if (device := device_of(state)).type == "cuda":
        torch.cuda.synchronize(device)  # the clock must not run ahead of the GPU
    return time.perf_counter() - began
