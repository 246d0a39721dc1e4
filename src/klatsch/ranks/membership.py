"""Who is still there: which links are lost, who has finished and who leaves, sent at the end of every message.

What a rank knows of the network, its status, is a list of numbers that only grow. Each rank keeps the larger of its
own numbers and of those it hears, so news travels one hop per round, without a server. The status travels as bytes
behind whatever else a message holds, so it is exact in every encoding of messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csr_array, diags_array
from torch import Tensor

from klatsch.topology import Topology
from klatsch.topology.matrix import Matrix, moved

WORD = 8  # bytes of a round's number
MOST_TURNS = 10_000  # of scaling; it takes a few dozen


class Membership:
    """What one rank knows of all others."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology, self.rank, self.size = topology, rank, topology.size
        heard = topology.union.tocoo()
        ways = zip(heard.coords[1].tolist(), heard.coords[0].tolist(), strict=True)
        self._ways = [(source, target) for source, target in ways if source != target]
        pairs = sorted({(min(way), max(way)) for way in self._ways})
        self._number = {pair: k for k, pair in enumerate(pairs)}
        self.links = len(pairs)  # whichever way they are heard
        self._status = torch.zeros((WORD + 1) * self.size + self.links, dtype=torch.uint8)
        self._finished, self._gone = self._read(self._status)
        self._leaving, self._lost = torch.split(self._gone, [self.size, self.links])
        self._leavers_at, self._known_leavers = -1, list[int]()
        self.since = 0  # the round from which on it counts who has finished: older news may still be on its way

    def __len__(self) -> int:
        """The bytes of the status."""
        return len(self._status)

    def number(self, node: int, other: int) -> int:
        """Of the link between two nodes."""
        return self._number[min(node, other), max(node, other)]

    def _read(self, status: Tensor) -> tuple[Tensor, Tensor]:
        """By rank: 1 + its last round, 0 while it is not finished. By rank and by link: 1 if it is gone, 0 if not."""
        words = WORD * self.size
        return status[:words].view(torch.int64), status[words:]

    # --- news --------------------------------------------------------------------------------------------------

    def tell(self, tail: Tensor) -> None:
        """Write what this rank knows to the end of a message."""
        tail.copy_(self._status)

    def learn(self, tails: Iterable[Tensor]) -> bool:
        """Add what other ranks know; returns whether a link is newly lost or a rank newly leaves."""
        before = self._gone.clone()
        for tail in tails:
            finished, gone = self._read(tail.to("cpu", copy=True))  # a copy, since words must be aligned
            if finished.min() >= 0 and gone.max() <= 1:  # nonsense is not news
                torch.maximum(self._finished, finished, out=self._finished)
                torch.maximum(self._gone, gone, out=self._gone)
        return not torch.equal(before, self._gone)

    def lose(self, peer: int) -> None:
        """Record that this rank and a neighbour go on without each other."""
        self._lost[self.number(peer, self.rank)] = 1

    def finish(self, rounds: int, leave: bool) -> None:
        """Record that this rank has taken its last gradient."""
        self._finished[self.rank] = rounds + 1
        self._leaving[self.rank] = leave

    # --- what follows from it ----------------------------------------------------------------------------------

    def links_lost(self) -> list[int]:
        """The neighbours whose link to this rank is lost, whichever of the two gave it up."""
        return [sum(pair) - self.rank for pair, k in self._number.items() if self.rank in pair and self._lost[k]]

    def gone_by(self, t: int) -> set[int]:
        """The ranks that announced that they leave before round t."""
        return {node for node in self._leavers() if t > self._end([node])}

    @property
    def leaving(self) -> bool:
        """Whether this rank itself leaves."""
        return bool(self._leaving[self.rank])

    def last_round(self) -> int | None:
        """The round after which nobody needs this rank any more; None while that is unknown.

        By then all have finished and know it. A rank that leaves only waits until everyone knows that.
        """
        if self.leaving:
            return self._end([self.rank])
        nodes = self.within_reach()
        return self._end(nodes) if bool((self._finished[nodes] > self.since).all()) else None

    def heard_out(self, t: int) -> bool:
        """Whether the last message of a rank that has left arrived in the round before t."""
        return any(self._end([node]) + self.topology.late == t - 1 for node in self._leavers())

    def within_reach(self, t: int | None = None) -> list[int]:
        """The ranks, with this one, that still hear each other; in round t also those that leave later."""
        return next(group for group in self._groups(t) if self.rank in group)

    def out_of_reach(self) -> list[list[int]]:
        """Groups of ranks that may keep training without this one; a single rank that lost a link is presumed gone."""
        ended = {node for pair, k in self._number.items() if self._lost[k] for node in pair} | {*self._leavers()}
        return [g for g in self._groups() if self.rank not in g and (len(g) > 1 or not ended.intersection(g))]

    def tree(self, t: int | None = None) -> tuple[list[int], list[int], int]:
        """The parent of this rank (none at the root), its children and depth in one tree of all within reach."""
        nodes, depth = self.within_reach(t), 0
        parents: list[int] = sparse.csgraph.breadth_first_order(self._graph(t), nodes[0], directed=False)[1].tolist()
        above = self.rank
        while above != nodes[0]:
            above, depth = parents[above], depth + 1
        return [parents[self.rank]] * (depth > 0), [node for node in nodes if parents[node] == self.rank], depth

    def beside(self, t: int | None = None) -> list[int]:
        """All neighbours, in any round and direction, whose link to this rank holds."""
        return sorted(sum(pair) - self.rank for pair in self._holding(self._number, t) if self.rank in pair)

    def rebalanced(self, t: int) -> Matrix | None:
        """The gossip matrix of a directed graph without the links that do not hold in round t; None if all do.

        A rank that takes over the weight of a lost neighbour keeps rows summing to 1; columns then do only if links go
        both ways. A graph that changes is left alone: in a single round too few links may be left.
        """
        topology = self.topology
        if not self._gone.any() or topology.changes or topology.symmetric or not topology.doubly_stochastic:
            return None
        kept = self._holding(self._ways, t)
        return _balanced(topology, tuple(kept)) if len(kept) < len(self._ways) else None

    def _leavers(self) -> list[int]:
        if self._leavers_at != self._leaving._version:  # asked several times in every round
            self._leavers_at, self._known_leavers = self._leaving._version, self._leaving.nonzero()[:, 0].tolist()
        return self._known_leavers

    def _holding(self, ends: Iterable[tuple[int, int]], t: int | None) -> list[tuple[int, int]]:
        """The links that are not lost, of which neither end leaves, or has left before round t."""
        gone = {*self._leavers()} if t is None else self.gone_by(t)
        return [pair for pair in ends if not self._lost[self.number(*pair)] and gone.isdisjoint(pair)]

    def _graph(self, t: int | None) -> csr_array:
        """The links that hold, from speaker to hearer."""
        kept = np.array(self._holding(self._ways, t), dtype=int).reshape(-1, 2)
        return csr_array((np.ones(len(kept)), tuple(kept.T)), shape=(self.size, self.size))

    def _groups(self, t: int | None = None) -> list[list[int]]:
        """The ranks in groups that reach each other over links that hold."""
        number, groups = sparse.csgraph.connected_components(self._graph(t), connection="strong")
        return [np.flatnonzero(groups == k).tolist() for k in range(number)]

    def _end(self, nodes: list[int]) -> int:
        """The round by which all know that these ranks have finished; an upper bound if links are lost."""
        rounds = int(self._finished[nodes].max()) - 1
        if self.size == 1:
            return rounds
        if self.topology.shuffle is not None and not self._gone.any():
            return rounds + 1 + _spread(self.topology, rounds + 2)
        return rounds + 1 + self.lag

    @property
    def lag(self) -> int:
        """See `lag`; an upper bound if links are lost or ranks leave."""
        return _longest(self.topology) if bool(self._gone.any()) else lag(self.topology)


