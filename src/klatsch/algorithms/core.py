"""What an update rule is: pure algebra on flat vectors that never knows where it runs.

    state' = rule.update(state, grad, mix, t)         t = 1, 2, 3, ...

Tensors end in the parameter axis, (..., d). Inside `update` there are only elementwise operations and calls of `mix`,
which gossips each tensor once with this round's matrix, v_i <- sum_j P_ij v_j; all tensors of one call travel in one
message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from klatsch import averaging, columns
from klatsch.columns import Number

Mix = Callable[..., tuple[Tensor, ...]]
LearningRate = Number | Callable[[int], Any]
State = TypeVar("State")


class Algorithm(Protocol):
    """An update rule: a frozen dataclass of hyper-parameters.

    Tensor fields, (C, 1), are hyper-parameters per column. Rules may add `iterate(state)`, the sequence w that takes
    the steps, where it is not the query point, `check_graph(graph)`, which raises ValueError with the reason on a
    graph that the rule does not work on, and `push = True` if they keep sums rather than averages, so that what a node
    cannot pass on it must keep.
    """

    @property
    def eager(self) -> tuple[str, ...]:
        """State fields whose mixing does not need the next gradient; the first `mix` call is on exactly these."""
        ...

    def init(self, x: Tensor) -> Any:
        """The state, a NamedTuple of tensors (None where a field is not needed), at a starting point.

        Fields may share memory with x and with each other: states are never changed in place.
        """
        ...

    def query(self, state: Any) -> Tensor:
        """Where the gradient is taken."""
        ...

    def output(self, state: Any) -> Tensor:
        """What to evaluate and keep."""
        ...

    def update(self, state: Any, grad: Tensor, mix: Mix, t: int) -> Any:
        """One round: the gradient at `query(state)` in, the next state out."""
        ...


def learning_rate(value: object) -> LearningRate:
    """Check a learning rate: a number, one per column, or a function of the round t."""
    if callable(value):
        hyper_rate("lr(1)", value(1))
        return value
    return columns.hyper("lr", value, lambda v: v > 0, "a number above 0, such as 0.01")


def hyper_rate(name: str, value: object) -> Number:
    """Check what a learning-rate function returned; it may reach 0."""
    return columns.hyper(name, value, lambda v: v >= 0, "a function that returns finite numbers from 0 up")


def rate(lr: LearningRate, t: int) -> Any:
    """The learning rate of round t."""
    return hyper_rate(f"lr({t})", lr(t)) if callable(lr) else lr


def momentum(value: object) -> Number:
    """Check a momentum beta."""
    return columns.hyper(
        "momentum", value, lambda v: (v >= 0) & (v < 1), "a number from 0 up to but not including 1, such as 0.9"
    )


def buffer_for(beta: Number, x: Tensor) -> Tensor | None:
    """A momentum buffer, or None where the momentum is 0 and nothing needs to be remembered."""
    return None if isinstance(beta, float) and beta == 0 else x * 0.0


def accumulate(m: Tensor | None, grad: Tensor, beta: Number) -> Tensor:
    """m <- beta m + g: local momentum; without a buffer the gradient itself."""
    if m is None:
        return grad
    if isinstance(m, Tensor) and isinstance(beta, float):
        return torch.add(grad, m, alpha=beta)  # in one pass through memory
    return beta * m + grad


def keep(m: Tensor | None, pushed: Tensor) -> Tensor | None:
    """The buffer for the next round."""
    return None if m is None else pushed


def average_weights(value: object) -> Any:
    """The weights of the average of its iterates that a rule gives out, or None where it gives out the last one."""
    return None if value is None else averaging.parse(value)


def averaged(a: Tensor | None, w: Tensor, weights: Any, t: int) -> Tensor | None:
    """The average of the iterates so far; nothing where none is kept."""
    return None if a is None else blend(a, w, weights.delta(t))


def descend(w: Tensor, direction: Tensor, length: Any) -> Tensor:
    """w - length * direction, in one pass through memory where the length is a number."""
    if isinstance(w, Tensor) and isinstance(length, float):
        return torch.sub(w, direction, alpha=length)
    if isinstance(w, Tensor) and isinstance(length, Tensor):
        return torch.addcmul(w, direction, length, value=-1.0)
    return w - length * direction  # type: ignore[no-any-return]


def blend(x: Tensor, w: Tensor, delta: Any) -> Tensor:
    """(1 - delta) x + delta w, in one pass through memory where delta is a number."""
    if isinstance(x, Tensor) and isinstance(delta, float):
        return torch.lerp(x, w, delta)
    return (1 - delta) * x + delta * w  # type: ignore[no-any-return]


def needs_doubly_stochastic(graph: Any, rule: str, instead: str) -> None:
    """Refuse a graph that does not keep the network mean.

    Args:
        graph: a topology.
        rule: the name of the rule, for the error.
        instead: the rule that works there.
    """
    if not graph.doubly_stochastic:
        raise ValueError(
            f"{rule} on {graph.name}: the matrix is not doubly stochastic, so mixing does not keep the network mean; "
            f"use {instead} with a column-stochastic graph, or allow it with any_graph=True (--any-graph)"
        )


def needs_static_symmetric(graph: Any, rule: str) -> None:
    """Refuse a graph that is directed or changes: rules that look back at the last round are not stable there."""
    if graph.period > 1 or not graph.symmetric:
        kinds = {"directed": graph.directed, "time-varying": graph.period > 1, "not symmetric": not graph.symmetric}
        reason = " and ".join([kind for kind, true in kinds.items() if true][:2])
        raise ValueError(
            f"{rule} on {graph.name}: the graph is {reason}, and {rule} needs one symmetric matrix for all rounds; "
            "use a static graph such as ring or torus, or another rule such as dat or gt, "
            "or allow it with any_graph=True (--any-graph)"
        )
