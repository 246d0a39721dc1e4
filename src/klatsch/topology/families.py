"""Graphs that stay the same every round.

Undirected ones carry Metropolis–Hastings weights, so a graph of equal degrees d has 1 / (d + 1) on every link.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from klatsch.arguments import whole
from klatsch.topology.validation import LARGEST, UNLIMITED, node_count
from klatsch.topology.graph import Topology
from klatsch.topology.weights import circulant, metropolis_hastings

if TYPE_CHECKING:
    import networkx as nx  # loaded by the random graphs, which need it

Links = tuple[NDArray[np.int64], NDArray[np.int64]]

LARGEST_DENSE = 5_000  # nodes that may all be linked with each other: a gigabyte or two
MOST_DRAWN = 2_000_000  # links of a random graph: half a minute, and a gigabyte
TRIES = 100  # how often a random graph is drawn again until it is connected


def ring(n: int) -> Topology:
    """A circle: every node talks to the next and the previous one."""
    n = node_count(n, "ring")
    i = np.arange(n if n > 2 else n - 1)  # two nodes share one link, not two
    return _undirected("ring", n, (i, (i + 1) % n))


def torus(n: int | None = None, *, rows: int | None = None, cols: int | None = None) -> Topology:
    """A rows x cols lattice that wraps around at all four sides; from n alone, the squarest one.

    Raises:
        ValueError: n is prime, so that the lattice would be a ring, or rows and cols do not give n.
    """
    rows, cols = lattice_shape("torus", n, rows, cols)
    return _undirected(f"torus({rows}x{cols})", rows * cols, _lattice(rows, cols, wrap=True), (rows, cols))


def grid(n: int | None = None, *, rows: int | None = None, cols: int | None = None) -> Topology:
    """A rows x cols lattice with borders; from n alone, the squarest one.

    Raises:
        ValueError: n is prime, so that the lattice would be a path, or rows and cols do not give n.
    """
    rows, cols = lattice_shape("grid", n, rows, cols)
    return _undirected(f"grid({rows}x{cols})", rows * cols, _lattice(rows, cols, wrap=False), (rows, cols))


def complete(n: int) -> Topology:
    """Everyone talks to everyone: one round gives the exact mean, as a parameter server would."""
    n = node_count(n, "complete", most=LARGEST_DENSE)
    i, j = np.triu_indices(n, k=1)
    return _undirected("complete", n, (i, j))


def near_complete(n: int) -> Topology:
    """The complete graph without the links (0, 1), (2, 3), ...: the near-complete row of the paper's Table 1."""
    n = node_count(n, "near_complete", most=LARGEST_DENSE)
    if n == 2:
        raise ValueError(
            "near_complete: 2 nodes without their only link are disconnected; the nearest sizes are 1 and 3"
        )
    i, j = np.triu_indices(n, k=1)
    kept = i // 2 != j // 2
    return _undirected("near_complete", n, (i[kept], j[kept]))


def star(n: int) -> Topology:
    """Node 0 talks to everyone, the others only to node 0."""
    n = node_count(n, "star")
    leaves = np.arange(1, n)
    return _undirected("star", n, (np.zeros_like(leaves), leaves))


