"""Rules side by side: every rule on every topology gets its own learning rate, over the same problems and seeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch import algorithms, problems
from klatsch import topology as topologies
from klatsch.arguments import whole
from klatsch.engine import simulate
from klatsch.engine.threads import cores, quiet_threads
from klatsch.topology import Topology

PAPER_GRID = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1)  # Section 5.1

Told = Callable[[str, int], None]
Job = tuple[str, str, Topology]  # the rule, the name of the topology, the graph


@dataclass(frozen=True)
class Plan:
    """What to compare. Options of rules and problems are given by name; each takes those that it has."""

    rules: Sequence[str]
    topologies: Sequence[str]
    nodes: Sequence[int]
    steps: int
    lrs: Sequence[float] = PAPER_GRID
    seeds: int = 3
    problem: str = "least-squares"
    problem_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    topology_options: Mapping[str, Any] = field(default_factory=dict)
    lazy: bool = False
    record: int = 50
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    any_graph: bool = False

    @property
    def title(self) -> str:
        """What the errors are."""
        grid = f"best of {len(self.lrs)} learning rates" if len(self.lrs) > 1 else f"learning rate {self.lrs[0]:g}"
        return f"{self.problem}: squared distance to the optimum, mean over nodes, {self.steps:,} rounds, {grid}"

    def __post_init__(self) -> None:
        for name, value in (
            ("rules", self.rules),
            ("topologies", self.topologies),
            ("nodes", self.nodes),
            ("lrs", self.lrs),
        ):
            if not value or isinstance(value, str):
                raise ValueError(f"{name} = {value!r}; give a list with at least one entry")
        for name in ("rules", "topologies", "nodes", "lrs"):  # named twice, run once
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        whole(self.seeds, "seeds", 1)
        whole(self.steps, "steps", 1)
        for name in self.rules:  # a wrong name or value shows before the first run
            _rule(self, name)
        for name in self.topologies:
            topologies.options(name)
        for option in self.rule_options:
            if not any(option in algorithms.options(name) for name in self.rules):
                raise ValueError(f"none of {', '.join(self.rules)} has an option {option!r}; leave it out")
        for option in self.topology_options:
            if not any(option in topologies.options(name) for name in self.topologies):
                raise ValueError(f"none of {', '.join(self.topologies)} has an option {option!r}; leave it out")
        for option in self.problem_options:
            if option not in problems.options(self.problem):
                known = ", ".join(problems.options(self.problem))
                raise ValueError(f"{self.problem} has no option {option!r}; it takes {known}")


class LeftOut(NamedTuple):
    """What could not be run."""

    nodes: int
    reason: str


@dataclass(frozen=True)
class Row:
    """One rule on one topology, with the learning rate whose mean final error over the seeds is smallest."""

    rule: str
    topology: str
    nodes: int
    lrs: tuple[float, ...]
    steps: tuple[int, ...]
    curves: NDArray[np.float64]  # (seeds, steps, lrs)
    consensus: NDArray[np.float64]  # Gamma, (seeds, steps, lrs)
    seconds: float

    @property
    def final(self) -> NDArray[np.float64]:
        """The final errors, (seeds, lrs)."""
        return np.asarray(self.curves[:, -1])

    @property
    def best(self) -> int:
        """The number of the learning rate chosen."""
        return int(self.final.mean(axis=0).argmin())

    @property
    def lr(self) -> float:
        """The learning rate chosen."""
        return self.lrs[self.best]

    @property
    def error(self) -> float:
        """The mean final error over the seeds at the learning rate chosen; inf if every one diverged."""
        return float(self.final[:, self.best].mean())

    @property
    def low(self) -> float:
        """The smallest final error of a seed."""
        return float(self.final[:, self.best].min())

    @property
    def high(self) -> float:
        """The largest final error of a seed."""
        return float(self.final[:, self.best].max())

    @property
    def at_edge(self) -> bool:
        """Whether the learning rate chosen is the smallest or largest tried, so that a better one may lie beyond."""
        return len(self.lrs) > 1 and self.lr in (min(self.lrs), max(self.lrs))


def compare(plan: Plan, told: Told | None = None) -> tuple[list[Row], list[LeftOut]]:
    """Run everything in a plan, on all cores.

    Args:
        plan: what to compare.
        told: a function that is told the topology and the rounds just done.

    Returns:
        The rows, ordered by topology, nodes and rule, and what was left out with the reason.

    Raises:
        ValueError: nothing at all can be run; with the first reason.
    """
    jobs, left_out = runnable(plan)
    instances = {
        (nodes, seed): problems.make(plan.problem, nodes, seed=seed, **plan.problem_options)
        for nodes in {graph.size for _, _, graph in jobs}
        for seed in range(plan.seeds)
    }

    stopped = threading.Event()

    def tell(name: str, rounds: int) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        if told is not None:
            told(name, rounds)

    def run(job: Job) -> Row:
        rule, name, graph = job
        results = [
            simulate(
                instances[graph.size, seed],
                _rule(plan, rule),
                graph,
                plan.steps,
                record=plan.record,
                dtype=plan.dtype,
                device=plan.device,
                any_graph=plan.any_graph,
                progress=lambda rounds: tell(name, rounds),
            )
            for seed in range(plan.seeds)
        ]
        return Row(
            rule=rule,
            topology=name,
            nodes=graph.size,
            lrs=tuple(plan.lrs),
            steps=tuple(results[0].steps),
            curves=np.stack([result.metrics["distance"].numpy() for result in results]),
            consensus=np.stack([result.metrics["Gamma"].numpy() for result in results]),
            seconds=sum(result.seconds for result in results),
        )

    # Threads, since the time is spent in native code; the largest jobs first, so that none is left for the end.
    largest_first = sorted(range(len(jobs)), key=lambda k: -jobs[k][2].size)
    with quiet_threads(cores() if plan.device == "cpu" else 1) as pool:
        try:
            done = dict(zip(largest_first, pool.map(lambda k: run(jobs[k]), largest_first), strict=True))
        except BaseException:  # Ctrl-C, or a run that failed: the others must not be waited for
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done[k] for k in range(len(jobs))], left_out


def runnable(plan: Plan) -> tuple[list[Job], list[LeftOut]]:
    """What a plan can run, and what is left out with the reason.

    Raises:
        ValueError: nothing at all can be run; with the first reason.
    """
    jobs: list[Job] = []
    left_out: list[LeftOut] = []
    for name in plan.topologies:
        for nodes in plan.nodes:
            try:
                graph = _graph(plan, name, nodes)
            except ValueError as refusal:
                left_out.append(LeftOut(nodes, str(refusal)))
                continue
            for rule in plan.rules:
                try:
                    check = getattr(_rule(plan, rule), "check_graph", None)
                    if check is not None and not plan.any_graph:
                        check(graph)
                except ValueError as refusal:
                    left_out.append(LeftOut(nodes, str(refusal)))
                else:
                    jobs.append((rule, name, graph))
    if not jobs:
        raise ValueError(left_out[0].reason)
    return jobs, left_out


def rounds_by_topology(plan: Plan) -> dict[str, int]:
    """How many rounds a plan will run on each topology."""
    jobs, _ = runnable(plan)
    return {name: plan.steps * plan.seeds * sum(job[1] == name for job in jobs) for name in plan.topologies}


def _rule(plan: Plan, name: str) -> Any:
    own = {key: value for key, value in plan.rule_options.items() if key in algorithms.options(name)}
    return algorithms.make(name, lr=list(plan.lrs), **own)


def _graph(plan: Plan, name: str, nodes: int) -> Topology:
    own = {key: value for key, value in plan.topology_options.items() if key in topologies.options(name)}
    graph = topologies.make(name, nodes, **own)
    return topologies.lazy(graph) if plan.lazy else graph
