"""The outer step: what happens beside mixing in the rounds in which nodes talk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from klatsch import columns
from klatsch.columns import Given
from klatsch.rules.base import Flow, Graph, State, blend, descend, positive, share


@dataclass(frozen=True, eq=False)
class Outer:
    """A longer or shorter step along what local steps have moved, and a momentum from mix to mix.

        u: where the steps since the last mix have led from the anchor a
        v = a + outer_lr (u - a);   a <- v + flow(v) + outer_momentum (v - v_prev);   w <- a

    This is GASLoC: momentum accelerates gossip itself, with one vector per message, also where nodes talk in every
    round. On an all-reduce the momentum is that of the mixed v, and the same on all nodes: DiLoCo, whose outer
    optimizer is SGD with Nesterov momentum; with outer_lr = 1 and outer_momentum = 0 it is local SGD. Without Nesterov
    the momentum is that of a, not of v: NoLoCo's step with its gamma = 1, which then needs one vector only.

    Args:
        outer_lr: the share of the local steps that is taken.
        outer_momentum: a number from 0 up to but not including 1, and at most the graph's `momentum_limit`: beyond,
            disagreement grows by itself, whatever outer_lr and nesterov are (`klatsch topology` shows it).
        nesterov: whether momentum looks ahead.

    References:
        Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, Algorithm 1.
        Cagnasso, Belilovsky and Oyallon, "Unifying local communications and local updates for LLM pretraining", 2026.
        Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models", 2025.
    """

    outer_lr: Given = 0.7
    outer_momentum: Given = 0.9
    nesterov: bool = True
    together: bool = field(default=False, kw_only=True)  # whether a mix makes all nodes equal, which `on` sets
    short: ClassVar[str] = "outer"
    graph = "ring"  # on which every momentum is stable

    def __post_init__(self) -> None:
        columns.settle(
            self,
            outer_lr=positive("outer_lr", self.outer_lr, "0.7"),
            outer_momentum=share("outer_momentum", self.outer_momentum),
        )
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov = {self.nesterov!r}; give true, or false for the momentum of NoLoCo")

    def init(self, x: Tensor) -> State:
        """Where the last mix has led, and what the momentum looks back at."""
        return {"anchor": x, "last": x}

    def on(self, graph: Graph) -> Self:
        """The step on a graph."""
        return columns.replaced(self, together=graph.all_reduce)

    def proposal(self, s: State, u: Tensor, flow: Flow) -> Tensor:
        """What to mix: v, or u where nobody talks. An `if` would not do: engines may hand in many rounds at once."""
        return blend(u, blend(s["anchor"], u, self.outer_lr), 1.0 - flow.silent)

    def step(self, s: State, v: Tensor, mixed: Tensor, flow: Flow) -> State:
        """The iterate after mixing, and what is remembered."""
        now = mixed if self.together else v
        looks = now if self.nesterov else s["anchor"]
        anchor = descend(mixed, looks - s["last"], -1.0 * self.outer_momentum)
        talks = 1.0 - flow.silent
        fields = {"w": (mixed, anchor), "anchor": (s["anchor"], anchor), "last": (s["last"], looks)}
        return {name: blend(old, new, talks) for name, (old, new) in fields.items()}


outer = Outer  # as in rules.Plain(0.1, outer=rules.outer(0.7, 0.9))
