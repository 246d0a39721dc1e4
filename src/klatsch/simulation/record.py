"""What `simulate` returns (`Result`), at which rounds it measures, and what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from klatsch.problems import Problem
from klatsch.rules import State

Facts = dict[str, object]  # plain data that JSON can hold

MOST_SHOWN = 3  # columns that diverged, where a result is printed


@dataclass(frozen=True, repr=False)
class Result:
    """What came out of a simulation.

    `metrics[name]` is (len(steps), C), float64: the squared distance to the optimum as a mean over nodes ("distance"),
    of the network mean ("distance_of_mean") and of the worst node ("worst_distance"), the loss gap at the network mean
    ("loss_gap") and at the worst node ("worst_loss_gap"), and the consensus distances of the query points, iterates
    and gradients ("Gamma", "Xi", "Psi"). After s rounds Gamma and Xi are those of the new points, Psi is that of the
    gradients of round s. A column that diverged is inf from there on, never NaN.
    """

    steps: list[int]  # rounds done when the metrics were taken
    metrics: dict[str, Tensor]
    output: Tensor  # (M, C, d): every node's final x
    diverged: Tensor  # (C,), bool
    diverged_at: Tensor  # (C, 2): the node and round where divergence began; -1 for finite columns
    seconds: float  # wall time of the rounds
    engine: str  # "fused", "cuda graph" or "torch"
    state: State = field(repr=False)  # the rule's state after the last round, to continue from
    rounds: int = 0  # rounds done
    origin: Facts = field(default_factory=dict, repr=False)  # what tells this run from others
    elapsed: list[float] = field(default_factory=list, repr=False)  # by step: when all nodes were there, on a clock

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {float(v[-1].min()):.3g}" for name, v in self.metrics.items() if len(v))
        where = [
            f"column {c} diverged first on node {self.diverged_at[c, 0]} in round {self.diverged_at[c, 1]:,}"
            for c in self.diverged.nonzero().flatten().tolist()
        ]
        where[MOST_SHOWN:] = [f"and {len(where) - MOST_SHOWN:,} more"] if len(where) > MOST_SHOWN else []
        lost = f" ({', '.join(where)})" if where else ""
        return f"<Result: {self.rounds:,} rounds, columns: {self.output.shape[1]}{lost}, smallest {last}>"

    def best(self, metric: str = "distance") -> int:
        """The column with the smallest final value of a metric; the first of equals."""
        if metric not in self.metrics:
            raise ValueError(f"no metric {metric!r}; there are {', '.join(self.metrics)}")
        return int(self.metrics[metric][-1].argmin())


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


def measure(problem: Problem, output: Tensor, *inner: Tensor) -> dict[str, Tensor]:
    """The metrics of one step, per column, in float64; inf where a number is not finite.

    `inner` are the query points, iterates and gradients of the nodes, whose distances from consensus are metrics too;
    nothing, where a problem is brief.
    """
    found = dict(problem.metrics(output))
    found |= {name: _spread(v) for name, v in zip(("Gamma", "Xi", "Psi"), inner, strict=False)}
    values = {name: torch.as_tensor(value).double().cpu() for name, value in found.items()}
    return {name: v.where(v.isfinite(), torch.inf) for name, v in values.items()}


def _spread(v: Tensor) -> Tensor:
    """1/M sum_i ||v_i - v_mean||², per column: the consensus distance (Section 4.3)."""
    return (v - v.mean(0)).square().sum(-1).mean(0)
