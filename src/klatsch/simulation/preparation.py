"""What must fit together before the first round, and what tells one run from another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import klatsch.columns as cols
from klatsch.channels.rehearsal import Rehearsal
from klatsch.problems import Problem
from klatsch.rules import Rule, State
from klatsch.rules.base import checked, rate
from klatsch.sealed import digest
from klatsch.simulation.driver import Run, Snapshot
from klatsch.simulation.record import Result
from klatsch.topology import Topology


def check_parts(problem: Problem, rule: Rule, topology: Topology, any_graph: bool) -> tuple[Rule, int]:
    """The rule as it runs on the graph, and the number of columns C of a run, after a check that its parts fit.

    Raises:
        ValueError: they do not; with the remedy.
    """
    if not isinstance(topology, Topology):
        raise ValueError(f"topology is a {type(topology).__name__}; give a Topology, such as topology.make('ring', 16)")
    rule = checked(rule)
    if topology.size != problem.nodes:
        raise ValueError(
            f"{topology.name} has {topology.size} nodes but the problem has {problem.nodes}; give both the same number"
        )
    if not any_graph:
        rule.check_graph(topology)
    first = rate(rule.lr, 1)
    C, own = cols.count(rule, first), problem.columns
    if own != C and 1 not in (C, own):
        raise ValueError(f"the rule has {C} columns but the problem has {own}; give both the same number, or one")
    Rehearsal(rule, torch.zeros(1, C, problem.dim, dtype=torch.float64))
    return rule.on(topology), max(C, own)


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


def identity(problem: Problem, rule: Rule, topology: Topology, C: int, dtype: torch.dtype) -> dict[str, Any]:
    """What tells one run from another, whatever its length, as plain data."""
    return {
        "problem": None if (told := problem.fingerprint()) is None else f"{problem!r} {told}",
        **cols.flattened("rule", rule),
        "topology": f"{topology!r} {topology.fingerprint}",
        "columns": C,
        "dtype": str(dtype),
    }


def length(rule: Rule, steps: int, points: list[int], start: Run, device: str, engine: str) -> dict[str, Any]:
    """What else determines a result to the last bit: its length, schedule and points, where it begins, what runs it."""
    lr = rule.lr
    rounds = sorted({1, *points, steps})
    state = {name: v.cpu() for name, v in start.now.state.items()}
    return {
        "steps": steps,
        "record": points,
        "learning rates": [cols.described(torch.as_tensor(lr(t))) for t in rounds] if callable(lr) else None,
        "begun": digest(state, {"rounds": start.now.rounds}),
        "device": device,
        "engine": engine,
    }


def continued(after: Result, run: dict[str, Any], state: State, steps: int) -> Run:
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
    fields = {name: after.state[name].to(new) for name, new in state.items()}
    rows = [{name: values[k] for name, values in after.metrics.items()} for k in range(len(after.steps))]
    lost = after.diverged.clone(), after.diverged_at.clone()
    now = Snapshot(fields, *lost, after.rounds, after.seconds, len(rows))
    return Run(now, rows)
