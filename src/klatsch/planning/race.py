"""A race of ways to train: the user's own problem, simulated with more and more machines beside a clock.

All ways run a number of rounds at all learning rates. Those that have not reached the target run on, four times as
long, unless they are hopeless: their clock has passed the time of the best one, or their errors are heading for a time
far behind it. What wins runs again with other seeds, at finer learning rates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch import rules, topology
from klatsch.arguments import number, whole
from klatsch.clock import Clock
from klatsch.problems import Problem
from klatsch.rules import Rule
from klatsch.simulation import Result, simulate
from klatsch.topology import Topology

Array = NDArray[np.float64]
Make = Callable[[int, int], Problem]  # a problem of some nodes with a seed
ALL_REDUCE = "complete"
FIRST, LONGER = 64, 4  # rounds that all ways run, and by what factor the next stretch is longer
SEEDS = 3
LEARNING_RATES = [10.0 ** (k / 2) for k in range(-12, 3)]
POINTS = 1.15  # at which rounds errors are taken: each so many times the one before
AROUND = 1  # points on each side with which an error is averaged: a dip by chance is not there to stay
AGAIN = 8  # times as many rounds as the first seed needed, for the others
FINER = (10**-0.25, 1.0, 10**0.25)  # times the chosen learning rate, for the winners
HOPELESS = 4.0  # times the best way's time
HEADING = 30.0  # how many times as many rounds a fit may add
ENOUGH = 1.05  # fewer machines are taken where they are at most this much slower
LEAST_SHARE = 0.1  # of a machine's worth that each one must bring
LATE = 0.7  # of the rounds of one machine; what it has after these is the target, if none is given
RACING = 0.7  # of the time; the rest is for the winners
PATIENCE, MOST = 4_000, 100_000  # rounds after which something must be heading for the target, and of one machine
STEADY = (64, 192)  # between these rounds of the clock a round takes as long as any


class Way(NamedTuple):
    """A way to train."""

    machines: int
    rule: str = "dsgd"
    graph: str = ALL_REDUCE  # with "/8" for gossip in every 8th round
    wire: str = "float32"

    @property
    def reduces(self) -> bool:
        """Whether it is an all-reduce."""
        return self.graph.partition("/")[0] == ALL_REDUCE

    def made(self, lr: Sequence[float]) -> tuple[Rule, Topology]:
        """The rule and the graph."""
        name, _, every = self.graph.partition("/")
        graph = topology.make(name, self.machines, every=int(every or 1), wire=self.wire)
        return RULES[self.rule](list(lr)), graph


RULES: dict[str, Callable[[list[float]], Rule]] = {
    "dsgd": rules.dsgd,
    "dat": partial(rules.dat, averaging="constant", beta=0.9),
    "dat-d2": partial(rules.dat_d2, averaging="constant", beta=0.9),
}
# By rule: on which graphs. D2's correction needs one matrix for all rounds.
GRAPHS = {
    "dsgd": ["ring", "one_peer_exponential", ALL_REDUCE],
    "dat": ["ring", "one_peer_exponential"],
    "dat-d2": ["ring"],
}
BETWEEN = (1, 8)  # H, rounds between two with gossip


@dataclass(frozen=True)
class Task:
    """What to reach, and with what.

    Args:
        make: gives the problem for some nodes and a seed.
        clock: how long gradients and messages take.
        target: the value of the problem's metric to reach; by default what one machine has after 1,024 rounds.
        machines: the most to consider; not more than there are samples.
        params: parameters of the model, if the problem stands for a larger one.
        seeds: how many the winners run with; 1 if the problem has no seed.
        seconds: of this machine's time, after which nothing new is begun.
    """

    make: Make
    clock: Clock
    target: float | None = None
    machines: int = 64
    params: int | None = None
    seeds: int = SEEDS
    seconds: float = 45.0

    def __post_init__(self) -> None:
        whole(self.machines, "machines", 1)
        whole(self.seeds, "seeds", 1)
        number("seconds", self.seconds, lambda v: v > 0, "a positive number of seconds")
        if self.target is not None:
            number("target", self.target, math.isfinite, "a number")


@dataclass
class Runner:
    """A way on its way: its errors so far, at all learning rates."""

    way: Way
    problem: Problem
    clock: Clock
    params: int
    lr: Sequence[float]
    result: Result | None = None
    steps: list[int] = field(default_factory=list)
    errors: Array = field(default_factory=lambda: np.empty((0, 0)))  # (len(steps), C)

    @cached_property
    def each(self) -> float:
        """Seconds of a round, by the clock."""
        rule, graph = self.way.made(self.lr[:1])
        first, last = self.clock.seconds(rule, graph, self.params, STEADY)
        return (last - first) / (STEADY[1] - STEADY[0])

    def run(self, rounds: int) -> None:
        """Go on to some rounds."""
        begin = self.steps[-1] if self.steps else 0
        points = np.geomspace(begin + 1, rounds, 1 + max(1, round(math.log(rounds / (begin + 1)) / math.log(POINTS))))
        record = sorted({int(p) for p in points.round()} | {rounds})
        rule, graph = self.way.made(self.lr)
        self.result = simulate(
            self.problem, rule, graph, rounds, record, after=self.result, progress=False, any_graph=self.way.reduces
        )
        now = gap(self.problem, self.result)
        self.errors = np.concatenate([self.errors.reshape(-1, now.shape[1]), now[-len(record) :]])
        self.steps += record

    def reached(self, target: float) -> tuple[float, int]:
        """The rounds to the target at the best learning rate, and its column; inf where none is there yet."""
        return min((crossing(self.steps, errors, target), c) for c, errors in enumerate(smoothed(self.errors).T))

    def heading(self, target: float) -> float:
        """The rounds to the target as errors are heading."""
        ahead = [fitted(self.steps, errors, target) for errors in smoothed(self.errors).T]
        return min(self.reached(target)[0], *ahead)


def gap(problem: Problem, result: Result) -> Array:
    """The problem's metric as an error, which falls: 1 - accuracy."""
    values = result.metrics[problem.headline.metric].numpy().astype(float)
    return np.asarray(1.0 - values if problem.headline.largest else values)


