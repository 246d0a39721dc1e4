"""Gradient tracking: every node follows an estimate of the network's mean gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from klatsch.columns import Number
from klatsch.rules.base import Flow, State, descend, joined
from klatsch.rules.patterns import Pattern


@dataclass(frozen=True, eq=False)
class Tracked(Pattern):
    """Gradient tracking: y follows the mean gradient over the network, so that heterogeneity does no harm.

        z <- z + flow(y);   y <- g + z;   u = w - lr s;   w <- u + flow(u)          s = direction(y)

    z sums to 0 over the nodes. It is the y <- mix(y) + g - g_prev of the literature, without g_prev, and in flows.

    Args:
        lr: see `Pattern`.
        direction: what a node makes of the tracked gradient.

    References:
        Koloskova, Lin and Stich, "An improved analysis of gradient tracking for decentralized machine learning", 2021,
        Algorithm 1.
    """

    short: ClassVar[str] = "gt"

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"y": x * 0.0, "z": x * 0.0})

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (f,) = flow(s["y"])
        z = s["z"] + f
        y = grad + z
        step, kept = self.direction(s, y, t)
        (w,) = flow.mix(descend(s["w"], step, lr))
        return {"w": w, "y": y, "z": z} | kept
