"""One rank's share of a network: its part of the rule's state, and the rounds that advance it.

The same `rule.update` as in simulation runs here, on slices of the vectors that stay in the cache: between two flows a
rule is elementwise, so a slice needs nothing but itself. Where an exchange lies in the middle of a round, the update is
run up to that call of `flow` to find what to send, and once more from the beginning when all has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from klatsch.channels.rehearsal import MOST_MESSAGES, plan
from klatsch.ranks.rows import Heard, Weights
from klatsch.rules import Flow, Rule, State
from klatsch.topology import Topology

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # numbers per slice: a cache's worth, or enough to hide the launches

PIECE = 1 << 30  # numbers of one product: a GPU's takes no more than twice as many

OTHER_CALLS = "{} does not call flow in every round as in the first; neighbours must know what to wait for"

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


class Given(NamedTuple):
    """What a round is given, for a slice of the vectors: the rule with its settings, the gradient, the rate."""

    rule: Rule
    grad: Tensor
    lr: Any


class _Reached(Exception):  # noqa: N818
    """The update has come to the call of `flow` that was looked for."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


class Node:
    """One rank's share of a network.

    Args:
        rule: the update rule, as it runs on the topology.
        x: where it starts; any shape that ends in the parameter axis.
        topology: who talks to whom.
        rank: which node this is.
        links: how messages travel.
        channel: tells the messages of several nodes on the same links apart.
        guarded: refuse messages that are not finite.
    """

    def __init__(
        self,
        rule: Rule,
        x: Tensor,
        topology: Topology,
        rank: int,
        links: Links,
        channel: int = 0,
        guarded: bool = False,
    ) -> None:
        self.rule, self.links, self.rounds, self.dtype = rule, links, 0, x.dtype
        self.plan = plan(rule, x)
        self._weights = Weights(topology, rank, x.dtype, push=rule.push)
        self._speaks = topology.speaks
        self._tag = channel * MOST_MESSAGES
        self._blocks = _blocks(x)
        self._begun, self._guarded, self._calls = False, guarded, 0
        early = self.plan.early
        self._first_late = 1 if early else 0  # the first message that has to be computed in the round
        # What travels early does so while the next state is computed, so its memory takes turns; the rest is
        # overwritten.
        memory = [Message(sent.shapes, x, links.tail) for sent in self.plan.messages]
        self._turns = [memory[0], Message(self.plan.messages[0].shapes, x, links.tail)] if early else []
        self._messages = memory[self._first_late :]
        start = rule.init(x)
        self._fields = {name: v.clone() for name, v in start.items()}
        self._fields |= dict(zip(early, self._turns[0].parts, strict=True)) if early else {}
        self._heard: dict[int, Heard] = {}
        self.load(start, 0)

    @property
    def state(self) -> State:
        """The state after the last round. Its tensors are this node's own memory."""
        return dict(self._fields)

    def load(self, fields: State, rounds: int) -> None:
        """Go on from a state that was saved after so many rounds."""
        for name, value in fields.items():
            self._fields[name].copy_(value)
        self.rounds, self._begun = rounds, False

    @torch.no_grad()
    def write(self, point: Callable[[State], Tensor], into: Tensor) -> None:
        """Write a point of the state into a vector, in the slices of a round: the same bits that a round computes."""
        for block in self._blocks:
            _slice(into, block, self._wide).copy_(point(self._cut(block)))

    def keep_also(self, rule: Rule) -> None:
        """Keep what the same rule with other options needs beside, such as a momentum; it begins as at the start."""
        for name, value in rule.init(self.rule.query(self.state)).items():
            if name not in self._fields:
                self._fields[name] = value.clone()

    def exchange(self, given: Callable[[Block], Given]) -> None:
        """The first half of a round: send what is to be sent, and wait for what is to come.

        Args:
            given: returns what the round is given, for a slice.

        Raises:
            LinkError: a neighbour failed; the state is still that of the round before.
        """
        t = self.rounds + 1
        if not self._begun:
            self._begin(t)
        self._heard = {}
        for k in range(self._first_late, len(self.plan.messages)):
            self._collect(t, self.plan.messages[k].needs)
            self.links.sent(self._tag + k, t - 1)  # whose memory is used again
            if self._speaks(t):  # else nobody waits for it
                self._compute_message(k, t, given)
                self.links.send(self._tag + k, t, self._messages[k - self._first_late].whole)
        self._collect(t, range(len(self.plan.messages)))
        if self._turns:
            self.links.sent(self._tag, t - 1)

    def advance(
        self,
        given: Callable[[Block], Given],
        arrived: Callable[[Block, State, Rule], None] | None = None,
        last: bool = False,
    ) -> None:
        """The second half: compute the new state, and send what of the next round is known already.

        Args:
            given: as in `exchange`.
            arrived: is given every slice of the new state.
            last: whether no round follows, so that no message of one is sent or waited for.
        """
        t = self.rounds + 1
        following = dict(self._fields)
        if self._turns:
            following |= dict(zip(self.plan.early, self._turns[1].parts, strict=True))
        single: State = {}
        for block in self._blocks:
            (rule, grad, lr), old = given(block), self._cut(block)
            new = _apart(old, rule.update(old, grad, self._flow(block, old), t, lr))
            if self._calls != len(self.plan.calls):
                raise ValueError(OTHER_CALLS.format(self.rule.name))
            for name, value in new.items():
                place = following[name]
                if self._is_wide(place):
                    _slice(place, block, self._wide).copy_(value)
                else:  # the same for all slices, and still read by the next ones
                    single[name] = value
            if arrived is not None:
                arrived(block, new, rule)
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
        for k, sent in enumerate(self.plan.messages):
            self.links.expect(self._tag + k, t, sum(shape.numel() for shape in sent.shapes), self.dtype)
        if self._turns:
            self.links.send(self._tag, t, self._turns[0].whole)
        self._begun = True

    def _collect(self, t: int, messages: Iterable[int]) -> None:
        """Wait for some messages."""
        for k in messages:
            if k not in self._heard:
                vectors = self.links.received(self._tag + k, t)
                if self._guarded:
                    for source in [source for source, vector in vectors if not is_sound(vector)]:
                        self.links.refuse(source, t)
                absent = self.links.absent(t)
                there = [(source, vector) for source, vector in vectors if source not in absent]
                self._heard[k] = self._weights.heard(there, t, absent)

    def _compute_message(self, k: int, t: int, given: Callable[[Block], Given]) -> None:
        """Run the update up to the call whose tensors message k carries, and keep them."""
        sent, parts = self.plan.messages[k], self._messages[k - self._first_late].parts
        places = self.plan.calls[sent.call or 0]
        for block in self._blocks:
            (rule, grad, lr), old = given(block), self._cut(block)
            try:
                rule.update(old, grad, self._flow(block, old, stop=sent.call), t, lr)
            except _Reached as reached:
                for tensor, place in zip(reached.tensors, places, strict=True):
                    if place.message == k:
                        _slice(parts[place.part], block, self._wide).copy_(tensor)
            else:
                raise ValueError(OTHER_CALLS.format(self.rule.name))
        for part, name in zip(parts[len(parts) - len(sent.fields) :], sent.fields, strict=True):
            part.copy_(self._fields[name])

    def _flow(self, block: Block, old: State, stop: int | None = None) -> Flow:
        """What the rule calls as `flow`, for one slice."""
        self._calls = 0

        def exchanged(mixed: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
            c, self._calls = self._calls, self._calls + 1
            if c >= len(self.plan.calls):
                raise ValueError(OTHER_CALLS.format(self.rule.name))
            if c == stop:
                raise _Reached(tensors)
            results = []
            for tensor, (k, place, field) in zip(tensors, self.plan.calls[c], strict=True):
                if field is not None and tensor is not old[field]:
                    raise ValueError(OTHER_CALLS.format(self.rule.name))
                if k not in self._heard:  # needed by nothing before the stop
                    results.append(tensor)
                    continue
                shapes = self.plan.messages[k].shapes
                begin, shape, heard = sum(s.numel() for s in shapes[:place]), shapes[place], self._heard[k]
                pieces = [vector[begin : begin + shape.numel()].view(shape) for vector in heard.vectors]
                others = [_slice(piece, block, self._wide) for piece in pieces]
                results.append(heard.mixed(tensor, others) if mixed else heard.flow(tensor, others))
            return tuple(results)

        return Flow(partial(exchanged, False), partial(exchanged, True))

    def _cut(self, block: Block) -> State:
        return {name: _slice(v, block, self._wide) for name, v in self._fields.items()}

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


def _apart(old: State, new: State) -> State:
    """A new state, none of whose fields is the memory of another field of the old one, which is overwritten."""
    owners = {v.data_ptr(): name for name, v in old.items()}
    return {name: v.clone() if owners.get(v.data_ptr(), name) != name else v for name, v in new.items()}


def _slice(v: Tensor, block: Block, wide: int) -> Tensor:
    return v if block is None or v.shape[-1] != wide else v[block]
