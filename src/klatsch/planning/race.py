"""A race of ways to train: the user's own problem, simulated with more and more machines beside a clock.

One machine runs first, at all learning rates. Then all ways run some rounds, at learning rates near the best so far;
those that have not reached the target run four times as many, unless they are hopeless: their clock has passed the time
of the best one, or their errors are heading for a time far behind it. What wins runs again with other seeds. If there
is no time for all, the most promising have come first, and only what was tried runs on.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch.arguments import number, whole
from klatsch.clock import Clock
from klatsch.clock.network import NoLinkError
from klatsch.planning.ways import KINDS, MOST_MACHINES, Way, round_seconds, ways_of
from klatsch.problems import Problem, checked
from klatsch.problems.sharded import Sharded
from klatsch.simulation import Result, simulate
from klatsch.units import duration

Array = NDArray[np.float64]
Told = Callable[[str, float], None]  # hears what is done, and how much of the time
Tick = bool | Callable[[int], object]  # hears of the rounds that a simulation has done; False for nobody

FIRST, LONGER = 64, 4  # rounds that all ways run, and by what factor the next stretch is longer
SEEDS = 3
LEARNING_RATES = [10.0 ** (k / 2) for k in range(-12, 3)]
BELOW, ABOVE = 3, 1  # learning rates that stay in the race, on both sides of the best one so far
FINER = (1.0, 10**-0.25, 10**0.25)  # times the chosen learning rate, for the winners
HEAVY = 1 << 17  # parameters from which fewer rates are tried, and several threads pay: they share each product
BELOW_HEAVY = 1
POINTS = 1.25  # at which rounds errors are taken: each so many times the one before
FEWEST, OVERTIME = 5, 1.1  # winners that run again beyond the time, and when these, too, are given up
NEAR, WINNERS = 2.0, 16  # times the best time, and how many of these run again: one seed alone does not decide
AGAIN = (2, 8)  # times as many rounds as the first seed needed, for the others; more where some are not there
CHEAP = 1.25  # times a gradient: what rounds take whose messages are cheap
HOPELESS = 4.0  # times the best way's time
ENOUGH = 1.05  # fewer machines are taken where they are at most this much slower
LEAST_SHARE = 0.1  # of a machine's worth that each one must bring
LATE = 0.7  # of the rounds of one machine; what it has after these is the target, if none is given
ALONE = 0.5  # of the time, in which one machine must have done its first rounds
RACING = 0.8  # of the time; the rest is for the winners
LEFT = 0.02  # of the time: with less left, nothing new begins
PATIENCE, MOST = 4_000, 60_000  # rounds after which something must be heading for the target, and all end
AROUND = 1  # points on each side with which an error is averaged: a dip by chance is not there to stay
ROUNDING = 1e-6  # by which an error may be below 0
HEADING = 30.0  # how many times as many rounds a fit may add


@dataclass(frozen=True)
class Task:
    """What to reach, and with what.

    Args:
        make: gives the problem for some nodes and a seed.
        clock: how long gradients and messages take.
        target: the value of the problem's metric to reach; by default what one machine has after 1,024 rounds, or
            fewer where these take long.
        machines: the most to consider; not more than there are samples.
        params: parameters of the model, if the problem stands for a larger one.
        seeds: how many the winners run with; 1 if the problem has no seed.
        seconds: of this machine's time; what is not done then is given up, and the winners a tenth later.
        device: where to simulate.
    """

    make: Callable[[int, int], Problem]
    clock: Clock
    target: float | None = None
    machines: int = 64
    params: int | None = None
    seeds: int = SEEDS
    seconds: float = 69.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        whole(self.machines, "machines", 1, MOST_MACHINES)
        whole(self.seeds, "seeds", 1)
        if self.params is not None:
            whole(self.params, "params", 1)
        number("seconds", self.seconds, lambda v: v > 0, "a positive number of seconds")
        if self.target is not None:
            number("target", self.target, math.isfinite, "a number")

    def problem(self, nodes: int, seed: int = 0) -> Problem:
        """The problem, which measures nothing but its headline."""
        return checked(self.make(nodes, seed)).briefly()

    def in_float32(self, problem: Problem) -> bool:
        """Whether it runs in float32: networks do, and everything on a GPU."""
        return self.device != "cpu" or isinstance(problem, Sharded)

    def run(
        self, way: Way, problem: Problem, rounds: int, rates: Sequence[float], tick: Tick = False
    ) -> tuple[list[int], Array]:
        """The rounds at which errors are taken, and the errors, (len(steps), len(rates))."""
        points, (rule, graph) = 1 + max(1, round(math.log(rounds) / math.log(POINTS))), way.made(rates)
        dtype = torch.float32 if self.in_float32(problem) else torch.float64
        given = problem, rule, graph, rounds, points
        result = simulate(*given, dtype=dtype, device=self.device, progress=tick, any_graph=way.reduces)
        return result.steps, smoothed(errors_of(problem, result))


class TimeUpError(Exception):
    """The time is over, perhaps in the middle of a run."""


@dataclass
class Timer:
    """The time that a race may take, and who hears of it."""

    seconds: float
    told: Told | None = None
    text: str = "one machine"  # what is being done
    limit: float = ALONE  # of the time, after which runs are given up
    rounds: int = 0  # that were done
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def share(self) -> float:
        """Of the time that is over."""
        return (time.monotonic() - self.began) / self.seconds

    def turn_to(self, text: str, limit: float) -> None:
        """Begin something else."""
        self.text, self.limit = text, limit
        self.tick()

    def tick(self, rounds: int = 0) -> None:
        """Look at the time; simulations do when they have done some rounds."""
        self.rounds, share = self.rounds + rounds, self.share
        if self.told is not None:
            self.told(self.text, min(share, 0.99))
        if share > self.limit:
            raise TimeUpError


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


@dataclass
class Runner:
    """A way on its way: its errors so far, at the learning rates that are left."""

    way: Way
    problem: Problem
    each: float  # seconds of a round
    rates: list[float]
    steps: list[int] = field(default_factory=list)
    errors: Array = field(default_factory=lambda: np.empty((0, 0)))  # (len(steps), len(rates))

    def run(self, task: Task, rounds: int, tick: Tick = False) -> None:
        """So many rounds from the start, at the learning rates around the best of those before."""
        rates = around(self.best_after(rounds), self.problem.dim) if self.steps else self.rates
        exact = self.way._replace(wire="float32")  # faster to simulate, and nearly the same; winners run as they are
        self.steps, self.errors = task.run(exact, self.problem, rounds, rates, tick)
        self.rates = rates

    def crossings(self, target: float) -> list[float]:
        """The rounds to the target, by learning rate; inf where it is not there yet."""
        return [crossing(self.steps, errors, target) for errors in self.errors.T]

    def seconds(self, target: float) -> float:
        """To the target at the best learning rate."""
        return min(self.crossings(target)) * self.each

    def heading(self, target: float) -> float:
        """Seconds to the target as errors are heading."""
        rounds = [*self.crossings(target), *(fitted(self.steps, errors, target) for errors in self.errors.T)]
        return min(rounds) * self.each

    def best_after(self, rounds: int) -> float:
        """The learning rate with the smallest error after so many rounds, or all that were run."""
        last = max(k for k, step in enumerate(self.steps) if step <= rounds)
        return self.rates[int(np.nan_to_num(self.errors[last], nan=np.inf).argmin())]

    def trial(self, target: float) -> Trial:
        """What it has found."""
        rounds, tried = self.crossings(target), self.steps[-1]
        fastest, error = min(rounds), float(np.nanmin(self.errors))
        lr = self.rates[rounds.index(fastest)] if fastest < math.inf else self.best_after(tried)
        return Trial(self.way, lr, fastest, self.each, error, fastest, fastest, tried=tried)


def around(best: float, dim: int, more: int = 0) -> list[float]:
    """The learning rates around one of them, and some more above."""
    k, below = LEARNING_RATES.index(best), BELOW if dim < HEAVY else BELOW_HEAVY
    return LEARNING_RATES[max(0, k - below) : k + ABOVE + 1 + more]


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
    untried: tuple[int, ...] = ()  # numbers of machines for which there was no time at all


def race(task: Task, told: Told | None = None) -> Answer:
    """Find out how many machines pay, and which way to train."""
    timer, threads = Timer(task.seconds, told), torch.get_num_threads()
    alone, problems, most = starters(task)
    torch.set_num_threads(1 if problems[1].dim < HEAVY else threads)  # for small products they wait for each other
    try:
        return _race(task, timer, alone, problems, most)
    finally:
        torch.set_num_threads(threads)


def _race(task: Task, timer: Timer, alone: list[Runner], problems: dict[int, Problem], most: str) -> Answer:
    target, headline = _target(task, alone, timer), alone[0].problem.headline
    runners = [*alone, *entrants(task, alone, problems)]
    sizes = {runner.way.machines for runner in runners}
    if left_out := [f"{machines:,}" for machines in problems if machines not in sizes]:
        most = f"the network does not have the links of any graph of {' or '.join(left_out)} machines"
    in_time = _run_on(task, runners, target, timer)
    trials = in_order(r.trial(target) for r in runners if r.steps)
    winners = chosen(trials)
    repeated = _again(task, winners, problems, target, timer)
    for trial in [t for t in winners if math.isfinite(t.rounds)]:
        later = repeated.get(trial.way, trial)
        in_time &= later is not trial and later.seeds == task.seeds
    trials = in_order(repeated.get(trial.way, trial) for trial in trials)
    sure = in_order(t for t in repeated.values() if math.isfinite(t.seconds))
    one = next(t for t in in_order(repeated.values()) if t.way.machines == 1)
    best, reduced = enough(sure, one), next((t for t in sure if t.way.reduces and t.way.machines > 1), None)
    others = tuple(t for t in sure if t not in (best, reduced) and t.way.machines > 1)[:2]
    untried = tuple(sorted(sizes - {t.way.machines for t in trials}))
    shown = 1.0 - target if headline.largest else target
    who = best, one, reduced, others, tuple(trials)
    return Answer(headline.metric, shown, *who, headline.largest, most, not in_time, untried)


def starters(task: Task) -> tuple[list[Runner], dict[int, Problem], str]:
    """One machine with the rules that differ there; the problem on 1, 2, 4, ... machines; and why not on more."""
    problems, most, machines, nodes = dict[int, Problem](), "", 1, task.clock.nodes or task.machines
    while machines <= task.machines and not most:
        try:
            problem = task.problem(machines)
        except ValueError as error:
            if machines == 1:
                raise
            most = f"{machines:,} machines are too many for the data ({error})"
            break
        if problem.samples is not None and machines > whole(problem.samples, "samples", 1):
            most = f"there are {problem.samples:,} samples, not one for each of {machines:,} machines"
        elif machines > nodes:
            most = f"the network, or the times of gradients, are for {nodes:,} node{'s' * (nodes > 1)}"
        else:
            problems[machines] = problem
            machines *= 2
    each = round_seconds(task.clock, Way(1), task.params or problems[1].dim)
    kinds = dict.fromkeys(kind.rates for kind in KINDS.values())
    return [Runner(Way(1, kind), problems[1], each, LEARNING_RATES) for kind in kinds], problems, most


def _target(task: Task, alone: Sequence[Runner], timer: Timer) -> float:
    """Run one machine's first rounds; returns the target as an error, by default what it reaches after some more."""
    problem = alone[0].problem
    try:
        for runner in alone:
            runner.run(task, FIRST, timer.tick)
        timer.tick()
    except TimeUpError:
        needed = timer.share / ALONE * len(alone) * FIRST / max(1, timer.rounds)  # times the time that was given
        raise ValueError(
            f"{type(problem).__name__} is too slow for a plan in {duration(task.seconds)} here: one machine "
            f"takes more than half of it for {FIRST} rounds at {len(LEARNING_RATES)} learning rates; give --minutes "
            f"{math.ceil(max(1.1, needed) * task.seconds / 60)}"
            f"{', or --device cuda with a GPU' if task.device == 'cpu' else ''}"
        ) from None
    if task.target is not None:
        return 1.0 - task.target if problem.headline.largest else task.target
    for stretch in [FIRST * LONGER**k for k in (1, 2) if timer.share * (1 + LONGER**k) <= ALONE][-1:]:
        with suppress(TimeUpError):
            for runner in alone:
                runner.run(task, stretch, timer.tick)
    late = np.array(alone[0].steps) > LATE * alone[0].steps[-1]
    with np.errstate(divide="ignore"):  # it may begin at the optimum
        target = float(np.exp(np.log(alone[0].errors[late]).mean(0)).min())
    if not math.isfinite(target):
        what = f"{problem.headline.metric} of {type(problem).__name__}"
        raise ValueError(f"{what} is not finite at any learning rate; check its gradients")
    return target


