"""What an update rule is: pure algebra on flat vectors that never knows where it runs.

    state' = rule.update(state, grad, flow, t, lr)         t = 1, 2, 3, ...

A state is a flat dictionary of named tensors that end in the parameter axis, (..., d). Inside `update` there are only
elementwise operations and calls of `flow`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number

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
    """

    def __init__(
        self, flow: Callable[..., Tensors], mix: Callable[..., Tensors] | None = None, silent: Silent = False
    ) -> None:
        self._flow, self._mix, self.silent = flow, mix, silent

    def __call__(self, *tensors: Tensor) -> Tensors:
        return self._flow(*tensors)

    def mix(self, *tensors: Tensor) -> Tensors:
        """Gossip: v_i <- sum_j P_ij v_j, which is v + flow(v)."""
        if self._mix is not None:
            return self._mix(*tensors)
        return tuple(v + f for v, f in zip(tensors, self._flow(*tensors), strict=True))


class Graph(Protocol):
    """What a rule asks of a topology."""

    @property
    def name(self) -> str: ...
    @property
    def doubly_stochastic(self) -> bool: ...
    @property
    def column_stochastic(self) -> bool: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def directed(self) -> bool: ...
    @property
    def changes(self) -> bool: ...
    @property
    def meets(self) -> str: ...
    @property
    def every(self) -> int: ...
    @property
    def late(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def smallest_eigenvalue(self) -> float: ...


class Rule:
    """An update rule: a frozen dataclass of hyper-parameters, one of them `lr`.

    Your own rule derives from this class and has an `lr`, an `update`, and an `init` if its state is more than the
    iterate w. Fields of type float may be lists, with one number per column.
    """

    lr: Given  # a number, one per column, or a function of t; engines pass that of the round to `update`
    push: ClassVar[bool] = False  # whether it keeps sums, not averages: a node keeps what it cannot pass on
    short: ClassVar[str] = ""  # its name, if not that of its class
    met: tuple[str, ...] = ()  # fields that two nodes may average at any time; none if it needs rounds

    @property
    def name(self) -> str:
        """What to call it."""
        return self.short or type(self).__name__

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

    @property
    def ignores_scale(self) -> bool:
        """Whether a factor on all gradients of a node changes nothing, since it divides them by their own size."""
        return False

    @property
    def scales(self) -> dict[str, float]:
        """By field, a number that the graph gives and it grows with: a training may go on over another graph."""
        return {}

    @property
    def decays(self) -> bool:
        """Whether its steps need the point where the gradient was taken, as `seen` shows it."""
        return False

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

    def check_graph(self, graph: Graph, name: str = "") -> None:
        """Refuse a graph that the rule does not work on; `name` is what to call the rule."""

    def on(self, graph: Graph) -> Self:
        """The rule as it runs on a graph."""
        return self

    @property
    def settings(self) -> dict[str, Number]:
        """Numbers that may differ between groups of parameters and from round to round, besides lr."""
        return {name: v for name, v in vars(self).items() if name == "momentum" and isinstance(v, int | float)}

    def with_settings(self, **values: Number) -> Self:
        """The rule with other settings, past the checks of its constructor; for engines."""
        return columns.replaced(self, **values)


def checked(rule: object) -> Rule:
    """A rule, made of any object that has what a rule needs."""
    missing = [name for name in ("lr", "init", "query", "output", "update") if name not in dir(rule)]
    if missing or isinstance(rule, type):
        what = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {type(rule).__name__}"
        what += f" without {', '.join(missing)}" if missing else ""
        remedy = "give a rule, such as rules.make('dat', lr=0.01), or an object of a class that derives from rules.Rule"
        raise ValueError(f"the rule is {what}; {remedy}")
    if not isinstance(rule, Rule):
        kind = type(rule)
        rule = columns.replaced(rule)  # a copy
        columns.settle(rule, __class__=type(kind.__name__, (kind, Rule), {}))
        assert isinstance(rule, Rule)
    try:
        inspect.signature(rule.update).bind(*"sgftl")
    except TypeError:
        raise ValueError(
            f"{rule.name}.update takes {inspect.signature(rule.update)}; since klatsch 0.2 it takes (s, grad, flow, t, "
            "lr), where s is a dictionary and flow.mix(v) is what mix(v) was"
        ) from None
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
    return columns.hyper("lr", value, lambda v: v > 0, "a number above 0, such as 0.01")


def rate(lr: LearningRate, t: int) -> Given:
    """The learning rate of round t; a function may return 0."""
    if not callable(lr):
        return lr
    return columns.hyper(f"lr({t})", lr(t), lambda v: v >= 0, "a function that returns finite numbers from 0 up")


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
