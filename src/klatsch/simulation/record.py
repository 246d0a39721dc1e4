"""Where a run stands (`Snapshot`), what `simulate` returns (`Result`), at which rounds it measures, and what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from klatsch.problems import Problem
from klatsch.rules import Rule, State
from klatsch.rules.base import each
from klatsch.topology import Topology

Facts = dict[str, object]  # plain data that JSON can hold

MOST_SHOWN = 3  # columns that diverged, where a result is printed
NODES = "@nodes"  # ends the names of metrics of every node


class Network(NamedTuple):
    """One network of a run: its parts, and its rows of the state."""

    problem: Problem
    rule: Rule  # as it was given
    topology: Topology
    origin: Facts  # what tells it from others, whatever its length
    nodes: slice
    members: tuple[int, ...]  # by row: which node of the problem it is

    def part(self, state: State) -> State:
        return each(lambda v: v[self.nodes], state)


class Snapshot(NamedTuple):
    """Where a run stands; replaced as a whole, so that an interrupt always finds it consistent."""

    state: State
    diverged_at: Tensor  # (columns of all networks, 2): the first node and round that were not finite, or -1
    rounds: int = 0
    seconds: float = 0.0
    points: int = 0  # rows of metrics so far

    @property
    def diverged(self) -> Tensor:
        return self.diverged_at[:, 1] >= 0


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """What came out of a simulation.

    `metrics[name]` is (len(steps), C), float64: the squared distance to the optimum as a mean over nodes ("distance"),
    of the network mean ("distance_of_mean") and of the worst node ("worst_distance"), the loss gap at the network mean
    ("loss_gap") and at the worst node ("worst_loss_gap"), and the consensus distances of the query points, iterates
    and gradients ("Gamma", "Xi", "Psi"). After s rounds Gamma and Xi are those of the new points, Psi is that of the
    gradients of round s. A column that diverged is inf from there on, never NaN.

    Results are equal if all their numbers are, whatever engine found them and however long it took.
    """

    steps: list[int]  # rounds done when the metrics were taken
    metrics: dict[str, Tensor]
    output: Tensor  # (M, C, d): every node's final x
    diverged: Tensor  # (C,), bool
    diverged_at: Tensor  # (C, 2): the node and round where divergence began; -1 for finite columns
    seconds: float  # wall time of the rounds
    engine: str  # "fused", "cuda kernel", "cuda graph" or "torch"
    state: State = field(repr=False)  # the rule's state after the last round, to continue from
    rounds: int = 0  # rounds done
    origin: Facts = field(default_factory=dict, repr=False)  # what tells this run from others
    elapsed: list[float] = field(default_factory=list, repr=False)  # by step: when all nodes were there, on a clock
    per_node: dict[str, Tensor] = field(default_factory=dict, repr=False)  # by metric, (len(steps), M, C), if asked for
    headline: str = "distance"  # the metric by which columns are compared
    large_is_good: tuple[str, ...] = ()  # metrics
    members: tuple[int, ...] = field(default=(), repr=False)  # by row of output and state: which node it is

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Result):
            return NotImplemented
        these, those = self._tensors(), other._tensors()
        if (self.steps, self.elapsed, these.keys()) != (other.steps, other.elapsed, those.keys()):
            return False
        return all(np.array_equal(v.cpu(), those[name].cpu(), equal_nan=True) for name, v in these.items())

    def _tensors(self) -> dict[str, Tensor]:
        kinds = {"metrics": self.metrics, "per_node": self.per_node, "state": self.state}
        tensors = {f"{kind} {name}": v for kind, some in kinds.items() for name, v in some.items()}
        return tensors | {"output": self.output, "diverged_at": self.diverged_at}

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {float(v[-1, self.best(name)]):.3g}" for name, v in self.metrics.items() if len(v))
        where = [
            f"column {c} diverged first on node {self.diverged_at[c, 0]} in round {self.diverged_at[c, 1]:,}"
            for c in self.diverged.nonzero().flatten().tolist()
        ]
        where[MOST_SHOWN:] = [f"and {len(where) - MOST_SHOWN:,} more"] if len(where) > MOST_SHOWN else []
        lost = f" ({', '.join(where)})" if where else ""
        return f"<Result: {self.rounds:,} rounds, columns: {self.output.shape[1]}{lost}, best {last}>"

    def best(self, metric: str | None = None) -> int:
        """The column with the best final value of a metric, by default the headline; the first of equals.

        Best is the smallest, or the largest where that is good, as for accuracy.
        """
        metric = self.headline if metric is None else metric
        if metric not in self.metrics:
            raise ValueError(f"no metric {metric!r}; there are {', '.join(self.metrics)}")
        last = self.metrics[metric][-1] * (-1.0 if metric in self.large_is_good else 1.0)
        return int(last.masked_fill(self.diverged.to(last.device), torch.inf).argmin())


def record_points(record: int | Sequence[int], steps: int) -> list[int]:
    """The steps at which metrics are taken: log-spaced from 1 to `steps` for a number, else those given."""
    if isinstance(record, int | np.integer) and not isinstance(record, bool):
        if record < 1:
            raise ValueError(f"record = {record}; give a number of points from 1 up, or a list of steps")
        points = np.geomspace(1, steps, int(record)) if record > 1 else np.array([steps])
        return sorted({int(p) for p in points.round()} | {steps})
    try:
        points = np.asarray(record)
        whole = sorted({int(p) for p in points})
    except (TypeError, ValueError):
        raise ValueError(f"record = {record!r}; give a number of points, or a list of steps") from None
    if not whole or points.dtype.kind not in "iu" or whole[0] < 1 or whole[-1] > steps:
        raise ValueError(f"record = {record!r}; give whole steps from 1 to {steps}")
    return whole


def measured(problem: Problem, diverged: Tensor, per_node: bool, output: Tensor, *inner: Tensor) -> dict[str, Tensor]:
    """The metrics of one step, per column, in float64; the worst value where a number is not finite.

    `inner` are the query points, iterates and gradients of the nodes, whose distances from consensus are metrics too;
    nothing, where a problem is brief. With `per_node` there are also those of every node, (M, C), that the problem
    measures so, and its headline; their names end in NODES.
    """
    M, C, _ = output.shape
    metrics = dict(problem.metrics(output))
    metrics |= {name: _spread(v) for name, v in zip(("Gamma", "Xi", "Psi"), inner, strict=False)}
    row, by_node = dict[str, Tensor](), problem.by_node(output) if per_node else {}
    for name, value in metrics.items():
        v = torch.as_tensor(value).double().cpu()
        if v.shape not in ((), (1,), (C,), (M, C)):
            raise ValueError(
                f"the metric {name} of {type(problem).__name__} has shape {tuple(v.shape)}; give one number per "
                f"column, ({C},), or one per node and column, ({M}, {C})"
            )
        row[name] = v.mean(0) if v.shape == (M, C) else v.expand(C)
        by_node |= {name: v} if v.shape == (M, C) else {}
    if per_node:
        row |= {name + NODES: v.double().cpu() for name, v in by_node.items()}
    worst = {name: problem.worst_of(name.removesuffix(NODES)) for name in row}
    return {name: v.where(v.isfinite() & ~diverged, worst[name]) for name, v in row.items()}


def _spread(v: Tensor) -> Tensor:
    """1/M sum_i ||v_i - v_mean||², per column: the consensus distance (Section 4.3)."""
    return (v - v.mean(0)).square().sum(-1).mean(0)
