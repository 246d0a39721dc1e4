"""How many machines, on which graph, with which rule: every choice predicted, and the one to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from klatsch import topology as topologies
from klatsch.arguments import number, whole
from klatsch.planning import graphs, predictions
from klatsch.planning.hardware import TINY, Network
from klatsch.planning.predictions import ALL_REDUCE, CALIBRATION, CANDIDATES, Calibration, Candidate, predicted
from klatsch.theory import Constants
from klatsch.topology.channel import check_channel, encoded_bytes
from klatsch.topology.names import family
from klatsch.topology.validation import no_wire

MOST_MACHINES, MOST_PARAMS = 1_000_000, 10**15
ENOUGH = 1.05  # fewer machines are taken where they are at most this much slower than the fastest choice


@dataclass(frozen=True)
class Task:
    """What to reach, and with what.

    Args:
        constants: of the problem; `probe` measures them.
        params: parameters of the model.
        network: the machines.
        samples: how many gradients may be taken in all, N = M T; without a limit if None.
        target: the error E f(x) - f* to be reached; if None, twice what N samples can bring at best.
        machines: the most machines to consider.
        efficiency: least speed-up per machine; M machines that are not at least this times M as fast as one do not pay.
        calibration: the constants of the rates.
        late: rounds that a message of gossip may travel (`topology.channel`).
        wire: how its numbers travel.
    """

    constants: Constants
    params: int
    network: Network
    samples: float | None = None
    target: float | None = None
    machines: int = 1024
    efficiency: float = 0.1
    calibration: Mapping[str, Calibration] | None = None
    late: int = 0
    wire: str = "float32"

    def __post_init__(self) -> None:
        most = 1 / TINY
        for name, value in asdict(self.constants).items():
            number(name, value, lambda v: v == 0 or TINY <= v <= most, f"0 or a number from {TINY:g} to {most:g}")
        whole(self.params, "params", 1, MOST_PARAMS)
        whole(self.machines, "machines", 1, MOST_MACHINES)
        wanted = "a number from 0 to 1, such as 0.1; 0 for the fastest at any cost"
        number("efficiency", self.efficiency, lambda v: 0 <= v <= 1, wanted)
        check_channel(late=self.late, wire=self.wire)
        if self.samples is None and self.target is None:
            raise ValueError("nothing to plan for; give samples (--samples 1e6), or a target error (--target 0.01)")
        if self.samples is not None:
            number("samples", self.samples, lambda v: 1 <= v <= most, f"a number of samples from 1 to {most:g}")
        if self.target is not None:
            number("target", self.target, lambda v: TINY <= v <= most, "a positive error")

    def by(self, rule: str) -> Calibration:
        """The constants of a rule's rate."""
        return (self.calibration or CALIBRATION)[rule]

    @property
    def vector(self) -> float:
        """Bytes of one vector of parameters in float32, as an all-reduce sends it."""
        return float(encoded_bytes("float32", self.params))

    @property
    def encoded(self) -> float:
        """Bytes of one vector of parameters as gossip sends it."""
        return float(encoded_bytes(self.wire, self.params))

    @property
    def channel(self) -> str:
        """How messages travel, in words; nothing if as usual."""
        late = [f"messages {self.late:,} round{'s' * (self.late > 1)} late"] if self.late else []
        return ", ".join([*late, *([f"as {self.wire}"] if self.wire != "float32" else [])])

    @property
    def goal(self) -> float:
        """The error to be reached: the target, or twice what the samples can bring, which one machine always can."""
        if self.target is not None:
            return self.target
        assert self.samples is not None
        alone = predicted(CANDIDATES[ALL_REDUCE], 1, self.samples, 1.0, self.constants, self.by(ALL_REDUCE))
        return float(max(2 * alone.statistical, alone.total))

    @property
    def budget(self) -> float | None:
        """The samples by which the largest M is judged: those given, or those whose noise makes half the goal."""
        if self.samples is not None:
            return self.samples
        noise = self.by(ALL_REDUCE).statistical * self.constants.sigma * self.constants.D1
        return max(1.0, (2 * noise / self.goal) ** 2) if noise > 0 else None


