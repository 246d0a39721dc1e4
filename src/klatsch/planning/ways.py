"""Ways to train: machines, rule, graph and channel; and which of them a clock leaves a chance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from klatsch import rules, topology
from klatsch.clock import Clock
from klatsch.clock.network import NoLinkError
from klatsch.columns import Given
from klatsch.rules import Rule
from klatsch.topology import Topology

ALL_REDUCE = "complete"
MOST_MACHINES = 4096  # whose rounds a clock times in seconds
# By rule: its options where they differ from the defaults of `rules.make`. A plan names them, so that what it
# recommends is what has raced.
RULES: dict[str, dict[str, Given]] = {"dsgd": {}, "dat": {"beta": 0.9}, "dat-d2": {"beta": 0.9}}
# By rule: on which graphs, with the fewest machines for which they differ from others. D2's correction needs one
# symmetric matrix for all rounds.
GRAPHS = {
    "dsgd": {"ring": 2, ALL_REDUCE: 2},
    "dat": {"ring": 2, "one_peer_exponential": 4, "exponential": 8, ALL_REDUCE: 2},
    "dat-d2": {"ring": 2, "hypercube": 8},
}
BETWEEN = (1, 4, 16, 64)  # H, rounds between two with gossip
STEADY = (128, 384)  # between these rounds of the clock a round takes as long as any
FASTER = 0.9  # of a round's time: what an option of a channel must save
HARDLY = 1.1  # times a gradient: rounds that take less need no larger H


class Way(NamedTuple):
    """A way to train."""

    machines: int
    rule: str = "dsgd"
    graph: str = ALL_REDUCE
    every: int = 1
    late: int = 0
    wire: str = "float32"

    @property
    def reduces(self) -> bool:
        """Whether it is an all-reduce."""
        return self.graph == ALL_REDUCE

    @property
    def options(self) -> Mapping[str, Given]:
        """The rule's options that are not its defaults."""
        return RULES[self.rule]

    @property
    def channel(self) -> dict[str, int | str]:
        """How messages travel, where it is not the default."""
        usual = {"every": 1, "late": 0, "wire": "float32"}
        return {name: value for name, value in self._asdict().items() if name in usual and value != usual[name]}

    @property
    def named_rule(self) -> str:
        """The rule with its options: "dat (beta=0.9)"."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.rule} ({options})" if options else self.rule

    def made(self, lr: Sequence[float]) -> tuple[Rule, Topology]:
        """The rule and the graph."""
        rule = rules.make(self.rule, lr=list(lr), **self.options)
        return rule, topology.make(self.graph, self.machines, **self.channel)

    def flags(self, lr: float, rounds: float) -> list[str]:
        """Of `klatsch run`, which does the same."""
        chosen = {name: value for name, value in {**self.options, **self.channel}.items() if name != "every"}
        graph = f"{self.graph}/{self.every}" if self.every > 1 else self.graph
        return [
            *("--rules", self.rule, "-t", graph, "-n", str(self.machines)),
            *(word for name, value in chosen.items() for word in ("--set", f"{name}={value}")),
            *("--lr", f"{lr:.6g}", "--steps", str(math.ceil(rounds))),
        ]

    def python(self, lr: float) -> str:
        """The optimizer that does the same on ranks."""
        rule = _call("klatsch.rules.make", f'"{self.rule}"', lr=float(f"{lr:.6g}"), **self.options)
        return _call("klatsch.optim.Gossip", "model.parameters()", rule, f'"{self.graph}"', **self.channel)

    def __str__(self) -> str:
        if self.machines == 1:
            return f"one machine, {self.named_rule}"
        seldom = f", in every {self.every}th round" if self.every > 1 else ""
        if self.reduces:
            return f"{self.machines:,} machines with an all-reduce, {self.named_rule}{seldom}"
        late = f", late {self.late}" if self.late else ""
        wire = f", as {self.wire}" if self.wire != "float32" else ""
        return f"{self.machines:,} machines, {self.named_rule} on {self.graph}{seldom}{late}{wire}"


def _call(function: str, *words: str, **options: Given) -> str:
    arguments = [*words, *(f"{name}={json.dumps(value)}" for name, value in options.items())]
    return f"{function}({', '.join(arguments)})"


def round_seconds(clock: Clock, way: Way, params: int) -> float:
    """Seconds of a round, by the clock, less the luck of its draws: how far their mean is from that of all."""
    clock, (rule, graph) = clock.of_first(way.machines), way.made([1.0])
    first, last = clock.seconds(rule, graph, params, STEADY)
    luck = float(np.mean(list(islice(clock.gradients(way.machines, 0), *STEADY)))) - clock.times.mean
    return max(clock.times.mean, (last - first) / (STEADY[1] - STEADY[0]) - luck)


def ways_of(clock: Clock, machines: int, params: int, alone: float) -> dict[Way, float]:
    """All ways with some machines, with the seconds of a round.

    Fewer bytes and late messages only where a round is faster so, and longer silence only up to where messages hardly
    cost time. M machines need at least an M-th of the rounds of one, so gossip whose rounds take M times as long as
    those of one machine, `alone`, has no chance. Graphs whose links the network does not have are left out.
    """
    found: dict[Way, float] = {}
    for rule, graphs in GRAPHS.items():
        for graph in [name for name, fewest in graphs.items() if machines >= fewest]:
            for H in BETWEEN:
                way = Way(machines, rule, graph, H)
                try:
                    seconds = round_seconds(clock, way, params)
                except NoLinkError as error:
                    missing = error
                    break
                mine = {way: seconds}
                if not way.reduces and seconds > HARDLY * alone:
                    small = way._replace(wire="bfloat16" if graph.startswith("one_peer") else "int8")
                    if (faster := round_seconds(clock, small, params)) < FASTER * seconds:
                        way, seconds, mine = small, faster, {small: faster}
                    hidden = way._replace(late=H - 1)
                    if H > 1 and (faster := round_seconds(clock, hidden, params)) < FASTER * seconds:
                        mine[hidden] = faster
                found |= mine
                if min(mine.values()) <= HARDLY * alone:
                    break
    if not found:
        raise missing
    return {way: each for way, each in found.items() if way.reduces or each < machines * alone}
