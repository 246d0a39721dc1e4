"""Directions: what a node makes of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from klatsch import columns
from klatsch.columns import Given
from klatsch.rules.base import State, share


@runtime_checkable
class Direction(Protocol):
    """What a node makes of a gradient: a frozen dataclass, whose fields groups of parameters may set."""

    def init(self, x: Tensor) -> State:
        """Its part of the state."""
        ...

    def __call__(self, s: State, grad: Tensor, t: int) -> tuple[Tensor, State]:
        """The direction of a round, and its part of the next state."""
        ...


@dataclass(frozen=True, eq=False)
class Momentum:
    """m <- momentum m + g, a momentum of every node's own; the gradient itself where it is 0.

    Args:
        momentum: a number from 0 up to but not including 1.
    """

    momentum: Given = 0.0

    def __post_init__(self) -> None:
        columns.settle(self, momentum=share("momentum", self.momentum))

    def init(self, x: Tensor) -> State:
        """A buffer, unless nothing needs to be remembered."""
        return {} if isinstance(self.momentum, float) and self.momentum == 0 else {"m": x * 0.0}

    def __call__(self, s: State, grad: Tensor, t: int) -> tuple[Tensor, State]:
        """The momentum."""
        if "m" not in s:
            return grad, {}
        if isinstance(grad, Tensor) and isinstance(self.momentum, float):
            m = torch.add(grad, s["m"], alpha=self.momentum)  # in one pass through memory
        else:
            m = self.momentum * s["m"] + grad
        return m, {"m": m}


def sgd() -> Momentum:
    """The gradient."""
    return Momentum()


def momentum(beta: Given) -> Momentum:
    """The gradient, and what is left of earlier ones: m <- beta m + g."""
    return Momentum(beta)
