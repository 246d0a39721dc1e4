"""Topologies by name, for study files and the command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from klatsch.arguments import check_options, named
from klatsch.own import is_own, label, load
from klatsch.topology.channel import CHANNEL, channel
from klatsch.topology.families import FAMILIES, UNLIMITED, Family
from klatsch.topology.graph import Topology
from klatsch.topology.validation import rounds_between


def make(name: str, n: int | None = None, **choices: object) -> Topology:
    """A topology by name: `make("ring", 16)`, `make("base_graph", 16, k=2)`, `make("torus", rows=3, cols=4)`.

    `make("ring/8", 16)` and `make("ring", 16, every=8)` gossip in every 8th round only; `late` and `wire` say how
    messages travel (see `channel`).
    """
    return builder(name, choices)(n, **choices)


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, n, ...)` takes besides n; all take those of `channel`."""
    return *family(name).options, *CHANNEL


def spectral_gap(name: str, n: int, **choices: object) -> float:
    """The spectral gap rho of `make(name, n, ...)`, in closed form where one is known: there n may be a million."""
    build, known = builder(name, choices), family(name)
    own, travel = _parted(name, choices)
    if known.gap is None or travel.get("late", 0) >= travel["every"] or travel.get("loss"):  # which change the weights
        return build(n, **choices).spectral_gap
    # A lattice of given sides may have an n that is refused without them: its closed form checks.
    gap = known.gap(n if known.lattice else known.checked(n, UNLIMITED), **own)
    return gap / int(travel["every"])


def nth_size(name: str, s: int) -> int:
    """The s-th size (from 1) at which a family keeps its shape; for most families that is s."""
    return family(name).nth_size(s)


def builder(name: str, choices: Collection[str] = ()) -> Callable[..., Topology]:
    """The function that builds a topology; checks its name and the names of its options first."""
    check_options(name, choices, options(name))

    def build(n: int | None = None, **chosen: object) -> Topology:
        own, travel = _parted(name, chosen)
        graph = family(name).build(n, **own)
        if not isinstance(graph, Topology):
            raise ValueError(
                f"{label(split(name)[0])} returns a {type(graph).__name__}; return a Topology, such as topology.ring(n)"
            )
        return channel(graph, **travel)

    return build


def family(name: str) -> Family:
    """The family of "ring" or "ring/8"; for your own "file.py:function" it knows the builder only."""
    kind, _ = split(name)
    return Family(load("topology", kind), symmetric=False) if is_own(kind) else named("topology", kind, FAMILIES)


def split(name: str) -> tuple[str, int]:
    """A name as family and rounds between two mixes: ("ring", 8) for "ring/8"."""
    if not isinstance(name, str) or "/" not in name:
        return name, 1
    kind, _, H = name.rpartition("/") if is_own(name) else name.partition("/")
    if is_own(H):  # the slash belongs to a path
        return name, 1
    if not (H.isascii() and H.isdigit() and len(H) < 10 and int(H) > 0):
        raise ValueError(
            f"topology {name!r}: {H!r} is not a number of rounds; write {kind}/8 for gossip in every 8th round"
        )
    return kind, rounds_between(int(H))


def _parted(name: str, choices: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """The options of the family, and those of the channel, of which the name may hold `every`."""
    kind, between = split(name)
    own = {option: value for option, value in choices.items() if option not in CHANNEL}
    travel = {option: value for option, value in choices.items() if option in CHANNEL}
    if "every" in travel:
        if kind != name:
            raise ValueError(f"{name} with every = {travel['every']!r}: the name says that; leave one of them out")
        rounds_between(travel["every"])
    return own, {"every": between} | travel
