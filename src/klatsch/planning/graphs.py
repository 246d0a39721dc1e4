"""The sizes of a family of graphs that the planner considers, with their gaps and degrees."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from klatsch.topology import make, spectral_gap
from klatsch.topology.names import family as family_of
from klatsch.topology.names import split

ALL_UP_TO = 64  # steps that are all considered; beyond, each is about 10 % larger than the last
RIPPLED_UP_TO = 1024  # the same for families whose gap does not simply fall with the size
LARGEST_BUILT = 256  # nodes, for families without a closed form of their gap


class Graph(NamedTuple):
    """One size of a family."""

    nodes: int
    rho: float  # spectral gap
    degree: int  # most messages that a node sends in a round
    every: int = 1  # H: it sends in every H-th round only


def is_built(name: str, late: int = 0) -> bool:
    """Whether graphs have to be built to know their gap: there is no closed form, or late messages change weights."""
    return family_of(name).gap is None or late >= split(name)[1]


def sizes(name: str, most: int, late: int = 0) -> list[int]:
    """Sizes of a family up to `most`: all small ones, then fewer, and powers of two, which mix fast."""
    known, built = family_of(name), is_built(name, late)
    most = min(most, LARGEST_BUILT) if built else most
    every = RIPPLED_UP_TO if known.ripples and not built else ALL_UP_TO
    found, step = {1}, 1
    while (size := known.nth_size(step)) <= most:
        found.add(size)
        step += 1 if step < every else max(1, step // 10)
    powers = set() if known.lattice else {most, *(1 << k for k in range(most.bit_length()))}
    return sorted(n for n in found | powers if not known.refusal(n))


@lru_cache(maxsize=100_000)
def graph(name: str, n: int, late: int = 0) -> Graph | None:
    """One size of a family, or None if the family does not have it."""
    known, (_, every) = family_of(name), split(name)
    if n == 1:
        return Graph(1, 1.0, 0)
    try:
        if not is_built(name, late) and known.degree is not None:
            return Graph(n, spectral_gap(name, n), known.degree(n), every)
        built = make(name, n, late=late)
        return Graph(n, built.spectral_gap, built.degree, every)
    except ValueError:
        return None


def family(name: str, most: int, late: int = 0) -> list[Graph]:
    """The sizes of a family up to `most` nodes, as graphs."""
    found = (graph(name, n, late) for n in sizes(name, most, late))
    return [one for one in found if one is not None and 0 < one.rho <= 1]


def between(name: str, low: int, high: int, late: int = 0) -> list[int]:
    """All sizes of a family strictly between two."""
    known = family_of(name)
    if is_built(name, late):
        return list(range(low + 1, high))
    steps = range(1, high + 1)  # there are no more sizes than numbers
    first, end = (bisect_right(steps, size, key=known.nth_size) for size in (low, high - 1))
    return [known.nth_size(step) for step in steps[first:end]]
