"""D-SGD: step along your own gradient, then average with your neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from klatsch.algorithms import core


class DSGDState(NamedTuple):
    """The iterate, and its momentum."""

    w: Tensor
    m: Tensor | None


@dataclass(frozen=True, eq=False)
class DSGD:
    """Decentralized SGD, the baseline of the field; mini-batch SGD on the complete graph.

        m <- beta m + g(w)
        w <- mix(w - lr m)

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        momentum: beta, local momentum; 0 for the plain rule.

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017, Algorithm 1.
    """

    lr: Any
    momentum: Any = 0.0
    eager: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "momentum", core.momentum(self.momentum))

    def check_graph(self, graph: Any) -> None:
        """Needs a doubly stochastic graph."""
        core.needs_doubly_stochastic(graph, "dsgd", "sgp")

    def init(self, x: Tensor) -> DSGDState:
        return DSGDState(x, core.buffer_for(self.momentum, x))

    def query(self, state: DSGDState) -> Tensor:
        return state.w

    output = query

    def update(self, state: DSGDState, grad: Tensor, mix: core.Mix, t: int) -> DSGDState:
        m = core.accumulate(state.m, grad, self.momentum)
        (w,) = mix(state.w - core.rate(self.lr, t) * m)
        return DSGDState(w, core.keep(state.m, m))
