"""The name table: topologies by name, for study files, the command line and the shared tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from klatsch.arguments import check_options, named
from klatsch.topology.checks import UNLIMITED, node_count
from klatsch.topology.closed_form import CLOSED_FORMS
from klatsch.topology.core import Topology
from klatsch.topology.static import (
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
from klatsch.topology.varying import base_graph, one_peer_exponential

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

    Raises:
        ValueError: the name is unknown, or the topology has no such option, or refuses n.
    """
    return builder(name, choices)(n, **choices)


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, n, ...)` takes beside n."""
    return tuple(inspect.signature(builder(name)).parameters)[1:]


def spectral_gap(name: str, n: int, **choices: Any) -> float:
    """The spectral gap rho of `make(name, n, ...)`, by a closed form where one is known, so that n may be a million."""
    build = builder(name, choices)
    if name not in CLOSED_FORMS:
        return build(n, **choices).spectral_gap
    return CLOSED_FORMS[name](node_count(n, name, most=UNLIMITED), **choices)


def builder(name: str, choices: Collection[str] = ()) -> Callable[..., Topology]:
    """The function that builds a topology, after a check of its name and of the names of its options."""
    build = named("topology", name, TOPOLOGIES)
    check_options(name, choices, tuple(inspect.signature(build).parameters)[1:])
    return build