def entrants(task: Task, alone: Sequence[Runner], problems: Mapping[int, Problem]) -> list[Runner]:
    """All ways with several machines, at the learning rates around those of one machine."""
    rates = {r.way.kind: around(r.best_after(FIRST), r.problem.dim, more=1) for r in alone}
    groups, missing = defaultdict[tuple[int, str], list[Runner]](list), None
    for machines, problem in [*problems.items()][1:]:
        try:
            ways = ways_of(task.clock, machines, task.params or problem.dim, alone[0].each)
        except NoLinkError as error:
            missing = missing or error
            continue
        for way, each in promising_first(ways, alone[0].each).items():
            groups[machines, way.kind].append(Runner(way, problem, each, rates[KINDS[way.kind].rates]))
    if missing and not groups:
        raise missing
    # All sizes and rules take turns, what one machine did best with first: the time may end.
    errors = {runner.way.kind: np.nanmin(runner.errors) for runner in alone}
    first = sorted(groups, key=lambda group: errors[KINDS[group[1]].rates])
    return [runner for turn in zip_longest(*(groups[each] for each in first)) for runner in turn if runner is not None]


def promising_first(ways: Mapping[Way, float], alone: float) -> dict[Way, float]:
    """First, for every rule and graph, the way that talks as often as is cheap, or the fastest; then the others."""
    first, others = dict[tuple[str, str], Way](), dict(ways)
    for way in sorted(ways, key=lambda way: (max(CHEAP * alone, ways[way]), way.every, ways[way])):
        first.setdefault((way.kind, way.graph), way)
    return {way: others.pop(way) for way in first.values()} | others


