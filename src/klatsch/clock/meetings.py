"""Asynchrony: who meets whom, and how old a message is when it is used. The clock makes these schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from klatsch.clock.network import Array

SOME = 64  # gradients of every node that are drawn at once

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Round = TypeVar("Round")


class Meeting(NamedTuple):
    """Nodes that take a step, and then pairs that average; no node does the same twice."""

    number: int  # from 1, over all rounds
    steps: Numbers  # (m,)
    pairs: Numbers  # (k, 2)


class Late(NamedTuple):
    """One round of nodes that send what arrives later, each (M,) or (degree, M)."""

    ready: Array  # when each node has its gradient, and looks at what has arrived
    arrivals: Array  # when it will have what its neighbours send in this round; -inf where it has fewer neighbours
    done: Array


class Schedule(Generic[Round]):
    """Rounds that a clock finds one after the other; all are kept, so that a run can go back."""

    def __init__(self, coming: Iterator[tuple[Round, float]]) -> None:
        self._coming, self._rounds = coming, list[tuple[Round, float]]()

    def round(self, t: int) -> Round:
        """What happens in round t."""
        return self._until(t)[t - 1][0]

    def seconds(self, t: int) -> float:
        """When round t is over."""
        return self._until(t)[t - 1][1]

    def _until(self, t: int) -> list[tuple[Round, float]]:
        self._rounds += islice(self._coming, max(0, t - len(self._rounds)))
        return self._rounds


class Pairwise(Schedule[list[Meeting]]):
    """Asynchronous gossip in pairs (AD-PSGD): nobody waits for anybody's gradient.

    A node asks a neighbour while it computes its gradient. When the answer is there, both have the mean of their
    vectors; when the gradient is there as well, it takes its step and begins again. So a gradient is of the point at
    which it began. A round counts M steps of the network, whoever takes them. `weights` say how likely a node (row)
    asks another one (column), `answers` how many seconds pass until the answer; `work` is to handle a message.
    """

    def __init__(self, gradients: Iterator[Array], weights: Array, answers: Array, work: float, seed: int) -> None:
        self.nodes = len(weights)
        self._gradients, self._answers, self._work = gradients, answers, work
        self._shares = np.cumsum(weights, axis=1) / np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
        self._chance = np.random.default_rng([seed, 1])
        super().__init__(self._grouped())

    def _grouped(self) -> Iterator[tuple[list[Meeting], float]]:
        """Rounds of M steps; each event is in the first meeting that keeps the order of every node's events."""
        M, number, events = self.nodes, 1, self._events()
        while True:
            steps, pairs = defaultdict[int, list[int]](list), defaultdict[int, list[tuple[int, int]]](list)
            may_step, may_meet = [0] * M, [0] * M  # from which meeting of the round on
            for taken, when, node, other in events:
                if other >= 0:
                    k = max(may_meet[node], may_meet[other])
                    pairs[k].append((node, other))
                    for one in (node, other):
                        may_step[one] = may_meet[one] = k + 1
                    continue
                k = may_step[node]
                steps[k].append(node)
                may_step[node], may_meet[node] = k + 1, k
                if taken % M == 0:
                    meetings = [
                        Meeting(number + k, np.array(steps[k], np.int64), np.array(pairs[k], np.int64).reshape(-1, 2))
                        for k in range(1 + max((*steps, *pairs)))
                    ]
                    number += len(meetings)
                    yield meetings, when
                    break

    def _events(self) -> Iterator[tuple[int, float, int, int]]:
        """Steps so far, when, which node, and whom it meets, in the order of time; -1 where it takes its step."""
        taken = 0
        M, everyone = self.nodes, np.arange(self.nodes)
        begun, left = np.zeros(M), np.empty((0, 3))
        while True:
            times = np.array(list(islice(self._gradients, SOME)))  # (SOME, M)
            asked = (self._chance.random((SOME, M, 1)) > self._shares).sum(-1).clip(0, M - 1)
            answered = self._answers[everyone, asked]
            ends = begun + np.cumsum(np.maximum(times, answered) + self._work, axis=0)
            starts = np.concatenate([begun[None], ends[:-1]])
            nodes = np.broadcast_to(everyone, ends.shape)
            met = np.stack([starts + answered, nodes, asked], -1).reshape(-1, 3)
            stepped = np.stack([ends, nodes, np.full(ends.shape, -1)], -1).reshape(-1, 3)
            events = np.concatenate([left, met[met[:, 1] != met[:, 2]], stepped])  # one machine meets nobody
            events = events[np.lexsort((events[:, 1], -events[:, 2], events[:, 0]))]
            begun = ends[-1]
            known = events[:, 0] <= begun.min()  # of what is later, some is not drawn yet
            for when, node, other in events[known].tolist():
                taken += other < 0
                yield taken, when, int(node), int(other)
            left = events[~known]


class Staleness(Schedule[dict[int, Flags]]):
    """Which messages, (degree, M), nodes use in a round, by how many rounds old they are.

    Each is used as soon as it is there; after `late` rounds nodes wait for it. `sources` are those whom each node
    hears, with the weights of their messages.
    """

    def __init__(self, rounds: Iterator[Late], sources: Numbers, weights: Array, late: int) -> None:
        self.sources, self.weights = sources, weights
        super().__init__(_used(rounds, late))


def _used(rounds: Iterator[Late], late: int) -> Iterator[tuple[dict[int, Flags], float]]:
    on_the_way: dict[int, tuple[Array, Flags]] = {}  # by round of sending: arrivals, and which are not used yet
    for t, (ready, arrivals, done) in enumerate(rounds, 1):
        on_the_way[t] = arrivals, np.isfinite(arrivals)
        used = {}
        for sent, (arrival, waiting) in on_the_way.items():
            due = waiting & ((arrival <= ready) | (sent + late <= t))
            waiting &= ~due
            if due.any():
                used[t - sent] = due
        on_the_way.pop(t - late, None)
        yield used, float(done.max())
