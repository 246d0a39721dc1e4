"""What a planner needs of a family of graphs, at any size and without building it: sizes, gap and neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from klatsch import topology as topologies
from klatsch.topology.closed_form import CLOSED_FORMS, nth_size
from klatsch.topology.silence import split
from klatsch.topology.families import lattice_shape

ALL_UP_TO = 64  # sizes that are all looked at; beyond, each is about a tenth larger than the one before
RIPPLED_UP_TO = 1024  # the same for families whose gap does not simply fall with the size
RIPPLED = ("base_graph", "exponential", "one_peer_exponential")
LARGEST_BUILT = 256  # nodes of families whose gap has no closed form, and is that of a graph that is built
SYMMETRIC = ("ring", "torus", "grid", "complete", "near_complete", "star", "hypercube", "erdos_renyi", "random_regular")


class Graph(NamedTuple):
    """One size of a family."""

    nodes: int
    rho: float  # spectral gap
    degree: int  # most messages that a node sends in a round
    every: int = 1  # rounds between two in which it sends any


def log2_up(n: int) -> int:
    """log2 n, rounded up."""
    return (n - 1).bit_length()


# Most messages that one node sends in a round. The families without a closed form are built.
DEGREES: dict[str, Callable[[int], int]] = {
    "ring": lambda n: min(n - 1, 2),
    "torus": lambda n: sum(min(side - 1, 2) for side in lattice_shape("torus", n, None, None)),
    "complete": lambda n: n - 1,
    "near_complete": lambda n: n - 1 if n <= 2 else n - 2 if n % 2 == 0 else n - 1,
    "star": lambda n: n - 1,
    "hypercube": log2_up,
    "exponential": log2_up,
    "one_peer_exponential": lambda n: min(n - 1, 1),
    "base_graph": lambda n: min(n - 1, 1),
    "directed_ring": lambda n: min(n - 1, 1),
}


def sizes(name: str, most: int) -> list[int]:
    """Sizes of a family up to `most`: all small ones, then fewer and fewer, with powers of two, which mix fast."""
    name, _ = split(name)
    most = most if name in CLOSED_FORMS else min(most, LARGEST_BUILT)
    every = RIPPLED_UP_TO if name in RIPPLED else ALL_UP_TO
    found, step = {1}, 1
    while (size := nth_size(name, step)) <= most:
        found.add(size)
        step += 1 if step < every else max(1, step // 10)
    if name not in ("torus", "grid", "hypercube"):
        found |= {1 << k for k in range(most.bit_length())} | {most}
    return sorted(found)


@lru_cache(maxsize=100_000)
def graph(name: str, n: int) -> Graph | None:
    """One size of a family, or None where the family refuses it."""
    if n == 1:
        return Graph(1, 1.0, 0)
    kind, every = split(name)
    try:
        if kind in CLOSED_FORMS:
            return Graph(n, topologies.spectral_gap(name, n), DEGREES[kind](n), every)
        built = topologies.make(name, n)
        return Graph(n, built.spectral_gap, built.degree, every)
    except ValueError:  # a size that the family does not have
        return None


def family(name: str, most: int) -> list[Graph]:
    """The sizes of a family that there are, up to `most` nodes."""
    found = (graph(name, n) for n in sizes(name, most))
    return [one for one in found if one is not None and 0 < one.rho <= 1]


def between(name: str, low: int, high: int) -> list[int]:
    """All sizes of a family strictly between two."""
    name, _ = split(name)
    if name not in CLOSED_FORMS:
        return list(range(low + 1, high))
    first = _step(name, low)
    return [size for step in range(first, _step(name, high) + 1) if low < (size := nth_size(name, step)) < high]


def _step(name: str, size: int) -> int:
    """A step of a family at or below a size."""
    if name in ("torus", "grid"):
        return max(1, 2 * math.isqrt(size) - 3)
    return max(1, size.bit_length() - 1 if name == "hypercube" else size - 1)
