"""What each neighbour has added to sums of flows, such as D2's correction y, to be taken out when it is lost.

Such sums are zero over the network. Without the lost node's they would not be, and push the others' mean for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.agreement import Group, members
from klatsch.ranks.message import Block
from klatsch.rules import State
from klatsch.wire.rehearsal import Sum

PIECE = 1 << 20  # numbers that travel at a time


class Ledger:
    """The entries of one node, for fields of the shape of x."""

    def __init__(self, sums: Sequence[Sum], x: Tensor) -> None:
        self._sums = {(entry.call, entry.part): entry for entry in sums}
        self._like = x
        self.entries: dict[int, dict[str, Tensor]] = {}  # by neighbour and field
        self.last: dict[int, int] = {}  # by neighbour: the round of its last entry

    @property
    def is_kept(self) -> bool:
        """Whether there are such sums."""
        return bool(self._sums)

    def covers(self, call: int, part: int) -> bool:
        """Whether a flow goes into a sum."""
        return (call, part) in self._sums

    def enter(self, t: int, call: int, part: int, block: Block, shares: dict[int, Tensor]) -> None:
        """Add the shares of the neighbours in a flow of round t, or in a slice of it."""
        entry = self._sums[call, part]
        self.last |= dict.fromkeys(shares, t)
        for node, share in shares.items():
            fields = self.entries.setdefault(node, {})
            if entry.field not in fields:
                fields[entry.field] = torch.zeros_like(self._like)
            whole = fields[entry.field]
            (whole if block is None else whole[block]).add_(share, alpha=entry.factor)

    def found(self, state: State, tree: tuple[int | None, list[int]], group: Group) -> None:
        """Make entries for sums that came without, as if their flows had come along a tree; all ranks do it together.

        What a rank owes its parent is the sum of its branch, and so the entries of every rank add up to its own sums.
        """
        (parent, children), ranks = tree, members(group)
        for field in sorted({entry.field for entry in self._sums.values()}):
            branch = state[field].to("cpu", copy=True)
            for child in children:
                theirs = torch.empty_like(branch)
                for piece in torch.split(theirs, PIECE):  # a timeout is about silence
                    dist.recv(piece, ranks[child], group=group)
                self.entries.setdefault(child, {})[field] = theirs.neg().to(self._like)
                branch += theirs
            if parent is not None:
                for piece in torch.split(branch, PIECE):
                    dist.send(piece, ranks[parent], group=group)
                self.entries.setdefault(parent, {})[field] = branch.to(self._like)

    def take_out(self, gone: Collection[int], state: State) -> None:
        """Take what these nodes have added out of a state."""
        for node in self.entries.keys() & set(gone):
            self.last.pop(node, None)
            for field, added in self.entries.pop(node).items():
                state[field].sub_(added)
