"""What a study found: for every rule, graph, size and setting the learning rate that does best over the seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from klatsch.study.cases import Case
from klatsch.study.store import Outcome, Store


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
    setting: Mapping[str, Any] = field(default_factory=dict)  # the problem's options

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
    def setting_text(self) -> str:
        """The problem's options in words."""
        return ", ".join(f"{name} {value:g}" for name, value in self.setting.items())

    @property
    def curve(self) -> NDArray[np.float64]:
        """The error at the learning rate chosen, (seeds, steps)."""
        return np.asarray(self.curves[:, :, self.best])

    @property
    def at_edge(self) -> bool:
        """Whether the learning rate chosen is the smallest or largest tried, so that a better one may lie beyond."""
        return len(self.lrs) > 1 and self.lr in (min(self.lrs), max(self.lrs))


def summarize(runs: Iterable[tuple[str, Case]], store: Store, metric: str = "distance") -> list[Row]:
    """The rows of runs, given with their keys and in their order, as far as the store holds them.

    A learning rate counts where it has all the seeds that the most complete one has.

    Raises:
        ValueError: no run has that metric; with those there are.
    """
    runs = list(runs)
    outcomes = store.outcomes((key for key, _ in runs), (metric, "Gamma"))
    if outcomes and not any(metric in outcome.metrics for outcome in outcomes.values()):
        some = next(iter(store.outcomes([next(iter(outcomes))]).values()))
        raise ValueError(f"no metric {metric!r}; there are {', '.join(some.metrics)}")
    groups: dict[tuple[str, str, int, str], list[tuple[str, Case]]] = {}
    for key, case in runs:
        if key in outcomes:
            groups.setdefault((case.graph_label, case.setting, case.nodes, case.label), []).append((key, case))
    return [_row(group, outcomes, metric) for group in groups.values()]


def _row(group: list[tuple[str, Case]], outcomes: Mapping[str, Outcome], metric: str) -> Row:
    found = {(case.lr, case.seed): outcomes[key] for key, case in group}
    seeds_of: dict[float, list[int]] = {}
    for lr, seed in found:
        seeds_of.setdefault(lr, []).append(seed)
    seeds = max(seeds_of.values(), key=len)
    lrs = [lr for lr, mine in seeds_of.items() if set(seeds) <= set(mine)]

    def stacked(name: str) -> NDArray[np.float64]:
        return np.stack([np.stack([found[lr, seed].metrics[name] for lr in lrs], axis=-1) for seed in seeds])

    first = group[0][1]
    return Row(
        rule=first.label,
        topology=first.graph_label,
        nodes=first.nodes,
        lrs=tuple(lrs),
        steps=tuple(int(step) for step in found[lrs[0], seeds[0]].steps),
        curves=stacked(metric),
        consensus=stacked("Gamma"),
        seconds=sum(outcome.seconds for outcome in found.values()),
        setting=first.problem_options,
    )
