"""Directions: what a node makes of a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from klatsch import columns
from klatsch.columns import Given
from klatsch.rules.base import Flow, State, share


class Direction:
    """What a node makes of a gradient: a frozen dataclass, whose numbers groups of parameters may set."""

    def init(self, x: Tensor) -> State:
        """Its part of the state."""
        return {}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The direction of a round, and its part of the next state."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(self, s, grad, flow, t)")


@dataclass(frozen=True, eq=False)
class Momentum(Direction):
    """m <- momentum m + g on every node, with a momentum from 0 up to but not including 1; 0 is the gradient itself."""

    momentum: Given = 0.0

    def __post_init__(self) -> None:
        columns.settle(self, momentum=share("momentum", self.momentum))

    def init(self, x: Tensor) -> State:
        """A buffer, unless nothing needs to be remembered."""
        return {} if isinstance(self.momentum, float) and self.momentum == 0 else {"m": x * 0.0}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The momentum."""
        if "m" not in s:
            return grad, {}
        if isinstance(grad, Tensor) and isinstance(self.momentum, float):
            m = torch.add(grad, s["m"], alpha=self.momentum)  # in one pass through memory
        else:
            m = self.momentum * s["m"] + grad
        return m, {"m": m}


sgd = momentum = Momentum  # as in rules.Plain(0.1, rules.momentum(0.9)), or rules.sgd()
