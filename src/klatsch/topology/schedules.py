"""Graphs that change from round to round and repeat: few messages each, and fast together."""

from __future__ import annotations

from functools import cache
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from klatsch.arguments import whole
from klatsch.topology.validation import node_count
from klatsch.topology.graph import Topology
from klatsch.topology.families import powers_of_two_below
from klatsch.topology.weights import circulant, symmetric

Nodes = NDArray[np.int64]
WeightedLinks = tuple[Nodes, Nodes, NDArray[np.float64]]  # both ends and the weight of every undirected link
MOST_LINKS = 20_000_000  # over a period: about four gigabytes
Round = list[WeightedLinks]  # links of one round that touch different nodes


def one_peer_exponential(n: int) -> Topology:
    """Directed: in phase k node i averages itself with node i + 2^k (modulo n), which it hears; period ceil(log2 n).

    If n is a power of two, one period gives the exact mean.

    References:
        Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021, Section 4.
    """
    n = node_count(n, "one_peer_exponential")
    phases = [circulant(n, [offset]) for offset in powers_of_two_below(n)]
    return Topology("one_peer_exponential", tuple(phases or [circulant(n, [])]))


def base_graph(n: int, k: int = 1) -> Topology:
    """The Base-(k+1) Graph: at most k neighbours in every round, and one period gives the exact mean for every n.

    n = p q, where p holds all prime factors up to k + 1. Either p groups of q nodes average exactly inside by the
    simple Base-(k+1) Graph and then, factor by factor, across the groups; or all n nodes use the simple graph, if that
    is shorter. A node with nothing to do in a round averages with nodes that hold the same value by then: that leaves
    the mean of a period as it is, and makes every round count when gradients come in between.

    Args:
        n: number of nodes.
        k: largest number of neighbours in a round.

    Raises:
        ValueError: there would be too many links.

    References:
        Takezawa et al., "Beyond exponential graph: communication-efficient topologies for decentralized learning via
        finite-time convergence", 2023, Algorithms 1 (hyper-hypercube), 2 (simple) and 3.
    """
    n, k = node_count(n, "base_graph"), whole(k, "base_graph: k", 1)
    links = n * min(k, n - 1) * base_graph_period(n, k) // 2
    if links > MOST_LINKS:
        raise ValueError(
            f"base_graph: n = {n:,} with k = {k:,} has up to {links:,} links over a period; the most is "
            f"{MOST_LINKS:,}: lower k, or take fewer nodes"
        )
    rounds = _base(np.arange(n), k) or [[]]
    return Topology(f"base_graph(k={k})", tuple(symmetric(n, *_joined(links)) for links in rounds))


def base_graph_period(n: int, k: int = 1) -> int:
    """The number of rounds of `base_graph(n, k)`, without building it."""
    return max(1, min(_simple_length(n, k), _composed_length(n, k)))


# --- the three constructions, as lists of rounds on an array of nodes ------------------------------------------------


def _hyper_hypercube(nodes: Nodes, k: int) -> list[Round]:
    """Algorithm 1, for a number of nodes without prime factors above k + 1: average along one factor per round."""
    shape = _factors(len(nodes), k)
    assert shape is not None
    cube = nodes.reshape(shape)
    return [[_cliques(np.moveaxis(cube, axis, -1).reshape(-1, side))] for axis, side in enumerate(shape)]


def _simple(nodes: Nodes, k: int) -> list[Round]:
    """Algorithm 2, for any number of nodes: n is written in base k + 1, one block of nodes per digit."""
    digits = _digits(len(nodes), k)
    if len(digits) == 1:
        return _hyper_hypercube(nodes, k)
    sizes = [a * (k + 1) ** p for a, p in digits]
    blocks = np.split(nodes, np.cumsum(sizes)[:-1])

    # First every block finds its own mean, all at the same time; a block that is done goes over it again.
    first = len(_hyper_hypercube(blocks[0], k))
    rounds = _in_parallel([_repeated(_hyper_hypercube(block, k), first) for block in blocks])
    rounds += [[] for _ in range(_simple_length(len(nodes), k) - first)]

    # Then block l meets all later blocks at once: each later node meets one node of each of the a_l parts of block l,
    # and takes over the share of their mean. That leaves the parts of block l with the overall mean on average.
    for step, (block, (a, p)) in enumerate(zip(blocks, digits, strict=True)):
        later = blocks[step + 1 :]
        parts = block.reshape(a, (k + 1) ** p) if later else block.reshape(1, -1)
        if later:
            meeting, others = rounds[first + step], np.concatenate(later)
            met, resting = parts[:, : len(others)].ravel(), parts[:, len(others) :].ravel()
            weight = len(block) / (a * (len(block) + len(others)))
            meeting.append((met, np.tile(others, a), np.full(len(met), weight)))
            meeting += _groups(resting, k)
        # Last, each part spreads the mean inside, while the later blocks go on.
        start = first + step + (1 if later else 0)
        for part in parts:
            again = _repeated(_hyper_hypercube(part, k), len(rounds) - start)
            for links, more in zip(rounds[start:], again, strict=True):
                links += more
    return rounds


