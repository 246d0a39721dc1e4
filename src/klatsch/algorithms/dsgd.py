"""D-SGD: step along your own gradient, then average with your neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from klatsch.algorithms import core


class DSGDState(NamedTuple):
    """The iterate, its momentum, and the average of the iterates."""

    w: Tensor
    m: Tensor | None
    a: Tensor | None


@dataclass(frozen=True, eq=False)
class DSGD:
    """Decentralized SGD, the baseline of the field; mini-batch SGD on the complete graph.

        m <- beta m + g(w)
        w <- mix(w - lr m)

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        momentum: beta, local momentum; 0 for the plain rule.
        average: give out the average of the iterates with these weights (constant: all alike) instead of the last one.

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017, Algorithm 1.
    """

    lr: Any
    momentum: Any = 0.0
    average: Any = None
    eager: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "momentum", core.momentum(self.momentum))
        object.__setattr__(self, "average", core.average_weights(self.average))

    def check_graph(self, graph: Any) -> None:
        """Needs a doubly stochastic graph."""
        core.needs_doubly_stochastic(graph, "dsgd", "sgp")

    def init(self, x: Tensor) -> DSGDState:
        return DSGDState(x, core.buffer_for(self.momentum, x), None if self.average is None else x)

    def query(self, state: DSGDState) -> Tensor:
        return state.w

    def output(self, state: DSGDState) -> Tensor:
        return state.w if state.a is None else state.a

    def update(self, state: DSGDState, grad: Tensor, mix: core.Mix, t: int) -> DSGDState:
        m = core.accumulate(state.m, grad, self.momentum)
        (w,) = mix(core.descend(state.w, m, core.rate(self.lr, t)))
        return DSGDState(w, core.keep(state.m, m), core.averaged(state.a, w, self.average, t))
