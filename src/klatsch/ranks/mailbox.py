"""One rank's end of a channel: the messages that it sends, those that arrive, and what neighbours hold of each other.

A message of round r arrives in round r + late, so some may be on their way. If the encoding remembers, a message is a
difference to what both ends hold already: `heard` reads it, and `commit` makes the sum what is held from now on. Until
then nothing has changed, so a round that fails can be taken again from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.encodings import check_memory
from klatsch.ranks.failures import MessageError
from klatsch.ranks.links import GlooLinks
from klatsch.ranks.message import Block, Layout, Part
from klatsch.rules import State
from klatsch.topology.matrix import Matrix, exact_weights, mapped
from klatsch.wire.program import Symbol
from klatsch.wire.rehearsal import MOST_MESSAGES, Traffic

SAMPLE = 1 << 14  # numbers by which distances between nodes are estimated: to 2 % or so
AHEAD = -1  # in place of a node: what neighbours hold of this one once all of its messages have arrived
Memory = dict[str, object]  # of a channel, for checkpoints: texts, numbers, tensors, and lists and dictionaries of them


class NodeWeights(NamedTuple):
    """One node's part of one gossip matrix, by node."""

    links: dict[int, float]  # P_ij: its weights for the values it hears
    away: dict[int, float]  # P_ki: others' weights for its value


class Heard(NamedTuple):
    """One message of each neighbour, and the weights for them."""

    voices: dict[int, list[Part]]  # by neighbour
    weights: dict[int, float]  # P_ij by neighbour
    away: float | None  # if columns sum to 1 instead of rows: the share of its value that this node gives away
    own: list[Part] | None  # what neighbours know of this node's value; None if that is the value itself
    dtype: torch.dtype  # of the state
    doubtful: bool = False  # whether kernels that read it have to look whether it is finite

    def pull(self, v: Tensor, part: int, block: Block, mixed: bool) -> Tensor:
        """The flow of a part, or of a slice of it: sum_j P_ij (v_j - v_i), or v_i plus that.

        It is summed as differences, which keep equal values equal. If columns sum to 1 instead of rows (push-sum), it
        is sum_j P_ij v_j - sum_k P_ki v_i.
        """
        others, own = self._said(v, part, block)
        if self.away is not None:
            result = own * -self.away if self.own is not None else v * (float(mixed) - self.away)
            for j, other in others.items():
                result.add_(other, alpha=self.weights[j])
            return result.add_(v) if mixed and self.own is not None else result
        if not others:
            return v if mixed else torch.zeros_like(v)
        (first, other), *rest = others.items()
        at_once = mixed and self.own is None  # v_i and its flow in one pass
        weight = self.weights[first]
        result = torch.lerp(v, other, weight) if at_once else (other - own).mul_(weight)
        for j, other in rest:
            result.add_(other - own, alpha=self.weights[j])
        return result.add_(v) if mixed and not at_once else result

    def shares(self, v: Tensor, part: int, block: Block) -> dict[int, Tensor]:
        """P_ij (v_j - v_i) by neighbour, which `pull` sums up."""
        others, own = self._said(v, part, block)
        return {j: self.weights[j] * (other - own) for j, other in others.items()}

    def _said(self, v: Tensor, part: int, block: Block) -> tuple[dict[int, Tensor], Tensor]:
        """A part, or a slice of it, by neighbour, and what they know of this node's."""
        others = {j: self._read(parts[part].cut(block), v, j) for j, parts in self.voices.items()}
        return others, v if self.own is None else self._read(self.own[part].cut(block), v)

    def _read(self, part: Part, v: Tensor, source: int | None = None) -> Tensor:
        """What a part says, as a symbol where v is one."""
        if not isinstance(v, Symbol):
            return part.read(self.dtype)
        said = part.streams[0] if part.is_plain else part.read(self.dtype)
        return v.tracer.heard(said, source if self.doubtful else None)  # type: ignore[return-value]


