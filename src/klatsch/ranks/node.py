"""One node of a network: its part of the rule's state, and the rounds that advance it.

The same `rule.update` as in simulation runs on slices of the vectors that stay in the cache: between two flows a rule
is elementwise, so slices are independent. If a message depends on the gradient, the update runs up to that call of
`flow` to find what to send, and once more from the beginning when all messages have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.channels.rehearsal import MOST_MESSAGES, Place, rehearse
from klatsch.columns import Number
from klatsch.ranks.links import Links
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import each
from klatsch.topology.matrix import Matrix, exact_weights, mapped

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # numbers per slice: a cache's worth, or enough to hide the launches
PIECE = 1 << 30  # numbers per dot product; the limit on a GPU is twice that

Block = slice | None  # a slice of the vectors, or all of them


class Given(NamedTuple):
    """What a round starts from, for a slice of the vectors."""

    rule: Rule  # with the settings of the round
    grad: Tensor
    lr: Number


Inputs = Callable[[Block], Given]
Receiver = Callable[[Block, State, Rule], None]  # called with a slice of the new state and the rule of the round


class Row(NamedTuple):
    """One node's part of one gossip matrix, by node."""

    links: dict[int, float]  # P_ij: its weights for the values it hears
    away: dict[int, float]  # P_ki: others' weights for its value


class Heard(NamedTuple):
    """One message of each neighbour, and the weights for them."""

    parts: list[list[Tensor]]  # by neighbour: the tensors of its message
    weights: list[float]  # P_ij by neighbour
    away: float | None  # if columns sum to 1 instead of rows: the share of its value that this node gives away

    def pull(self, v: Tensor, others: list[Tensor], mixed: bool) -> Tensor:
        """The flow sum_j P_ij (v_j - v_i), or v_i plus that; summed as differences, which keep equal values equal.

        If columns sum to 1 instead of rows (push-sum), it is sum_j P_ij v_j - sum_k P_ki v_i.
        """
        if self.away is not None:
            result = v * (float(mixed) - self.away)
            for weight, other in zip(self.weights, others, strict=True):
                result.add_(other, alpha=weight)
            return result
        if not others:
            return v if mixed else torch.zeros_like(v)
        first = self.weights[0]
        result = torch.lerp(v, others[0], first) if mixed else (others[0] - v).mul_(first)
        for weight, other in zip(self.weights[1:], others[1:], strict=True):
            result.add_(other - v, alpha=weight)
        return result


class Message:
    """Tensors side by side in one piece of memory, so that they travel together, with room for news at the end.

    It travels as bytes, and only this class knows what they mean: an encoding belongs here, in memory of its own, since
    the state may live in that of the message.
    """

    def __init__(self, shapes: Sequence[torch.Size], like: Tensor, tail: int) -> None:
        size = like.element_size() * sum(shape.numel() for shape in shapes)
        self.whole = torch.zeros(size + tail, dtype=torch.uint8, device=like.device)
        self.parts = _parts(self.whole[:size].view(like.dtype), shapes)
        self._dtype, self._shapes = like.dtype, shapes

    def numbers(self, came: Tensor) -> Tensor:
        """What came in a message like this, as one vector."""
        return came.view(self._dtype)

    def tensors(self, vector: Tensor) -> list[Tensor]:
        """The tensors that such a vector holds."""
        return _parts(vector, self._shapes)


class _Reached(Exception):  # noqa: N818
    """The update has reached the call of `flow` where it should stop."""

    def __init__(self, places: Iterable[tuple[Tensor, Place]]) -> None:
        self.places = places