def smoothed(errors: Array) -> Array:
    """Errors, each the geometric mean of those around it, (len(steps), C)."""
    with np.errstate(divide="ignore"):
        logs = np.log(errors)
    padded = np.pad(logs, ((AROUND, AROUND), (0, 0)), mode="edge")
    return np.asarray(np.exp(np.mean([padded[k : k + len(logs)] for k in range(2 * AROUND + 1)], axis=0)))


def crossing(steps: Sequence[int], errors: Array, target: float) -> float:
    """The round at which errors fall to the target for the first time, between two that are known."""
    below = np.flatnonzero(errors <= target)
    if not len(below):
        return math.inf
    k = int(below[0])
    if k == 0 or not errors[k] > 0:
        return float(steps[k])
    (a, b), (high, low) = (steps[k - 1], steps[k]), (errors[k - 1], errors[k])
    share = math.log(high / target) / math.log(high / low) if math.isfinite(high) and target > 0 else 1.0
    return float(a * (b / a) ** share)


def fitted(steps: Sequence[int], errors: Array, target: float) -> float:
    """The round at which errors that go on to fall as they do, by a power of the rounds, reach the target."""
    late = [k for k, step in enumerate(steps) if step >= steps[-1] / 4]
    x, y = np.log([steps[k] for k in late]), errors[late]
    if len(late) < 4 or not (np.isfinite(y).all() and (y > 0).all()) or target <= 0:
        return math.inf
    slope, height = np.polyfit(x, np.log(y), 1)
    if slope > -0.02:
        return math.inf
    rounds = math.exp(min((math.log(target) - height) / slope, 700.0))
    return rounds if rounds <= HEADING * steps[-1] else math.inf


@dataclass(frozen=True)
class Trial:
    """A way, and what it takes to the target."""

    way: Way
    lr: float
    rounds: float  # inf where the target was not reached
    each: float  # seconds of a round
    error: float  # the smallest seen
    low: float = math.nan  # rounds of the fastest seed; `rounds` are those of the middle one
    high: float = math.nan  # of the slowest, inf if it was not there after those that were tried
    seeds: int = 1
    tried: int = 0  # rounds

    @property
    def seconds(self) -> float:
        """To the target."""
        return self.rounds * self.each


