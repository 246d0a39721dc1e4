"""Rounds on a GPU, captured as a CUDA graph: a few dozen rounds per launch instead of one kernel per launch."""

from __future__ import annotations

import torch

from klatsch.problems import Problem
from klatsch.rules import State
from klatsch.rules.base import each
from klatsch.simulation.preparation import Prepared
from klatsch.simulation.stack import Stack

ROUNDS = 32  # per graph, rounded up to whole periods of the topology
MOST_ROUNDS = 512  # per graph: capturing takes memory and time


class GraphStack(Stack):
    """Rounds as replays of a CUDA graph; those that do not fill a graph use plain operations.

    A graph repeats the same launches on the same memory, so draws, round numbers and scheduled learning rates are
    copied into place before each replay. A rule that cannot be captured, such as one that asks for the round as a
    number, is a RuntimeError.
    """

    name, place = "cuda graph", "cuda"

    def __init__(self, problem: Problem, parts: Prepared) -> None:
        super().__init__(problem, parts)
        if self.device.type != "cuda":
            raise ValueError("it runs on a GPU only, with device='cuda'")
        if not self.gradients.draws_ahead:
            raise ValueError("the problem has no draw(t) and gradient(x, drawn)")
        parts.rehearsal.check(slices=False)
        period = self.mix.period
        if any(topology.loss for topology in parts.topologies):
            raise ValueError("other messages are lost in every round")
        if period > MOST_ROUNDS:
            raise ValueError(f"the topology repeats after {period:,} rounds; a graph holds {MOST_ROUNDS} at most")
        self.rounds = period * -(-ROUNDS // period)
        # A chunk of draws covers whole graphs, so that filling one is a plain copy.
        self.gradients.chunk = self.rounds * -(-self.gradients.chunk // self.rounds)
        self._numbers = torch.arange(1, self.rounds + 1, dtype=torch.float64, device=self.device)
        self._t = self._numbers.clone()
        self._drawn = self.gradients.drawn(0, self.rounds).clone()
        self._state = each(torch.clone, self.start)
        self._rates = self.rates.between(0, self.rounds) if self.rates.change else None
        with torch.cuda.device(self.device):
            self._graph = self._capture()

    def advance(self, state: State, done: int, until: int) -> State:
        aligned = min(until, -(-done // self.rounds) * self.rounds)
        state = super().advance(state, done, aligned)
        replays = (until - aligned) // self.rounds
        if replays:
            self._copy(state)
            with torch.cuda.device(self.device):
                for k in range(replays):
                    self._fill(aligned + k * self.rounds)
                    self._graph.replay()
            state = each(torch.clone, self._state)
        return super().advance(state, aligned + replays * self.rounds, until)

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        self._fill(0)
        with torch.cuda.stream(side):  # libraries set themselves up here, which cannot be captured
            self._all_rounds()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._all_rounds()
        return graph

    def _all_rounds(self) -> None:
        state = self._state
        for k in range(self.rounds):
            grad = self.problem.gradient(self.rule.query(state), self._drawn[k])
            lr = self._rates[k] if self._rates is not None else self.rates(1)
            state = self.rule.update(state, grad, self.mix.in_round(k + 1), self._t[k], lr)  # type: ignore[arg-type]
        self._copy(state)

    def _fill(self, done: int) -> None:
        torch.add(self._numbers, done, out=self._t)
        self._drawn.copy_(self.gradients.drawn(done, done + self.rounds))
        if self._rates is not None:
            self._rates.copy_(self.rates.between(done, done + self.rounds))

    def _copy(self, source: State) -> None:
        mine = self._state
        # Late flows move from field to field: what is still in its old place must not be overwritten before it moves.
        still = {id(v) for v in mine.values()}
        moved = {name: v.clone() if id(v) in still else v for name, v in source.items()}
        for name, v in mine.items():
            v.copy_(moved[name])
