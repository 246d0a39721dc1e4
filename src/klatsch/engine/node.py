"""One rank's share of a network: its part of the rule's state, and the rounds that advance it.

The same `rule.update` as in simulation runs here, on slices of the vectors that stay in the cache: between two mixes a
rule is elementwise, so a slice needs nothing but itself. Where an exchange lies in the middle of a round, the update is
run up to that `mix` call to find what to send, and once more from the beginning when all has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from klatsch.algorithms import Algorithm
from klatsch.engine.plan import MOST_CALLS, plan
from klatsch.engine.weights import Heard, Weights
from klatsch.topology import Topology

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # numbers per slice: a cache's worth, or enough to hide the launches

PIECE = 1 << 30  # numbers of one product: a GPU's takes no more than twice as many

OTHER_CALLS = "{} does not call mix as often in every round; neighbours must know what to wait for"

Block = slice | None  # a slice of the vectors, or all of them


class Links(Protocol):
    """How messages travel; see `links.GlooLinks`."""

    tail: int

    def absent(self, t: int) -> Collection[int]: ...
    def refuse(self, source: int, t: int) -> None: ...
    def expect(self, tag: int, t: int, length: int, dtype: torch.dtype) -> None: ...
    def send(self, tag: int, t: int, message: Tensor) -> None: ...
    def received(self, tag: int, t: int) -> list[tuple[int, Tensor]]: ...
    def sent(self, tag: int, t: int) -> None: ...


class _Reached(Exception):  # noqa: N818
    """The update has come to the mix call that was looked for."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


