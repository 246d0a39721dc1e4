"""The sizes and topologies that every property is checked on."""

import functools

import networkx as nx
import numpy as np

from klatsch import topology as tp

# All small ones; then primes, squares, cubes, powers of two and their neighbours.
SIZES = (*range(1, 18), 20, 23, 24, 25, 27, 31, 32, 33, 36, 49, 60, 63, 64)

REFUSED = {name: {n for n in range(1, 65) if family.refusal(n)} for name, family in tp.FAMILIES.items()}
REPEATING = [name for name in tp.TOPOLOGIES if name != "random_matching"]  # which has tests of its own


def build_or_skip(name, n, **options):
    """A topology, or None where the family refuses this n, and must (its errors are read in test_bad_input)."""
    try:
        graph = tp.make(name, n, **options)
    except ValueError:
        assert n in REFUSED[name]
        return None
    assert n not in REFUSED[name]
    return graph


@functools.cache
def all_topologies(n):
    """Every named topology that repeats and exists for n nodes, and a few options of those that have any."""
    graphs = [graph for name in REPEATING if (graph := build_or_skip(name, n)) is not None]
    graphs += [tp.base_graph(n, 3), tp.erdos_renyi(n, p=0.7, seed=5), tp.lazy(tp.ring(n))]
    return graphs + ([tp.random_regular(n, degree=2, seed=1)] if n > 3 else [])


def uneven(n):
    """A directed ring with a shortcut, on which push-sum's weights differ where there are four nodes or more."""
    ring = [(k, (k + 1) % n) for k in range(n)]
    return tp.from_networkx(nx.DiGraph([*ring, (0, n // 2)]), stochastic="columns")


def product(graph):
    """P_tau ... P_1 as a dense matrix, the simple reference."""
    result = np.eye(graph.size)
    for P in graph.matrices:
        result = P.toarray() @ result
    return result
