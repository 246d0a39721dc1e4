"""Ways to run rounds. Plain torch operations run every rule on every problem; faster ways are tested against them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.algorithms import Algorithm
from klatsch.engine.gradients import Gradients
from klatsch.engine.mixing import StackedMix


class Rounds(Protocol):
    """A way to run rounds."""

    @property
    def name(self) -> str:
        """What to call it."""
        ...

    def advance(self, state: Any, done: int, until: int) -> Any:
        """The state after `until` rounds, from the state after `done` rounds."""
        ...


class TorchRounds:
    """Rounds as plain torch operations."""

    name = "torch"

    def __init__(self, gradients: Gradients, rule: Algorithm, mix: StackedMix) -> None:
        self.gradients, self.rule, self.mix = gradients, rule, mix

    def one(self, state: Any, t: int) -> tuple[Any, Tensor]:
        """Round t: the next state, and the gradients that led to it."""
        grad = self.gradients(self.rule.query(state), t)
        return self.rule.update(state, grad, lambda *tensors: self.mix(t, *tensors), t), grad

    def advance(self, state: Any, done: int, until: int) -> Any:
        """Round after round."""
        for t in range(done + 1, until + 1):
            state, _ = self.one(state, t)
        return state


def placed(algorithm: Algorithm, dtype: torch.dtype, device: torch.device) -> Algorithm:
    """The rule with its per-column hyper-parameters where the states are."""
    rule = cols.mapped(algorithm, lambda v: v.to(device, dtype))
    if callable(schedule := getattr(algorithm, "lr", None)):

        def lr(t: int) -> Any:
            value = schedule(t)
            return (
                value
                if isinstance(value, int | float)
                else torch.as_tensor(value, dtype=torch.float64).to(device, dtype)
            )

        rule = cols.replaced(rule, lr=lr)
    return rule
