"""The name table: topologies by name, for study files, the command line and the shared tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from klatsch.arguments import check_options, named
from klatsch.own import label
from klatsch.topology.validation import UNLIMITED, node_count, rounds_between
from klatsch.topology.closed_form import CLOSED_FORMS
from klatsch.topology.graph import Topology
from klatsch.topology.silence import every, split
from klatsch.topology.families import (
    complete,
    directed_ring,
    erdos_renyi,
    exponential,
    grid,
    hypercube,
    near_complete,
    random_regular,
    ring,
    star,
    torus,
)
from klatsch.topology.schedules import base_graph, one_peer_exponential

TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    build.__name__: build
    for build in (
        ring,
        torus,
        grid,
        complete,
        near_complete,
        star,
        hypercube,
        exponential,
        one_peer_exponential,
        base_graph,
        directed_ring,
        erdos_renyi,
        random_regular,
    )
}


def make(name: str, n: int | None = None, **choices: Any) -> Topology:
    """A topology by name: `make("ring", 16)`, `make("base_graph", 16, k=2)`, `make("torus", rows=3, cols=4)`.

    `make("ring/8", 16)`, or `make("ring", 16, every=8)`, gossips in every 8th round only; see `every`.

    Raises:
        ValueError: the name is unknown, or the topology has no such option, or refuses n.
    """
    return builder(name, choices)(n, **choices)


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, n, ...)` takes beside n; all take `every`, the rounds between two mixes."""
    family, _ = split(name)
    return *tuple(inspect.signature(named("topology", family, TOPOLOGIES)).parameters)[1:], "every"


def spectral_gap(name: str, n: int, **choices: Any) -> float:
    """The spectral gap rho of `make(name, n, ...)`, by a closed form where one is known, so that n may be a million."""
    build = builder(name, choices)
    family, own, between = _taken_apart(name, choices)
    if family not in CLOSED_FORMS:
        return build(n, **choices).spectral_gap
    return CLOSED_FORMS[family](node_count(n, family, most=UNLIMITED), **own) / between


def builder(name: str, choices: Collection[str] = ()) -> Callable[..., Topology]:
    """The function that builds a topology, after a check of its name and of the names of its options."""
    check_options(name, choices, options(name))

    def build(n: int | None = None, **chosen: Any) -> Topology:
        family, own, between = _taken_apart(name, chosen)
        graph = named("topology", family, TOPOLOGIES)(n, **own)
        if not isinstance(graph, Topology):
            kind = type(graph).__name__
            raise ValueError(f"{label(family)} gives a {kind}; give a Topology, such as topology.ring(n)")
        return every(graph, between)

    return build


def _taken_apart(name: str, choices: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
    """The family, its own options, and the rounds between two mixes, which the name says or an option does."""
    family, between = split(name)
    own = {option: value for option, value in choices.items() if option != "every"}
    if "every" in choices:
        if family != name:
            raise ValueError(
                f"{name} with every = {choices['every']!r}: its name says that already; leave one of them out"
            )
        between = rounds_between(choices["every"])
    return family, own, between
