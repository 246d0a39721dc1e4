"""Push-sum, for directed graphs whose links have no way back.

On such a graph a node can choose how it splits what it sends (the columns of P sum to 1) but not what it receives, so
values drift towards nodes that hear much. Every node therefore gossips a weight as well, which drifts the same way,
and divides by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from klatsch.columns import Number
from klatsch.rules.base import Flow, Graph, State, descend, joined
from klatsch.rules.patterns import Pattern


@dataclass(frozen=True, eq=False)
class Push(Pattern):
    """Stochastic gradient push (SGP).

        u = w - lr s;   w <- u + flow(u);   weight <- weight + flow(weight)         s = direction(g(w / weight))

    Args:
        lr, direction: see `Pattern`.

    References:
        Assran et al., "Stochastic gradient push for distributed deep learning", 2019, Algorithm 1.
    """

    short: ClassVar[str] = "sgp"
    push: ClassVar[bool] = True

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"weight": x[..., :1] * 0.0 + 1.0})

    def at(self, s: State, v: Tensor) -> Tensor:
        return v / s["weight"]

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (weight,) = flow.mix(s["weight"])
        step, kept = self.direction(s, grad, t)
        (w,) = flow.mix(descend(s["w"], step, lr))
        return {"w": w, "weight": weight} | kept

    def check_graph(self, graph: Graph, name: str = "") -> None:
        if not graph.column_stochastic:
            name = name or self.name
            raise ValueError(
                f"{name} on {graph.name}: the columns of P do not sum to 1, so that mass is lost; build the graph with "
                f"stochastic='columns', or use {'dat' if name.startswith('dat') else 'dsgd'} on a doubly stochastic "
                "graph"
            )
