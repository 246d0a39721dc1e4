"""What patterns have in common: a learning rate, a direction, and the graphs that they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number
from klatsch.rules.base import Graph, Rule, State, joined, learning_rate
from klatsch.rules.directions import Direction, sgd


@dataclass(frozen=True, eq=False)
class Pattern(Rule):
    """How nodes combine their steps.

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        direction: what a node makes of its gradient; the gradient itself by default.
    """

    lr: Given
    direction: Direction = field(default_factory=sgd)
    short: ClassVar[str] = ""  # the name of the pattern, if it is not that of the class

    def __post_init__(self) -> None:
        columns.settle(self, lr=learning_rate(self.lr))
        if not isinstance(self.direction, Direction):
            raise ValueError(f"direction = {self.direction!r}; give one, such as rules.momentum(0.9)")

    @property
    def name(self) -> str:
        return self.short or super().name

    def init(self, x: Tensor) -> State:
        return joined(self.name, {"w": x}, self.direction.init(x))

    @property
    def settings(self) -> dict[str, Number]:
        return dict(vars(self.direction))

    def with_settings(self, **values: Number) -> Self:
        return columns.replaced(self, direction=columns.replaced(self.direction, **values))

    def check_graph(self, graph: Graph, name: str = "") -> None:
        needs_doubly_stochastic(graph, name or self.name)


def needs_doubly_stochastic(graph: Graph, rule: str) -> None:
    """Refuse a graph that does not keep the network mean."""
    if not graph.doubly_stochastic:
        raise ValueError(
            f"{rule} on {graph.name}: the matrix is not doubly stochastic, so mixing does not keep the network mean; "
            f"use {'dat-sgp' if rule.startswith('dat') else 'sgp'} with a column-stochastic graph, or allow it with "
            "any_graph=True (--any-graph)"
        )


def needs_static_symmetric(graph: Graph, rule: str) -> None:
    """Refuse a graph that is directed or changes: rules that look back at the last round are not stable there."""
    if graph.changes or not graph.symmetric:
        kinds = {"directed": graph.directed, "time-varying": graph.changes, "not symmetric": not graph.symmetric}
        reason = " and ".join([kind for kind, true in kinds.items() if true][:2])
        raise ValueError(
            f"{rule} on {graph.name}: the graph is {reason}, and {rule} needs one symmetric matrix for all rounds; "
            "use a static graph such as ring or torus, or another rule such as dat or gt, "
            "or allow it with any_graph=True (--any-graph)"
        )