@lru_cache(maxsize=8)
def _balanced(topology: Topology, ways: tuple[tuple[int, int], ...]) -> Matrix:
    """Weights for some links of a static graph, from speaker to hearer, such that rows and columns sum to 1.

    What is left of the matrix is scaled, rows and columns in turn (Sinkhorn). A link without a way back gets 0.
    """
    P, ends = topology.speaking[0], np.array(ways, dtype=int).reshape(-1, 2).T[::-1]
    held = csr_array((np.ones(len(ways)), tuple(ends)), shape=P.shape)
    groups = sparse.csgraph.connected_components(held, connection="strong")[1]
    held.data = held.data * (groups[held.nonzero()[0]] == groups[held.nonzero()[1]])
    left = csr_array(P.multiply(held))
    left = csr_array(left + diags_array(1.0 - left.sum(axis=1)))
    rows = columns = np.ones(topology.size)
    for _ in range(MOST_TURNS):
        columns = np.reciprocal(np.asarray(left.T @ rows))
        before, rows = rows, np.reciprocal(np.asarray(left @ columns))
        if np.allclose(before, rows, rtol=1e-14, atol=0.0):
            break
    return csr_array(diags_array(rows) @ left @ diags_array(columns))


def _longest(topology: Topology) -> int:
    """The rounds that news takes at most, if it waits a whole period at every hop.

    Among random pairs of which half are gone, that it takes longer than this has a probability below 1e-9.
    """
    if topology.shuffle is not None:
        return (100 + topology.size) * (topology.every + topology.late)
    return (topology.size - 1) * (topology.period + topology.late)


@lru_cache(maxsize=64)
def _spread(topology: Topology, start: int) -> int:
    """The rounds, from one on, after which news of every rank has reached all whom it can reach."""
    known, arriving = np.eye(topology.size, dtype=np.float32), dict[int, NDArray[np.float32]]()
    rounds, t, every = 0, start, topology.every
    while not known.all() and rounds < _longest(topology):
        if topology.speaks(t):
            P = topology.speaking[(t // every - 1) % len(topology.speaking)]
            heard = P if topology.shuffle is None else moved(P, topology.places(t))
            arriving[t + topology.late] = heard.astype(np.float32) @ known
        known = np.sign(known + arriving.pop(t, 0))
        rounds, t = t + 1 - start, min([*arriving, t + every - t % every])  # the next in which something happens
    return rounds


@lru_cache(maxsize=8)
def lag(topology: Topology) -> int:
    """Rounds that a rank can be ahead of the slowest: after t rounds of its own, all others have done t - lag.

    It is also how many rounds news takes to reach everybody, from any round.
    """
    if not topology.changes:
        hops = sparse.csgraph.shortest_path(topology.speaking[0], unweighted=True)
        return int(hops[np.isfinite(hops)].max()) * (topology.every + topology.late)
    if topology.shuffle is not None:
        return _longest(topology)
    return max(_spread(topology, 1 + t) for t in range(0, topology.period, topology.every))  # after each mix
