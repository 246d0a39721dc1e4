"""Who is still there: which links are lost, who has finished and who leaves, told at the end of every message.

What a rank knows of the network is a vector of numbers that only grow, its status. Each takes the larger of its own
numbers and of those that it hears, so that news travels one hop per round, without a server.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path
from torch import Tensor

from klatsch.topology import Topology

DIGIT = 1 << 20  # rounds are told in two numbers below this, which every dtype of a message holds exactly


class Membership:
    """What one rank knows of all others.

    Args:
        topology: who talks to whom.
        rank: which node this is.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology, self.rank, self.size = topology, rank, topology.size
        heard = sum((abs(P) for P in topology.speaking), start=csr_array((self.size, self.size))).tocoo()
        ways = zip(heard.coords[1].tolist(), heard.coords[0].tolist(), strict=True)
        self._ways = [(source, target) for source, target in ways if source != target]
        pairs = sorted({(min(way), max(way)) for way in self._ways})
        self._number = {pair: k for k, pair in enumerate(pairs)}
        self._status = torch.zeros(3 * self.size + len(pairs), dtype=torch.float64)
        self._low, self._high, self._leaving, self._lost = torch.split(
            self._status, [self.size, self.size, self.size, len(pairs)]
        )
        self._gone = self._status[2 * self.size :]  # the last two of them

    def __len__(self) -> int:
        return len(self._status)

    # --- news --------------------------------------------------------------------------------------------------

    def tell(self, tail: Tensor) -> None:
        """Write what this rank knows to the end of a message."""
        tail.copy_(self._status)

    def learn(self, tails: Iterable[Tensor]) -> bool:
        """Take in what other ranks know; returns whether a link is lost, or a rank leaves, that was not known to."""
        before = self._gone.clone()
        for tail in tails:
            heard = torch.nan_to_num(tail.to(self._status), nan=0.0, posinf=0.0)  # nonsense is no news
            torch.maximum(self._status, heard, out=self._status)
        return not torch.equal(before, self._gone)

    def lose(self, peer: int) -> None:
        """Say that this rank and a neighbour go on without each other."""
        self._lost[self._number[min(peer, self.rank), max(peer, self.rank)]] = 1

    def finish(self, rounds: int, leave: bool) -> None:
        """Say that this rank has taken its last gradient."""
        self._high[self.rank], low = divmod(rounds, DIGIT)
        self._low[self.rank] = low + 1  # 0: not finished
        self._leaving[self.rank] = leave

    # --- what follows from it ----------------------------------------------------------------------------------

    def links_lost(self) -> list[int]:
        """The neighbours whose link to this rank is lost, whoever of the two gave it up."""
        ends = [pair for pair, k in self._number.items() if self.rank in pair and self._lost[k]]
        return [a if b == self.rank else b for a, b in ends]

    def gone_by(self, peer: int, t: int) -> bool:
        """Whether a neighbour has left before round t, as it had said."""
        return bool(self._leaving[peer]) and t > self._end([peer])

    @property
    def leaving(self) -> bool:
        """Whether this rank itself leaves."""
        return bool(self._leaving[self.rank])

    @property
    def anyone_leaves(self) -> bool:
        """Whether any rank does."""
        return bool(self._leaving.any())

    def last_round(self) -> int | None:
        """The round after which nobody needs this rank any more; None as long as that is not known.

        All have finished then, and all know it: news of the last one needs a round to be sent, and `lag` to arrive.
        A rank that leaves waits only until everyone has heard of that.
        """
        if self.leaving:
            return self._end([self.rank])
        nodes = self.within_reach()
        return self._end(nodes) if bool((self._low[nodes] > 0).all()) else None

    def within_reach(self) -> list[int]:
        """The ranks that this one still hears from, and is heard by, through others or directly; itself included."""
        parts = self._parts()
        return [node for node in range(self.size) if parts[node] == parts[self.rank]]

    def out_of_reach(self) -> list[list[int]]:
        """Ranks that may train on without this one, in groups that still hear each other.

        One that is alone counts only if nobody has lost it: others have left it behind.
        """
        parts = self._parts()
        groups = [[node for node in range(self.size) if parts[node] == part] for part in sorted(set(parts))]
        lost = {node for pair, k in self._number.items() if self._lost[k] for node in pair}
        leaving = {node for node in range(self.size) if self._leaving[node]}
        return [g for g in groups if self.rank not in g and (len(g) > 1 or not (lost | leaving).intersection(g))]

    def tree(self) -> tuple[int | None, list[int]]:
        """The parent and the children of this rank in a tree of all within reach, the same one on all of them."""
        nodes = self.within_reach()
        parent: dict[int, int | None] = {nodes[0]: None}
        for node in (queue := [nodes[0]]):
            for other in self._beside(node):
                if other not in parent:
                    parent[other] = node
                    queue.append(other)
        return parent[self.rank], [node for node in nodes if parent[node] == self.rank]

    def beside(self) -> list[int]:
        """All neighbours, in whatever round and direction, whose link to this rank is not lost."""
        return self._beside(self.rank)

    def _beside(self, node: int) -> list[int]:
        held = [pair for pair in self._number if node in pair and self._holds(pair)]
        return sorted(a if b == node else b for a, b in held)

    def _holds(self, pair: tuple[int, int]) -> bool:
        """Whether a link is there to stay: not lost, and none of the two leaves."""
        a, b = pair
        return not (self._lost[self._number[min(a, b), max(a, b)]] or self._leaving[a] or self._leaving[b])

    def _end(self, nodes: list[int]) -> int:
        """The round by which all have heard that these have finished; a late one where links are missing."""
        rounds = max(int(self._high[node]) * DIGIT + int(self._low[node]) - 1 for node in nodes)
        hops = (self.size - 1) * self.topology.period if bool(self._gone.any()) else self._lag
        return rounds + (1 + hops if self.size > 1 else 0)

    @cached_property
    def _lag(self) -> int:
        return lag(self.topology)

    def _parts(self) -> list[int]:
        """The part of the network that each rank is in: those who reach each other over links that hold."""
        kept = [way for way in self._ways if self._holds(way)]
        rows, columns = zip(*kept, strict=True) if kept else ((), ())
        graph = csr_array((np.ones(len(kept)), (rows, columns)), shape=(self.size, self.size))
        parts: list[int] = connected_components(graph, connection="strong")[1].tolist()
        return parts


def lag(topology: Topology) -> int:
    """Rounds that a rank may be ahead of the slowest one: after t of its own, all others have done t - lag.

    It is also how many rounds news needs to reach everybody. Whenever it comes up, so many rounds hold as many in which
    nodes talk as it has to travel.
    """
    if not topology.changes:
        hops = shortest_path(topology.speaking[0], unweighted=True)
        return int(hops[np.isfinite(hops)].max()) * topology.every
    worst, itself = 0, np.eye(topology.size, dtype=np.float32)  # numbers, whose product is the fast one
    heard = [np.maximum(itself, P.toarray() != 0).astype(np.float32) for P in topology.speaking]
    for phase in range(len(heard)):
        reached, back, last = itself, 0, 0  # `last`: the hops after which something new was reached
        while not reached.all() and back - last < len(heard):
            further = np.minimum(reached @ heard[(phase - back) % len(heard)], 1)
            back += 1
            last, reached = (back if (further != reached).any() else last), further
        worst = max(worst, last)
    return worst * topology.every
