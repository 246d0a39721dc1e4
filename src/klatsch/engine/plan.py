"""What a rule sends in a round: found by running it on a few numbers, before anything is sent.

A state field that goes into `flow` untouched needs no gradient. All such fields of a round travel in one message, as
soon as the round before is over. Whatever else goes into one call of `flow` travels in a message of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.rules import Flow, Rule
from klatsch.rules.base import rate

MOST_MESSAGES = 8  # in one round, for the numbering of tags


class Sent(NamedTuple):
    """One message of a round."""

    fields: tuple[str, ...]  # state fields that travel in it untouched
    call: int | None  # of `flow`, whose other tensors travel in front of them; None where there are none
    shapes: tuple[torch.Size, ...]
    needs: tuple[int, ...] = ()  # earlier messages that have to arrive before it can be computed


class Plan(NamedTuple):
    """The messages of a round, and where the tensors of every call of `flow` are in them."""

    messages: tuple[Sent, ...]
    calls: tuple[tuple[tuple[int, int], ...], ...]  # by call and tensor: the message, and the place within it

    @property
    def early(self) -> tuple[str, ...]:
        """The fields that travel before there is a gradient."""
        return self.messages[0].fields if self.messages and self.messages[0].call is None else ()


def plan(rule: Rule, x: Tensor) -> Plan:
    """The messages of a round of a rule that starts at x.

    Raises:
        ValueError: it sends too many.
    """
    tiny = x.new_zeros(*x.shape[:-1], min(2, x.shape[-1]))
    state = rule.init(tiny)
    names = {id(v): name for name, v in reversed(state.items())}
    state = {name: v if names[id(v)] == name else v.clone() for name, v in state.items()}  # told apart by identity
    names = {id(v): name for name, v in state.items()}

    def calls(*poisoned: int) -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []

        def mix(*tensors: Tensor) -> tuple[Tensor, ...]:
            found.append(tensors)
            return tuple(v * (torch.nan if len(found) - 1 in poisoned else 1.0) for v in tensors)

        rule.update(state, tiny, Flow(mix, mix), 1, rate(rule.lr, 1))
        return found

    found = calls()
    early = tuple(dict.fromkeys(names[id(v)] for tensors in found for v in tensors if id(v) in names))
    late = [c for c, tensors in enumerate(found) if any(id(v) not in names for v in tensors)]
    used = [c for c, tensors in enumerate(found) if any(id(v) in names for v in tensors)]
    needy = {c for c, tensors in enumerate(calls(*used)) if any(bool(v.isnan().any()) for v in tensors)}
    # A few numbers, such as push-sum's weight, are not worth a message of their own.
    narrow = all(state[name].shape[-1] < tiny.shape[-1] for name in early)
    beside = next((c for c in late if c not in needy), None) if narrow else None

    wide = tiny.shape[-1]
    fields = {None: early if beside is None else (), beside: early} if early else {}
    messages = []
    for call in [*([None] if fields.get(None) else []), *late]:
        moved = [v for v in found[call] if id(v) not in names] if call is not None else []
        moved += [state[name] for name in fields.get(call, ())]
        shapes = [[*v.shape[:-1], x.shape[-1] if v.shape[-1] == wide else v.shape[-1]] for v in moved]
        messages.append(Sent(fields.get(call, ()), call, tuple(map(torch.Size, shapes))))
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"{rule.name} sends {len(messages)} messages per round; {MOST_MESSAGES} at most")

    places: list[tuple[tuple[int, int], ...]] = []
    for c, tensors in enumerate(found):
        own = [id(v) for v in tensors if id(v) not in names]
        with_fields = next((k for k, sent in enumerate(messages) if sent.fields), 0)
        ahead = len(messages[with_fields].shapes) - len(early) if messages else 0
        by_call = {sent.call: k for k, sent in enumerate(messages)}
        places.append(
            tuple(
                (with_fields, ahead + early.index(names[id(v)])) if id(v) in names else (by_call[c], own.index(id(v)))
                for v in tensors
            )
        )
    for k, _ in enumerate(messages):
        heard = {c for c, where in enumerate(places) if any(message == k for message, _ in where)}
        stained = {c for c, tensors in enumerate(calls(*heard)) if any(bool(v.isnan().any()) for v in tensors)}
        for later, sent in enumerate(messages):
            if later > k and sent.call in stained:
                messages[later] = sent._replace(needs=(*sent.needs, k))
    return Plan(tuple(messages), tuple(places))
