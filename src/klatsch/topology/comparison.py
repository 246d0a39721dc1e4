"""A graph in numbers: `summarize` says how fast it mixes and what a round costs, `compare` does so for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from klatsch.arguments import whole
from klatsch.topology.channel import CHANNEL, check_channel, damps, encoded_bytes, no_wire
from klatsch.topology.families import FAMILIES, family, make, node_count, options, spectral_gap
from klatsch.topology.graph import Topology, check_topology

GAMMA = 0.95  # the memory that explains deep-learning runs best in Vogels et al. 2022

LARGEST_DETAILED = 20_000  # nodes beyond which the slower figures are left out
LARGEST_SOLVED = 100_000  # nodes beyond which a gap comes from a closed form or not at all: solvers take minutes
LARGEST_DENSE = 1000  # nodes up to which a graph with links between all of them joins a comparison


@dataclass(frozen=True)
class Summary:
    """What one round of gossip on a topology costs, and how fast it mixes."""

    name: str
    nodes: int
    edges: int
    degree: int
    period: int | None  # none where the graph is drawn anew in every round
    every: int
    late: int
    wire: str
    symmetric: bool
    doubly_stochastic: bool
    rho: float
    rounds_to_halve: int | None
    exact_after: int | None
    smallest_eigenvalue: float | None
    momentum_limit: float | None  # of outer steps
    effective_neighbors: float | None
    messages_per_round: float
    params: int
    bytes_per_vector: float  # of `params` numbers, sent per node and round, on average
    copies: int = 0  # vectors that a node holds for each that it sends


def summarize(topology: Topology, params: int = 1_000_000, *, rho: float | None = None) -> Summary:
    """Everything that a table shows about one topology.

    Args:
        topology: the graph.
        params: parameters of the model, for the size of messages.
        rho: the spectral gap in closed form; then it is not solved for, and changing graphs are not followed.
    """
    check_topology("summarize", topology)
    vector = encoded_bytes(topology.wire, whole(params, "params", 1))
    small = topology.size <= LARGEST_DETAILED
    static = topology.symmetric and not topology.changes
    halved = None
    if rho is not None and not topology.changes:  # such static families are symmetric or circulant: they shrink by it
        of_mix = rho * topology.every
        halved = topology.every * (1 if of_mix >= 0.5 else math.ceil(math.log(0.5) / math.log1p(-of_mix) - 1e-9))
    return Summary(
        name=topology.name,
        nodes=topology.size,
        edges=topology.edges,
        degree=topology.degree,
        period=topology.period if topology.shuffle is None else None,
        every=topology.every,
        late=topology.late,
        wire=topology.wire,
        symmetric=topology.symmetric,
        doubly_stochastic=topology.doubly_stochastic,
        rho=topology.spectral_gap if rho is None else rho,
        rounds_to_halve=topology.rounds_to_halve if rho is None else halved,
        exact_after=topology.exact_after,
        smallest_eigenvalue=topology.smallest_eigenvalue if static and small else None,
        momentum_limit=topology.momentum_limit,
        effective_neighbors=topology.effective_neighbors(GAMMA) if topology.doubly_stochastic and small else None,
        messages_per_round=topology.messages,
        params=params,
        bytes_per_vector=topology.messages * vector,
        copies=topology.copies if topology.wire != CHANNEL["wire"] else 0,
    )


def beyond_solvers(name: str, n: int, lazy: bool, choices: Mapping[str, object]) -> bool:
    """Whether n nodes need the closed form of the gap, being too many to solve; refused where there is none."""
    if reason := _unsolvable(name, n, "lazy " * lazy + _changed(choices)):
        raise ValueError(reason)
    return n > LARGEST_SOLVED


def _changed(choices: Mapping[str, object]) -> str:
    """What makes the weights of a channel others than the family's."""
    return "late " * bool(choices.get("late")) + "damped " * damps(choices.get("wire", CHANNEL["wire"]))


def _unsolvable(name: str, n: int, changed: str = "") -> str:
    """Why the gap of so many nodes is not known; `changed` says how the weights differ from the family's."""
    if n <= LARGEST_SOLVED or (family(name).gap is not None and not changed):
        return ""
    return (
        f"{changed}{name}: no closed form of its spectral gap is known, and {n:,} nodes are too many "
        f"to solve for it; take {LARGEST_SOLVED:,} or fewer"
    )


def compare(n: int, params: int = 1_000_000, **choices: object) -> tuple[list[Summary], dict[str, str]]:
    """All topologies of n nodes, the largest rho first, and why others are left out; each takes the options it has."""
    node_count(n, "compare")
    whole(params, "params", 1)
    travel = {name: value for name, value in choices.items() if name in CHANNEL}
    check_channel(**travel)
    changed, wire = _changed(travel), travel.get("wire", CHANNEL["wire"])
    summaries, left_out = [], {}
    for name, kind in FAMILIES.items():
        own = {key: value for key, value in choices.items() if key in options(name)}
        links = f"{name}: {n * (n - 1) // 2:,} links; it joins a comparison up to {LARGEST_DENSE:,} nodes"
        dense = kind.dense and n > LARGEST_DENSE
        refusal = no_wire(name, wire, kind.drawn) or kind.refusal(n) or _unsolvable(name, n, changed)
        if reason := links if dense else refusal:
            left_out[name] = reason
        else:
            rho = spectral_gap(name, n, **own) if n > LARGEST_SOLVED else None
            summaries.append(summarize(make(name, n, **own), params, rho=rho))
    return sorted(summaries, key=lambda s: -s.rho), left_out
