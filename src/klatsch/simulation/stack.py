"""Ways to run rounds. Plain torch operations run every rule on every problem; faster ways are tested against them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.rules import Rule, State
from klatsch.rules.base import rate
from klatsch.simulation.gradients import Gradients
from klatsch.simulation.mixing import StackedMix


class Rounds(Protocol):
    """A way to run rounds."""

    @property
    def name(self) -> str:
        """What to call it."""
        ...

    def advance(self, state: State, done: int, until: int) -> State:
        """The state after `until` rounds, from the state after `done` rounds."""
        ...


class TorchRounds:
    """Rounds as plain torch operations."""

    name = "torch"

    def __init__(self, gradients: Gradients, rule: Rule, rates: Rates, mix: StackedMix) -> None:
        self.gradients, self.rule, self.rates, self.mix = gradients, rule, rates, mix

    def one(self, state: State, t: int) -> tuple[State, Tensor]:
        """Round t: the next state, and the gradients that led to it."""
        x = self.rule.query(state)
        grad = self.gradients(x, t)
        if grad.shape != x.shape:
            raise ValueError(
                f"the problem gave gradients of shape {tuple(grad.shape)} for points of shape {tuple(x.shape)}; "
                "grad(x, t) must return one gradient for every point, (nodes, columns, parameters)"
            )
        return self.rule.update(state, grad, self.mix.in_round(t), t, self.rates(t)), grad

    def advance(self, state: State, done: int, until: int) -> State:
        """Round after round."""
        for t in range(done + 1, until + 1):
            state, _ = self.one(state, t)
        return state


def device_of(state: State) -> torch.device:
    """Where a state is."""
    return next(iter(state.values())).device


def placed(rule: Rule, dtype: torch.dtype, device: torch.device) -> Rule:
    """The rule with its per-column hyper-parameters where the states are."""
    return cols.mapped(rule, lambda v: v.to(device, dtype))


class Rates:
    """The learning rates of a run, round by round.

    Args:
        rule: the rule that declares them.
        steps: the last round; engines look ahead, and a schedule is not asked beyond it.
        columns: how many there are.
        dtype: of rates per column.
        device: of those.
    """

    def __init__(self, rule: Rule, steps: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rule, self._lr, self._steps, self._columns = rule, rule.lr, steps, columns
        self._place = device, dtype
        self.change = callable(rule.lr)
        if isinstance(rule.lr, Tensor):
            self._lr = rule.lr.to(*self._place)

    def __call__(self, t: int) -> Any:
        """The learning rate of round t: a number, or a tensor (columns, 1).

        Raises:
            ValueError: a schedule returned something else.
        """
        if not self.change:
            return self._lr
        rates = rate(self._lr, min(t, self._steps))
        if not isinstance(rates, Tensor):
            return rates
        if len(rates) != self._columns:
            raise ValueError(f"lr({t}) has {len(rates)} columns; return one number, or {self._columns} at every round")
        return rates.to(*self._place)

    def wide(self) -> Rates:
        """The same in float64 on the CPU."""
        return Rates(self._rule, self._steps, self._columns, torch.float64, torch.device("cpu"))

    def between(self, done: int, until: int) -> Tensor:
        """Those of rounds done + 1 to until, (rounds, columns, 1)."""
        device, dtype = self._place
        rates = [torch.as_tensor(self(t), dtype=dtype, device=device) for t in range(done + 1, until + 1)]
        return torch.stack([v.reshape(-1, 1).expand(self._columns, 1) for v in rates])
