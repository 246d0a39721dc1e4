"""What must fit together before the first round, and what tells one run from another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.algorithms import Algorithm
from klatsch.algorithms.core import hyper_rate
from klatsch.engine.record import Result
from klatsch.engine.run import Run, Snapshot
from klatsch.engine.sealed import digest
from klatsch.problems import Problem
from klatsch.topology import Topology


def check_parts(problem: Problem, algorithm: Algorithm, topology: Topology, any_graph: bool) -> int:
    """The number of columns C of a run, after a check that its parts fit.

    Raises:
        ValueError: they do not; with the remedy.
    """
    if not isinstance(topology, Topology):
        raise ValueError(f"topology is a {type(topology).__name__}; give a Topology, such as topology.make('ring', 16)")
    if not hasattr(algorithm, "update"):
        kind = type(algorithm).__name__
        raise ValueError(f"algorithm is a {kind}; give a rule, such as algorithms.make('dat', lr=0.01)")
    missing = [name for name in ("nodes", "dim", "start", "grad", "metrics") if not hasattr(problem, name)]
    if missing:
        raise ValueError(
            f"problem is a {type(problem).__name__} without {', '.join(missing)}; give a problem, such as "
            "problems.LeastSquares(16), or see problems.Problem for what one of your own needs"
        )
    if topology.size != problem.nodes:
        raise ValueError(
            f"{topology.name} has {topology.size} nodes but the problem has {problem.nodes}; give both the same number"
        )
    if not any_graph and hasattr(algorithm, "check_graph"):
        algorithm.check_graph(topology)
    lr = getattr(algorithm, "lr", None)
    C, own = cols.count(algorithm, hyper_rate("lr(1)", lr(1)) if callable(lr) else None), getattr(problem, "columns", 1)
    if own != C and 1 not in (C, own):
        raise ValueError(f"the rule has {C} columns but the problem has {own}; give both the same number, or one")
    return max(C, own)


def check_steps(steps: Any) -> int:
    """A number of rounds.

    Raises:
        ValueError: it is none.
    """
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 1:
        raise ValueError(f"steps = {steps!r}; give a whole number of rounds from 1 up")
    return int(steps)


def check_place(dtype: torch.dtype, device: str | torch.device) -> torch.device:
    """Where tensors go.

    Raises:
        ValueError: there is no such dtype or device here.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype = {dtype}; choose torch.float32 or torch.float64")
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):  # before torch tells all that its backends cannot do
            raise RuntimeError(f"{where.type} is not supported")
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        remedy = "choose cpu, or cuda where there is one"
        raise ValueError(f"device = {device!r} cannot be used ({reason}); {remedy}") from None
    return where


def within(algorithm: Algorithm, steps: int) -> Algorithm:
    """The rule with a schedule that is never asked beyond the last round, though engines look ahead."""
    if not callable(lr := getattr(algorithm, "lr", None)):
        return algorithm
    return cols.replaced(algorithm, lr=lambda t: lr(min(t, steps)))


def identity(problem: Any, algorithm: Algorithm, topology: Topology, C: int, dtype: torch.dtype) -> dict[str, Any]:
    """What tells one run from another, whatever its length, as plain data."""
    return {
        "problem": f"{problem!r} {problem.fingerprint()}" if hasattr(problem, "fingerprint") else None,
        **_flat("algorithm", cols.described(algorithm)),
        "topology": f"{topology!r} {topology.fingerprint}",
        "columns": C,
        "dtype": str(dtype),
    }


def _flat(name: str, value: object) -> dict[str, Any]:
    """Nested facts as "algorithm lr", "algorithm averaging p"..., so that an error can name the one that differs."""
    if not isinstance(value, dict):
        return {name: value}
    parts = [_flat(f"{name} {key}", inner) for key, inner in value.items()]
    return {key: inner for part in parts for key, inner in part.items()}


def length(algorithm: Algorithm, steps: int, points: list[int], start: Run, device: str, engine: str) -> dict[str, Any]:
    """What else determines a result to the last bit: its length, schedule and points, where it begins, what runs it."""
    lr = getattr(algorithm, "lr", None)
    rounds = sorted({1, *points, steps})
    state = {name: v.cpu() for name, v in start.now.state._asdict().items() if v is not None}
    return {
        "steps": steps,
        "record": points,
        "learning rates": [cols.described(torch.as_tensor(lr(t))) for t in rounds] if callable(lr) else None,
        "begun": digest(state, {"rounds": start.now.rounds}),
        "device": device,
        "engine": engine,
    }


def continued(after: Result, run: dict[str, Any], state: Any, steps: int) -> Run:
    """The run that begins where a result ends.

    Raises:
        ValueError: the result is of another run, or as long already.
    """
    if not isinstance(after, Result):
        raise ValueError(f"after is a {type(after).__name__}; give a result of simulate")
    for name, value in run.items():
        if after.origin.get(name) != value:
            raise ValueError(f"after is a result of another {name}; give one of the same run")
    if steps <= after.rounds:
        raise ValueError(f"steps = {steps}, but {after.rounds} rounds are done; steps counts all rounds, give more")
    fields: list[Tensor | None] = [
        None if old is None else old.to(new) for old, new in zip(after.state, state, strict=True)
    ]
    rows = [{name: values[k] for name, values in after.metrics.items()} for k in range(len(after.steps))]
    lost = after.diverged.clone(), after.diverged_at.clone()
    now = Snapshot(type(state)(*fields), *lost, after.rounds, after.seconds, len(rows))
    return Run(now, rows)
