"""D2 and its anytime form: what a node learnt about its own bias last round is taken back this round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from klatsch import averaging as weights
from klatsch.algorithms import core


class D2State(NamedTuple):
    """The iterate, and the previous iterate less the previous step's lr g."""

    w: Tensor
    back: Tensor


@dataclass(frozen=True, eq=False)
class D2:
    """D2: removes the heterogeneity between nodes by differences of successive steps.

        w <- mix(2 w - w_prev - (lr g(w) - lr_prev g_prev)),   first step mix(w - lr g)

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.

    References:
        Tang et al., "D2: decentralized training over decentralized data", 2018, Algorithm 1.
    """

    lr: Any
    eager: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))

    def check_graph(self, graph: Any) -> None:
        """Needs one symmetric matrix whose smallest eigenvalue is above -1/3."""
        core.needs_static_symmetric(graph, "d2")
        smallest = graph.smallest_eigenvalue
        if smallest <= -1 / 3 + 1e-9:  # rounding may lift an even ring's -1/3 above it
            raise ValueError(
                f"d2 on {graph.name}: the smallest eigenvalue of P is {smallest:.4g}, and d2 needs more than -1/3; "
                'mix with (I + P) / 2, which is topology.lazy(graph), --lazy, or lazy = "auto" of the rule in a study'
            )

    def init(self, x: Tensor) -> D2State:
        return D2State(x, x)

    def query(self, state: D2State) -> Tensor:
        return state.w

    output = query

    def update(self, state: D2State, grad: Tensor, mix: core.Mix, t: int) -> D2State:
        step = core.rate(self.lr, t) * grad
        (w,) = mix(2 * state.w - state.back - step)
        return D2State(w, state.w - step)


class DATD2State(NamedTuple):
    """The iterate w, the previous iterate less its step, and the query point x."""

    w: Tensor
    back: Tensor
    x: Tensor


@dataclass(frozen=True, eq=False)
class DATD2:
    """Anytime averaging over D2 iterates: DAT without the bias that heterogeneous data cause. Beyond the paper.

        w½ = 2 w - w_prev - (lr alpha_t g_t(x) - lr alpha_{t-1} g_{t-1}),   first w - lr alpha_1 g
        w <- (w½ + mix(w½)) / 2;   x <- (1 - delta_t) mix(x) + delta_t mix(w½)

    w is mixed with the lazy matrix (I + P) / 2, whose eigenvalues suit D2 on every graph; the messages are those of
    DAT.

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        averaging: anytime weights: constant, linear, polynomial(p) or fixed(gamma).
    """

    lr: Any
    averaging: Any = field(default_factory=weights.constant)
    eager: ClassVar[tuple[str, ...]] = ("x",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "averaging", weights.parse(self.averaging))

    def check_graph(self, graph: Any) -> None:
        """Needs one symmetric matrix."""
        core.needs_static_symmetric(graph, "dat-d2")

    def init(self, x: Tensor) -> DATD2State:
        return DATD2State(x, x, x)

    def iterate(self, state: DATD2State) -> Tensor:
        return state.w

    def query(self, state: DATD2State) -> Tensor:
        return state.x

    output = query

    def update(self, state: DATD2State, grad: Tensor, mix: core.Mix, t: int) -> DATD2State:
        (x,) = mix(state.x)
        step = core.rate(self.lr, t) * self.averaging.alpha(t) * grad
        half = 2 * state.w - state.back - step
        (mixed,) = mix(half)
        x = core.blend(x, mixed, self.averaging.delta(t))
        return DATD2State(core.blend(half, mixed, 0.5), state.w - step, x)