def _base(nodes: Nodes, k: int) -> list[Round]:
    """Algorithm 3: factors up to k + 1 by hyper-hypercubes, the rest by the simple graph."""
    n = len(nodes)
    if _simple_length(n, k) < _composed_length(n, k):
        return _simple(nodes, k)
    p, q = _split(n, k)
    groups = nodes.reshape(p, q)
    inside = _in_parallel([_simple(group, k) for group in groups])
    across = _in_parallel([_hyper_hypercube(column, k) for column in groups.T])
    return inside + across


# --- lengths and number theory ---------------------------------------------------------------------------------------


def _simple_length(n: int, k: int) -> int:
    digits = _digits(n, k)
    (a, p), *rest = digits
    first = p + (a > 1)
    return first + 1 + p if rest else first


def _composed_length(n: int, k: int) -> int:
    p, q = _split(n, k)
    return _simple_length(q, k) + len(_factors(p, k) or ())


def _digits(n: int, k: int) -> list[tuple[int, int]]:
    """The non-zero digits a and their exponents p in n = sum of a (k + 1)^p, largest first."""
    digits, p = [], 0
    while n:
        n, a = divmod(n, k + 1)
        if a:
            digits.append((a, p))
        p += 1
    return digits[::-1]


def _split(n: int, k: int) -> tuple[int, int]:
    """n = p q, where p has only prime factors up to k + 1 and q has none of them."""
    p, q = 1, n
    for divisor in range(2, min(k + 1, n) + 1):
        while q % divisor == 0:
            p, q = p * divisor, q // divisor
    return p, q


@cache
def _factors(n: int, k: int) -> tuple[int, ...] | None:
    """The fewest factors from 2 to k + 1 whose product is n, or None if n has a larger prime factor."""
    if n == 1:
        return ()
    best: tuple[int, ...] | None = None
    for divisor in range(min(k + 1, n), 1, -1):
        if n % divisor == 0:
            rest = _factors(n // divisor, k)
            if rest is not None and (best is None or len(rest) + 1 < len(best)):
                best = (divisor, *rest)
    return best


# --- links -----------------------------------------------------------------------------------------------------------


def _cliques(groups: Nodes) -> WeightedLinks:
    """Every row of `groups` averages all its nodes."""
    side = groups.shape[1]
    i, j = np.triu_indices(side, k=1)
    a, b = groups[:, i].ravel(), groups[:, j].ravel()
    return a, b, np.full(len(a), 1.0 / side)


def _groups(nodes: Nodes, k: int) -> Round:
    """Groups of k + 1 nodes that average, and a smaller one of what is left."""
    full = len(nodes) // (k + 1) * (k + 1)
    parts = (nodes[:full].reshape(-1, k + 1), nodes[full:].reshape(1, -1))
    return [_cliques(groups) for groups in parts if groups.size]


def _repeated(rounds: list[Round], length: int) -> list[Round]:
    """The rounds over and over, up to a length; a single node has none and rests."""
    return [list(rounds[t % len(rounds)]) if rounds else [] for t in range(length)]


def _in_parallel(schedules: list[list[Round]]) -> list[Round]:
    """Schedules on different nodes, side by side; the shorter ones rest at the end."""
    return [[links for part in parts for links in part] for parts in zip_longest(*schedules, fillvalue=[])]


def _joined(round_: Round) -> WeightedLinks:
    empty = np.array([], dtype=np.int64)
    if not round_:
        return empty, empty, np.array([])
    i, j, weight = (np.concatenate(part) for part in zip(*round_, strict=True))
    return i, j, weight
