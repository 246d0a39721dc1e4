"""What a rule sends in a round: found by running it on a few numbers, before anything is sent.

A state field that goes into `flow` untouched needs no gradient. All such fields of a round travel in one message, as
soon as the round before is over. Whatever else goes into one call of `flow` travels in a message of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
    rehearsal = _Rehearsal(rule, x)
    found, field_of = rehearsal.calls(), rehearsal.field_of
    early = dict.fromkeys(name for tensors in found for v in tensors if (name := field_of(v)) is not None)
    late = [c for c, tensors in enumerate(found) if any(field_of(v) is None for v in tensors)]
    beside = None
    if not any(rehearsal.is_wide(rehearsal.state[name]) for name in early):
        # A few numbers, such as push-sum's weight, are not worth a message of their own.
        needy = rehearsal.after(c for c, tensors in enumerate(found) if any(map(field_of, tensors)))
        beside = next((c for c in late if c not in needy), None)

    # What travels in each message: a field by its name, any other tensor by its call and its place there.
    inside: list[list[str | tuple[int, int]]] = [[*early]] if early and beside is None else []
    for c in late:
        own = [(c, n) for n, v in enumerate(found[c]) if field_of(v) is None]
        inside.append([*own, *(early if c == beside else ())])
    if len(inside) > MOST_MESSAGES:
        raise ValueError(f"{rule.name} sends {len(inside)} messages per round; {MOST_MESSAGES} at most")
    place = {what: (k, n) for k, parts in enumerate(inside) for n, what in enumerate(parts)}
    calls = [tuple(place[field_of(v) or (c, n)] for n, v in enumerate(tensors)) for c, tensors in enumerate(found)]
    heard = [{c for c, where in enumerate(calls) if any(m == k for m, _ in where)} for k in range(len(inside))]
    after = [rehearsal.after(some) for some in heard]

    messages = []
    for k, parts in enumerate(inside):
        tensors = [rehearsal.state[what] if isinstance(what, str) else found[what[0]][what[1]] for what in parts]
        call = next((what[0] for what in parts if not isinstance(what, str)), None)
        messages.append(
            Sent(
                fields=tuple(what for what in parts if isinstance(what, str)),
                call=call,
                shapes=tuple(map(rehearsal.full, tensors)),
                needs=tuple(j for j in range(k) if call in after[j]),
            )
        )
    return Plan(tuple(messages), tuple(calls))


class _Rehearsal:
    """Rounds of a rule on a few numbers."""

    def __init__(self, rule: Rule, x: Tensor) -> None:
        self._rule, self._length = rule, x.shape[-1]
        self._grad = x.new_zeros(*x.shape[:-1], min(2, x.shape[-1]))
        # Fields may start as one tensor; each is a tensor of its own here, by which it is known.
        self.state = {name: v.clone() for name, v in rule.init(self._grad).items()}
        self._names = {id(v): name for name, v in self.state.items()}

    def field_of(self, v: Tensor) -> str | None:
        """The state field that a tensor is, if it is one untouched."""
        return self._names.get(id(v))

    def is_wide(self, v: Tensor) -> bool:
        """Whether a tensor is as long as the vectors are."""
        return v.shape[-1] == self._grad.shape[-1]

    def full(self, v: Tensor) -> torch.Size:
        """The shape of a tensor in a real round."""
        return torch.Size([*v.shape[:-1], self._length if self.is_wide(v) else v.shape[-1]])

    def calls(self, poisoned: Collection[int] = ()) -> list[tuple[Tensor, ...]]:
        """What goes into the calls of `flow`, where some of them return NaN."""
        found: list[tuple[Tensor, ...]] = []

        def mix(*tensors: Tensor) -> tuple[Tensor, ...]:
            found.append(tensors)
            return tuple(v * (torch.nan if len(found) - 1 in poisoned else 1.0) for v in tensors)

        self._rule.update(self.state, self._grad, Flow(mix, mix), 1, rate(self._rule.lr, 1))
        return found

    def after(self, calls: Iterable[int]) -> set[int]:
        """The calls of `flow` that need what some others return."""
        found = self.calls(poisoned=set(calls))
        return {c for c, tensors in enumerate(found) if any(bool(v.isnan().any()) for v in tensors)}
