"""All nodes of one or several networks as one stack of tensors (M, C, d), advanced by plain torch operations.

They run every rule on every problem; faster engines derive from them and are tested against them. Several networks lie
one after the other along the first axis, with a block-diagonal gossip matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from klatsch.columns import Number
from klatsch.problems import Problem
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import Tensors
from klatsch.simulation.driver import Nodes, Snapshot
from klatsch.simulation.mixing import StackedMix
from klatsch.simulation.preparation import Prepared

MOST_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 24}  # drawn at once: a cache's worth, or enough to hide the launches


class Gradients:
    """`gradients(x, t)`: the stochastic gradients of round t at x, (M, C, d), drawn many rounds ahead if possible."""

    def __init__(self, problem: Problem, steps: int, device: str = "cpu") -> None:
        self.problem, self.draws_ahead = problem, problem.draws_ahead
        numbers = problem.nodes * (problem.drawn or problem.dim)  # per round
        self.chunk = max(1, min(1000, steps, MOST_NUMBERS[device] // numbers))  # rounds drawn at once
        self._chunks: dict[int, Future[Tensor]] = {}

    def __call__(self, x: Tensor, t: int) -> Tensor:
        grad = (
            self.problem.gradient(x, self.drawn(t - 1, t)[0])
            if self.draws_ahead
            else self.problem.grad_with_autograd(x, t)
        )
        if grad.shape != x.shape:
            raise ValueError(
                f"the problem returned gradients of shape {tuple(grad.shape)} for points of shape {tuple(x.shape)}; "
                "grad(x, t) must return one gradient for every point, (nodes, columns, parameters)"
            )
        return grad

    def drawn(self, done: int, until: int) -> Tensor:
        """The draws of rounds done + 1 to until, which lie in one chunk."""
        number = done // self.chunk
        if number not in self._chunks:
            chunk: Future[Tensor] = Future()
            chunk.set_result(self._draw(number))
            self._keep(number, chunk)
        return self._chunks[number].result()[done - number * self.chunk : until - number * self.chunk]

    def draw_next(self, done: int, executor: Executor) -> None:
        """Draw the chunk after that of round done + 1 in the background."""
        number = done // self.chunk + 1
        if number not in self._chunks:
            self._keep(number, executor.submit(self._draw, number))

    def _keep(self, number: int, chunk: Future[Tensor]) -> None:
        """Keep this chunk and the previous one."""
        self._chunks = {k: v for k, v in self._chunks.items() if k == number - 1} | {number: chunk}

    def _draw(self, number: int) -> Tensor:
        first = number * self.chunk + 1
        return self.problem.draw(torch.arange(first, first + self.chunk))


class Stack(Nodes):
    """The nodes of a simulation, advanced by plain torch operations; `problem` covers all of them."""

    name = "torch"
    place: ClassVar[str] = ""  # the device where it is the fastest

    def __init__(self, problem: Problem, parts: Prepared) -> None:
        self.problem, self.networks, self.rates, self.device = problem, parts.networks, parts.rates, parts.rates.device
        self.parts, self.rule = parts, parts.rates.placed(parts.rule)
        self.brief = all(own.problem.brief for own in parts.networks)
        self.gradients = Gradients(problem, self.rates.steps, self.device.type)
        starts = [self.rates.start(own).expand(own.nodes, -1, -1) for own, _ in self.networks]
        self.start = self.rule.init(torch.cat(starts))

    @cached_property
    def mix(self) -> StackedMix:
        return StackedMix(*self.parts.topologies, dtype=self.rates.dtype, device=self.device)

    def advance(self, state: State, done: int, until: int) -> State:
        for t in range(done + 1, until + 1):
            state, _ = self.one(state, t)
        return state

    def one(self, state: State, t: int, rule: Rule | None = None) -> tuple[State, Tensor]:
        rule = rule or self.rule
        grad = self.gradients(rule.query(state), t)
        return rule.update(state, grad, self.mix.in_round(t), t, self.rates(t)), grad

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
            nodes = torch.cat([finite[network.nodes].argmin(0) for network in self.networks])
            begun[first] = torch.stack([nodes, torch.full_like(nodes, reached)], -1)[first]
            lost, early = lost & ~first, (low, done)
        return begun

    def finite_steps(self, state: State, t: int, new: State) -> Tensor:
        """How far each node and column came in round t, which leads from one state to a new one, (M, C)."""
        watched = Watched(self.rule)
        self.one(state, t, watched)
        # Other engines round differently, and may be the only ones to overflow.
        return watched.finite_steps(self.rule.output(new))

    def _lost(self, state: State) -> Tensor:
        """Which columns are not finite on some node, network by network."""
        finite = torch.isfinite(self.rule.output(state)).all(-1)
        return torch.cat([~finite[network.nodes].all(0) for network in self.networks]).cpu()


class Watched(Rule):
    """A rule that remembers what its last round computed, in order: the gradient, everything mixed, the output.

    Numbers that are not finite spread to neighbours within a round; the node that began failed first in this order.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self.lr = rule, rule.lr
        self._seen: list[Tensor] = []

    def query(self, s: State) -> Tensor:
        return self.rule.query(s)

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        seen = [grad]

        def watched(function: Callable[..., Tensors], *tensors: Tensor) -> Tensors:
            seen.extend(tensors)
            return function(*tensors)

        new = self.rule.update(s, grad, Flow(partial(watched, flow), partial(watched, flow.mix), flow.silent), t, lr)
        self._seen = [*seen, self.rule.output(new)]
        return new

    def finite_steps(self, *outputs: Tensor) -> Tensor:
        """How many steps of the round, and then of `outputs`, were finite before one was not, per node and column."""
        steps = [*self._seen, *outputs]
        finite = [torch.isfinite(v).all(-1).expand(steps[-1].shape[:-1]) for v in steps]
        return torch.stack(finite).int().cumprod(0).sum(0).cpu()
