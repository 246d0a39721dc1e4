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
    def curve(self) -> NDArray[np.float64]:
        """The error at the learning rate chosen, (seeds, steps)."""
        return np.asarray(self.curves[:, :, self.best])

    @property
    def at_edge(self) -> bool:
        """Whether the learning rate chosen is the smallest or largest tried, so that a better one may lie beyond."""
        return len(self.lrs) > 1 and self.lr in (min(self.lrs), max(self.lrs))


def summarize(cases: Iterable[Case], store: Store, metric: str = "distance") -> list[Row]:
    """The rows of a study, in its order; learning rates that lack a seed, or everything, are passed over.

    Raises:
        ValueError: no run has that metric; with those there are.
    """
    cases = list(cases)
    outcomes = store.outcomes((case.key for case in cases), (metric, "Gamma"))
    if outcomes and not any(metric in outcome.metrics for outcome in outcomes.values()):
        some = next(iter(store.outcomes([next(iter(outcomes))]).values()))
        raise ValueError(f"no metric {metric!r}; there are {', '.join(some.metrics)}")
    groups: dict[tuple[str, str, int, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.graph_label, case.setting, case.nodes, case.label), []).append(case)
    rows = [_row(group, outcomes, metric) for group in groups.values()]
    return [row for row in rows if row is not None]


def _row(group: list[Case], outcomes: Mapping[str, Outcome], metric: str) -> Row | None:
    seeds = list(dict.fromkeys(case.seed for case in group))
    found = {(case.lr, case.seed): outcomes[case.key] for case in group if case.key in outcomes}
    lrs = [lr for lr in dict.fromkeys(case.lr for case in group) if all((lr, seed) in found for seed in seeds)]
    if not lrs:
        return None

    def stacked(name: str) -> NDArray[np.float64]:
        return np.stack([np.stack([found[lr, seed].metrics[name] for lr in lrs], axis=-1) for seed in seeds])

    first = group[0]
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
