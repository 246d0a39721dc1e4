"""What the paper's theory promises at least: upper bounds, with all constants of its rates set to 1."""

from __future__ import annotations

import math
from typing import NamedTuple

from klatsch import theory, topology
from klatsch.arguments import number, whole
from klatsch.clock import Clock
from klatsch.clock.network import NoLinkError
from klatsch.planning.ways import ALL_REDUCE, MOST_MACHINES, Way, round_seconds
from klatsch.theory import Constants

GRAPHS = ("ring", "torus", "one_peer_exponential")
RATES = {"dat": GRAPHS, "dsgd": GRAPHS, "minibatch": (ALL_REDUCE,)}


class Bound(NamedTuple):
    """A rule on a graph: with how many machines, in how many rounds and how much time."""

    rule: str
    graph: str
    machines: int
    rounds: float = math.nan
    each: float = math.nan  # seconds of a round

    @property
    def seconds(self) -> float:
        """To the target."""
        return self.rounds * self.each


def largest(constants: Constants, samples: float, machines: float = math.inf) -> list[Bound]:
    """Up to how many machines so many samples bring as much as on one, by rule and graph; `machines` at most."""
    return [
        Bound(rule, graph, int(min(machines, theory.largest_machines(rule, samples, graph, constants))))
        for rule, graphs in RATES.items()
        for graph in graphs
    ]


def fastest(constants: Constants, target: float, clock: Clock, params: int, machines: int) -> list[Bound]:
    """The number of machines, of 1, 2, 4, ..., with which the bound on f(x) - f* reaches the target first."""
    number("target", target, lambda v: 1e-50 <= v < math.inf, "a positive error")
    whole(params, "params", 1)
    machines = min(whole(machines, "machines", 1, MOST_MACHINES), clock.nodes or MOST_MACHINES)
    found = []
    for rule, graphs in RATES.items():
        for graph in graphs:
            choices = []
            for n in [1 << k for k in range(machines.bit_length())]:
                name, way = graph if n > 1 else ALL_REDUCE, Way(n, "dat" if rule == "dat" else "dsgd", graph)
                try:
                    gap = topology.spectral_gap(name, n)
                except ValueError:  # no graph of this size
                    continue
                try:
                    each = round_seconds(clock, way if n > 1 else Way(1), params)
                except NoLinkError:
                    continue
                rounds = theory.rounds_to_error(rule, target, n, min(1.0, gap), constants)
                choices.append(Bound(rule, graph, n, rounds, each))
            found.append(min(choices, key=lambda bound: bound.seconds))
    return sorted(found, key=lambda bound: bound.seconds)
