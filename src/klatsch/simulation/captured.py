"""Rounds on a GPU, captured as a CUDA graph: some tens of rounds are launched at once instead of a kernel at a time."""

from __future__ import annotations

import torch

from klatsch.rules import State
from klatsch.simulation.stack import TorchRounds, device_of

ROUNDS = 32  # per graph, or a little more to make whole periods of the topology
MOST_ROUNDS = 512  # in one graph: it takes memory and time to capture


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

    def __init__(self, plain: TorchRounds, state: State) -> None:
        if not plain.gradients.draws_ahead:
            raise ValueError("the problem has no draw(t) and gradient(x, drawn)")
        self.plain, self.problem = plain, plain.gradients.problem
        period = plain.mix.period
        if period > MOST_ROUNDS:
            raise ValueError(f"the topology repeats after {period:,} rounds; a graph holds {MOST_ROUNDS} at most")
        self.rounds = period * -(-ROUNDS // period)
        device = device_of(state)
        # A chunk of draws holds whole graphs, so that filling one is a copy and no computation.
        plain.gradients.chunk = self.rounds * -(-plain.gradients.chunk // self.rounds)
        self._numbers = torch.arange(1, self.rounds + 1, dtype=torch.float64, device=device)
        self._t = self._numbers.clone()
        self._drawn = plain.gradients.drawn(0, self.rounds).clone()
        self._state = {name: v.clone() for name, v in state.items()}
        self._rates = plain.rates.between(0, self.rounds) if plain.rates.change else None
        with torch.cuda.device(device):
            self._graph = self._capture()

    def advance(self, state: State, done: int, until: int) -> State:
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
            state = {name: v.clone() for name, v in self._state.items()}
        return self.plain.advance(state, aligned + replays * self.rounds, until)

    def _capture(self) -> torch.cuda.CUDAGraph:
        kept = {name: v.clone() for name, v in self._state.items()}
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
        state, rule = self._state, self.plain.rule
        for k in range(self.rounds):
            grad = self.problem.gradient(rule.query(state), self._drawn[k])
            lr = self._rates[k] if self._rates is not None else self.plain.rates(1)
            state = rule.update(state, grad, self.plain.mix.in_round(k + 1), self._t[k], lr)  # type: ignore[arg-type]
        self._copy(state)

    def _fill(self, done: int) -> None:
        torch.add(self._numbers, done, out=self._t)
        self._drawn.copy_(self.plain.gradients.drawn(done, done + self.rounds))
        if self._rates is not None:
            self._rates.copy_(self.plain.rates.between(done, done + self.rounds))

    def _copy(self, source: State) -> None:
        for name, mine in self._state.items():
            mine.copy_(source[name])
