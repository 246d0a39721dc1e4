"""Gradients of all nodes, round by round, with the randomness of many rounds drawn at once where the problem can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOST_NUMBERS = 1 << 20  # drawn ahead


class Gradients:
    """`gradients(x, t)`: the stochastic gradients of round t at x, (M, C, d)."""

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.draws_ahead = hasattr(problem, "draw") and hasattr(problem, "gradient")
        self._drawn: Tensor | None = None
        self._first = 0
        self._ahead = max(1, min(1000, MOST_NUMBERS // (problem.nodes * problem.dim)))

    def __call__(self, x: Tensor, t: int) -> Tensor:
        if not self.draws_ahead:
            gradient: Tensor = self.problem.grad(x, t)
            return gradient
        return self.problem.gradient(x, self._draw(t))  # type: ignore[no-any-return]

    def _draw(self, t: int) -> Tensor:
        if self._drawn is None or not 0 <= t - self._first < len(self._drawn):
            self._first = t
            self._drawn = self.problem.draw(torch.arange(t, t + self._ahead))
        return self._drawn[t - self._first]
