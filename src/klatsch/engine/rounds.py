"""Ways to run rounds. Plain torch operations run every rule on every problem; faster ways are tested against them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.algorithms import Algorithm
from klatsch.algorithms.core import rate
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
        x = self.rule.query(state)
        grad = self.gradients(x, t)
        if grad.shape != x.shape:
            raise ValueError(
                f"the problem gave gradients of shape {tuple(grad.shape)} for points of shape {tuple(x.shape)}; "
                "grad(x, t) must return one gradient for every point, (nodes, columns, parameters)"
            )
        return self.rule.update(state, grad, lambda *tensors: self.mix(t, *tensors), t), grad

    def advance(self, state: Any, done: int, until: int) -> Any:
        """Round after round."""
        for t in range(done + 1, until + 1):
            state, _ = self.one(state, t)
        return state


def placed(algorithm: Algorithm, dtype: torch.dtype, device: torch.device, columns: int) -> Algorithm:
    """The rule with its per-column hyper-parameters where the states are."""
    rule = cols.mapped(algorithm, lambda v: v.to(device, dtype))
    if callable(schedule := getattr(algorithm, "lr", None)):

        def lr(t: int) -> Any:
            rates = scheduled(schedule, t, columns)
            return rates.to(device, dtype) if isinstance(rates, Tensor) else rates

        rule = cols.replaced(rule, lr=lr)
    return rule


def scheduled(schedule: Any, t: int, columns: int) -> Any:
    """What a learning-rate function gives for round t: a number, or a tensor (columns, 1).

    Raises:
        ValueError: it gives something else.
    """
    rates = rate(schedule, t)
    if isinstance(rates, Tensor) and len(rates) != columns:
        raise ValueError(f"lr({t}) has {len(rates)} columns; return one number, or {columns} at every round")
    return rates
