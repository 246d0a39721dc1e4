"""Rounds on a GPU, captured as a CUDA graph: some tens of rounds are launched at once instead of a kernel at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.engine.rounds import TorchRounds

ROUNDS = 32  # per graph, or a little more to make whole periods of the topology


class GraphRounds:
    """Rounds as replays of a CUDA graph; what does not fill a graph is run with plain operations.

    A graph repeats the same launches on the same memory, so everything that changes from round to round lies in
    tensors that are filled before a replay: what was drawn, the numbers of the rounds, the learning rates of a
    schedule.

    Args:
        plain: the plain way to run the same rounds, on a problem that draws ahead.
        state: a state of the run.

    Raises:
        ValueError: the problem does not draw ahead, or the rule needs a number where the graph has a tensor.
    """

    name = "cuda graph"

    def __init__(self, plain: TorchRounds, state: Any) -> None:
        if not plain.gradients.draws_ahead:
            raise ValueError("the problem has no draw(t) and gradient(x, drawn)")
        self.plain, self.problem = plain, plain.gradients.problem
        period = plain.mix.period
        self.rounds = period * -(-ROUNDS // period)
        device = state[0].device
        # A chunk of draws holds whole graphs, so that filling one is a copy and no computation.
        plain.gradients.chunk = self.rounds * -(-plain.gradients.chunk // self.rounds)
        self._numbers = torch.arange(1, self.rounds + 1, dtype=torch.float64, device=device)
        self._t = self._numbers.clone()
        self._drawn = plain.gradients.drawn(0, self.rounds).clone()
        self._state = type(state)(*(None if v is None else v.clone() for v in state))
        self._rates = self._schedule(0)
        with torch.cuda.device(device):
            self._graph = self._capture()

    def advance(self, state: Any, done: int, until: int) -> Any:
        """Rounds done + 1 to until."""
        aligned = min(until, -(-done // self.rounds) * self.rounds)
        state = self.plain.advance(state, done, aligned)
        replays = (until - aligned) // self.rounds
        if replays:
            self._copy(state)
            with torch.cuda.device(self._t.device):
                for k in range(replays):
                    self._fill(aligned + k * self.rounds)
                    self._graph.replay()
            state = type(state)(*(None if v is None else v.clone() for v in self._state))
        return self.plain.advance(state, aligned + replays * self.rounds, until)

    def _capture(self) -> torch.cuda.CUDAGraph:
        kept = [None if v is None else v.clone() for v in self._state]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        self._fill(0)
        with torch.cuda.stream(side):  # lets libraries set themselves up, which cannot be captured
            self._all_rounds()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._all_rounds()
        self._copy(kept)
        return graph

    def _all_rounds(self) -> None:
        state, rule, scheduled = self._state, self.plain.rule, callable(getattr(self.plain.rule, "lr", None))
        for k in range(self.rounds):
            now = cols.replaced(rule, lr=self._rates[k]) if scheduled else rule
            grad = self.problem.gradient(now.query(state), self._drawn[k])
            state = now.update(state, grad, lambda *v, t=k + 1: self.plain.mix(t, *v), self._t[k])  # type: ignore[arg-type]
        self._copy(state)

    def _fill(self, done: int) -> None:
        torch.add(self._numbers, done, out=self._t)
        self._drawn.copy_(self.plain.gradients.drawn(done, done + self.rounds))
        if self._rates.numel():
            self._rates.copy_(self._schedule(done))

    def _schedule(self, done: int) -> Tensor:
        """The learning rates of the next rounds, (rounds, columns, 1); nothing if the learning rate does not change."""
        lr = getattr(self.plain.rule, "lr", None)
        if not callable(lr):
            return torch.zeros(0)
        first = next(v for v in self._state if v is not None)
        rates = [torch.as_tensor(lr(t)).to(first).reshape(-1, 1) for t in range(done + 1, done + self.rounds + 1)]
        return torch.stack([v.expand(first.shape[1], 1) for v in rates])

    def _copy(self, source: Any) -> None:
        for mine, other in zip(self._state, source, strict=True):
            if mine is not None:
                mine.copy_(other)
