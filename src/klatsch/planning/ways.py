"""What a plan may choose from: ways to train (machines, rule, graph, channel), and a problem on any number of nodes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from klatsch import own, problems, rules, topology
from klatsch.arguments import check_options, whole
from klatsch.clock import Clock
from klatsch.clock.network import NoLinkError
from klatsch.columns import Given
from klatsch.problems import Problem
from klatsch.rules import Rule
from klatsch.topology import Topology
from klatsch.topology.channel import CHANNEL

NODES, MOST_NODES = 16, 1 << 16  # of a problem, by default and at most
ALL_REDUCE = "complete"
MOST_MACHINES = 4096  # whose rounds a clock times in seconds


class Kind(NamedTuple):
    """A rule that races, and where."""

    rule: str
    options: dict[str, Given]  # that are not defaults of `rules.make`; a plan names them
    graphs: dict[str, int]  # with the fewest machines for which they differ from others
    rates: str  # the kind whose learning rates with one machine it begins with
    least: int = 1  # the smallest H
    wires: tuple[str, ...] = ("int8", "int4")  # with which it needs as many rounds as with float32


MOMENTUM: dict[str, Given] = {"momentum": 0.9}
AVERAGE: dict[str, Given] = {"beta": 0.9}
# With an all-reduce in every round, momentum is that of the whole network without being sent. D2 needs one symmetric
# matrix. `topk` does not race: int4 in every 64th round sends a quarter of the bytes of topk(0.01) in every round,
# and neighbours know all numbers sooner.
KINDS = {
    "dsgd": Kind("dsgd", {}, {"ring": 2, ALL_REDUCE: 2}, "dsgd"),
    "momentum": Kind("dsgd", MOMENTUM, {ALL_REDUCE: 2}, "momentum"),
    "shared-momentum": Kind("dsgd", MOMENTUM | {"shared": True}, {"one_peer_exponential": 4}, "momentum"),
    "qg": Kind("qg", {}, {"one_peer_exponential": 4}, "momentum"),
    "diloco": Kind("diloco", {}, {ALL_REDUCE: 2}, "momentum", 16),
    "kgt": Kind("kgt", {}, {"hypercube": 8}, "dsgd", 4, ("int8",)),
    "dat": Kind("dat", AVERAGE, {"ring": 2, "one_peer_exponential": 4, "exponential": 8, ALL_REDUCE: 2}, "dat"),
    "dat-d2": Kind("dat-d2", AVERAGE, {"ring": 2, "hypercube": 8}, "dat"),
}
BETWEEN = (1, 4, 16, 64)  # H, rounds between two with gossip
STEADY = (128, 384)  # between these rounds of the clock a round takes as long as any
FASTER = 0.9  # of a round's time: what an option of a channel must save
HARDLY = 1.1  # times a gradient: rounds that take less need no larger H


class Way(NamedTuple):
    """A way to train."""

    machines: int
    kind: str = "dsgd"  # of `KINDS`
    graph: str = ALL_REDUCE
    every: int = 1
    late: int = 0
    wire: str = "float32"

    @property
    def reduces(self) -> bool:
        """Whether it is an all-reduce."""
        return self.graph == ALL_REDUCE

    @property
    def rule(self) -> str:
        """Its name."""
        return KINDS[self.kind].rule

    @property
    def options(self) -> dict[str, Given]:
        """The rule's options that are not its defaults."""
        return KINDS[self.kind].options

    @property
    def works(self) -> bool:
        """Whether the rule takes the graph and its channel."""
        rule, graph = self.made([1.0])
        with suppress(ValueError):
            rule.check_graph(graph)
            return True
        return False

    @property
    def channel(self) -> dict[str, Given]:
        """How messages travel, where it is not the default."""
        return {name: value for name, value in self._asdict().items() if value != CHANNEL.get(name, value)}

    @property
    def named_rule(self) -> str:
        """The rule with its options: "dat (beta=0.9)"."""
        return f"{self.rule} ({_listed(self.options)})" if self.options else self.rule

    def made(self, lr: Sequence[float]) -> tuple[Rule, Topology]:
        """The rule and the graph."""
        rule = rules.make(self.rule, lr=list(lr), **self.options)
        return rule, topology.make(self.graph, self.machines, **self.channel)

    def flags(self, lr: float, rounds: float) -> list[str]:
        """The options of `klatsch run` that do the same."""
        chosen = {name: value for name, value in {**self.options, **self.channel}.items() if name != "every"}
        return [
            *("--rules", self.rule, "-t", self.graph + f"/{self.every}" * (self.every > 1), "-n", str(self.machines)),
            *(word for name, value in chosen.items() for word in ("--set", f"{name}={value}")),
            *("--lr", f"{lr:.6g}", "--steps", str(math.ceil(rounds))),
        ]

    def python(self, lr: float) -> str:
        """The optimizer that does the same on ranks."""
        rule = f'klatsch.rules.make("{self.rule}", {_listed({"lr": float(f"{lr:.6g}"), **self.options})})'
        channel = f", {_listed(self.channel)}" if self.channel else ""
        return f'klatsch.optim.Gossip(model.parameters(), {rule}, "{self.graph}"{channel})'

    def __str__(self) -> str:
        if self.machines == 1:
            return f"one machine, {self.named_rule}"
        seldom = f", in every {self.every}th round" if self.every > 1 else ""
        if self.reduces:
            return f"{self.machines:,} machines with an all-reduce, {self.named_rule}{seldom}"
        late = f", late {self.late}" if self.late else ""
        wire = f", as {self.wire}" if self.wire != "float32" else ""
        return f"{self.machines:,} machines, {self.named_rule} on {self.graph}{seldom}{late}{wire}"


