"""Sums over all ranks that are still there, over the links that still hold, where a collective would fail.

First the ranks tell each other what they know, until all within reach know the same; then numbers go up a tree that
all of them see alike, and their sum comes down again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klatsch.ranks.gloo import GlooLinks

FIRST_TAG, LAST_TAG = 1 << 20, 1 << 31  # above those of rounds; another one for every round that is asked after
NEWS, UP, DOWN = range(3)


class Survivors:
    """The ranks within reach of this one; all of them must make it, and ask it, together after the same round.

    Args:
        links: those of this rank.
        t: the round, which tells the messages of one question from those of another.

    Raises:
        RuntimeError: a rank within reach does not answer.
        QuorumError: fewer are left than were asked for.
    """

    def __init__(self, links: GlooLinks, t: int) -> None:
        self._links, self._round = links, t
        knowledge = links.membership
        for _ in range(links.topology.size - 1):
            message = torch.zeros(len(knowledge), dtype=torch.float64)
            knowledge.tell(message)
            beside = knowledge.beside()
            if knowledge.learn(self._swap(NEWS, message, beside, beside)):
                links.take_stock(t)
        self.ranks = knowledge.within_reach()
        self._parent, self._children = knowledge.tree()

    def summed(self, mine: Tensor) -> Tensor:
        """The sum over all of them.

        Raises:
            RuntimeError: one died meanwhile; all others hear of that, too.
        """
        parents = [] if self._parent is None else [self._parent]
        total = torch.cat([mine, mine.new_ones(1)])  # the last number counts who is in the sum
        for theirs in self._swap(UP, total, self._children, []):
            total += theirs
        self._swap(UP, total, [], parents)
        if parents:
            total = next(iter(self._swap(DOWN, total, parents, [])), torch.zeros_like(total))
        self._swap(DOWN, total, [], self._children)
        if int(total[-1]) != len(self.ranks):
            raise RuntimeError("a rank was lost meanwhile; ask again")
        return total[:-1]

    def _swap(self, kind: int, message: Tensor, sources: list[int], targets: list[int]) -> list[Tensor]:
        tag = FIRST_TAG + (self._round * 3 + kind) % (LAST_TAG - FIRST_TAG)
        return [vector for _, vector in self._links.swap(tag, self._round, message, sources, targets)]