@dataclass(frozen=True)
class Choice:
    """A rule on a graph with M machines, and what is predicted of it."""

    rule: str
    topology: str  # "" for an all-reduce
    machines: int
    rho: float
    rounds: float  # to the goal; inf where it is never reached
    seconds_per_round: float
    seconds: float
    bytes_per_node: float  # sent until the goal is reached
    error: float  # with the budget of samples; that of the goal where there is no budget
    speedup: float  # over one machine

    @property
    def title(self) -> str:
        """As in a sentence."""
        if self.machines == 1:
            return "one machine"
        return f"{self.rule} on {self.topology}" if self.topology else self.rule


@dataclass(frozen=True)
class Line:
    """A rule on a family of graphs: all sizes, the best of them, and how many machines keep the statistical rate."""

    rule: str
    topology: str
    choices: tuple[Choice, ...]
    best: Choice
    largest: int


@dataclass(frozen=True)
class Plan:
    """Every rule on every family, and the choice to take."""

    task: Task
    lines: tuple[Line, ...]
    alone: Choice  # one machine
    best: Choice
    left_out: Mapping[str, str]  # "rule on topology": why

    def line(self, rule: str, topology: str = "") -> Line:
        """The line of a rule on a family of graphs."""
        lines = {(line.rule, line.topology): line for line in self.lines}
        if (rule, topology) not in lines:
            known = ", ".join(f"{a} on {b}" if b else a for a, b in lines)
            raise ValueError(f"no line of {rule!r} on {topology!r}; there are {known}")
        return lines[rule, topology]


class Span(NamedTuple):
    """From how many machines to how many a recommendation may move."""

    low: int
    high: int
    out_of_reach: bool  # whether the target may be beyond the samples


def plan(task: Task, *, rules: Sequence[str] | None = None, families: Sequence[str] | None = None) -> Plan:
    """Predict every rule on every family of graphs, and choose.

    Args:
        task: the goal and the means.
        rules: names of `CANDIDATES`; all by default.
        families: names of topologies, such as "ring", or "ring/8" for gossip in every 8th round; all by default.
    """
    asked = [predictions.candidate(name) for name in dict.fromkeys(CANDIDATES if rules is None else rules)]
    kinds = {name: family(name) for name in (topologies.TOPOLOGIES if families is None else families)}
    alone = _choices(task, CANDIDATES[ALL_REDUCE], "", [graphs.Graph(1, 1.0, 0)], None)[0]
    lines, left_out = [], {}
    for one in asked:
        for name in [""] if one.rule is None else kinds:
            if one.name == "dat-d2" and (kinds[name].changes or not kinds[name].symmetric):
                left_out[f"{one.name} on {name}"] = "it needs one symmetric matrix for all rounds"
                continue
            if name and (reason := no_wire(name, task.wire, kinds[name].changes)):
                left_out[f"{one.name} on {name}"] = reason.partition(": ")[2].partition(";")[0]
                continue
            found = graphs.family(name or "complete", task.machines, task.late if name else 0)
            choices = _choices(task, one, name, found, alone.seconds)
            if len(choices) == 1 and task.machines > 1:
                left_out[f"{one.name} on {name}"] = f"it has no graph of 2 to {task.machines:,} nodes"
                continue
            lines.append(Line(one.name, name, choices, _best(task, choices), _largest(task, one, name, choices)))
    if not lines:
        refusals = "; ".join(f"{what}: {reason}" for what, reason in left_out.items())
        why = refusals or "no rule, or no topology, was named"
        raise ValueError(f"nothing is left to plan with ({why}); name others")
    every = [alone, *(choice for line in lines for choice in line.choices)]
    if not any(math.isfinite(choice.seconds) for choice in every):
        if task.samples is None:
            raise ValueError(
                f"target = {task.goal:g} takes more than {predictions.MOST_ROUNDS:g} rounds; give a larger one"
            )
        near = min(every, key=lambda choice: choice.error)
        how = near.title if near.machines == 1 else f"{near.title}, {near.machines:,} machines"
        raise ValueError(
            f"target = {task.goal:g} is out of reach of {task.samples:g} samples: at best they bring "
            f"{near.error:.3g} ({how}); give more samples, or a larger target"
        )
    return Plan(task, tuple(lines), alone, _best(task, every), left_out)


def within_a_factor(found: Plan) -> dict[str, tuple[float, float]]:
    """Every constant of a plan, halved and doubled."""
    return {name: (value / 2, value * 2) for name, value in asdict(found.task.constants).items()}


