"""One rank's share of a network: its part of the rule's state, and the rounds that advance it.

The same `rule.update` as in simulation runs here, on slices of the vectors that stay in the cache: between two mixes a
rule is elementwise, so a slice needs nothing but itself. Where an exchange lies in the middle of a round, the update is
run up to that `mix` call to find what to send, and once more from the beginning when all has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from klatsch.algorithms import Algorithm
from klatsch.engine.mixing import exact_weights
from klatsch.topology import Topology

BLOCK = {"cpu": 1 << 16, "cuda": 1 << 24}  # numbers per slice: a cache's worth, or enough to hide the launches
MOST_CALLS = 8  # mixes in one round, for the numbering of tags

Block = slice | None  # a slice of the vectors, or all of them


class Links(Protocol):
    """How messages travel; see `links.GlooLinks`."""

    lost: dict[int, Any]

    def expect(self, tag: int, t: int, length: int, dtype: torch.dtype) -> None: ...
    def send(self, tag: int, t: int, message: Tensor) -> None: ...
    def received(self, tag: int, t: int) -> list[tuple[int, Tensor]]: ...
    def sent(self, tag: int, t: int) -> None: ...


class Call(NamedTuple):
    """One call of `mix` in a round."""

    shapes: tuple[torch.Size, ...]  # of the tensors that travel in its message
    needs: tuple[int, ...]  # earlier calls whose results are part of what it sends


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
    """

    def __init__(
        self, rule: Algorithm, x: Tensor, topology: Topology, rank: int, links: Links, channel: int = 0
    ) -> None:
        self.rule, self.links, self.rounds, self.dtype = rule, links, 0, x.dtype
        self.calls = plan(rule, x)
        self._weights = Weights(topology, rank, x.dtype)
        self._tag = channel * MOST_CALLS
        self._blocks = _blocks(x)
        self._begun = False
        self._first_late = 1 if rule.eager else 0  # the first mix call whose message has to be computed in the round
        start = rule.init(x)
        # What is eager travels while the next state is computed, so its memory takes turns; the rest is overwritten.
        shapes = [getattr(start, name).shape for name in rule.eager]
        self._turns = [Message(shapes, x) for _ in range(2)] if rule.eager else []
        self._messages = [Message(call.shapes, x) for call in self.calls[self._first_late :]]
        own = {name: v.clone() for name, v in start._asdict().items() if v is not None and name not in rule.eager}
        self._fields: dict[str, Tensor | None] = {name: own.get(name) for name in start._fields}
        self._type = type(start)
        for name, part in zip(rule.eager, self._turns[0].parts if self._turns else (), strict=True):
            part.copy_(getattr(start, name))
            self._fields[name] = part

    @property
    def state(self) -> Any:
        """The state after the last round. Its tensors are this node's own memory."""
        return self._type(**self._fields)

    def load(self, fields: dict[str, Tensor], rounds: int) -> None:
        """Go on from a state that was saved after so many rounds."""
        for name, value in fields.items():
            held = self._fields[name]
            assert held is not None
            held.copy_(value)
        self.rounds, self._begun = rounds, False

    def step(
        self,
        gradient: Callable[[Block], Tensor],
        rule: Callable[[Block], Algorithm],
        arrived: Callable[[Block, Any, Algorithm], None] | None = None,
        last: bool = False,
    ) -> None:
        """One round.

        Args:
            gradient: gives a slice of the gradient.
            rule: gives the rule for a slice, with this round's learning rates.
            arrived: is given every slice of the new state.
            last: whether no round follows, so that no message of one is sent or waited for.

        Raises:
            LinkError: a neighbour failed; the state is still that of the round before.
        """
        t = self.rounds + 1
        if not self._begun:
            self._begin(t)
        came: dict[int, list[tuple[float, Tensor]]] = {}
        for c in range(self._first_late, len(self.calls)):
            for k in self.calls[c].needs:
                if k not in came:
                    came[k] = self._collect(k, t)
            self.links.sent(self._tag + c, t - 1)  # whose memory is used again
            self._compute_message(c, t, gradient, rule, came)
            self.links.send(self._tag + c, t, self._messages[c - self._first_late].whole)
        for c in range(len(self.calls)):
            if c not in came:
                came[c] = self._collect(c, t)
        if self._turns:
            self.links.sent(self._tag, t - 1)
        self._advance(t, gradient, rule, came, arrived)
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

    def _collect(self, c: int, t: int) -> list[tuple[float, Tensor]]:
        weights = self._weights.of(t)
        return [(weights.links[source], vector) for source, vector in self.links.received(self._tag + c, t)]

    def _compute_message(self, c: int, t: int, gradient: Any, rule: Any, came: Any) -> None:
        """Run the update up to call c, and keep what it would mix."""
        parts = self._messages[c - self._first_late].parts
        for block in self._blocks:
            try:
                rule(block).update(self._cut(block), gradient(block), self._mix(block, t, came, stop=c), t)
            except _Reached as reached:
                for part, tensor in zip(parts, reached.tensors, strict=True):
                    _slice(part, block, self._wide).copy_(tensor)

    def _advance(self, t: int, gradient: Any, rule: Any, came: Any, arrived: Any) -> None:
        """Run the whole update, with all that came, and take the new state over."""
        following = dict(self._fields)
        if self._turns:
            following |= dict(zip(self.rule.eager, self._turns[1].parts, strict=True))
        last: dict[str, Tensor] = {}
        for block in self._blocks:
            here, old = rule(block), self._cut(block)
            new = here.update(old, gradient(block), self._mix(block, t, came), t)
            for name, value in _apart(old, new).items():
                place = following[name]
                assert place is not None
                if self._is_wide(place):
                    _slice(place, block, self._wide).copy_(value)
                else:  # the same for all slices, and still read by the next ones
                    last[name] = value
            if arrived is not None:
                arrived(block, new, here)
        for name, value in last.items():
            place = following[name]
            assert place is not None
            place.copy_(value)
        self._fields = following
        self._turns.reverse()

    def _mix(self, block: Block, t: int, came: dict[int, Any], stop: int | None = None) -> Callable[..., Any]:
        """What the rule calls as `mix`, for one slice."""
        number = 0

        def mix(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal number
            c, number = number, number + 1
            if c == stop:
                raise _Reached(tensors)
            if c not in came:  # needed by nothing before the stop
                return tensors
            mixed, offset = [], 0
            for tensor, shape in zip(tensors, self.calls[c].shapes, strict=True):
                size = shape.numel()
                heard = [
                    (weight, _slice(vector[offset : offset + size].view(shape), block, self._wide))
                    for weight, vector in came[c]
                ]
                mixed.append(self._weights.mixed(tensor, heard, t, self.links.lost))
                offset += size
            return tuple(mixed)

        return mix

    def _cut(self, block: Block) -> Any:
        return self._type(**{k: None if v is None else _slice(v, block, self._wide) for k, v in self._fields.items()})

    @property
    def _wide(self) -> int:
        return self._blocks[-1].stop if self._blocks[-1] is not None else -1

    def _is_wide(self, tensor: Tensor) -> bool:
        return self._wide == -1 or tensor.shape[-1] == self._wide


class Message:
    """Tensors side by side in one piece of memory, so that they travel together."""

    def __init__(self, shapes: Any, like: Tensor) -> None:
        sizes = [shape.numel() for shape in shapes]
        self.whole = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        self.parts = [piece.view(shape) for piece, shape in zip(torch.split(self.whole, sizes), shapes, strict=True)]


class Row(NamedTuple):
    """What a node does with what it hears in one phase of a topology."""

    links: dict[int, float]  # what it gives to the value of each node that it hears
    away: dict[int, float]  # what each of those that hear it gives to its value


class Weights:
    """One node's rows of the gossip matrices; weights of lost nodes fall back to itself."""

    def __init__(self, topology: Topology, rank: int, dtype: torch.dtype) -> None:
        self.by_rows = topology.row_stochastic
        self._rows = []
        for P in topology.matrices:
            links, _ = exact_weights(P, dtype, by_rows=self.by_rows)
            row, column = links[[rank], :].tocoo(), links[:, [rank]].tocoo()
            self._rows.append(
                Row(
                    dict(zip(row.coords[1].tolist(), row.data.tolist(), strict=True)),
                    dict(zip(column.coords[0].tolist(), column.data.tolist(), strict=True)),
                )
            )

    def of(self, t: int) -> Row:
        """The row of round t."""
        return self._rows[(t - 1) % len(self._rows)]

    def mixed(self, v: Tensor, heard: list[tuple[float, Tensor]], t: int, lost: Any) -> Tensor:
        """v_i + sum_j P_ij (v_j - v_i): the difference form, which leaves equal values as they are.

        Where the columns sum to 1 instead of the rows (push-sum), what others take is what this node gives away:
        v_i - sum_k P_ki v_i + sum_j P_ij v_j. So a lost node's share stays here in both cases.
        """
        if not self.by_rows:
            given = sum(weight for node, weight in self.of(t).away.items() if node not in lost)
            result = v * (1.0 - given)
            for weight, other in heard:
                result.add_(other, alpha=weight)
            return result
        result = v
        for k, (weight, other) in enumerate(heard):
            result = torch.lerp(v, other, weight) if k == 0 else result.add_(other - v, alpha=weight)
        return result


def plan(rule: Algorithm, x: Tensor) -> tuple[Call, ...]:
    """The mix calls of a round, found by running the rule on a few numbers.

    Raises:
        ValueError: the rule does not keep its promise on what is eager, or mixes too often.
    """
    tiny = x.new_zeros(*x.shape[:-1], min(2, x.shape[-1]))
    state = rule.init(tiny)

    def calls(poisoned: int | None = None) -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []

        def mix(*tensors: Tensor) -> tuple[Tensor, ...]:
            found.append(tensors)
            return tuple(v * (torch.nan if len(found) - 1 == poisoned else 1.0) for v in tensors)

        rule.update(state, tiny, mix, 1)
        return found

    found = calls()
    eager = [getattr(state, name) for name in rule.eager]
    if eager and (
        not found or len(found[0]) != len(eager) or any(a is not b for a, b in zip(found[0], eager, strict=True))
    ):
        raise ValueError(
            f"{type(rule).__name__}: its first mix call is not on exactly the eager fields {', '.join(rule.eager)}, in "
            "this order and unchanged; put them so, or leave eager empty"
        )
    if len(found) > MOST_CALLS:
        raise ValueError(f"{type(rule).__name__} mixes {len(found)} times per round; {MOST_CALLS} times at most")
    needs: list[list[int]] = [[] for _ in found]
    for k in range(len(found)):
        for c, tensors in enumerate(calls(poisoned=k)):
            if c > k and any(bool(v.isnan().any()) for v in tensors):
                needs[c].append(k)
    wide = tiny.shape[-1]
    shapes = [
        tuple(torch.Size([*v.shape[:-1], x.shape[-1] if v.shape[-1] == wide else v.shape[-1]]) for v in tensors)
        for tensors in found
    ]
    return tuple(Call(*pair) for pair in zip(shapes, map(tuple, needs), strict=True))


def _blocks(x: Tensor) -> list[Block]:
    """Slices of a plain vector; anything else is taken as a whole."""
    if x.ndim != 1:
        return [None]
    size = BLOCK.get(x.device.type, BLOCK["cuda"])
    return [slice(k, min(k + size, len(x))) for k in range(0, len(x), size)] or [None]


def _apart(old: Any, new: Any) -> dict[str, Tensor]:
    """The fields of a new state, none of which is the memory of another field of the old one, which is overwritten."""
    owners = {v.data_ptr(): name for name, v in old._asdict().items() if v is not None}
    return {
        name: v if owners.get(v.data_ptr(), name) == name else v.clone()
        for name, v in new._asdict().items()
        if v is not None
    }


def _slice(v: Tensor, block: Block, wide: int) -> Tensor:
    return v if block is None or v.shape[-1] != wide else v[block]
