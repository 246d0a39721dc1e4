"""Gradient tracking and its anytime form: every node carries an estimate y of the network's mean gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from klatsch import averaging as weights
from klatsch.algorithms import core


class TrackingState(NamedTuple):
    """The iterate, the tracked gradient, the last gradient, and the average of the iterates."""

    w: Tensor
    y: Tensor
    g: Tensor
    a: Tensor | None


@dataclass(frozen=True, eq=False)
class GradientTracking:
    """Gradient tracking: y follows the mean gradient over the network, so that heterogeneity does no harm.

        y <- mix(y) + g(w) - g_prev,   first y = g
        w <- mix(w - lr y)

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        average: give out the average of the iterates with these weights (constant: all alike) instead of the last one.

    References:
        Koloskova, Lin and Stich, "An improved analysis of gradient tracking for decentralized machine learning", 2021,
        Algorithm 1.
    """

    lr: Any
    average: Any = None
    eager: ClassVar[tuple[str, ...]] = ("y",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "average", core.average_weights(self.average))

    def check_graph(self, graph: Any) -> None:
        """Needs a doubly stochastic graph."""
        core.needs_doubly_stochastic(graph, "gt", "sgp")

    def init(self, x: Tensor) -> TrackingState:
        return TrackingState(x, x * 0.0, x * 0.0, None if self.average is None else x)

    def query(self, state: TrackingState) -> Tensor:
        return state.w

    def output(self, state: TrackingState) -> Tensor:
        return state.w if state.a is None else state.a

    def update(self, state: TrackingState, grad: Tensor, mix: core.Mix, t: int) -> TrackingState:
        (y,) = mix(state.y)
        y = y + grad - state.g
        (w,) = mix(core.descend(state.w, y, core.rate(self.lr, t)))
        return TrackingState(w, y, grad, core.averaged(state.a, w, self.average, t))


class DATTrackingState(NamedTuple):
    """The iterate w, the query point x, the tracked gradient, and the last gradient."""

    w: Tensor
    x: Tensor
    y: Tensor
    g: Tensor


@dataclass(frozen=True, eq=False)
class DATTracking:
    """DAT whose step on w uses the tracked gradient. Beyond the paper, which names it as open.

        y <- mix(y) + g(x) - g_prev,   first y = g
        w½ = w - lr alpha_t y;   w <- mix(w½);   x <- (1 - delta_t) mix(x) + delta_t mix(w½)

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        averaging: anytime weights: constant, linear, polynomial(p) or fixed(gamma).
    """

    lr: Any
    averaging: Any = field(default_factory=weights.constant)
    eager: ClassVar[tuple[str, ...]] = ("x", "y")

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "averaging", weights.parse(self.averaging))

    def check_graph(self, graph: Any) -> None:
        """Needs a doubly stochastic graph."""
        core.needs_doubly_stochastic(graph, "dat-gt", "dat-sgp")

    def init(self, x: Tensor) -> DATTrackingState:
        return DATTrackingState(x, x, x * 0.0, x * 0.0)

    def iterate(self, state: DATTrackingState) -> Tensor:
        return state.w

    def query(self, state: DATTrackingState) -> Tensor:
        return state.x

    output = query

    def update(self, state: DATTrackingState, grad: Tensor, mix: core.Mix, t: int) -> DATTrackingState:
        x, y = mix(state.x, state.y)
        y = y + grad - state.g
        (w,) = mix(core.descend(state.w, y, core.rate(self.lr, t) * self.averaging.alpha(t)))
        return DATTrackingState(w, core.blend(x, w, self.averaging.delta(t)), y, grad)