@dataclass(frozen=True)
class Answer:
    """How many machines, and which way; None where nothing reaches the target."""

    metric: str
    target: float  # of the metric
    best: Trial | None
    alone: Trial  # one machine
    reduced: Trial | None  # the best all-reduce
    others: tuple[Trial, ...]  # the next best
    trials: tuple[Trial, ...]  # all, the best of each first
    largest: bool = False  # whether the metric is to grow
    most: str = ""  # why there were not more machines
    stopped: bool = False  # whether time ran out


def race(task: Task, told: Callable[[str, float], None] | None = None) -> Answer:
    """Find out how many machines pay, and which way to train; `told` hears what is done, and how much of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: more of them wait for each other where cores are busy
    try:
        return _race(task, told)
    finally:
        torch.set_num_threads(threads)


def _race(task: Task, told: Callable[[str, float], None] | None) -> Answer:
    began = time.monotonic()

    def spent() -> float:
        return (time.monotonic() - began) / task.seconds

    def tell(text: str) -> None:
        if told is not None:
            told(text, min(spent(), 0.99))

    runners, most = starters(task)
    headline = runners[0].problem.headline
    target = math.nan if task.target is None else 1.0 - task.target if headline.largest else task.target
    if task.target is None:
        runners[0].run(FIRST * LONGER**2)
        late = np.array(runners[0].steps) > LATE * runners[0].steps[-1]
        target = float(np.exp(np.log(runners[0].errors[late]).mean(0)).min())
    rounds, racing, stopped = FIRST, list(runners), False
    while racing and not stopped:
        for runner in racing:
            if stopped := spent() > RACING:
                break
            tell(f"{runner.way.machines} machines, {rounds:,} rounds")
            if not runner.steps or runner.steps[-1] < rounds:
                runner.run(rounds)
        racing, rounds = still_racing(racing, runners, target), rounds * LONGER
    trials = sorted((trial_of(r, target) for r in runners if r.steps), key=lambda trial: (trial.seconds, trial.error))
    repeated = {}
    for trial in chosen(trials):
        tell(f"{trial.way.machines} machines again, with other seeds")
        repeated[trial.way] = again(task, trial, target) if math.isfinite(trial.rounds) else trial
    trials = sorted(
        (repeated.get(trial.way, trial) for trial in trials), key=lambda trial: (trial.seconds, trial.error)
    )
    alone = next(t for t in trials if t.way.machines == 1)
    sure = sorted((t for t in repeated.values() if math.isfinite(t.seconds)), key=lambda t: t.seconds)
    best = enough(sure, alone)
    return Answer(
        metric=headline.metric,
        target=1.0 - target if headline.largest else target,
        best=best,
        alone=alone,
        reduced=next((t for t in sure if t.way.reduces and t.way.machines > 1), None),
        others=tuple(t for t in sure if best is not None and t.way != best.way and t.way.machines > 1)[:2],
        trials=tuple(trials),
        largest=headline.largest,
        most=most,
        stopped=stopped,
    )


def still_racing(racing: Sequence[Runner], runners: Sequence[Runner], target: float) -> list[Runner]:
    """Those that have not arrived and may be first, and to compare one machine and an all-reduce; none if hopeless."""
    run = [r for r in runners if r.steps]
    best = min(r.reached(target)[0] * r.each for r in run)
    going = [r for r in racing if r.steps and r.reached(target)[0] == math.inf]
    hoped = {r.way: r.heading(target) * r.each for r in going}
    limit = HOPELESS * min(best, *hoped.values(), math.inf)
    if limit == math.inf and run[0].steps[-1] >= PATIENCE:
        return []
    kept = {r.way for r in going if r.steps[-1] * r.each < best and hoped[r.way] <= limit}
    alone, reducing = (
        [r for r in run if r.way.reduces and (r.way.machines > 1) is several] for several in (False, True)
    )
    for kind in (alone, reducing):
        mine = [r for r in kind if r.way in hoped and r.steps[-1] < MOST]
        if mine and all(r.reached(target)[0] == math.inf for r in kind):
            kept.add(min(mine, key=lambda r: (hoped[r.way], r.errors.min() * r.each)).way)
    return [r for r in going if r.way in kept]


def starters(task: Task) -> tuple[list[Runner], str]:
    """One machine, and all ways with 2, 4, 8, ... of them; and why there are not more."""
    found, most, machines = [], "", 1
    while machines <= task.machines:
        try:
            problem = task.make(machines, 0)
        except ValueError as error:
            if machines == 1:
                raise
            most = f"{machines:,} machines are too many for the data ({error})"
            break
        if problem.samples is not None and machines > problem.samples:
            most = f"there are {problem.samples:,} samples, not one for each of {machines:,} machines"
            break
        found += [runner_of(task, way, problem) for way in wired(task, ways_of(machines), problem)]
        machines *= 2
    return found, most


def runner_of(task: Task, way: Way, problem: Problem, rates: Sequence[float] = LEARNING_RATES) -> Runner:
    """A way at its start."""
    return Runner(way, problem, task.clock, task.params or problem.dim, rates)


def ways_of(machines: int) -> list[Way]:
    """All ways with some machines."""
    if machines == 1:
        return [Way(1, rule) for rule in ("dsgd", "dat")]
    return [
        Way(machines, rule, graph if H == 1 else f"{graph}/{H}")
        for rule, graphs in GRAPHS.items()
        for graph in graphs
        for H in BETWEEN
        if not (machines == 2 and graph == "one_peer_exponential")  # the same as a ring
    ]


def wired(task: Task, ways: Sequence[Way], problem: Problem) -> list[Way]:
    """The same ways as int8, where that makes a round faster by the clock."""
    found = []
    for way in ways:
        small = way._replace(wire="int8")
        if way.reduces or way.graph.startswith("one_peer"):  # nodes that change neighbours hold nothing of each other
            found.append(way)
            continue
        plain, fast = (runner_of(task, each, problem).each for each in (way, small))
        found.append(small if fast < 0.95 * plain else way)
    return found


def trial_of(runner: Runner, target: float) -> Trial:
    """What a runner has found."""
    rounds, column = runner.reached(target)
    errors = smoothed(runner.errors)
    if rounds == math.inf:
        column = int(errors.min(0).argmin())
    error = float(errors.min())
    return Trial(runner.way, runner.lr[column], rounds, runner.each, error, rounds, rounds, tried=runner.steps[-1])


def chosen(trials: Sequence[Trial]) -> list[Trial]:
    """What runs again: the fastest, one machine, an all-reduce, and the fastest of other sizes."""
    picked: dict[Way, Trial] = {}
    for some in (
        [t for t in trials if t.way.machines == 1][:1],
        trials[:3],
        [t for t in trials if t.way.reduces and t.way.machines > 1][:1],
        [next(t for t in trials if t.way.machines == m) for m in dict.fromkeys(t.way.machines for t in trials)][:3],
    ):
        picked |= {trial.way: trial for trial in some}
    return list(picked.values())


def again(task: Task, trial: Trial, target: float) -> Trial:
    """The same way with other seeds, at its learning rate and the two beside it."""
    rates = [trial.lr * factor for factor in FINER]
    found = []
    for seed in range(task.seeds):
        problem = task.make(trial.way.machines, seed)
        runner = runner_of(task, trial.way, problem, rates)
        runner.run(math.ceil(AGAIN * trial.rounds))
        found.append([crossing(runner.steps, errors, target) for errors in smoothed(runner.errors).T])
    by_seed = np.array(found)  # (seeds, rates)
    best = int(np.argmin(np.median(by_seed, axis=0)))
    rounds, tried = by_seed[:, best], math.ceil(AGAIN * trial.rounds)
    low, middle, high = (float(v) for v in np.quantile(rounds, (0, 0.5, 1), method="nearest"))
    return Trial(trial.way, rates[best], middle, trial.each, trial.error, low, high, len(rounds), tried)


def enough(trials: Sequence[Trial], alone: Trial) -> Trial | None:
    """The fastest whose machines pay, or one with fewer that is hardly slower."""
    paying = [t for t in trials if t.way.machines == 1 or alone.seconds >= LEAST_SHARE * t.way.machines * t.seconds]
    if not paying:
        return None
    soonest = min(t.seconds for t in paying)
    return min((t for t in paying if t.seconds <= ENOUGH * soonest), key=lambda t: (t.way.machines, t.seconds))
