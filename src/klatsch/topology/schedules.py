"""The rounds of the Base-(k+1) Graph (Takezawa et al. 2023): few messages in each, and the exact mean after all.

n = p q, where p holds all prime factors up to k + 1. Each of p groups of q nodes averages exactly by the simple
Base-(k+1) Graph; then the groups average, factor by factor. If it is shorter, all n nodes use the simple graph.
"""

from __future__ import annotations

from functools import cache
from itertools import zip_longest

import numpy as np

from klatsch.topology.matrix import Nodes, Weights

WeightedLinks = tuple[Nodes, Nodes, Weights]  # both ends and the weight of every undirected link
Round = list[WeightedLinks]  # links of one round that touch different nodes


def base_graph_rounds(n: int, k: int) -> list[WeightedLinks]:
    """Algorithm 3: hyper-hypercubes for the factors up to k + 1, the simple graph for the rest."""
    nodes = np.arange(n)
    if _simple_length(n, k) < _composed_length(n, k):
        rounds = _simple(nodes, k)
    else:
        groups = nodes.reshape(_split(n, k))
        rounds = _in_parallel([_simple(group, k) for group in groups])
        rounds += _in_parallel([_hyper_hypercube(column, k) for column in groups.T])
    empty: WeightedLinks = (nodes[:0], nodes[:0], np.array([]))
    joined = [zip(empty, *links, strict=True) for links in rounds or [[]]]
    return [tuple(np.concatenate(part) for part in parts) for parts in joined]  # type: ignore[misc]


def base_graph_period(n: int, k: int = 1) -> int:
    """The number of rounds of `base_graph(n, k)`, without building it."""
    return max(1, min(_simple_length(n, k), _composed_length(n, k)))


def _hyper_hypercube(nodes: Nodes, k: int) -> list[Round]:
    """Algorithm 1, for numbers of nodes without prime factors above k + 1: one factor per round."""
    shape = _factors(len(nodes), k)
    assert shape is not None
    cube = nodes.reshape(shape)
    return [[_cliques(np.moveaxis(cube, axis, -1).reshape(-1, side))] for axis, side in enumerate(shape)]


def _simple(nodes: Nodes, k: int) -> list[Round]:
    """Algorithm 2, for any number of nodes n: one block of nodes for each digit of n in base k + 1."""
    digits = _digits(len(nodes), k)
    if len(digits) == 1:
        return _hyper_hypercube(nodes, k)
    sizes = [a * (k + 1) ** p for a, p in digits]
    blocks = np.split(nodes, np.cumsum(sizes)[:-1])

    # First all blocks find their own means at the same time; one that is done repeats its rounds.
    first = len(_hyper_hypercube(blocks[0], k))
    rounds = _in_parallel([_repeated(_hyper_hypercube(block, k), first) for block in blocks])
    rounds += [[] for _ in range(_simple_length(len(nodes), k) - first)]

    # Then block l meets all later blocks: each later node meets one node from each of the a_l parts of block l and
    # takes its share of their mean. Afterwards the mean of every part of block l is the overall mean.
    for step, (block, (a, p)) in enumerate(zip(blocks, digits, strict=True)):
        later = blocks[step + 1 :]
        parts = block.reshape(a, (k + 1) ** p) if later else block.reshape(1, -1)
        if later:
            meeting, others = rounds[first + step], np.concatenate(later)
            met, resting = parts[:, : len(others)].ravel(), parts[:, len(others) :].ravel()
            weight = len(block) / (a * (len(block) + len(others)))
            meeting.append((met, np.tile(others, a), np.full(len(met), weight)))
            full = len(resting) // (k + 1) * (k + 1)
            rest = (resting[:full].reshape(-1, k + 1), resting[full:].reshape(1, -1))
            meeting += [_cliques(groups) for groups in rest if groups.size]
        # Last, each part averages inside while the later blocks go on.
        start = first + step + (1 if later else 0)
        for part in parts:
            again = _repeated(_hyper_hypercube(part, k), len(rounds) - start)
            for links, more in zip(rounds[start:], again, strict=True):
                links += more
    return rounds


def _simple_length(n: int, k: int) -> int:
    (a, p), *rest = _digits(n, k)
    first = p + (a > 1)
    return first + 1 + p if rest else first


def _composed_length(n: int, k: int) -> int:
    p, q = _split(n, k)
    return _simple_length(q, k) + len(_factors(p, k) or ())


def _digits(n: int, k: int) -> list[tuple[int, int]]:
    """The non-zero digits a and their exponents p in n = sum of a (k + 1)^p, largest first."""
    return [(a, p) for p in reversed(range(n.bit_length())) if (a := n // (k + 1) ** p % (k + 1))]


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
    divisors = [divisor for divisor in range(min(k + 1, n), 1, -1) if n % divisor == 0]
    found = [(divisor, *rest) for divisor in divisors if (rest := _factors(n // divisor, k)) is not None]
    return min(found, key=len, default=None)


def _cliques(groups: Nodes) -> WeightedLinks:
    """Every row of `groups` averages all its nodes."""
    side = groups.shape[1]
    i, j = np.triu_indices(side, k=1)
    a, b = groups[:, i].ravel(), groups[:, j].ravel()
    return a, b, np.full(len(a), 1.0 / side)


def _repeated(rounds: list[Round], length: int) -> list[Round]:
    """The rounds repeated up to a length; a single node rests."""
    return [list(rounds[t % len(rounds)]) if rounds else [] for t in range(length)]


def _in_parallel(schedules: list[list[Round]]) -> list[Round]:
    """Schedules of different nodes at the same time; the shorter ones rest at the end."""
    return [[links for part in parts for links in part] for parts in zip_longest(*schedules, fillvalue=[])]
