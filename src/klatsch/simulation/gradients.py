"""Gradients of all nodes, round by round, with the randomness of many rounds drawn at once where the problem can."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import torch
from torch import Tensor

from klatsch.problems import Problem

MOST_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 24}  # drawn at once: a cache's worth, or enough to hide the launches


class Gradients:
    """`gradients(x, t)`: the stochastic gradients of round t at x, (M, C, d)."""

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        self.problem = problem
        self.draws_ahead = problem.draws_ahead
        numbers = problem.nodes * (problem.drawn or problem.dim)  # per round
        self.chunk = max(1, min(1000, MOST_NUMBERS[device] // numbers))  # rounds drawn at once
        self._chunks: dict[int, Future[Tensor]] = {}

    def __call__(self, x: Tensor, t: int) -> Tensor:
        if not self.draws_ahead:
            return self.problem.grad(x, t)
        return self.problem.gradient(x, self.drawn(t - 1, t)[0])

    def drawn(self, done: int, until: int) -> Tensor:
        """What was drawn for rounds done + 1 to until, which lie in one chunk."""
        number = done // self.chunk
        if number not in self._chunks:
            self._keep(number)
            self._chunks[number] = Future()
            self._chunks[number].set_result(self._draw(number))
        return self._chunks[number].result()[done - number * self.chunk : until - number * self.chunk]

    def draw_next(self, done: int, executor: Executor) -> None:
        """Let someone else draw the chunk after the one that round done + 1 lies in."""
        number = done // self.chunk + 1
        if number not in self._chunks:
            self._keep(number)
            self._chunks[number] = executor.submit(self._draw, number)

    def _keep(self, number: int) -> None:
        """Forget all chunks but this one and the one before."""
        self._chunks = {k: v for k, v in self._chunks.items() if k in (number - 1, number)}

    def _draw(self, number: int) -> Tensor:
        first = number * self.chunk + 1
        return self.problem.draw(torch.arange(first, first + self.chunk))