def _run_on(task: Task, runners: Sequence[Runner], target: float, timer: Timer) -> bool:
    """Run all until they are there or hopeless; returns whether there was time for it."""
    rounds, racing, in_time = FIRST, list(runners), True
    trying = (timer.share + RACING) / 2  # what has not begun by then waits until the others are there or hopeless
    best = min(r.seconds(target) for r in runners if r.steps)
    while racing:
        try:
            for runner in [r for r in racing if not r.steps or r.steps[-1] < rounds]:
                limit = math.inf if runner.way.reduces else NEAR * best / runner.each  # later ones do not count
                if not runner.steps or limit > runner.steps[-1]:
                    timer.turn_to(f"{len(racing)} ways, {rounds:,} rounds", trying if rounds == FIRST else RACING)
                    runner.run(task, max(2, math.ceil(min(rounds, limit))), timer.tick)
                best = min(best, runner.seconds(target))
        except TimeUpError:
            in_time = False
            if rounds > FIRST:
                break
        racing, rounds = still_racing(racing, runners, target, rounds, not in_time), rounds * LONGER
        if not racing and not in_time and RACING - timer.share > LEFT:
            (racing, rounds), trying = _put_off(runners, target), (timer.share + RACING) / 2
    return in_time


def _put_off(runners: Sequence[Runner], target: float) -> tuple[list[Runner], int]:
    """What was not tried, or else what was given up early, to be first in time; and for how many rounds."""
    if untried := [runner for runner in runners if not runner.steps]:
        return [*untried[1:], untried[0]], FIRST  # the first one was interrupted
    early = [runner for runner in runners if runner.steps[-1] == FIRST]
    return still_racing(early, runners, target, FIRST), FIRST * LONGER