class Node:
    """One rank's share of a network: a rule that starts at x, of any shape that ends in the parameter axis.

    Nodes on the same links need different streams. A guarded node refuses messages that are not finite.
    """

    def __init__(self, rule: Rule, x: Tensor, links: Links, stream: int = 0, guarded: bool = False) -> None:
        self.rule, self.links, self.rounds = rule, links, 0
        self._traffic = rehearse(rule, x)
        self._by_rows = links.topology.row_stochastic and not rule.push
        self._rows = mapped(links.topology.matrices, lambda P: _row(P, links.rank, x.dtype))
        self._first_tag = stream * MOST_MESSAGES
        self._blocks, self._wide = _blocks(x), x.shape[-1]
        self._begun, self._guarded, self._calls = False, guarded, 0
        self._messages = [Message(sent.shapes, x, links.tail) for sent in self._traffic.messages]
        # Early messages travel while the next state is computed, so their memory alternates with a spare one.
        self._early = self._traffic.early
        self._spare = Message(self._traffic.messages[0].shapes, x, links.tail) if self._early else None
        start = rule.init(x)
        self._fields = {name: v.clone() for name, v in start.items()}
        if self._early:
            self._fields |= dict(zip(self._early, self._messages[0].parts, strict=True))
        self._heard: dict[int, Heard] = {}
        self.load(start, 0)

    @property
    def state(self) -> State:
        """The state after the last round; its tensors are the node's own memory."""
        return dict(self._fields)

    def load(self, fields: State, rounds: int) -> None:
        """Continue from a state saved after some rounds."""
        for name, value in fields.items():
            self._fields[name].copy_(value)
        self.rounds, self._begun = rounds, False

    @torch.no_grad()
    def write(self, point: Callable[[State], Tensor], into: Tensor) -> None:
        """Write a point of the state into a vector, in the same slices and so the same bits as a round."""
        for block in self._blocks:
            self._part(block, into).copy_(point(self._cut(block)))

    def keep_also(self, rule: Rule) -> None:
        """Add the fields that the rule needs with other options, such as a momentum, with their initial values."""
        for name, value in rule.init(self.rule.query(self.state)).items():
            if name not in self._fields:
                self._fields[name] = value.clone()

    def exchange(self, given: Inputs) -> None:
        """The first half of a round: send and receive all messages. If a neighbour fails, the state is unchanged."""
        t = self.rounds + 1
        if not self._begun:
            self._begin(t)
        self._heard = {}
        for k, sent in enumerate(self._traffic.messages):
            if sent.call is None:  # it travels early
                continue
            self._collect(t, sent.needs)
            self.links.sent(self._first_tag + k, t - 1)  # its memory is reused
            if self.links.topology.speaks(t):  # otherwise nobody waits for it
                self._compute_message(k, t, given)
                self.links.send(self._first_tag + k, t, self._messages[k].whole)
        self._collect(t, range(len(self._messages)))
        if self._early:
            self.links.sent(self._first_tag, t - 1)

    def advance(self, given: Inputs, arrived: Receiver | None = None, last: bool = False) -> None:
        """The second half: compute the new state, pass its slices to `arrived`, and begin the next round, if any."""
        t, following = self.rounds + 1, dict(self._fields)
        if self._spare is not None:
            following |= dict(zip(self._early, self._spare.parts, strict=True))
        single: State = {}
        for block in self._blocks:
            (rule, grad, lr), old = given(block), self._cut(block)
            new = _apart(old, rule.update(old, grad, self._flow(block, old), t, lr))
            if self._calls != len(self._traffic.calls):
                raise self._other_calls()
            for name, value in new.items():
                place = following[name]
                if block is None or place.shape[-1] == self._wide:
                    self._part(block, place).copy_(value)
                else:  # the same for all slices, and the next ones still read it
                    single[name] = value
            if arrived is not None:
                arrived(block, new, rule)
        for name, value in single.items():
            following[name].copy_(value)
        self._fields, self.rounds = following, t
        if self._spare is not None:
            self._messages[0], self._spare = self._spare, self._messages[0]
        if not last:
            self._begin(t + 1)

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin(self, t: int) -> None:
        """Prepare to receive all messages of round t, and send those that need no gradient."""
        for k, message in enumerate(self._messages):
            self.links.expect(self._first_tag + k, t, message.whole)
        if self._early:
            self.links.send(self._first_tag, t, self._messages[0].whole)
        self._begun = True

    def _collect(self, t: int, messages: Iterable[int]) -> None:
        """Wait for some messages."""
        for k in messages:
            if k in self._heard:
                continue
            message, came = self._messages[k], self.links.received(self._first_tag + k, t)
            vectors = [(source, message.numbers(theirs)) for source, theirs in came]
            if self._guarded:
                for source in [source for source, vector in vectors if not is_sound(vector)]:
                    self.links.refuse(source, t)
            # The weight of a lost neighbour goes to this node's own value, so rows still sum to 1; in push-sum this
            # node keeps what it would have passed on to it, so columns still do.
            absent, row = self.links.absent(t), self._rows[(t - 1) % len(self._rows)]
            away = None if self._by_rows else sum(w for node, w in row.away.items() if node not in absent)
            there = [(source, vector) for source, vector in vectors if source not in absent]
            parts = [message.tensors(vector) for _, vector in there]
            self._heard[k] = Heard(parts, [row.links[source] for source, _ in there], away)

    def _compute_message(self, k: int, t: int, given: Inputs) -> None:
        """Fill message k: run the update up to the call of `flow` whose tensors it carries."""
        sent, parts = self._traffic.messages[k], self._messages[k].parts
        for block in self._blocks:
            (rule, grad, lr), old = given(block), self._cut(block)
            try:
                rule.update(old, grad, self._flow(block, old, stop=sent.call), t, lr)
            except _Reached as reached:
                for tensor, place in reached.places:
                    if place.message == k:
                        self._part(block, parts[place.part]).copy_(tensor)
            else:
                raise self._other_calls()
        for part, name in zip(parts[len(parts) - len(sent.fields) :], sent.fields, strict=True):
            part.copy_(self._fields[name])

    def _flow(self, block: Block, old: State, stop: int | None = None) -> Flow:
        """The rule's `flow` for one slice; it raises _Reached at call number `stop`."""
        self._calls = 0

        def exchanged(mixed: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
            c, self._calls = self._calls, self._calls + 1
            if c >= len(self._traffic.calls):
                raise self._other_calls()
            if c == stop:
                raise _Reached(zip(tensors, self._traffic.calls[c], strict=True))
            results = []
            for tensor, (k, part, field) in zip(tensors, self._traffic.calls[c], strict=True):
                if field is not None and tensor is not old[field]:
                    raise self._other_calls()
                if (heard := self._heard.get(k)) is None:  # not needed before the stop
                    results.append(tensor)
                else:
                    others = [self._part(block, theirs[part]) for theirs in heard.parts]
                    results.append(heard.pull(tensor, others, mixed))
            return tuple(results)

        return Flow(partial(exchanged, False), partial(exchanged, True))

    def _cut(self, block: Block) -> State:
        return each(partial(self._part, block), self._fields)

    def _part(self, block: Block, v: Tensor) -> Tensor:
        return v if block is None or v.shape[-1] != self._wide else v[block]

    def _other_calls(self) -> ValueError:
        return ValueError(
            f"{self.rule.name} does not call flow the same way in every round; neighbours must know what to wait for"
        )


def is_sound(v: Tensor) -> bool:
    """Whether the squares of all numbers are finite; one dot product is 15 times as fast as testing each number."""
    v = v.float() if v.element_size() < 4 else v
    return bool(torch.isfinite(torch.stack([torch.dot(piece, piece) for piece in torch.split(v, PIECE)]).sum()))


def _row(P: Matrix, rank: int, dtype: torch.dtype) -> Row:
    links, _ = exact_weights(P, dtype)
    row, column = links[[rank], :].tocoo(), links[:, [rank]].tocoo()
    return Row(
        dict(zip(row.coords[1].tolist(), row.data.tolist(), strict=True)),
        dict(zip(column.coords[0].tolist(), column.data.tolist(), strict=True)),
    )


def _parts(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The tensors of a message."""
    pieces = torch.split(vector, [shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _blocks(x: Tensor) -> list[Block]:
    """Slices of a plain vector; any other tensor stays whole."""
    if x.ndim != 1:
        return [None]
    size = BLOCK.get(x.device.type, BLOCK["cuda"])
    return [slice(k, min(k + size, len(x))) for k in range(0, len(x), size)] or [None]


def _apart(old: State, new: State) -> State:
    """The new state, with copies of fields that are other fields of the old one: those will be overwritten."""
    owners = {v.data_ptr(): name for name, v in old.items()}
    return {name: v.clone() if owners.get(v.data_ptr(), name) != name else v for name, v in new.items()}