def machines_between(found: Plan, ranges: Mapping[str, tuple[float, float]]) -> Span:
    """The smallest and the largest best M of the recommended rule and graph, as one constant at a time changes.

    `ranges` holds the lowest and the highest value of each constant, by name (sigma, zeta, L, D1).
    """
    best, task = found.best, found.task
    if best.machines == 1:
        return Span(1, 1, False)
    seen, out_of_reach = [best.machines], False
    for name, ends in ranges.items():
        for value in ends:
            other = replace(task, constants=replace(task.constants, **{name: value}))
            try:
                again = plan(other, rules=[best.rule], families=[best.topology] if best.topology else None)
                seen.append(again.best.machines)
            except ValueError:
                out_of_reach = True
    return Span(min(seen), max(seen), out_of_reach)


def _choices(
    task: Task, candidate: Candidate, name: str, found: Sequence[graphs.Graph], alone: float | None
) -> tuple[Choice, ...]:
    M, rho, degree, every = (np.array(column, float) for column in zip(*found, strict=True))
    by, constants, network = task.by(candidate.name), task.constants, task.network
    if candidate.rule is None:
        rho = np.ones_like(M)
        each = np.asarray(network.all_reduce_seconds(task.vector, M))
        sent = np.asarray(network.all_reduce_bytes(task.vector, M))
    else:
        each = np.asarray(
            network.gossip_seconds(task.vector, degree, *candidate.vectors, every, task.late, task.encoded)
        )
        sent = degree * sum(candidate.vectors) * task.encoded / every
    rounds = predictions.rounds_to(task.goal, candidate, M, rho, constants, by)
    error = np.full_like(M, task.goal)
    if (N := task.samples) is not None:
        rounds = np.where(rounds * M <= math.ceil(N) * (1 + 1e-9), rounds, np.inf)
        error = np.where(M <= N, predicted(candidate, M, np.maximum(1.0, N / M), rho, constants, by).total, np.inf)
    sent = np.where(np.isfinite(rounds), rounds, 0.0) * sent
    seconds = rounds * each
    reached = np.isfinite(seconds)
    speedup = np.ones_like(M) if alone is None else np.where(reached, alone / np.where(reached, seconds, 1.0), 0.0)
    columns = (M, rho, rounds, each, seconds, sent, error, speedup)
    rows = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
    return tuple(Choice(candidate.name, name, int(m), *numbers) for m, *numbers in rows)


def _best(task: Task, choices: Sequence[Choice]) -> Choice:
    """The fastest choice whose machines pay, or one with fewer machines that is hardly slower."""
    paying = [c for c in choices if c.machines == 1 or c.speedup >= task.efficiency * c.machines]
    soonest = min(c.seconds for c in paying)
    enough = [c for c in paying if c.seconds <= ENOUGH * soonest]
    return min(enough, key=lambda c: (c.machines, c.seconds, c.bytes_per_node))


def _largest(task: Task, candidate: Candidate, name: str, choices: Sequence[Choice]) -> int:
    """The largest M up to `task.machines` at which noise is still the larger half of the error."""
    if (N := task.budget) is None or task.constants.sigma * task.constants.D1 == 0:
        return 1

    def pays(M: predictions.Array, rho: predictions.Array) -> NDArray[np.bool_]:
        parts = predicted(candidate, M, np.maximum(1.0, N / M), rho, task.constants, task.by(candidate.name))
        return np.asarray(parts.mostly_statistical & (M <= N))

    good = np.flatnonzero(pays(np.array([c.machines for c in choices], float), np.array([c.rho for c in choices])))
    if not len(good):
        return 1
    low, *high = (choice.machines for choice in choices[good[-1] : good[-1] + 2])
    late = task.late if name else 0
    passed_over = graphs.between(name or "complete", low, high[0], late) if high else []
    while passed_over:  # halved: gaps that ripple may hide a larger one
        middle = len(passed_over) // 2
        size = passed_over[middle]
        one = graphs.graph(name or "complete", size, late)
        good_too = one is not None and pays(np.array([float(size)]), np.array([one.rho if name else 1.0]))[0]
        low, passed_over = (size, passed_over[middle + 1 :]) if good_too else (low, passed_over[:middle])
    return low
