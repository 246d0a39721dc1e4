"""What `simulate` does before the first round: it checks that problem, rule and graph fit, and tells runs apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.arguments import whole
from klatsch.clock.rounds import check_meets
from klatsch.problems import Problem
from klatsch.problems import checked as checked_problem
from klatsch.rules import Rule
from klatsch.rules.base import LearningRate, checked, each, rate
from klatsch.sealed import digest
from klatsch.simulation.record import Facts, Network, Snapshot, record_points
from klatsch.topology import Topology
from klatsch.wire.carried import carried
from klatsch.wire.rehearsal import Rehearsal


@dataclass
class Rates:
    """The learning rates of a run, round by round, and where it computes."""

    lrs: Sequence[LearningRate]  # one for all networks, or one for each
    nodes: Sequence[int]  # of each network
    steps: int  # the last round: engines look ahead, but never ask a schedule beyond it
    columns: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self.change = any(map(callable, self.lrs))
        self._fixed = None if self.change else self._placed(self._of(1))

    def __call__(self, t: int) -> cols.Number:
        """The learning rate of round t: a number, or a tensor (columns, 1), or (nodes, columns, 1) if they differ."""
        return self._placed(self._of(t)) if self._fixed is None else self._fixed

    def between(self, done: int, until: int) -> Tensor:
        """The learning rates of rounds done + 1 to until, as tensors."""
        rounds = (torch.as_tensor(self._of(t), dtype=self.dtype) for t in range(done + 1, until + 1))
        rates = [v if v.ndim == 3 else v.reshape(-1, 1).expand(self.columns, 1) for v in rounds]
        # One transfer for all rounds: on a GPU one for each would take longer than the rounds themselves.
        return torch.stack(rates).to(self.device)

    def _of(self, t: int) -> cols.Number:
        rates: list[cols.Number] = [rate(lr, min(t, self.steps)) for lr in self.lrs]
        for lr, one in zip(self.lrs, rates, strict=True):
            if callable(lr) and isinstance(one, Tensor) and len(one) != self.columns:
                raise ValueError(f"lr({t}) has {len(one)} columns; return one number, or {self.columns} at every round")
        return rates[0] if len(rates) == 1 else cols.spread(rates, self.nodes)

    def _placed(self, rates: cols.Number) -> cols.Number:
        return rates.to(self.device, self.dtype) if isinstance(rates, Tensor) else rates

    def placed(self, rule: Rule) -> Rule:
        """The rule with its per-column hyper-parameters on the device of the run."""
        return cols.mapped(rule, lambda v: v.to(self.device, self.dtype))

    def start(self, problem: Problem) -> Tensor:
        """Where every node of a problem starts, (C, d)."""
        return torch.as_tensor(problem.start()).to(self.device, self.dtype).expand(self.columns, problem.dim)


@dataclass(frozen=True)
class Prepared:
    """The parts of a run, checked, with the problems on its device."""

    networks: list[Network]
    topologies: Sequence[Topology]  # one per network
    rule: Rule  # as it runs on them
    rates: Rates
    points: list[int]
    origins: list[Facts]  # by network: what tells it from others, whatever its length
    rehearsal: Rehearsal  # of the rule, without a channel
    meets: str = ""  # when nodes mix, if not all together in rounds


def prepared(
    problems: Sequence[Problem],
    rules: Sequence[Rule],
    topologies: Sequence[Topology],
    steps: int,
    record: int | Sequence[int],
    dtype: torch.dtype,
    device: str | torch.device,
    any_graph: bool,
    meets: str = "",
) -> Prepared:
    """Check that the parts of a run, of one network or several, fit together; `rules` has one for all, or for each."""
    problems = [checked_problem(problem) for problem in problems]
    each_rule = rules if len(rules) > 1 else [*rules] * len(problems)
    trios = [*zip(problems, each_rule, topologies, strict=True)]
    each_rule, columns, rehearsals = zip(*(_fitted(*trio, any_graph, meets) for trio in trios), strict=True)
    rule, C, nodes = each_rule[0], max(columns), [problem.nodes for problem in problems]
    if len(rules) > 1:
        rule = cols.joined(each_rule, nodes)
    elif len({str(cols.flattened("rule", one)) for one in each_rule}) > 1:
        raise ValueError(f"{rule.name} differs between these graphs; give graphs with the same every, late and wire")
    if len({problem.brief for problem in problems}) > 1:
        raise ValueError("some of these problems measure their headline alone, others more; give all or none `briefly`")
    if len({graph.every for graph in topologies if graph.wire == "int8"}) > 1:  # its memory rests in silent rounds
        raise ValueError("graphs with wire = 'int8' differ in every; give those that run together the same")
    if meets and len(problems) > 1:
        raise ValueError(f"meets = {meets!r} is for one network, but there are {len(problems)}; call simulate for each")
    steps = whole(steps, "steps", 1)
    points, where = record_points(record, steps), check_place(dtype, device)
    origins = [
        {
            "problem": None if (told := problem.fingerprint()) is None else f"{problem!r} {told}",
            **cols.flattened("rule", one),
            "topology": f"{graph!r} {graph.fingerprint}",
            "columns": C,
            "dtype": str(dtype),
            **({"meets": meets} if meets else {}),
            **({"choice of metrics": "headline"} if problem.brief else {}),
        }
        for problem, one, graph in zip(problems, each_rule, topologies, strict=True)
    ]
    rows = pairwise(accumulate(nodes, initial=0))
    networks = [Network(problem.to(dtype, where), slice(*own)) for problem, own in zip(problems, rows, strict=True)]
    rates = Rates([one.lr for one in each_rule[: len(rules)]], nodes, steps, C, dtype, where)
    return Prepared(networks, topologies, rule, rates, points, origins, rehearsals[0], meets)


def _fitted(
    problem: Problem, rule: Rule, topology: Topology, any_graph: bool, meets: str
) -> tuple[Rule, int, Rehearsal]:
    """The rule as it runs on the graph, the number of columns C, and its rehearsal; refuse parts that do not fit."""
    if not isinstance(topology, Topology):
        raise ValueError(f"topology is a {type(topology).__name__}; give a Topology, such as topology.make('ring', 16)")
    rule = checked(rule)
    if topology.size != problem.nodes:
        raise ValueError(
            f"{topology.name} has {topology.size} nodes but the problem has {problem.nodes}; give both the same number"
        )
    check_meets(topology.name, meets, topology.every, topology.late, topology.wire, topology.loss)
    if not any_graph:
        rule.check_graph(topology)
    C, own = cols.count(rule, rate(rule.lr, 1)), problem.columns
    if own != C and 1 not in (C, own):
        raise ValueError(f"the rule has {C} columns but the problem has {own}; give both the same number, or one")
    rehearsal = Rehearsal(rule, torch.zeros(1, C, problem.dim, dtype=torch.float64))
    return carried(rule.on(topology), topology, meets), max(C, own), rehearsal


def check_place(dtype: torch.dtype, device: str | torch.device) -> torch.device:
    """The device; refuse a dtype or device that this machine does not have."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype = {dtype}; choose torch.float32 or torch.float64")
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):  # torch's own error is long
            raise RuntimeError(f"{where.type} is not supported")
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        remedy = "choose cpu, or cuda where there is one"
        raise ValueError(f"device = {device!r} cannot be used ({reason}); {remedy}") from None
    return where


def length(rates: Rates, points: list[int], start: Snapshot, engine: str) -> Facts:
    """What else determines a result to the last bit: length, schedule, points, start, device and engine."""
    rounds = sorted({1, *points, rates.steps})
    told = [[cols.described(torch.as_tensor(lr(t))) for t in rounds] if callable(lr) else None for lr in rates.lrs]
    return {
        "steps": rates.steps,
        "record": points,
        "learning rates": told[0] if len(told) == 1 else told,
        "begun": digest(each(Tensor.cpu, start.state), {"rounds": start.rounds}),
        "device": rates.device.type,
        "engine": engine,
    }
