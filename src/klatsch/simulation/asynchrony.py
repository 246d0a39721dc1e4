"""Nodes that do not wait for each other: they meet as the schedule of a clock says."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from klatsch.clock.meetings import Pairwise, Staleness
from klatsch.clock.rounds import scheduled
from klatsch.problems import Problem
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import Tensors, each
from klatsch.simulation.mixing import StackedMix
from klatsch.simulation.preparation import Prepared
from klatsch.simulation.stack import Stack
from klatsch.wire.carried import bare

ASKED, FOUND = "asked@", "found@"  # fields: where a node's gradient is being taken, and its last gradient


class AsynchronousStack(Stack):
    """Nodes that do not meet in rounds."""

    def finite_steps(self, state: State, t: int, new: State) -> Tensor:
        return torch.isfinite(self.rule.output(new)).all(-1).int().cpu()


class PairwiseStack(AsynchronousStack):
    """Nodes that average in pairs, and step when their gradients are there, from where these began."""

    def __init__(self, problem: Problem, parts: Prepared) -> None:
        super().__init__(problem, parts)
        schedule, asked = (
            scheduled(self.rule, parts.topologies[0], problem.dim, parts.meets),
            self.rule.query(self.start),
        )
        assert isinstance(schedule, Pairwise)
        self.schedule = schedule
        self.start = self.start | {ASKED: asked, FOUND: torch.zeros_like(asked)}

    def one(self, state: State, t: int, rule: Rule | None = None) -> tuple[State, Tensor]:
        rule, state = rule or self.rule, each(Tensor.clone, state)
        for number, steps, pairs in self.schedule.round(t):
            if len(steps):
                self._step(rule, state, torch.as_tensor(steps, device=self.device), t, number)
            a, b = torch.as_tensor(pairs, device=self.device).T
            for name in rule.met:
                v = state[name]
                v[a] = v[b] = (v[a] + v[b]) / 2
        return state, state[FOUND]

    def _step(self, rule: Rule, state: State, nodes: Tensor, t: int, number: int) -> None:
        """The steps of some nodes, in place, with what is drawn for a meeting."""
        own = {name: v[nodes] for name, v in state.items() if "@" not in name}
        asked = state[ASKED]
        if self.gradients.draws_ahead:
            grad = self.gradients(asked, number)[nodes]  # of all nodes: cheaper than to pick the data of some
        else:
            grad = self.problem.grad_with_autograd(asked[nodes], number, nodes.tolist())
        new = rule.update(own, grad, SILENT, t, self.rates(t))
        for name, v in (new | {ASKED: rule.query(new), FOUND: grad}).items():
            state[name][nodes] = v


class StaleStack(AsynchronousStack):
    """Nodes whose neighbours' values arrive as soon as they are there."""

    @cached_property
    def mix(self) -> StackedMix:
        return StaleMix(self.rule, self.parts, self.problem.dim)


class StaleMix(StackedMix):
    """The flows that arrive in a round, from what was sent in the last ones, (late + 1, M, ...)."""

    def __init__(self, rule: Rule, parts: Prepared, params: int) -> None:
        schedule = scheduled(bare(rule), parts.topologies[0], params, parts.meets)
        assert isinstance(schedule, Staleness)
        self.schedule, where = schedule, parts.rates.device
        self._weights = torch.tensor(schedule.weights, dtype=parts.rates.dtype, device=where)
        self._sources = torch.tensor(schedule.sources, device=where)

    def in_round(self, t: int) -> Flow:
        """The flow of round t."""
        used = {age: torch.as_tensor(here).to(self._weights) for age, here in self.schedule.round(t).items()}
        return Flow(partial(self._flow, used))

    def _flow(self, used: dict[int, Tensor], *sent: Tensor) -> Tensors:
        return tuple(
            sum((self._pull(v[age], here) for age, here in used.items()), torch.zeros_like(v[0])) for v in sent
        )

    def _pull(self, v: Tensor, here: Tensor) -> Tensor:
        """What neighbours pull by, of those whose messages are used, summed up."""
        weights = (self._weights * here).reshape(*here.shape, *[1] * (v.ndim - 1))
        return (weights * (v[self._sources] - v)).sum(0)


SILENT = Flow(lambda *tensors: tuple(torch.zeros_like(v) for v in tensors), lambda *tensors: tensors, silent=True)
