"""Push-sum and its anytime form, for directed graphs whose links have no way back.

On such a graph a node can choose how it splits what it sends (the columns of P sum to 1) but not what it receives, so
values drift towards nodes that hear much. Every node therefore gossips a weight as well, which drifts the same way,
and divides by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from klatsch import averaging as weights
from klatsch.algorithms import core


class PushSumState(NamedTuple):
    """The iterate before the division, and the push-sum weight (..., 1)."""

    w: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class PushSum:
    """Stochastic gradient push (SGP).

        w <- mix(w - lr g(w / weight));   weight <- mix(weight),   first weight = 1

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.

    References:
        Assran et al., "Stochastic gradient push for distributed deep learning", 2019, Algorithm 1.
    """

    lr: Any
    eager: ClassVar[tuple[str, ...]] = ()
    push: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))

    def check_graph(self, graph: Any) -> None:
        """Needs a column-stochastic graph."""
        need_column_stochastic(graph, "sgp", "dsgd")

    def init(self, x: Tensor) -> PushSumState:
        return PushSumState(x, x[..., :1] * 0.0 + 1.0)

    def query(self, state: PushSumState) -> Tensor:
        return state.w / state.weight

    output = query

    def update(self, state: PushSumState, grad: Tensor, mix: core.Mix, t: int) -> PushSumState:
        w, weight = mix(core.descend(state.w, grad, core.rate(self.lr, t)), state.weight)
        return PushSumState(w, weight)


class DATPushState(NamedTuple):
    """The iterate w and the query point x, both before the division, and the push-sum weight (..., 1)."""

    w: Tensor
    x: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class DATPush:
    """DAT over push-sum, for directed graphs. Beyond the paper.

        w½ = w - lr alpha_t g(x / weight)
        w <- mix(w½);   x <- (1 - delta_t) mix(x) + delta_t mix(w½);   weight <- mix(weight),   first weight = 1

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        averaging: anytime weights: constant, linear, polynomial(p) or fixed(gamma).
    """

    lr: Any
    averaging: Any = field(default_factory=weights.constant)
    eager: ClassVar[tuple[str, ...]] = ("x", "weight")
    push: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "averaging", weights.parse(self.averaging))

    def check_graph(self, graph: Any) -> None:
        """Needs a column-stochastic graph."""
        need_column_stochastic(graph, "dat-sgp", "dat")

    def init(self, x: Tensor) -> DATPushState:
        return DATPushState(x, x, x[..., :1] * 0.0 + 1.0)

    def iterate(self, state: DATPushState) -> Tensor:
        return state.w / state.weight

    def query(self, state: DATPushState) -> Tensor:
        return state.x / state.weight

    output = query

    def update(self, state: DATPushState, grad: Tensor, mix: core.Mix, t: int) -> DATPushState:
        x, weight = mix(state.x, state.weight)
        (w,) = mix(core.descend(state.w, grad, core.rate(self.lr, t) * self.averaging.alpha(t)))
        return DATPushState(w, core.blend(x, w, self.averaging.delta(t)), weight)


def need_column_stochastic(graph: Any, rule: str, instead: str) -> None:
    """Refuse a graph whose columns do not sum to 1."""
    if not graph.column_stochastic:
        raise ValueError(
            f"{rule} on {graph.name}: the columns of P do not sum to 1, so that mass is lost; build the graph with "
            f"stochastic='columns', or use {instead} on a doubly stochastic graph"
        )
