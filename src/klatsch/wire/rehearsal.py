"""What a rule sends in a round, and what an engine may do with it: found by running it on a few numbers beforehand.

A state field that goes into `flow` untouched needs no gradient. All such fields of a round travel in one message, as
soon as the round before is over. Whatever else goes into one call of `flow` travels in its own message.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.columns import Number
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import Tensors, each, rate

MOST_MESSAGES = 8  # in one round, for the numbering of tags
FEW = 7  # numbers in a rehearsal: fields that are as long are taken for whole vectors
ROUNDS = (1, 2, 3, 4, 5, 8, 1000)  # that are rehearsed
TRIALS = [(t, silent) for silent in (False, True) for t in ROUNDS]


class NotAlikeError(ValueError):
    """A rule does not do the same to the same numbers, whenever and in whatever slices it is asked."""


class Sent(NamedTuple):
    """One message of a round."""

    fields: tuple[str, ...]  # state fields that travel in it untouched
    call: int | None  # of `flow`, whose other tensors travel in front of them; None where there are none
    shapes: tuple[torch.Size, ...]
    needs: tuple[int, ...] = ()  # earlier messages that have to arrive before it can be computed


class Place(NamedTuple):
    """Where a tensor that goes into `flow` is."""

    message: int
    part: int  # of the message
    field: str | None  # the state field that it is, where it is one untouched


class Traffic(NamedTuple):
    """The messages of a round, and where the tensors of every call of `flow` are in them."""

    messages: tuple[Sent, ...]
    calls: tuple[tuple[Place, ...], ...]

    @property
    def early(self) -> tuple[str, ...]:
        """The fields that travel before there is a gradient."""
        return self.messages[0].fields if self.messages and self.messages[0].call is None else ()


class Sum(NamedTuple):
    """A state field that is a sum of flows, such as the correction of D2: it is zero over the network."""

    field: str
    call: int  # of `flow`
    part: int  # of the call
    factor: float


class _Stained(Tensor):
    """A tensor that depends on what some call of `flow` returned, as does whatever is computed from it."""


class Rehearsal:
    """Some rounds of a rule on a few numbers, from a point of which only the shape counts.

    A rule that does not return a state like the one that it began with is refused. One that fits only vectors as long
    as x, since it has a tensor of its own, is rehearsed on so many numbers.
    """

    def __init__(self, rule: Rule, x: Tensor) -> None:
        self._length, rule = x.shape[-1], rule.shaped(())  # messages are the same without matrices
        try:
            self._rule = copy.deepcopy(rule)  # one that counts on itself begins its run at the beginning
        except Exception:  # a rule of one's own may hold anything
            self._rule = rule
        try:
            self._begin(x, min(FEW, self._length))
        except Exception:
            if self._length <= FEW:
                raise
            self._begin(x, self._length)

    def _begin(self, x: Tensor, length: int) -> None:
        rule = self._rule
        self._grad = x.new_zeros(*x.shape[:-1], max(1, length))  # x may be empty: a host's last slice
        start = rule.init(self._grad)
        if not isinstance(start, dict) or not all(isinstance(v, Tensor) for v in start.values()):
            raise ValueError(f"{rule.name}.init returns {_kind(start)}; return a dictionary of tensors by name")
        # Fields may start as one tensor; each gets its own here, by which it is known.
        self.state = each(torch.clone, start)
        self.calls()

    @cached_property
    def traffic(self) -> Traffic:
        """The messages of a round; the rule must do the same in every round."""
        calls, names = range(len(self.rounds[0])), {id(v): name for name, v in self.state.items()}

        def field(c: int, n: int) -> str | None:
            """The state field that a tensor of a call of `flow` is in every round, if it is one untouched."""
            known = {names.get(id(tensors[c][n])) for tensors in self.rounds}
            return known.pop() if len(known) == 1 else None

        fields = [[field(c, n) for n in range(len(self.rounds[0][c]))] for c in calls]
        early = dict.fromkeys(name for names in fields for name in names if name is not None)
        late = [c for c in calls if None in fields[c]]
        beside = None
        if not any(self.is_wide(self.state[name]) for name in early):
            # A few numbers, such as push-sum's weight, are not worth their own message.
            needy = self._after(c for c in calls if any(fields[c]))
            beside = next((c for c in late if c not in needy), None)

        # What travels in each message: a field by its name, any other tensor by its call and its place there.
        inside: list[list[str | tuple[int, int]]] = [[*early]] if early and beside is None else []
        for c in late:
            own = [(c, n) for n, name in enumerate(fields[c]) if name is None]
            inside.append([*own, *(early if c == beside else ())])
        if len(inside) > MOST_MESSAGES:
            raise ValueError(f"{self._rule.name} sends {len(inside)} messages per round; {MOST_MESSAGES} at most")
        place = {what: (k, n) for k, parts in enumerate(inside) for n, what in enumerate(parts)}
        places = [tuple(Place(*place[f or (c, n)], f) for n, f in enumerate(fields[c])) for c in calls]
        after = [self._after(c for c in calls if any(p.message == k for p in places[c])) for k in range(len(inside))]
        messages = []
        for k, parts in enumerate(inside):
            named = tuple(what for what in parts if isinstance(what, str))
            tensors = [self.state[w] if isinstance(w, str) else self.rounds[0][w[0]][w[1]] for w in parts]
            call = next((what[0] for what in parts if not isinstance(what, str)), None)
            needs = tuple(j for j in range(k) if call in after[j])
            messages.append(Sent(named, call, tuple(map(self.full, tensors)), needs))
        return Traffic(tuple(messages), tuple(places))

    @cached_property
    def sums(self) -> list[Sum]:
        """The fields that start at zero and change by a multiple of a flow, and by nothing else."""
        zero = [name for name, v in self.state.items() if self.is_wide(v) and not v.any()]
        sums = (Sum(name, c, n, self._change(name, c, n)) for name in zero for c, n, _ in self.sent)
        return [entry for entry in sums if entry.factor]

    @property
    def output(self) -> Place | None:
        """The tensor that travels and moves the rule's output most: x itself, if it travels, else the iterate."""
        start = {name: v * 0.0 + 0.3 for name, v in self.state.items()}

        def pull(c: int, n: int) -> float:
            """By how much the output changes if one flow is 1 and the others are 0, late in a training."""
            moved, still = (self._rule.output(self._moved(start, c, n, flow, 0.0, 1000)) for flow in (1.0, 0.0))
            return float((moved - still).abs().max())

        sizes = {(c, n): pull(c, n) for c, n, v in self.sent if self.is_wide(v)}
        if not sizes or self._rule.push:  # what push-sum sends has another scale on every node
            return None
        c, n = max(sizes, key=lambda place: sizes[place])
        return self.traffic.calls[c][n]

    def check(self, slices: bool) -> None:
        """Refuse a rule that does something else if it is asked again, or if it is asked for slices of the vectors.

        Fast engines and ranks ask as often as they like, with slices, or with symbols for whole vectors.
        """
        once = self._trial()
        if not _alike(once, self._trial()):
            raise NotAlikeError(
                f"{self._rule.name}.update returns other numbers if it is called again with the same arguments, so it "
                "draws random numbers or remembers something outside its state; keep what it remembers in the state, "
                "and random numbers in the problem"
            )
        if not slices:
            return
        cut = self._grad.shape[-1] // 2
        try:
            alike = _alike([self._sliced(v, cut) for v in once], self._trial(cut))
        except Exception:  # tensors that do not fit the slice
            alike = False
        if not alike:
            raise NotAlikeError(
                f"{self._rule.name}.update does not treat each coordinate by itself: it uses a norm, a sum, a length "
                "or a tensor of its own; use elementwise operations on the state, the gradient and flows alone"
            )

    def _trial(self, cut: int = 0) -> list[Tensor]:
        """What a round makes of some numbers, without the first ones of each vector."""
        numbers = torch.linspace(0.3, 0.9, self._grad.shape[-1]).to(self._grad)
        state = {
            name: self._sliced(v * 0.0 + k / 16 + (numbers if self.is_wide(v) else 0.5), cut)
            for k, (name, v) in enumerate(self.state.items())
        }
        flow = Flow(lambda *tensors: tuple(-0.25 * v for v in tensors))
        grad = self._sliced(self._grad + numbers.flip(0), cut)
        new = self._rule.update(dict(state), grad, flow, 2, self._rate(1))
        return [self._rule.query(state), self._rule.output(state), *(new[name] for name in state)]

    def _sliced(self, v: Tensor, cut: int) -> Tensor:
        return v[..., cut:] if self.is_wide(v) else v

    @cached_property
    def rounds(self) -> list[list[Tensors]]:
        """What goes into the calls of `flow` in several rounds, which must be the same calls in each."""
        rounds = [self.calls(t=t, silent=silent) for t, silent in TRIALS]
        for (t, silent), calls in zip(TRIALS, rounds, strict=True):
            if [*map(len, calls)] != [*map(len, rounds[0])]:
                other = "a silent round" if silent else f"round {t}"
                raise ValueError(
                    f"{self._rule.name} does not call flow in {other} as in round 1; neighbours must know what to wait "
                    "for. Call it alike in every round: in the silent ones, which topology.every makes, it returns "
                    "zeros and sends nothing"
                )
        return rounds

    @property
    def sent(self) -> list[tuple[int, int, Tensor]]:
        """Calls of `flow`, places there and tensors."""
        return [(c, n, v) for c, tensors in enumerate(self.rounds[0]) for n, v in enumerate(tensors)]

    def is_wide(self, v: Tensor) -> bool:
        """Whether a tensor is as long as the vectors are."""
        return v.shape[-1] == self._grad.shape[-1]

    def full(self, v: Tensor) -> torch.Size:
        """The shape of a tensor in a real round."""
        return torch.Size([*v.shape[:-1], self._length if self.is_wide(v) else v.shape[-1]])

    def _after(self, calls: Iterable[int]) -> set[int]:
        """The calls of `flow` that need what some others return, in any round."""
        stained = set(calls)
        rounds = [self.calls(stained, t, silent) for t, silent in TRIALS]
        return {c for calls in rounds for c, vs in enumerate(calls) if any(isinstance(v, _Stained) for v in vs)}

    def _change(self, field: str, c: int, n: int) -> float:
        """By what a field changes if one flow is 1, the others are 0 and so is the field; 0 if other things count."""
        start = {name: v * 0.0 + (0.0 if name == field else 0.3) for name, v in self.state.items()}
        still = [self._moved(start, c, n, 0.0, grad, t)[field] for grad in (0.0, 1.7) for t in (1, 4)]
        moved = [self._moved(start, c, n, 1.0, grad, t)[field] for grad in (0.0, 1.7) for t in (1, 4)]
        alike = all(torch.allclose(v, moved[0]) for v in moved)
        return float(moved[0].flatten()[0]) if alike and not any(v.any() for v in still) else 0.0

    def _moved(self, start: State, c: int, n: int, flow: float, grad: float, t: int) -> State:
        """The state after a round t in which one flow is `flow` and the others are 0."""
        count = iter(range(len(self.state) * MOST_MESSAGES))

        def moved(mixed: bool, *tensors: Tensor) -> Tensors:
            call = next(count)
            flows = [torch.full_like(v, flow if (call, k) == (c, n) else 0.0) for k, v in enumerate(tensors)]
            return tuple(v + f if mixed else f for v, f in zip(tensors, flows, strict=True))

        made = Flow(partial(moved, False), partial(moved, True))
        return self._rule.update(dict(start), self._grad + grad, made, t, self._rate(t))

    def _rate(self, t: int) -> Number:
        """The learning rate of round t, with those of several columns where the vectors are."""
        lr = rate(self._rule.lr, t)
        return lr.to(self._grad) if isinstance(lr, Tensor) else lr

    def calls(self, stained: Collection[int] = (), t: int = 1, silent: bool = False) -> list[Tensors]:
        """What goes into the calls of `flow` in a round, where some of them return stained tensors."""
        calls: list[Tensors] = []

        def mix(*tensors: Tensor) -> Tensors:
            calls.append(tensors)
            return tuple(v.clone().as_subclass(_Stained) if len(calls) - 1 in stained else v.clone() for v in tensors)

        new = self._rule.update(dict(self.state), self._grad, Flow(mix, mix, silent), t, self._rate(t))
        if not isinstance(new, dict) or new.keys() != self.state.keys():
            raise ValueError(
                f"{self._rule.name}.update returns {_kind(new)} where the state is {_kind(self.state)}; return all of "
                "its fields, and no others"
            )
        for name, v in new.items():
            if not isinstance(v, Tensor) or v.shape != self.state[name].shape:
                shape = f"shape {tuple(v.shape)}" if isinstance(v, Tensor) else f"a {type(v).__name__}"
                raise ValueError(
                    f"{self._rule.name}.update returns {shape} as {name}, which began as shape "
                    f"{tuple(self.state[name].shape)}; fields keep their shapes (flow returns a tuple: (f,) = flow(v))"
                )
        return calls


def vectors(rule: Rule) -> tuple[int, int]:
    """How many whole vectors a node sends to each neighbour in a round: early, and once there is a gradient."""
    traffic = Rehearsal(rule, torch.zeros(FEW)).traffic
    whole = [sum(shape[-1] == FEW for shape in sent.shapes) for sent in traffic.messages]
    early = whole[0] if traffic.early else 0
    return early, sum(whole) - early


def _alike(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.allclose(a, b, equal_nan=True) for a, b in zip(some, others, strict=True))


def _kind(state: object) -> str:
    return f"a dictionary of {', '.join(map(str, state))}" if isinstance(state, dict) else f"a {type(state).__name__}"
