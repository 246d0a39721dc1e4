"""What an update rule is: pure algebra on flat vectors that never knows where it runs.

    state' = rule.update(state, grad, flow, t, lr)         t = 1, 2, 3, ...

A state is a flat dictionary of named tensors that end in the parameter axis, (..., d). Inside `update` there are only
elementwise operations and calls of `flow`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from klatsch import columns
from klatsch.arguments import kind_of, named, whole
from klatsch.columns import Given, Number, WeightMatrix
from klatsch.rules.names import NAMES

if TYPE_CHECKING:  # rules are algebra: what they know of a graph, they are told
    from klatsch.rules.directions import Hooked
    from klatsch.topology import Topology

State = dict[str, Tensor]
LearningRate = Number | Callable[[int], Given]
Tensors = tuple[Tensor, ...]
Silent = bool | Tensor
# Options that may differ between the columns of one run.
PER_COLUMN = ("lr", "momentum", "beta", "beta1", "beta2", "eps", "weight_decay", "outer_lr", "outer_momentum")


class Flow:
    """The pull of a node's neighbours in one round: flow(v)_i = sum_j P_ij (v_j - v_i).

    Flows sum to zero over the nodes, so v + flow(v) keeps the network mean. All tensors of one call travel in one
    message. State fields that are passed unchanged need no gradient, and travel together, early. An engine may pass a
    `mix` that is faster than the sum v + flow(v).

    Attributes:
        silent: whether nobody talks in this round. An engine that takes many rounds at once has a tensor of 0 and 1, so
            write `a + flow.silent * (b - a)`; where a rule asks `if flow.silent`, it runs with plain operations.
        audience: the number of who hears whom in this round; for channels, which remember what nodes have heard.
    """

    def __init__(
        self,
        flow: Callable[..., Tensors],
        mix: Callable[..., Tensors] | None = None,
        silent: Silent = False,
        audience: int = 0,
    ) -> None:
        self._flow, self._mix, self.silent, self.audience = flow, mix, silent, audience

    def __call__(self, *tensors: Tensor) -> Tensors:
        return self._flow(*tensors)

    def mix(self, *tensors: Tensor) -> Tensors:
        """Gossip: v_i <- sum_j P_ij v_j, which is v + flow(v)."""
        if self._mix is not None:
            return self._mix(*tensors)
        return tuple(v + f for v, f in zip(tensors, self._flow(*tensors), strict=True))

    def inside(self, around: Callable[..., Tensors]) -> Flow:
        """The same round, where `around(function, *tensors)` calls the function that flows or mixes."""
        return Flow(partial(around, self), partial(around, self.mix), self.silent, self.audience)


def of(path: str) -> Any:
    """A property that a part has, such as "direction.decays"."""
    return property(attrgetter(path))


class Rule:
    """An update rule: a frozen dataclass of hyper-parameters, one of them `lr`.

    Your own rule derives from this class and has an `lr`, an `update`, and an `init` if its state is more than the
    iterate w. Fields of type float may be lists, with one number per column.
    """

    lr: Given  # a number, one per column, or a function of t; engines pass that of the round to `update`
    graph: str = "ring"  # the topology that optimizers take if they are given none
    push: bool = False  # whether it keeps sums, not averages: a node keeps what it cannot pass on
    pushed: tuple[str, ...] = ()  # if so, the fields of the weight and of all that it divides
    short: ClassVar[str] = ""  # its name as a part, if not that of its class
    met: tuple[str, ...] = ()  # fields that two nodes may average at any time; none if it needs rounds
    averages: bool = False  # whether it returns an average already
    decays: bool = False  # whether its steps need the point where the gradient was taken, as `seen` shows it
    ignores_scale: bool = False  # whether a factor on all gradients of a node changes nothing
    needs_shapes: bool = False  # whether it needs whole vectors, and `shaped` to know the matrices in them
    hook: Hooked | None = None  # what an all-reduce sends of gradients, if not all of them
    # By field, a number that the graph gives and it grows with: a training may go on over another graph.
    scales: Mapping[str, float] = MappingProxyType({})

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its parts."""
        return (self.short or type(self).__name__,)

    @property
    def name(self) -> str:
        """What to call it: the name of the product of its parts."""
        product = "+".join(self.parts)
        return NAMES.get(product, product)

    def init(self, x: Tensor) -> State:
        """The state at a starting point. Fields may share memory: states are never changed in place."""
        return {"w": x}

    def iterate(self, s: State) -> Tensor:
        """The point that takes the steps."""
        return self.at(s, s["w"])

    def query(self, s: State) -> Tensor:
        """Where the gradient is taken."""
        return self.iterate(s)

    def output(self, s: State) -> Tensor:
        """What to evaluate and keep."""
        return self.iterate(s)

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        """One round: the gradient at `query(s)` in, the next state out."""
        raise NotImplementedError(f"{type(self).__name__} has no update(self, s, grad, flow, t, lr)")

    def seen(self, s: State) -> State:
        """The state as a step sees it: with the query point, where steps need it and no rule around has put it in."""
        return s | {"query": self.query(s)} if self.decays and "query" not in s else s

    @property
    def apart(self) -> bool:
        """Whether `output` and `query` are different points, as a made-up state shows."""
        s = {name: v * 0.0 + k for k, (name, v) in enumerate(self.init(torch.ones(2)).items(), 1)}
        return not torch.equal(self.query(s), self.output(s))

    def at(self, s: State, v: Tensor) -> Tensor:
        """A vector of the state as a point: divided by the weight if the rule keeps sums."""
        return v

    def mixed(self, s: State, new: State) -> Tensor:
        """The iterate of a new state as an average sees it: after a whole flow."""
        return new["w"]

    def check_graph(self, graph: Topology, name: str = "") -> None:
        """Refuse a graph that the rule does not work on; `name` is what to call the rule."""

    def on(self, graph: Topology) -> Self:
        """The rule as it runs on a graph."""
        return self

    def shaped(self, matrices: Sequence[WeightMatrix]) -> Self:
        """The rule as it runs on parameters with these matrices."""
        return self

    @property
    def settings(self) -> dict[str, Number]:
        """Numbers that may differ between groups of parameters and from round to round, besides lr."""
        return {name: v for name, v in vars(self).items() if name == "momentum" and isinstance(v, int | float)}

    def with_settings(self, **values: Number) -> Self:
        """The rule with other settings, past the checks of its constructor; for engines."""
        return columns.replaced(self, **values)