def hypercube(n: int) -> Topology:
    """Nodes whose numbers differ in one binary digit talk to each other; n is a power of two."""
    n = check_power_of_two(node_count(n, "hypercube"))
    nodes, bits = np.arange(n), n.bit_length() - 1
    i = np.concatenate([nodes[nodes & (1 << b) == 0] for b in range(bits)] or [nodes[:0]])
    flip = np.concatenate([np.full(n // 2, 1 << b) for b in range(bits)] or [nodes[:0]])
    return _undirected("hypercube", n, (i, i ^ flip))


def exponential(n: int) -> Topology:
    """Directed: node i hears the nodes i + 1, i + 2, i + 4, ... (Ying et al. 2021), all with equal weights."""
    n = node_count(n, "exponential")
    return Topology("exponential", (circulant(n, powers_of_two_below(n)),))


def directed_ring(n: int) -> Topology:
    """Node i hears only node i + 1, with weight 1/2: the sparsest graph that push-sum can use."""
    n = node_count(n, "directed_ring")
    return Topology("directed_ring", (circulant(n, [1] if n > 1 else []),))


def erdos_renyi(n: int, *, p: float | None = None, seed: int = 0) -> Topology:
    """Every pair of nodes is linked with probability p; drawn again until connected.

    Args:
        n: number of nodes.
        p: probability of a link; by default 2 ln(n) / n, twice the threshold of connectivity (at most 1).
        seed: the same seed gives the same graph.

    Raises:
        ValueError: p is not a probability, there would be too many links, or none of 100 draws is connected.
    """
    import networkx as nx

    n = node_count(n, "erdos_renyi")
    p = min(1.0, 2 * math.log(n) / n) if p is None else p
    if not isinstance(p, int | float | np.number) or not 0 <= p <= 1:
        raise ValueError(f"erdos_renyi: p = {p!r} is not a probability; choose it from 0 to 1")
    _check_links(f"erdos_renyi: n = {n:,} with p = {p:g}", float(p) * n * (n - 1) / 2, "lower p, or take fewer nodes")
    generator = random.Random(whole(seed, "erdos_renyi: seed", 0))
    remedy = f"raise p above ln(n) / n = {math.log(n) / n:.3g}"
    graph = _drawn(f"erdos_renyi with p = {p:g}", lambda: nx.fast_gnp_random_graph(n, p, seed=generator), remedy)
    return _undirected("erdos_renyi", n, _links(graph))


def random_regular(n: int, *, degree: int | None = None, seed: int = 0) -> Topology:
    """A random graph in which every node has the same number of neighbours; drawn again until connected.

    Args:
        n: number of nodes.
        degree: neighbours per node; by default 4, or n - 1 if that is less.
        seed: the same seed gives the same graph.

    Raises:
        ValueError: no such graph exists, it would have too many links, or none of 100 draws is connected.
    """
    import networkx as nx

    n = node_count(n, "random_regular")
    degree = min(4, n - 1) if degree is None else whole(degree, "random_regular: degree", 0)
    if degree >= n:
        raise ValueError(f"random_regular: degree = {degree} with n = {n}; choose a degree below n")
    if n * degree % 2:
        raise ValueError(
            f"random_regular: n = {n} and degree = {degree} are both odd, which no graph allows;"
            f" the nearest that work are n = {n + 1} or degree = {degree - 1}"
        )
    if degree < min(2, n - 1):
        raise ValueError(f"random_regular: degree = {degree} cannot connect {n} nodes; choose 2 or more")
    _check_links(f"random_regular: n = {n:,} with degree = {degree:,}", n * degree / 2, "lower it, or take fewer nodes")
    generator = random.Random(whole(seed, "random_regular: seed", 0))
    name = f"random_regular with degree = {degree}"
    graph = _drawn(name, lambda: nx.random_regular_graph(degree, n, seed=generator), "choose degree 3 or more")
    return _undirected("random_regular", n, _links(graph))


def powers_of_two_below(n: int) -> list[int]:
    """1, 2, 4, ... below n: the offsets of the exponential graphs."""
    return [1 << k for k in range((n - 1).bit_length())]


def check_power_of_two(n: int) -> int:
    """Check the size of a hypercube."""
    n = node_count(n, "hypercube", most=UNLIMITED)
    if n & (n - 1):
        lower, upper = 1 << (n.bit_length() - 1), 1 << n.bit_length()
        nearest = lower if n - lower <= upper - n else upper
        raise ValueError(f"hypercube: n = {n} is not a power of two; the nearest that works is {nearest}")
    return n


def squarest(n: int) -> tuple[int, int]:
    """The factors rows <= cols of n that are closest to each other."""
    rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    return rows, n // rows


def lattice_shape(name: str, n: int | None, rows: int | None, cols: int | None, most: int = LARGEST) -> tuple[int, int]:
    """Rows and columns of a lattice, from whatever of n, rows and cols is given."""
    n, rows, cols = (size if size is None else node_count(size, name, most) for size in (n, rows, cols))
    if rows is None and cols is None:
        if n is None:
            raise ValueError(f"{name}: give n, or rows and cols")
        rows, cols = squarest(n)
        if n > 1 and rows == 1:
            # The neighbours of a larger prime are even: take the squarer one.
            nearest = 4 if n <= 3 else max((n - 1, n + 1), key=squarest)
            line = "ring" if name == "torus" else "path"
            raise ValueError(
                f"{name}: n = {n} is prime and leaves only a {line}; the nearest {name} is {nearest}"
                f" = {' x '.join(map(str, squarest(nearest)))} (rows = 1 and cols = {n} if a {line} is meant)"
            )
        return rows, cols
    if n is not None:
        rows = rows or max(1, n // (cols or 1))
        cols = cols or max(1, n // rows)
        if rows * cols != n:
            raise ValueError(
                f"{name}: {rows} x {cols} = {rows * cols} nodes, not n = {n}; leave out n or change one side"
            )
    if rows is None or cols is None:
        raise ValueError(f"{name}: rows = {rows} and cols = {cols}; give both, or one of them and n")
    node_count(rows * cols, name, most)
    return rows, cols


def _undirected(name: str, n: int, links: Links, lattice: tuple[int, int] | None = None) -> Topology:
    return Topology(name, (metropolis_hastings(n, *links),), lattice=lattice)


def _drawn(name: str, draw: Callable[[], nx.Graph[int]], remedy: str) -> nx.Graph[int]:
    """The first connected one of up to 100 draws."""
    import networkx as nx

    for _ in range(TRIES):
        graph = draw()
        if nx.is_connected(graph):
            return graph
    a, b = (min(part) for part in list(nx.connected_components(graph))[:2])
    raise ValueError(
        f"{name}: none of {TRIES} draws is connected (in the last, node {a} cannot reach node {b}); {remedy}"
    )


def _check_links(what: str, links: float, remedy: str) -> None:
    if links > MOST_DRAWN:
        raise ValueError(f"{what} has about {links:,.0f} links; the most that are drawn is {MOST_DRAWN:,}: {remedy}")


def _links(graph: nx.Graph[int]) -> Links:
    pairs = np.array(sorted(graph.edges), dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _lattice(rows: int, cols: int, wrap: bool) -> Links:
    number = np.arange(rows * cols).reshape(rows, cols)
    links = []
    for axis, length in enumerate((rows, cols)):
        if wrap and length > 2:  # a side of two would close on the link it already has
            links.append((number.ravel(), np.roll(number, -1, axis).ravel()))
        elif length > 1:
            along = np.moveaxis(number, axis, 0)
            links.append((along[:-1].ravel(), along[1:].ravel()))
    i = np.concatenate([a for a, _ in links] or [number.ravel()[:0]])
    j = np.concatenate([b for _, b in links] or [number.ravel()[:0]])
    return i, j