def _listed(options: dict[str, Given]) -> str:
    return ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in options.items())


def round_seconds(clock: Clock, way: Way, params: int) -> float:
    """Seconds of a round, by the clock, less the luck of its draws: how far their mean is from that of all."""
    clock, (rule, graph) = clock.of_first(way.machines), way.made([1.0])
    first, last = clock.seconds(rule, graph, params, STEADY)
    luck = float(np.mean(list(islice(clock.gradients(way.machines, 0), *STEADY)))) - clock.times.mean
    return max(clock.times.mean, (last - first) / (STEADY[1] - STEADY[0]) - luck)


def ways_of(clock: Clock, machines: int, params: int, alone: float) -> dict[Way, float]:
    """All ways with some machines that have a chance, with the seconds of a round.

    Messages are small or late only where that makes a round faster, and H grows only until messages hardly cost time.
    M machines need at least an M-th of the rounds of one, so gossip whose rounds take M times as long as those of one
    machine, `alone`, has no chance. Graphs whose links the network does not have are left out.
    """
    seconds_of: dict[Way, float] = {}
    for kind, (_, _, graphs, _, least, wires) in KINDS.items():
        for graph in [name for name, fewest in graphs.items() if machines >= fewest]:
            for H in BETWEEN:
                way = Way(machines, kind, graph, H)
                try:
                    seconds = round_seconds(clock, way, params)
                except NoLinkError as error:
                    missing = error
                    break
                variants = {way: seconds}
                if not way.reduces and seconds > HARDLY * alone:
                    for small in (way._replace(wire=wire) for wire in wires):
                        if (faster := round_seconds(clock, small, params)) < FASTER * seconds:
                            way, seconds, variants = small, faster, {small: faster}
                    hidden = way._replace(late=H - 1)
                    if H > 1 and hidden.works and (faster := round_seconds(clock, hidden, params)) < FASTER * seconds:
                        variants[hidden] = faster
                if least <= H:
                    seconds_of |= variants
                if min(variants.values()) <= HARDLY * alone:
                    break
    if not seconds_of:
        raise missing
    return {way: each for way, each in seconds_of.items() if way.reduces or each < machines * alone}


def problem_of(text: str, nodes: int | None = None, /, **options: Any) -> Problem:
    """A problem by name, or from your own "file.py:function", which may take the number of nodes; it is executed."""
    if nodes is not None:
        whole(nodes, "nodes", 1, MOST_NODES)
    if ".py" not in text:
        return problems.make(text, NODES if nodes is None else nodes, **options)
    make, function = problems.of_any(own.load("problem", text)), own.part_of(text)
    takes = list(inspect.signature(make).parameters)
    check_options(function, options, takes[1:])
    with own.explained(text):
        problem = problems.checked(make(nodes or NODES, **options), f"{text} gives")
        shapes = problems.shapes(problem, torch.as_tensor(problem.start()).reshape(-1))
    for asked, (shape, wanted) in shapes.items():
        if math.prod(shape) != math.prod(wanted):
            sizes = f"{problem.nodes} nodes and {problem.dim} parameters"
            raise ValueError(f"{text}: {asked} of {type(problem).__name__} does not fit {sizes}; see problems.Problem")
    if nodes not in (None, problem.nodes):
        made = f"{function} gives a problem with nodes = {problem.nodes}, and not {nodes}"
        raise ValueError(f"{made}; let it take their number and use it")
    return problem


def of_any_size(text: str, machines: int, /, **options: Any) -> tuple[Callable[[int, int], Problem], bool]:
    """A function that gives the problem for 1, 2, 4, ... `machines` nodes and a seed; and whether the seed counts.

    All have the same data, where the problem can be put on fewer nodes. A function in a file must take the number of
    nodes, and may take a seed.
    """
    whole(machines, "machines", 1, MOST_MACHINES)
    if ".py" in text:
        takes = inspect.signature(problems.of_any(own.load("problem", text))).parameters
        if not set(takes) - {"seed"}:
            name = own.part_of(text)
            raise ValueError(f"{name} takes no number of nodes, and has to run with 1, 2, 4, ...; let it take one")
        for nodes in range(1, min(2, machines) + 1):
            problem = problem_of(text, nodes, **options)
            problems.check_headline(text, problem, problem.headline)
        seeded = "seed" in takes
        return lambda nodes, seed: problem_of(text, nodes, **options, **{"seed": seed} if seeded else {}), seeded
    if problems.declared(text).on_fewer is None:
        return lambda nodes, seed: problem_of(text, nodes, **{**options, "seed": seed}), True
    largest = problem_of(text, 1 << (machines.bit_length() - 1), **options)
    assert largest.on_fewer is not None
    return largest.on_fewer, True