def checked(rule: object) -> Rule:
    """A rule as engines take it, with lists of numbers as columns; anything else is refused."""
    if not isinstance(rule, Rule) or "lr" not in dir(rule):
        what = kind_of(rule) + (" without lr" if isinstance(rule, Rule) else "")
        raise ValueError(
            f"the rule is {what}; give one, such as rules.make('dat', lr=0.01), or an object of a class that derives "
            "from klatsch.rules.Rule and has an lr"
        )
    try:
        inspect.signature(rule.update).bind(*"sgftl")
    except TypeError:
        takes = inspect.signature(rule.update)
        raise ValueError(f"{rule.name}.update takes {takes}; let it take (s, grad, flow, t, lr)") from None
    lr = learning_rate(rule.lr)
    # A list becomes a column here; a rule around another has one already.
    formed = callable(lr) or isinstance(rule.lr, float) or (isinstance(rule.lr, Tensor) and rule.lr.ndim == 2)
    return columns.formed(rule if formed else columns.replaced(rule, lr=lr))


def each(function: Callable[[Tensor], Tensor], state: State) -> State:
    """A state with every field replaced by function(field)."""
    return {name: function(v) for name, v in state.items()}


def joined(name: str, state: State, more: State) -> State:
    """The states of two parts as one."""
    if both := state.keys() & more.keys():
        raise ValueError(f"{name} and a part of it both keep a field {', '.join(both)}; give one another name")
    return state | more


def learning_rate(value: Given) -> LearningRate:
    """Check a learning rate: a number, one per column, or a function of the round t."""
    if callable(value):
        rate(value, 1)
        return value  # type: ignore[no-any-return]
    return positive("lr", value, "0.01")


def rate(lr: LearningRate, t: int) -> Given:
    """The learning rate of round t; a function may return 0."""
    if not callable(lr):
        return lr
    return columns.hyper(f"lr({t})", lr(t), lambda v: v >= 0, "a function that returns finite numbers from 0 up")


