"""Plain gossip: step along your own gradient, and average with your neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number
from klatsch.rules.base import Flow, Graph, Rule, State, descend, learning_rate, share
from klatsch.rules.patterns import Pattern, needs_static_symmetric

ORDERS = ("atc", "cta")


@dataclass(frozen=True, eq=False)
class Plain(Pattern):
    """Gossip as it is; mini-batch SGD on the complete graph.

        atc:  u = w - lr s;   w <- u + flow(u)            s = direction(g)
        cta:  w <- w + flow(w) - lr s

    In cta the iterate travels while the gradient is computed.

    Args:
        lr, direction: see `Pattern`.
        order: "atc" (adapt, then combine) or "cta" (combine, then adapt).

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017, Algorithm 1.
    """

    order: str = "atc"
    short: ClassVar[str] = "dsgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ORDERS:
            raise ValueError(f"order = {self.order!r}; choose atc (adapt, then combine) or cta (combine, then adapt)")

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        step, kept = self.direction(s, grad, t)
        if self.order == "atc":
            (w,) = flow.mix(descend(s["w"], step, lr))
        else:
            (w,) = flow.mix(s["w"])
            w = descend(w, step, lr)
        return {"w": w} | kept


@dataclass(frozen=True, eq=False)
class DecentLaM(Rule):
    """Plain gossip whose momentum remembers what flows did as well: large-batch momentum.

        u = w - lr g;   v <- momentum v + w - (u + flow(u));   w <- w - v

    w - mix(u) is lr times the gradient that plain gossip effectively follows. Local momentum amplifies its bias under
    heterogeneous data by 1 / (1 - momentum)^2; this form does not. The paper accumulates v / lr, which is the same for
    a constant learning rate.

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        momentum: a number from 0 up to but not including 1; 0 is plain gossip.

    References:
        Yuan et al., "DecentLaM: decentralized momentum SGD for large-batch deep training", 2021.
    """

    lr: Given
    momentum: Given = 0.9

    def __post_init__(self) -> None:
        columns.settle(self, lr=learning_rate(self.lr), momentum=share("momentum", self.momentum))

    @property
    def name(self) -> str:
        return "decentlam"

    def init(self, x: Tensor) -> State:
        return {"w": x, "v": x * 0.0}

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (mixed,) = flow.mix(descend(s["w"], grad, lr))
        v = self.momentum * s["v"] + s["w"] - mixed
        return {"w": s["w"] - v, "v": v}

    def check_graph(self, graph: Graph, name: str = "") -> None:
        needs_static_symmetric(graph, name or self.name)  # momentum remembers what the last round's matrix did
        if graph.every > 1 and not (isinstance(self.momentum, float) and self.momentum == 0):
            raise ValueError(
                f"{name or self.name} on {graph.name}: its momentum repeats the flow of a round with gossip in the "
                "silent ones, and diverges; use d2 or dat-d2 for local steps"
            )
