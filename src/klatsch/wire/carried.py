"""A rule over a channel, in simulation: its flows are rounded, and arrive late, as between ranks.

What is on its way, and what neighbours hold, are fields of the state, so they are in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from klatsch.columns import Number
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import Tensors
from klatsch.wire import encodings
from klatsch.wire.rehearsal import Rehearsal


class Channel(Protocol):
    """What a channel asks of a topology."""

    @property
    def late(self) -> int: ...
    @property
    def wire(self) -> str: ...


def carried(rule: Rule, channel: Channel, meets: str = "") -> Rule:
    """The rule with its flows over a channel; the rule itself where they arrive at once and as they are."""
    plain = channel.late == 0 and channel.wire == "float32"
    kind = Stale if meets.startswith("stale") else Carried
    return rule if plain else kind(rule, rule.lr, channel.late, channel.wire)


def bare(rule: Rule) -> Rule:
    """The rule itself, for engines that have real channels."""
    return rule.rule if isinstance(rule, Carried) else rule


@dataclass(frozen=True, eq=False)
class Carried(Rule):
    """A rule whose flows travel over a channel."""

    rule: Rule
    lr: Number
    late: int
    wire: str

    @property
    def name(self) -> str:
        return self.rule.name

    def init(self, x: Tensor) -> State:
        state, rehearsal = dict(self.rule.init(x)), Rehearsal(self.rule, x)
        for c, tensors in enumerate(rehearsal.rounds[0]):
            for n, like in enumerate(tensors):
                nothing = x.new_zeros(rehearsal.full(like))
                if self._holds(rehearsal.is_wide(like)):
                    state[_held(c, n)] = nothing
                state |= {_flight(c, n, k): nothing for k in range(self.late)}
        return state

    def iterate(self, s: State) -> Tensor:
        return self.rule.iterate(s)

    def query(self, s: State) -> Tensor:
        return self.rule.query(s)

    def output(self, s: State) -> Tensor:
        return self.rule.output(s)

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        kept: State = {}
        calls = count()

        def travel(mixed: bool, *tensors: Tensor) -> Tensors:
            c = next(calls)
            sent = [self._sent(s, kept, flow, _held(c, n), v, grad) for n, v in enumerate(tensors)]
            came = self._came(s, kept, flow, c, sent)
            return tuple(v + f for v, f in zip(tensors, came, strict=True)) if mixed else tuple(came)

        own = {name: v for name, v in s.items() if "@" not in name}
        channel = Flow(partial(travel, False), partial(travel, True), flow.silent)
        return self.rule.update(own, grad, channel, t, lr) | kept

    def _holds(self, wide: bool) -> bool:
        return self.wire == "int8" and wide

    def _sent(self, s: State, kept: State, flow: Flow, held: str, v: Tensor, grad: Tensor) -> Tensor:
        """What neighbours know of v after this round."""
        if self.wire == "float32":  # first: the fused engine traces late flows with symbols, which have no shape
            return v
        wide = v.shape[-1] == grad.shape[-1]
        if self._holds(wide):
            h = s[held]
            kept[held] = h if flow.silent else h + encodings.restored(*encodings.quantized(v - h), v.dtype)
            return kept[held]
        return encodings.rounded(v) if wide else v

    def _came(self, s: State, kept: State, flow: Flow, c: int, sent: Sequence[Tensor]) -> list[Tensor]:
        """The flows that arrive now; those of what is sent take their places at the end of the queues."""
        return [self._queue(s, kept, c, n, f)[-1] for n, f in enumerate(flow(*sent))]

    def _queue(self, s: State, kept: State, c: int, n: int, last: Tensor) -> list[Tensor]:
        """What is on its way, the last one first, of which all but the oldest stay so."""
        queue = [last, *(s[_flight(c, n, k)] for k in range(self.late))]
        kept |= {_flight(c, n, k): queue[k] for k in range(self.late)}
        return queue


@dataclass(frozen=True, eq=False)
class Stale(Carried):
    """A rule whose flows arrive link by link, as soon as messages are there: its queues hold what was sent."""

    def _came(self, s: State, kept: State, flow: Flow, c: int, sent: Sequence[Tensor]) -> list[Tensor]:
        """The flows of all ages that arrive now, found by the engine in what was sent, the newest first."""
        return list(flow(*(torch.stack(self._queue(s, kept, c, n, v)) for n, v in enumerate(sent))))


def _held(c: int, n: int) -> str:
    return f"held@{c}.{n}"


def _flight(c: int, n: int, k: int) -> str:
    return f"flight@{c}.{n}.{k}"