# What is left of the learning rate when a share p of the rounds is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "cosine": lambda p: (1.0 + math.cos(math.pi * p)) / 2.0,
    "linear": lambda p: 1.0 - p,
}


@dataclass(frozen=True)
class Decay:
    """A learning rate for a rule: `rules.make("dsgd", lr=rules.Decay(0.1, "cosine", steps=10_000))`.

    "cosine" and "linear" end near 0, as torch's CosineAnnealingLR(T_max=steps) and LinearLR(start_factor=1,
    end_factor=0, total_iters=steps) do. "cosine/100" warms up first: over 100 rounds the rate grows to the whole one,
    and decays in those that are left; "cosine/5%" takes a share of the rounds.

    Args:
        lr: the whole learning rate, that of round 1 without a warm-up, or a list with one per column.
        schedule: "constant", "cosine" or "linear", each also with a warm-up, or a list with one per column.
        steps: the rounds of the whole run.
    """

    lr: float | Sequence[float]
    schedule: str | Sequence[str] = "cosine"
    steps: int = 1

    def __post_init__(self) -> None:
        whole(self.steps, "steps", 1)
        positive("lr", self.lr, "0.01")
        names = self.schedule if isinstance(self.schedule, list | tuple) else [self.schedule]
        for name in names:
            check_schedule(name)
        if isinstance(self.lr, Sequence) and len(names) != len(self.lr) and names is self.schedule:
            raise ValueError(f"{len(names)} schedules for {len(self.lr)} learning rates; give one, or one for each")

    def __call__(self, t: int) -> float | list[float]:
        """The learning rates of round t."""
        if isinstance(self.schedule, str):
            left = _left(self.schedule, t, self.steps)
            return [lr * left for lr in self.lr] if isinstance(self.lr, Sequence) else self.lr * left
        rates = self.lr if isinstance(self.lr, Sequence) else [self.lr] * len(self.schedule)
        return [lr * _left(name, t, self.steps) for lr, name in zip(rates, self.schedule, strict=True)]


def check_schedule(text: object) -> None:
    """Refuse a text that names no schedule."""
    name, _, warmup = text.partition("/") if isinstance(text, str) else (text, "", "")
    named("schedule", name, SCHEDULES)
    if text != name and not re.fullmatch(r"\d+|\d+(\.\d+)?%", warmup):
        raise ValueError(f"schedule = {text!r}; write {name}/100 for a warm-up of 100 rounds, or {name}/5%")


def _left(text: str, t: int, steps: int) -> float:
    """What a schedule leaves of the learning rate in round t of so many."""
    name, _, warmup = text.partition("/")
    rounds = float(warmup[:-1]) / 100 * steps if warmup.endswith("%") else float(warmup or 0)
    if t < rounds:
        return t / rounds
    return SCHEDULES[name](min((t - 1 - rounds) / max(steps - rounds, 1), 1.0) if t > rounds else 0.0)


def positive(name: str, value: Given, example: str) -> Number:
    """Check a number above 0."""
    return columns.hyper(name, value, lambda v: v > 0, f"a number above 0, such as {example}")


def share(name: str, value: Given, most: str = "up to but not including 1") -> Number:
    """Check a number from 0 to 1, such as a momentum."""
    wanted = f"a number from 0 {most}, such as 0.9"
    return columns.hyper(name, value, lambda v: (v >= 0) & ((v <= 1) if most == "to 1" else (v < 1)), wanted)


def descend(w: Tensor, direction: Tensor, length: Number) -> Tensor:
    """w - length * direction, in one pass through memory if the length is a number."""
    if isinstance(w, Tensor) and isinstance(length, float):
        return torch.sub(w, direction, alpha=length)
    if isinstance(w, Tensor) and isinstance(length, Tensor):
        return torch.addcmul(w, direction, length, value=-1.0)
    return w - length * direction


def blend(x: Tensor, w: Tensor, delta: Number) -> Tensor:
    """(1 - delta) x + delta w, in one pass through memory if delta is a number."""
    if isinstance(x, Tensor) and isinstance(delta, float):
        return torch.lerp(x, w, delta)
    return (1 - delta) * x + delta * w