def still_racing(
    racing: Sequence[Runner], runners: Sequence[Runner], target: float, rounds: int, hurried: bool = False
) -> list[Runner]:
    """Those that have not arrived and may be first, and to compare one machine and an all-reduce; none if hopeless."""
    seconds = {r.way: r.seconds(target) for r in runners if r.steps}
    going = [r for r in racing if r.steps and seconds[r.way] == math.inf]
    best, hoped = min(seconds.values()), {r.way: r.heading(target) for r in going}
    limit = HOPELESS * min(best, *hoped.values(), math.inf)
    if rounds >= MOST or (limit == math.inf and rounds >= PATIENCE):
        return []
    early = rounds == FIRST and not hurried  # too early to say where errors are heading
    kept = {r.way for r in going if rounds * r.each < best and (early or hoped[r.way] <= limit)}
    for several in (False, True):
        kind = [r for r in runners if r.steps and r.way.reduces and (r.way.machines > 1) is several]
        left = [r for r in kind if r.way in hoped]
        if left and all(seconds[r.way] == math.inf for r in kind):
            kept.add(min(left, key=lambda r: (hoped[r.way], np.nanmin(r.errors) * r.each)).way)
    # The time may end: first one machine, with which all others are compared.
    return sorted((r for r in going if r.way in kept), key=lambda r: (r.way.machines > 1, hoped[r.way]))


