"""All nodes of one or several networks as one stack of tensors (M, C, d), advanced by torch operations.

`Stack` runs every rule on every problem; faster engines derive from it and are tested against it. Several networks lie
one after the other along the first axis, with a block-diagonal gossip matrix. On a GPU, `GraphStack` launches a few
dozen rounds at once; nodes that do not wait for each other meet in a `PairwiseStack` or a `StaleStack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.clock.rounds import Pairwise, Staleness, scheduled
from klatsch.problems import Problem
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import LearningRate, Tensors, each, rate
from klatsch.simulation.mixing import StackedMix
from klatsch.simulation.record import Network, Snapshot
from klatsch.units import size as told
from klatsch.wire.carried import bare
from klatsch.wire.rehearsal import Rehearsal

MOST_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 24}  # drawn at once: a cache's worth, or enough to hide the launches
ROUNDS, MOST_ROUNDS = 32, 512  # per CUDA graph, rounded up to whole periods: capturing takes memory and time
COPIES = 16  # of a state that has to fit a GPU for a graph; launches hardly count in rounds of a larger one
ASKED, LAST = "asked@", "last@"  # fields: where a node's gradient is being taken, and its last gradient


@dataclass
class Rates:
    """The learning rates of a run, round by round, and where it computes."""

    lrs: Sequence[LearningRate]  # one for all networks, or one for each
    nodes: Sequence[int]  # of each network
    steps: int  # the last round: engines look ahead, but never ask a schedule beyond it
    columns: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self.change = any(map(callable, self.lrs))
        self._fixed = None if self.change else self._placed(self._of(1))

    def __call__(self, t: int) -> cols.Number:
        """The learning rate of round t: a number, or a tensor (columns, 1), or (nodes, columns, 1) if they differ."""
        return self._placed(self._of(t)) if self._fixed is None else self._fixed

    def between(self, done: int, until: int) -> Tensor:
        """The learning rates of rounds done + 1 to until, as tensors."""
        rounds = (torch.as_tensor(self._of(t), dtype=self.dtype) for t in range(done + 1, until + 1))
        rates = [v if v.ndim == 3 else v.reshape(-1, 1).expand(self.columns, 1) for v in rounds]
        # One transfer for all rounds: on a GPU one for each would take longer than the rounds themselves.
        return torch.stack(rates).to(self.device)

    def _of(self, t: int) -> cols.Number:
        rates: list[cols.Number] = [rate(lr, min(t, self.steps)) for lr in self.lrs]
        for lr, one in zip(self.lrs, rates, strict=True):
            if callable(lr) and isinstance(one, Tensor) and len(one) != self.columns:
                raise ValueError(f"lr({t}) has {len(one)} columns; return one number, or {self.columns} at every round")
        return rates[0] if len(rates) == 1 else cols.spread(rates, self.nodes)

    def _placed(self, rates: cols.Number) -> cols.Number:
        return rates.to(self.device, self.dtype) if isinstance(rates, Tensor) else rates

    def placed(self, rule: Rule) -> Rule:
        """The rule with its per-column hyper-parameters on the device of the run."""
        return cols.mapped(rule, lambda v: v.to(self.device, self.dtype))

    def start(self, problem: Problem) -> Tensor:
        """Where every node of a problem starts, (C, d)."""
        return torch.as_tensor(problem.start()).to(self.device, self.dtype).expand(self.columns, problem.dim)


@dataclass(frozen=True)
class Prepared:
    """The parts of a run, checked, with the problems on its device."""

    problem: Problem  # of all networks together
    networks: list[Network]
    rule: Rule  # as it runs on them
    rates: Rates
    points: list[int]
    rehearsal: Rehearsal  # of the rule, without a channel
    meets: str = ""  # when nodes mix, if not all together in rounds


class Gradients:
    """`gradients(x, t)`: the stochastic gradients of round t at x, (M, C, d), drawn many rounds ahead if possible."""

    def __init__(self, problem: Problem, steps: int, device: str = "cpu") -> None:
        self.problem, self.draws_ahead = problem, problem.draws_ahead
        numbers = problem.nodes * (problem.drawn or problem.dim)  # per round
        self.chunk = max(1, min(1000, steps, MOST_NUMBERS[device] // numbers))  # rounds drawn at once
        self._chunks: dict[int, Callable[[], Tensor]] = {}

    def __call__(self, x: Tensor, t: int) -> Tensor:
        if self.draws_ahead:
            grad = self.problem.gradient(x, self.drawn(t - 1, t)[0])
        else:
            grad = self.problem.grad_with_autograd(x, t)
        if grad.shape != x.shape:
            raise ValueError(
                f"the problem returned gradients of shape {tuple(grad.shape)} for points of shape {tuple(x.shape)}; "
                "grad(x, t) must return one gradient for every point, (nodes, columns, parameters)"
            )
        return grad

    def drawn(self, done: int, until: int) -> Tensor:
        """The draws of rounds done + 1 to until, which lie in one chunk."""
        number = done // self.chunk
        self._draw(number)
        return self._chunks[number]()[done - number * self.chunk : until - number * self.chunk]

    def draw_next(self, done: int, executor: Executor) -> None:
        """Draw the chunk after that of round done + 1 in the background."""
        self._draw(done // self.chunk + 1, executor)

    def _draw(self, number: int, executor: Executor | None = None) -> None:
        """Draw a chunk, which is kept with the one before."""
        if number not in self._chunks:
            draw = partial(self.problem.draw, torch.arange(number * self.chunk + 1, (number + 1) * self.chunk + 1))
            drawn = cache(draw) if executor is None else executor.submit(draw).result
            self._chunks = {k: v for k, v in self._chunks.items() if k == number - 1} | {number: drawn}


class Stack:
    """The nodes of a simulation, advanced by plain torch operations."""

    name: ClassVar[str] = "torch"
    place: ClassVar[str] = ""  # the device where it is the fastest
    pays_from: ClassVar[int] = 0  # rounds

    def __init__(self, parts: Prepared) -> None:
        self.parts, self.problem, self.networks, self.rates = parts, parts.problem, parts.networks, parts.rates
        self.device, self.rule = self.rates.device, self.rates.placed(parts.rule)
        self.brief = all(own.problem.brief for own in self.networks)
        self.topologies = [own.topology for own in self.networks]
        self.gradients = Gradients(self.problem, self.rates.steps, self.device.type)
        starts = [self.rates.start(own.problem).expand(own.problem.nodes, -1, -1) for own in self.networks]
        self.start = self.rule.init(torch.cat(starts))

    @cached_property
    def mix(self) -> StackedMix:
        """The gossip of all rounds, which only some engines need."""
        return StackedMix(*self.topologies, dtype=self.rates.dtype, device=self.device)

    def flow(self, t: int) -> Flow:
        """The flow of round t."""
        return self.mix.in_round(t)

    def advance(self, state: State, done: int, until: int) -> State:
        """The state after `until` rounds, from the state after `done` rounds."""
        for t in range(done + 1, until + 1):
            state, _ = self.one(state, t)
        return state

    def one(self, state: State, t: int) -> tuple[State, Tensor]:
        """Round t: the next state and its gradients."""
        grad = self.gradients(self.rule.query(state), t)
        return self.rule.update(state, grad, self.flow(t), t, self.rates(t)), grad

    def beginnings(self, now: Snapshot, state: State, rounds: int) -> Tensor:
        """`now.diverged_at` with the columns that diverge before a later state, found by bisection of these rounds."""
        lost = self._lost(state) & ~now.diverged
        begun, early = now.diverged_at.clone(), (now.state, now.rounds)
        while lost.any():
            (low, done), (high, reached) = early, (state, rounds)
            while reached - done > 1:
                half = (done + reached) // 2
                middle = self.advance(low, done, half)
                if (lost & self._lost(middle)).any():
                    high, reached = middle, half
                else:
                    low, done = middle, half
            first, finite = lost & self._lost(high), self.finite_steps(low, reached, high)
            nodes = torch.cat([torch.tensor(own.members)[finite[own.nodes].argmin(0)] for own in self.networks])
            begun[first] = torch.stack([nodes, torch.full_like(nodes, reached)], -1)[first]
            lost, early = lost & ~first, (low, done)
        return begun

    def finite_steps(self, state: State, t: int, new: State) -> Tensor:
        """How many steps of round t, which leads from one state to a new one, are finite on each node, (M, C).

        The steps are the gradient, everything mixed, and the output. Numbers that are not finite spread to neighbours
        within a round; the node that began failed first in this order.
        """
        seen: list[Tensor] = []

        def watched(function: Callable[..., Tensors], *tensors: Tensor) -> Tensors:
            seen.extend(tensors)
            return function(*tensors)

        flow, grad = self.flow(t), self.gradients(self.rule.query(state), t)
        again = self.rule.update(state, grad, flow.inside(watched), t, self.rates(t))
        # Other engines round differently, and may be the only ones to overflow.
        steps = [grad, *seen, self.rule.output(again), self.rule.output(new)]
        finite = [torch.isfinite(v).all(-1).expand(steps[-1].shape[:-1]) for v in steps]
        return torch.stack(finite).int().cumprod(0).sum(0).cpu()

    def _lost(self, state: State) -> Tensor:
        """Which columns are not finite on some node, network by network."""
        finite = torch.isfinite(self.rule.output(state)).all(-1)
        return torch.cat([~finite[network.nodes].all(0) for network in self.networks]).cpu()


class GraphStack(Stack):
    """Rounds as replays of a CUDA graph; those that do not fill a graph use plain operations.

    A graph repeats the same launches on the same memory, so draws, round numbers and scheduled learning rates are
    copied into place before each replay. A rule that cannot be captured, such as one that asks for the round as a
    number, is a RuntimeError.
    """

    name, place = "cuda graph", "cuda"

    def __init__(self, parts: Prepared) -> None:
        super().__init__(parts)
        if self.device.type != "cuda":
            raise ValueError("it runs on a GPU only, with device='cuda'")
        if not self.gradients.draws_ahead:
            raise ValueError("the problem has no draw(t) and gradient(x, drawn)")
        parts.rehearsal.check(slices=False)
        state = sum(v.nbytes for v in self.start.values())
        if COPIES * state > torch.cuda.get_device_properties(self.device).total_memory:
            raise ValueError(f"a state of {told(state)} would not fit several times")
        period = self.mix.period
        if any(topology.loss for topology in self.topologies):
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
        self._places = self.mix.places(0, self.rounds)
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
            flow = self.mix.in_round(k + 1, None if self._places is None else self._places[k])
            state = self.rule.update(state, grad, flow, self._t[k], lr)  # type: ignore[arg-type]
        self._copy(state)

    def _fill(self, done: int) -> None:
        torch.add(self._numbers, done, out=self._t)
        self._drawn.copy_(self.gradients.drawn(done, done + self.rounds))
        if self._rates is not None:
            self._rates.copy_(self.rates.between(done, done + self.rounds))
        if (places := self.mix.places(done, done + self.rounds)) is not None and self._places is not None:
            self._places.copy_(places)

    def _copy(self, source: State) -> None:
        # Late flows move from field to field: what is still in its old place must not be overwritten before it moves.
        still = {id(v) for v in self._state.values()}
        moved = {name: v.clone() if id(v) in still else v for name, v in source.items()}
        for name, v in self._state.items():
            v.copy_(moved[name])


class AsynchronousStack(Stack):
    """Nodes that do not meet in rounds."""

    def finite_steps(self, state: State, t: int, new: State) -> Tensor:
        return torch.isfinite(self.rule.output(new)).all(-1).int().cpu()


class PairwiseStack(AsynchronousStack):
    """Nodes that average in pairs, and step when their gradients are there, from where these began."""

    def __init__(self, parts: Prepared) -> None:
        super().__init__(parts)
        schedule = scheduled(self.rule, self.topologies[0], self.problem.dim, parts.meets)
        assert isinstance(schedule, Pairwise)
        self.schedule, asked = schedule, self.rule.query(self.start)
        self.start = self.start | {ASKED: asked, LAST: torch.zeros_like(asked)}

    def one(self, state: State, t: int) -> tuple[State, Tensor]:
        state = each(Tensor.clone, state)
        for number, steps, pairs in self.schedule.round(t):
            if len(steps):
                self._step(state, torch.as_tensor(steps, device=self.device), t, number)
            a, b = torch.as_tensor(pairs, device=self.device).T
            for name in self.rule.met:
                v = state[name]
                v[a] = v[b] = (v[a] + v[b]) / 2
        return state, state[LAST]

    def _step(self, state: State, nodes: Tensor, t: int, number: int) -> None:
        """The steps of some nodes, in place, with what is drawn for a meeting."""
        own = {name: v[nodes] for name, v in state.items() if "@" not in name}
        asked = state[ASKED]
        if self.gradients.draws_ahead:
            grad = self.gradients(asked, number)[nodes]  # of all nodes: cheaper than to pick the data of some
        else:
            grad = self.problem.grad_with_autograd(asked[nodes], number, nodes.tolist())
        new = self.rule.update(own, grad, SILENT, t, self.rates(t))
        for name, v in (new | {ASKED: self.rule.query(new), LAST: grad}).items():
            state[name][nodes] = v


class StaleStack(AsynchronousStack):
    """Nodes whose neighbours' values, of what was sent in the last rounds, arrive as soon as they are there."""

    def __init__(self, parts: Prepared) -> None:
        super().__init__(parts)
        schedule = scheduled(bare(self.rule), self.topologies[0], self.problem.dim, parts.meets)
        assert isinstance(schedule, Staleness)
        self.schedule = schedule
        self._weights = torch.tensor(schedule.weights, dtype=self.rates.dtype, device=self.device)
        self._sources = torch.tensor(schedule.sources, device=self.device)

    def flow(self, t: int) -> Flow:
        arrived = {
            age: self._weights * torch.as_tensor(used).to(self._weights) for age, used in self.schedule.round(t).items()
        }

        def pull(v: Tensor, weights: Tensor) -> Tensor:
            return (weights.reshape(*weights.shape, *[1] * (v.ndim - 1)) * (v[self._sources] - v)).sum(0)

        def flow(*sent: Tensor) -> Tensors:  # (late + 1, M, ...) each, the newest first
            return tuple(sum((pull(v[age], w) for age, w in arrived.items()), torch.zeros_like(v[0])) for v in sent)

        return Flow(flow)


SILENT = Flow(lambda *tensors: tuple(torch.zeros_like(v) for v in tensors), lambda *tensors: tensors, silent=True)
