"""DecentLaM: momentum that does not amplify the differences between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from klatsch.algorithms import core


class DecentLaMState(NamedTuple):
    """The iterate and its velocity lr m."""

    w: Tensor
    v: Tensor


@dataclass(frozen=True, eq=False)
class DecentLaM:
    """Decentralized large-batch momentum: the momentum accumulates what gossip did to the iterate as well.

        v <- beta v + (w - mix(w - lr g(w)));   w <- w - v

    w - mix(w - lr g) is lr times the gradient that plain D-SGD effectively follows. Local momentum amplifies its bias
    under heterogeneous data by 1 / (1 - beta)^2; this form does not. With beta = 0 it is
    D-SGD. The paper accumulates v / lr, which is the same for a constant learning rate.

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        momentum: beta.

    References:
        Yuan et al., "DecentLaM: decentralized momentum SGD for large-batch deep training", 2021.
    """

    lr: Any
    momentum: Any = 0.9
    eager: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", core.learning_rate(self.lr))
        object.__setattr__(self, "momentum", core.momentum(self.momentum))

    def check_graph(self, graph: Any) -> None:
        """Needs one symmetric matrix: momentum remembers what last round's matrix did."""
        core.needs_static_symmetric(graph, "decentlam")

    def init(self, x: Tensor) -> DecentLaMState:
        return DecentLaMState(x, x * 0.0)

    def query(self, state: DecentLaMState) -> Tensor:
        return state.w

    output = query

    def update(self, state: DecentLaMState, grad: Tensor, mix: core.Mix, t: int) -> DecentLaMState:
        (mixed,) = mix(core.descend(state.w, grad, core.rate(self.lr, t)))
        v = self.momentum * state.v + state.w - mixed
        return DecentLaMState(state.w - v, v)