def in_order(trials: Iterable[Trial]) -> list[Trial]:
    """The fastest first."""
    return sorted(trials, key=lambda trial: (trial.seconds, trial.error))


def chosen(trials: Sequence[Trial]) -> list[Trial]:
    """What runs again: the fastest of all, of one machine, of an all-reduce, and of each size."""
    alone = [t for t in trials if t.way.machines == 1]
    reduced = [t for t in trials if t.way.reduces and t.way.machines > 1]
    near = [t for t in trials if t.seconds <= NEAR * trials[0].seconds]
    sizes = {t.way.machines: t for t in reversed(trials)}
    first = (*alone[:1], *near[:3], *reduced[:1])  # which run even if the time is over
    return list({t.way: t for t in (*first, *near[3:WINNERS], *reduced[1:3], *sizes.values())}.values())


def _again(
    task: Task, winners: Sequence[Trial], problems: Mapping[int, Problem], target: float, timer: Timer
) -> dict[Way, Trial]:
    """The winners with other seeds; of the first few what is known, if there is no time."""
    known, share = {trial.way: trial for trial in winners[:FEWEST]}, timer.share
    arrived = [trial for trial in winners if math.isfinite(trial.rounds)]
    first = [trial for trial in arrived if trial.way in known]
    limits = [(trial, share + (OVERTIME - share) * k / len(first)) for k, trial in enumerate(first, 1)]
    limits += [(trial, 1.0) for trial in arrived if trial.way not in known]
    for trial, limit in [*limits, *((trial, OVERTIME) for trial in first)]:
        latest = known.get(trial.way, trial)
        if latest is trial or latest.seeds < task.seeds:  # also once more, if the others left some time
            with suppress(TimeUpError):
                timer.turn_to(f"{trial.way.machines} machines again, with other seeds", limit)
                known[trial.way] = again(task, trial, problems[trial.way.machines], target, timer.tick)
    return known