class Node:
    """One rank's share of a network.

    Args:
        rule: the update rule.
        x: where it starts; any shape that ends in the parameter axis.
        topology: who talks to whom.
        rank: which node this is.
        links: how messages travel.
        channel: tells the messages of several nodes on the same links apart.
        guarded: refuse messages that are not finite.
    """

    def __init__(
        self,
        rule: Algorithm,
        x: Tensor,
        topology: Topology,
        rank: int,
        links: Links,
        channel: int = 0,
        guarded: bool = False,
    ) -> None:
        self.rule, self.links, self.rounds, self.dtype = rule, links, 0, x.dtype
        self.calls = plan(rule, x)
        self._weights = Weights(topology, rank, x.dtype, push=getattr(rule, "push", False))
        self._tag = channel * MOST_CALLS
        self._blocks = _blocks(x)
        self._begun, self._guarded = False, guarded
        self._first_late = 1 if rule.eager else 0  # the first mix call whose message has to be computed in the round
        start = rule.init(x)
        # What is eager travels while the next state is computed, so its memory takes turns; the rest is overwritten.
        shapes = [getattr(start, name).shape for name in rule.eager]
        self._turns = [Message(shapes, x, links.tail) for _ in range(2)] if rule.eager else []
        self._messages = [Message(call.shapes, x, links.tail) for call in self.calls[self._first_late :]]
        self._start = start._replace(**dict.fromkeys(start._fields))  # no memory, just the type and the names
        self._fields = {name: v.clone() for name, v in start._asdict().items() if v is not None}
        self._fields |= dict(zip(rule.eager, self._turns[0].parts, strict=True)) if self._turns else {}
        self._heard: dict[int, Heard] = {}
        self.load({name: getattr(start, name) for name in self._fields}, 0)

    @property
    def state(self) -> Any:
        """The state after the last round. Its tensors are this node's own memory."""
        return self._start._replace(**self._fields)

    def load(self, fields: dict[str, Tensor], rounds: int) -> None:
        """Go on from a state that was saved after so many rounds."""
        for name, value in fields.items():
            self._fields[name].copy_(value)
        self.rounds, self._begun = rounds, False

    def keep_also(self, rule: Algorithm) -> None:
        """Keep what the same rule with other options needs beside, such as a momentum; it begins as at the start."""
        start = rule.init(self.rule.query(self.state))
        for name, value in start._asdict().items():
            if value is not None and name not in self._fields:
                self._fields[name] = value.clone()

    def exchange(self, gradient: Callable[[Block], Tensor], rule: Callable[[Block], Algorithm]) -> None:
        """The first half of a round: send what is to be sent, and wait for what is to come.

        Args:
            gradient: gives a slice of the gradient.
            rule: gives the rule for a slice, with this round's learning rates.

        Raises:
            LinkError: a neighbour failed; the state is still that of the round before.
        """
        t = self.rounds + 1
        if not self._begun:
            self._begin(t)
        self._heard = {}
        for c in range(self._first_late, len(self.calls)):
            self._collect(t, self.calls[c].needs)
            self.links.sent(self._tag + c, t - 1)  # whose memory is used again
            self._compute_message(c, t, gradient, rule)
            self.links.send(self._tag + c, t, self._messages[c - self._first_late].whole)
        self._collect(t, range(len(self.calls)))
        if self._turns:
            self.links.sent(self._tag, t - 1)

    def advance(
        self,
        gradient: Callable[[Block], Tensor],
        rule: Callable[[Block], Algorithm],
        arrived: Callable[[Block, Any, Algorithm], None] | None = None,
        last: bool = False,
    ) -> None:
        """The second half: compute the new state, and send what of the next round is known already.

        Args:
            gradient: as in `exchange`.
            rule: as in `exchange`.
            arrived: is given every slice of the new state.
            last: whether no round follows, so that no message of one is sent or waited for.
        """
        t = self.rounds + 1
        following = dict(self._fields)
        if self._turns:
            following |= dict(zip(self.rule.eager, self._turns[1].parts, strict=True))
        single: dict[str, Tensor] = {}
        for block in self._blocks:
            here, old = rule(block), self._cut(block)
            new = _apart(old, here.update(old, gradient(block), self._mix(block), t))
            for name, value in new._asdict().items():
                if value is None:
                    continue
                place = following[name]
                if self._is_wide(place):
                    _slice(place, block, self._wide).copy_(value)
                else:  # the same for all slices, and still read by the next ones
                    single[name] = value
            if arrived is not None:
                arrived(block, new, here)
        for name, value in single.items():
            following[name].copy_(value)
        self._fields = following
        self._turns.reverse()
        self.rounds = t
        if not last:
            self._begin(t + 1)

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin(self, t: int) -> None:
        """Make ready for all messages of round t, and send those that need no gradient."""
        for c, call in enumerate(self.calls):
            length = sum(shape.numel() for shape in call.shapes)
            self.links.expect(self._tag + c, t, length, self.dtype)
        if self._turns:
            self.links.send(self._tag, t, self._turns[0].whole)
        self._begun = True

    def _collect(self, t: int, calls: Iterable[int]) -> None:
        """Wait for the messages of some mix calls."""
        for c in calls:
            if c not in self._heard:
                vectors = self.links.received(self._tag + c, t)
                if self._guarded:
                    for source in [source for source, vector in vectors if not is_sound(vector)]:
                        self.links.refuse(source, t)
                absent = self.links.absent(t)
                there = [(source, vector) for source, vector in vectors if source not in absent]
                self._heard[c] = self._weights.heard(there, t, absent)

    def _compute_message(self, c: int, t: int, gradient: Any, rule: Any) -> None:
        """Run the update up to call c, and keep what it would mix."""
        parts = self._messages[c - self._first_late].parts
        for block in self._blocks:
            try:
                rule(block).update(self._cut(block), gradient(block), self._mix(block, stop=c), t)
            except _Reached as reached:
                for part, tensor in zip(parts, reached.tensors, strict=True):
                    _slice(part, block, self._wide).copy_(tensor)
            else:
                raise ValueError(OTHER_CALLS.format(type(self.rule).__name__))

    def _mix(self, block: Block, stop: int | None = None) -> Callable[..., Any]:
        """What the rule calls as `mix`, for one slice."""
        number = 0

        def mix(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal number
            c, number = number, number + 1
            if c >= len(self.calls):
                raise ValueError(OTHER_CALLS.format(type(self.rule).__name__))
            if c == stop:
                raise _Reached(tensors)
            if c not in self._heard:  # needed by nothing before the stop
                return tensors
            mixed, offset = [], 0
            for tensor, shape in zip(tensors, self.calls[c].shapes, strict=True):
                place = slice(offset, offset + shape.numel())
                others = [_slice(v[place].view(shape), block, self._wide) for v in self._heard[c].vectors]
                mixed.append(self._heard[c].mixed(tensor, others))
                offset = place.stop
            return tuple(mixed)

        return mix

    def _cut(self, block: Block) -> Any:
        return self._start._replace(**{name: _slice(v, block, self._wide) for name, v in self._fields.items()})

    @property
    def _wide(self) -> int:
        return self._blocks[-1].stop if self._blocks[-1] is not None else -1

    def _is_wide(self, tensor: Tensor) -> bool:
        return self._wide == -1 or tensor.shape[-1] == self._wide


class Message:
    """Tensors side by side in one piece of memory, so that they travel together, with room at the end."""

    def __init__(self, shapes: Any, like: Tensor, tail: int) -> None:
        sizes = [shape.numel() for shape in shapes]
        self.whole = torch.zeros(sum(sizes) + tail, dtype=like.dtype, device=like.device)
        *pieces, _ = torch.split(self.whole, [*sizes, tail])
        self.parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def is_sound(v: Tensor) -> bool:
    """Whether all numbers of a vector are finite, and none is absurd: their squares must not overflow.

    One product is 15 times as fast as asking every number whether it is finite.
    """
    v = v.float() if v.element_size() < 4 else v
    pieces = torch.split(v, PIECE)
    return bool(torch.isfinite(torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()))


def _blocks(x: Tensor) -> list[Block]:
    """Slices of a plain vector; anything else is taken as a whole."""
    if x.ndim != 1:
        return [None]
    size = BLOCK.get(x.device.type, BLOCK["cuda"])
    return [slice(k, min(k + size, len(x))) for k in range(0, len(x), size)] or [None]


def _apart(old: Any, new: Any) -> Any:
    """A new state, none of whose fields is the memory of another field of the old one, which is overwritten."""
    owners = {v.data_ptr(): name for name, v in old._asdict().items() if v is not None}
    shared = {
        name: v.clone() for name, v in new._asdict().items() if v is not None and owners.get(v.data_ptr(), name) != name
    }
    return new._replace(**shared) if shared else new


def _slice(v: Tensor, block: Block, wide: int) -> Tensor:
    return v if block is None or v.shape[-1] != wide else v[block]