class Mailbox:
    """The messages of a rule that starts at x, over links; streams keep several on the same links apart.

    A guarded one refuses messages that are not finite.
    """

    def __init__(
        self, traffic: Traffic, x: Tensor, links: GlooLinks, by_rows: bool, stream: int = 0, guarded: bool = False
    ) -> None:
        self.links, self.traffic, self._guarded, self._by_rows, self._like = links, traffic, guarded, by_rows, x
        topology = links.topology
        self.late, self._every = topology.late, topology.every
        self._slots = max(1, -(-self.late // self._every))  # messages of one kind on their way at a time
        self._first_tag = stream * MOST_MESSAGES * self._slots
        self._rows = mapped(topology.matrices, lambda P: _row(P, links.rank, x.dtype))
        encoding = None if topology.wire == "float32" else topology.encoding
        self._layouts = [Layout(sent.shapes, x, encoding) for sent in traffic.messages]
        if differences := [shape.numel() for layout in self._layouts for shape in layout.differences.values()]:
            check_memory(topology.name, topology.copies, sum(differences) * x.element_size(), x.device)
        # A spare one where a message is written while another is read (late), or still travels (early).
        spare = [bool(self.late or sent.call is None) for sent in traffic.messages]
        self._messages = [
            [x.new_zeros(layout.size + links.tail, dtype=torch.uint8) for _ in range(self._slots + more)]
            for layout, more in zip(self._layouts, spare, strict=True)
        ]
        # What is held, by message, node and who hears it (`Topology.audience`), and then by part.
        self._held: dict[tuple[int, int, int], dict[int, Tensor]] = {}
        self._flight: list[int] = []  # rounds whose messages are on their way
        self.heard: dict[int, Heard] = {}  # by message, in this round
        self.defers = False  # whether whoever reads messages looks whether they are finite
        self._spoken: dict[int, dict[int, list[Part]]] = {}  # by message and neighbour
        self._parts: dict[tuple[int, int, int, int], list[Part]] = {}  # see `_own`

    @property
    def is_plain(self) -> bool:
        """Whether all messages can be read as they lie there."""
        return all(layout.elementwise for layout in self._layouts)

    @property
    def shares_memory(self) -> bool:
        """Whether a state may live in the early message, so that it need not be copied there."""
        return not self.late and bool(self.traffic.early) and self._layouts[0].exact

    def early_fields(self, t: int) -> State:
        """The fields that live in the early message of round t, if they travel as they are."""
        if not self.shares_memory:
            return {}
        parts = self._own(0, t, self.links.rank)
        return {name: part.streams[0] for name, part in zip(self.traffic.early, parts, strict=True)}

    def where(self, k: int, part: int, block: Block) -> Block:
        """The slice of a part of message k that belongs to a slice of the vectors; single numbers stay whole."""
        return block if self.traffic.messages[k].shapes[part][-1] == self._like.shape[-1] else None

    # --- sending -----------------------------------------------------------------------------------------------

    def expect(self, t: int) -> None:
        """Get ready for all messages of round t."""
        for k in range(len(self._layouts)):
            self.links.expect(self._tag(k, t), t, self._message(k, t))

    def wait_until_sent(self, t: int, k: int) -> None:
        """Wait until the memory of message k of round t can be written."""
        self.links.sent(self._tag(k, t), t - self._slots * (self._every if self.late else 1))

    def put(self, t: int, k: int, part: int, block: Block, v: Tensor) -> None:
        """Write a tensor, or a slice of it, into message k of round t."""
        own = self._own(k, t, AHEAD if self.late else self.links.rank)
        target = own[part].cut(self.where(k, part, block))

        def write(v: Tensor) -> None:
            target.write(v)
            if self.late:
                target.committed([None])

        if isinstance(v, Symbol) and not target.is_plain:
            v.tracer.afterwards(v, target.numbers, write)
        else:
            write(v)

    def send(self, t: int, k: int) -> None:
        """Send message k of round t."""
        self.links.send(self._tag(k, t), t, self._message(k, t))

    def dispatch(self, *rounds: int) -> None:
        """Send all messages of some rounds, which arrive late; or again those that were on their way before `load`."""
        self._flight += rounds
        for r in rounds or self._flight:
            self.expect(r)
            for k in range(len(self._layouts)):
                self.send(r, k)

    def _slot(self, k: int, t: int) -> int:
        return (t // self._every if self.late else t) % len(self._messages[k])

    def _message(self, k: int, t: int) -> Tensor:
        return self._messages[k][self._slot(k, t)]

    def _own(self, k: int, t: int, node: int) -> list[Part]:
        """The parts of message k of round t, to what is held of this node or, where it is AHEAD, will be."""
        key = k, self._slot(k, t), node, (audience := self.links.topology.audience(t))
        if key not in self._parts:
            self._parts[key] = self._layouts[k].parts(self._message(k, t), self._held_of(k, node, audience))
        return self._parts[key]

    def _tag(self, k: int, t: int) -> int:
        slot = t // self._every % self._slots if self.late else 0
        return self._first_tag + slot * MOST_MESSAGES + k

    # --- receiving ---------------------------------------------------------------------------------------------

    def land(self) -> None:
        """Wait for all that is on its way, and forget it."""
        for r in self._flight:
            self.heard = {}
            self.listen(r)
        self._flight = []

    def listen(self, r: int, messages: Iterable[int] | None = None) -> None:
        """Wait for some messages of round r, or for all, where they come and have not been waited for."""
        if not self.late or r in self._flight:
            for k in range(len(self._layouts)) if messages is None else messages:
                if k not in self.heard:
                    self.heard[k] = self._listen(r, k)

    def commit(self, r: int, blocks: Sequence[Block]) -> None:
        """Hold what the messages of round r said."""
        for heard in self.heard.values():
            for parts in (*heard.voices.values(), heard.own or []):
                parts[:] = [part.committed(blocks) for part in parts]
        if r in self._flight:
            self._flight.remove(r)

    def apart(self, r: int, k: int, part: int) -> Tensor | None:
        """The mean squared distance of the neighbours' part of a message from this node's, after `commit`, if any came.

        Of a long vector it is that of a sample, scaled up.
        """
        heard = self.heard.get(k)
        if heard is None or not heard.voices:
            return None
        own = self._own(k, r, self.links.rank) if heard.own is None else heard.own
        few, *others = (p[part].some(self._sample, heard.dtype) for p in (own, *heard.voices.values()))
        distances = [(other - few).square().sum() for other in others]
        return torch.stack(distances).mean() * (self._like.shape[-1] / max(len(self._sample), 1))

    @cached_property
    def _sample(self) -> Tensor:
        """The places of a sample of a vector; all of a short one."""
        size, chance = self._like.shape[-1], torch.Generator().manual_seed(0)
        places = torch.randint(size, (SAMPLE,), generator=chance).sort()[0] if size > SAMPLE else torch.arange(size)
        return places.to(self._like.device)

    def _listen(self, r: int, k: int) -> Heard:
        received, audience = self.links.received(self._tag(k, r), r), self.links.topology.audience(r)
        self._spoken[k] = {j: self._layouts[k].parts(v, self._held_of(k, j, audience)) for j, v in received}
        if not self.defers:
            self._examine(r, k)
        return self._weighed(r, k)

    def examine(self, r: int) -> bool:
        """Go on without neighbours whose numbers in round r are not finite; whether there are some."""
        wrong = [k for k in self.heard if self._examine(r, k)]
        self.heard |= {k: self._weighed(r, k) for k in wrong}
        return bool(wrong)

    def _examine(self, r: int, k: int) -> bool:
        spoken = self._spoken[k].items() if self._guarded else ()
        wrong = [source for source, parts in spoken if not all(part.is_sound for part in parts)]
        for source in wrong:
            self.links.lose(MessageError(self.links.rank, source, r))
            del self._spoken[k][source]
        return bool(wrong)

    def _weighed(self, r: int, k: int) -> Heard:
        """What neighbours have said in message k of round r, with the weights for it."""
        layout, links, topology, dtype = self._layouts[k], self.links, self.links.topology, self._like.dtype
        # The weight of a lost neighbour goes to this node's own value, so rows still sum to 1; in push-sum this node
        # keeps what it would have passed on to it, so columns still do.
        absent, row = links.absent(r), self._rows[(r - 1) % len(self._rows)]
        if topology.loss or topology.shuffle is not None:
            row = _row(topology.matrix(r), links.rank, dtype)
        elif self._by_rows and (P := links.membership.rebalanced(r)) is not None:
            row = _row(P, links.rank, dtype)
        away = None if self._by_rows else sum(w for node, w in row.away.items() if node not in absent)
        voices = {j: parts for j, parts in self._spoken[k].items() if j not in absent and j in row.links}
        own = None
        if topology.speaks(r) and (self.late or not layout.exact):
            own = [*self._own(k, r, links.rank)]
        return Heard(voices, row.links, away, own, dtype, self._guarded and self.defers)

    # --- memory ------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        """Copies of what is held and on its way, for a checkpoint; empty where there is nothing."""
        held = {
            f"{k} {node} {audience} {n}": v.clone()
            for (k, node, audience), by_part in self._held.items()
            for n, v in by_part.items()
        }
        flight = {
            str(r): [self._message(k, r)[: layout.size].clone() for k, layout in enumerate(self._layouts)]
            for r in self._flight
        }
        return {"held": held, "flight": flight} if held or flight else {}

    def load(self, memory: Memory) -> None:
        """Go on with such a memory: what was on its way is sent again by `dispatch`."""
        held: dict[str, Tensor] = memory.get("held", {})  # type: ignore[assignment]
        flight: dict[str, list[Tensor]] = memory.get("flight", {})  # type: ignore[assignment]
        self._held, self.heard, self._parts = {}, {}, {}
        for key, v in held.items():
            k, node, audience, n = map(int, key.split())
            self._held_of(k, node, audience)[n].copy_(v)
        self._flight = sorted(map(int, flight))
        for r in self._flight:
            for k, whole in enumerate(flight[str(r)]):
                self._message(k, r)[: len(whole)].copy_(whole)

    def checks(self) -> Tensor:
        """By node: numbers that sum to 0 over all ranks where neighbours hold of a node what it holds itself.

        A lost link leaves different copies at its ends, and differences would be added to the wrong ones.
        """
        lost, numbers = self.links.lost.keys(), torch.zeros(self.links.topology.size, dtype=torch.int64)
        rows = zip(self.links.topology.audiences, self._rows[self._every - 1 :: self._every], strict=True)
        hearers = {audience: len(row.away.keys() - lost) for audience, row in rows}
        for (_, node, audience), held in self._held.items():
            if node != AHEAD and node not in lost:
                numbers[node] += _checksum(held) * (-hearers[audience] if node == self.links.rank else 1)
        return numbers

    def _held_of(self, k: int, node: int, audience: int) -> dict[int, Tensor]:
        """What is held of a node by those who hear it in some rounds, by part; zero at first."""
        if (key := (k, node, audience)) not in self._held and self._layouts[k].differences:
            differences = self._layouts[k].differences
            self._held[key] = {n: self._like.new_zeros(shape) for n, shape in differences.items()}
        return self._held.get(key, {})


def _checksum(held: dict[int, Tensor]) -> int:
    """A number for the bits of all tensors; so small that many ranks can add theirs up."""
    words = {4: torch.int32, 8: torch.int64}
    return sum(int(v.view(words[v.element_size()]).sum(dtype=torch.int64)) for v in held.values()) % (1 << 31)


def _row(P: Matrix, rank: int, dtype: torch.dtype) -> NodeWeights:
    links, _ = exact_weights(P, dtype)
    row, column = links[[rank], :].tocoo(), links[:, [rank]].tocoo()
    return NodeWeights(
        dict(zip(row.coords[1].tolist(), row.data.tolist(), strict=True)),
        dict(zip(column.coords[0].tolist(), column.data.tolist(), strict=True)),
    )
