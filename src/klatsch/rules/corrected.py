"""Corrected gossip, or D2: what flows took away from a node's own steps is given back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from klatsch import columns
from klatsch.columns import Number
from klatsch.rules.base import Flow, Graph, State, descend, joined
from klatsch.rules.patterns import Pattern, needs_static_symmetric


@dataclass(frozen=True, eq=False)
class Corrected(Pattern):
    """D2, or exact diffusion: y remembers what flows took away, and gives it back, so heterogeneity does no harm.

        u = w - lr s - y / H;   f = flow(u) / 2;   w <- u + f;   y <- y - f         s = direction(g)

    y sums to 0 over the nodes. With H = 1, eliminating y gives D2 with the matrix (I + P) / 2, whose eigenvalues suit
    it on every symmetric graph:

        w <- mix(2 w - w_prev - (lr s - lr_prev s_prev)),   first step mix(w - lr s)

    Written with flows it does not drift in float32, and serves local steps: in silent rounds the flow is zero and y
    stays, while y / H steers the steps.

    Args:
        lr, direction: see `Pattern`.
        lazy: halve the flow; without, it is D2 as published, which not every graph suits.
        every: H, rounds between two mixes; taken from the graph.

    References:
        Tang et al., "D2: decentralized training over decentralized data", 2018, Algorithm 1.
        Alghunaim, "Local exact-diffusion for decentralized optimization and learning", 2023, for H > 1.
    """

    lazy: bool = True
    every: int = 1
    short: ClassVar[str] = "d2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lazy, bool):
            raise ValueError(f"lazy = {self.lazy!r}; give true, or false for D2 as published")

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"y": x * 0.0})

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        step, kept = self.direction(s, grad, t)
        u = descend(descend(s["w"], step, lr), s["y"], 1.0 / self.every)
        (f,) = flow(u)
        part = 0.5 if self.lazy else 1.0
        return {"w": descend(u, f, -part), "y": descend(s["y"], f, part)} | kept

    def mixed(self, s: State, new: State) -> Tensor:
        return new["w"] + (s["y"] - new["y"]) if self.lazy else new["w"]  # w took half of the flow, y the other half

    def on(self, graph: Graph) -> Self:
        return columns.replaced(self, every=graph.every)

    def check_graph(self, graph: Graph, name: str = "") -> None:
        name = name or self.name
        needs_static_symmetric(graph, name)
        # Rounding may lift an even ring's -1/3 above it.
        if not self.lazy and (smallest := graph.smallest_eigenvalue) <= -1 / 3 + 1e-9:
            raise ValueError(
                f"{name} with lazy = false on {graph.name}: the smallest eigenvalue of P is {smallest:.4g}, and D2 as "
                "published needs more than -1/3; leave lazy out"
            )
