"""DAT-SGD: gradients at a slowly moving average of the iterates, and gossip of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from klatsch import averaging as weights
from klatsch.algorithms import core

ORDERS = ("atc", "cta")


class DATState(NamedTuple):
    """The iterate w, the query point x, and the momentum."""

    w: Tensor
    x: Tensor
    m: Tensor | None


@dataclass(frozen=True, eq=False)
class DAT:
    """Decentralized Anytime SGD (Algorithm 2); Anytime SGD on a single node.

    The gradient is taken at x, and x is what you evaluate and keep.

        m <- beta m + g(x)
        atc:  w½ = w - lr alpha_t m;   w <- mix(w½);   x <- mix((1 - delta_t) x + delta_t w½)
        cta:  w <- mix(w) - lr alpha_t m;              x <- (1 - delta_t) mix(x) + delta_t w

    Mixing is linear, so atc is computed as x <- (1 - delta_t) mix(x) + delta_t mix(w½): then x can travel while the
    gradient is computed, and only w½ is waited for. In cta both travel early. The network mean is the same Anytime SGD.

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        averaging: anytime weights: constant, linear, polynomial(p) or fixed(gamma).
        order: "atc" (adapt, then combine; the paper's) or "cta" (combine, then adapt).
        momentum: beta, local momentum; 0 for the plain rule.

    References:
        Eisen, Dorfman and Levy, "Enhancing parallelism in decentralized stochastic convex optimization", 2025.
    """

    lr: Any
    averaging: Any = field(default_factory=weights.constant)
    order: str = "atc"
    momentum: Any = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "averaging", weights.parse(self.averaging))
        object.__setattr__(self, "momentum", core.momentum(self.momentum))
        if self.order not in ORDERS:
            raise ValueError(f"order = {self.order!r}; choose atc (adapt, then combine) or cta (combine, then adapt)")

    @property
    def eager(self) -> tuple[str, ...]:
        return ("x",) if self.order == "atc" else ("w", "x")

    def check_graph(self, graph: Any) -> None:
        """Needs a doubly stochastic graph."""
        core.needs_doubly_stochastic(graph, "dat", "dat-sgp")

    def init(self, x: Tensor) -> DATState:
        return DATState(x, x, core.buffer_for(self.momentum, x))

    def iterate(self, state: DATState) -> Tensor:
        return state.w

    def query(self, state: DATState) -> Tensor:
        return state.x

    output = query

    def update(self, state: DATState, grad: Tensor, mix: core.Mix, t: int) -> DATState:
        m = core.accumulate(state.m, grad, self.momentum)
        length = core.rate(self.lr, t) * self.averaging.alpha(t)
        if self.order == "atc":
            (x,) = mix(state.x)
            (w,) = mix(core.descend(state.w, m, length))
        else:
            w, x = mix(state.w, state.x)
            w = core.descend(w, m, length)
        return DATState(w, core.blend(x, w, self.averaging.delta(t)), core.keep(state.m, m))