def again(task: Task, trial: Trial, problem: Problem, target: float, tick: Tick = False) -> Trial:
    """The same way with other seeds, at its learning rate, and the two beside it unless that takes long."""
    finer = FINER if problem.dim < HEAVY else FINER[:1]
    rates, tried, by_seed = [trial.lr * factor for factor in finer], 0, list[list[float]]()
    instances = [problem, *(task.problem(trial.way.machines, seed) for seed in range(1, task.seeds))]
    for longer in AGAIN:
        rounds, crossings = max(2, math.ceil(longer * trial.rounds)), list[list[float]]()
        with suppress(TimeUpError):  # the seeds that are done count
            for instance in instances:
                steps, errors = task.run(trial.way, instance, rounds, rates, tick)
                crossings.append([crossing(steps, column, target) for column in errors.T])
        done = len(crossings) == len(instances)
        if done or not by_seed:
            by_seed, tried = crossings, rounds
        if not done or np.isfinite(crossings).all(0).any():  # a learning rate with which all are there
            break
    if not by_seed:
        raise TimeUpError
    middle, columns = len(by_seed) // 2, [sorted(column) for column in zip(*by_seed, strict=True)]
    # Where most do not get there: with which rate some do.
    best = min(range(len(rates)), key=lambda c: (columns[c][middle], sum(map(math.isinf, columns[c])), columns[c][0]))
    low, high, column = columns[best][0], columns[best][-1], columns[best]
    return replace(trial, lr=rates[best], rounds=column[middle], low=low, high=high, seeds=len(column), tried=tried)


def enough(trials: Sequence[Trial], alone: Trial) -> Trial | None:
    """The fastest whose machines pay, or one with fewer that is hardly slower."""
    paying = [t for t in trials if t.way.machines == 1 or alone.seconds >= LEAST_SHARE * t.way.machines * t.seconds]
    soonest = min((t.seconds for t in paying), default=math.inf)
    near = [t for t in paying if t.seconds <= ENOUGH * soonest]
    return min(near, key=lambda t: (t.way.machines, t.seconds), default=None)


def errors_of(problem: Problem, result: Result) -> Array:
    """The problem's metric as an error, such as 1 - accuracy."""
    metric, largest = problem.headline.metric, problem.headline.largest
    values = result.metrics[metric].cpu().numpy().astype(float)
    errors = np.where(np.isfinite(values), 1.0 - values if largest else values, np.inf)
    if (errors < -ROUNDING).any():
        wanted = "a share from 0 to 1" if largest else "0 or more"
        raise ValueError(f"{metric} is {values.flat[errors.argmin()]:.3g}; a plan needs {wanted}")
    return np.maximum(errors, 0.0)


def smoothed(errors: Array) -> Array:
    """Errors, each the geometric mean of those around it, (len(steps), C); zeros count as the smallest other one."""
    if not (errors > 0).any():
        return errors
    logs = np.log(np.maximum(errors, errors[errors > 0].min()))
    padded = np.pad(logs, ((AROUND, AROUND), (0, 0)), mode="edge")
    return np.asarray(np.exp(np.mean([padded[k : k + len(logs)] for k in range(2 * AROUND + 1)], axis=0)))


def crossing(steps: Sequence[int], errors: Array, target: float) -> float:
    """The round at which errors first fall to the target, between two that are known."""
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
    """The round at which errors reach the target if they go on falling as a power of the rounds."""
    late = [k for k, step in enumerate(steps) if step >= steps[-1] / 4]
    x, y = np.log([steps[k] for k in late]), errors[late]
    if len(late) < 4 or not (np.isfinite(y).all() and (y > 0).all()) or target <= 0:
        return math.inf
    slope, height = np.polyfit(x, np.log(y), 1)
    if slope > -0.02:
        return math.inf
    rounds = math.exp(min((math.log(target) - height) / slope, 700.0))
    return rounds if rounds <= HEADING * steps[-1] else math.inf
