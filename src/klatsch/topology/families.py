"""Every family of graphs: how to build it, by its function or its name, and what is known of it at any size.

Undirected graphs have Metropolis–Hastings weights: with equal degrees d, 1 / (d + 1) on every link. Tests compare the
records of `FAMILIES` with the graphs.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from klatsch.arguments import check_options, named, number, whole
from klatsch.own import is_own, label, load
from klatsch.topology.channel import AS_THEY_ARE, CHANNEL, damps, rounds_between
from klatsch.topology.graph import Topology, channel
from klatsch.topology.matrix import Nodes, Weights, circulant, metropolis_hastings, symmetric

if TYPE_CHECKING:
    import networkx as nx  # loaded only for random graphs

LARGEST = 10**6  # nodes: up to a gigabyte for ring and torus, several for others
UNLIMITED = 10**100  # nodes, for closed forms
LARGEST_DENSE = 5_000  # nodes, all linked with each other: a gigabyte or two
MOST_DRAWN = 2_000_000  # links of a random graph: half a minute and a gigabyte
MOST_LINKS = 20_000_000  # of a base graph over a period: about four gigabytes
NO_TWO = "near_complete: 2 nodes have only the link it leaves out; take 1 or 3"
TRIES = 100  # draws of a random graph until it is connected

WeightedLinks = tuple[Nodes, Nodes, Weights]  # both ends and the weight of every undirected link
Round = list[WeightedLinks]  # links of one round that touch different nodes


@dataclass(frozen=True)
class Family:
    """What is known of a family of graphs at every size."""

    build: Callable[..., Topology]  # of n and options
    gap: Callable[..., float] | None = None  # the spectral gap in closed form, if there is one
    refusal: Callable[[int], str] = lambda n: ""  # why there is no graph of n nodes, and the remedy
    nth_size: Callable[[int], int] = lambda s: s  # the s-th size (from 1) at which it keeps its shape
    drawn: bool = False  # whether it is drawn anew in every round
    dense: bool = False  # whether (nearly) all nodes are linked with each other, now or later
    lattice: bool = False  # whether the nodes form rows and columns

    @property
    def options(self) -> tuple[str, ...]:
        """What `build` takes besides n."""
        return tuple(inspect.signature(self.build).parameters)[1:]

    def checked(self, n: object, most: int | None = None) -> int:
        """Check a number of nodes of this family, and return a plain int."""
        usual = LARGEST_DENSE if self.dense else LARGEST
        n = node_count(n, self.build.__name__, usual if most is None else most)
        if reason := self.refusal(n):
            raise ValueError(reason)
        return n


def ring(n: int) -> Topology:
    """A circle: every node talks to the next and the previous one."""
    n = FAMILIES["ring"].checked(n)
    i = np.arange(n if n > 2 else n - 1)  # two nodes share one link, not two
    return _undirected("ring", n, i, (i + 1) % n)


def torus(n: int | None = None, *, rows: int | None = None, cols: int | None = None) -> Topology:
    """A rows x cols lattice that wraps around at all four sides; from n alone, the squarest one."""
    return _lattice("torus", n, rows, cols)


def grid(n: int | None = None, *, rows: int | None = None, cols: int | None = None) -> Topology:
    """A rows x cols lattice with borders; from n alone, the squarest one."""
    return _lattice("grid", n, rows, cols)


def complete(n: int) -> Topology:
    """Everyone talks to everyone: one round gives the exact mean, as a parameter server would."""
    n = FAMILIES["complete"].checked(n)
    return _undirected("complete", n, *np.triu_indices(n, k=1), all_reduce=True)


def near_complete(n: int) -> Topology:
    """The complete graph without the links (0, 1), (2, 3), ...: the near-complete row of the paper's Table 1."""
    n = FAMILIES["near_complete"].checked(n)
    i, j = np.triu_indices(n, k=1)
    kept = i // 2 != j // 2
    return _undirected("near_complete", n, i[kept], j[kept])


def star(n: int) -> Topology:
    """Node 0 talks to everyone, the others only to node 0."""
    n = FAMILIES["star"].checked(n)
    leaves = np.arange(1, n)
    return _undirected("star", n, np.zeros_like(leaves), leaves)


def hypercube(n: int) -> Topology:
    """Nodes whose numbers differ in one binary digit talk to each other; n is a power of two."""
    n = FAMILIES["hypercube"].checked(n)
    nodes, bits = np.arange(n), np.array(powers_of_two_below(n), dtype=np.int64)[:, None]
    lower = nodes & bits == 0
    return _undirected("hypercube", n, np.broadcast_to(nodes, lower.shape)[lower], (nodes | bits)[lower])


def exponential(n: int) -> Topology:
    """Directed: node i hears the nodes i + 1, i + 2, i + 4, ... (Ying et al. 2021), all with equal weights."""
    n = FAMILIES["exponential"].checked(n)
    return Topology("exponential", (circulant(n, powers_of_two_below(n)),))


def one_peer_exponential(n: int) -> Topology:
    """Directed: in phase k node i averages itself with node i + 2^k (modulo n), which it hears; period ceil(log2 n).

    If n is a power of two, one period gives the exact mean.

    References:
        Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021, Section 4.
    """
    n = FAMILIES["one_peer_exponential"].checked(n)
    phases = [[offset] for offset in powers_of_two_below(n)] or [[]]
    return Topology("one_peer_exponential", tuple(circulant(n, offsets) for offsets in phases))


def base_graph(n: int, k: int = 1) -> Topology:
    """The Base-(k+1) Graph: at most k neighbours in every round, and one period gives the exact mean for every n.

    A node with nothing to do in a round averages with nodes that hold the same value by then, so that every round
    counts when gradients come in between.

    References:
        Takezawa et al., "Beyond exponential graph: communication-efficient topologies for decentralized learning via
        finite-time convergence", 2023, Algorithms 1 (hyper-hypercube), 2 (simple) and 3.
    """
    n, k = FAMILIES["base_graph"].checked(n), whole(k, "base_graph: k", 1)
    links = n * min(k, n - 1) * base_graph_period(n, k) // 2
    if links > MOST_LINKS:
        raise ValueError(
            f"base_graph: n = {n:,} with k = {k:,} has up to {links:,} links over a period; the most is "
            f"{MOST_LINKS:,}: lower k, or take fewer nodes"
        )
    return Topology(f"base_graph(k={k})", tuple(symmetric(n, *links) for links in base_graph_rounds(n, k)))


def directed_ring(n: int) -> Topology:
    """Node i hears only node i + 1, with weight 1/2: the sparsest graph that push-sum can use."""
    n = FAMILIES["directed_ring"].checked(n)
    return Topology("directed_ring", (circulant(n, [1] if n > 1 else []),))


def erdos_renyi(n: int, *, p: float | None = None, seed: int = 0) -> Topology:
    """Every pair of nodes is linked with probability p; drawn again until connected.

    By default p is 2 ln(n) / n, twice the threshold of connectivity, and at most 1.
    """
    import networkx as nx

    n = FAMILIES["erdos_renyi"].checked(n)
    p = min(1.0, 2 * math.log(n) / n) if p is None else p
    p = number("erdos_renyi: p", p, lambda v: 0 <= v <= 1, "a probability, from 0 to 1")
    remedy = f"raise p above ln(n) / n = {math.log(n) / n:.3g}"
    draw = partial(nx.fast_gnp_random_graph, n, p)
    return _drawn("erdos_renyi", n, f"p = {p:g}", p * n * (n - 1) / 2, draw, seed, remedy)


def random_regular(n: int, *, degree: int | None = None, seed: int = 0) -> Topology:
    """A random graph in which every node has the same number of neighbours, by default 4; drawn until connected."""
    import networkx as nx

    n = FAMILIES["random_regular"].checked(n)
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
    draw = partial(nx.random_regular_graph, degree, n)
    return _drawn("random_regular", n, f"degree = {degree:,}", n * degree / 2, draw, seed, "choose degree 3 or more")


def random_matching(n: int, *, seed: int = 0) -> Topology:
    """In every round, each node averages with one other: random pairs, drawn anew; if n is odd, one node rests.

    Over time everyone meets everyone, with one message per node and round; the pairs of NoLoCo.

    References:
        Kolehmainen et al., "NoLoCo: No-all-reduce low communication training method for large models", 2025.
        Boyd et al., "Randomized gossip algorithms", 2006, for the contraction by E[P^T P].
    """
    n, seed = FAMILIES["random_matching"].checked(n), whole(seed, "random_matching: seed", 0)
    i = np.arange(0, n - 1, 2)
    return _undirected("random_matching", n, i, i + 1, shuffle=seed if n > 2 else None)


def node_count(n: object, name: str, most: int = LARGEST) -> int:
    """Check a number of nodes, or of rows or columns, and return a plain int."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"{name}: {n!r} nodes; give a whole number from 1 up")
    if n > most:
        raise ValueError(f"{name}: {n:,} nodes are too many to build; the most is {most:,}")
    return int(n)


def powers_of_two_below(n: int) -> list[int]:
    """1, 2, 4, ... below n: the offsets of the exponential graphs."""
    return [1 << k for k in range((n - 1).bit_length())]


def squarest(n: int) -> tuple[int, int]:
    """The factors rows <= cols of n that are closest to each other."""
    rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    return rows, n // rows


def _lattice_shape(
    name: str, n: int | None, rows: int | None, cols: int | None, most: int = LARGEST
) -> tuple[int, int]:
    """Rows and columns of a lattice, from n, rows and cols, as far as given."""
    n, rows, cols = (size if size is None else node_count(size, name, most) for size in (n, rows, cols))
    if rows is None and cols is None:
        if n is None:
            raise ValueError(f"{name}: give n, or rows and cols")
        return squarest(FAMILIES[name].checked(n, most))
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


def _lattice(name: str, n: int | None, rows: int | None, cols: int | None) -> Topology:
    rows, cols = _lattice_shape(name, n, rows, cols)
    nodes = np.arange(rows * cols).reshape(rows, cols)
    links = []
    for along in (nodes, nodes.T):
        # A torus closes each line; on a side of two that link is there already.
        ends = len(along) if name == "torus" and len(along) > 2 else len(along) - 1
        links.append((along[:ends], np.roll(along, -1, axis=0)[:ends]))
    i, j = (np.concatenate([part.ravel() for part in parts]) for parts in zip(*links, strict=True))
    return _undirected(f"{name}({rows}x{cols})", rows * cols, i, j, lattice=(rows, cols))


def _undirected(name: str, n: int, i: Nodes, j: Nodes, **facts: Any) -> Topology:
    return Topology(name, (metropolis_hastings(n, i, j),), **facts)


def _drawn(
    name: str, n: int, option: str, links: float, draw: Callable[..., nx.Graph[int]], seed: int, remedy: str
) -> Topology:
    """The first connected draw of up to 100."""
    import networkx as nx

    if links > MOST_DRAWN:
        raise ValueError(
            f"{name}: n = {n:,} with {option} has about {links:,.0f} links; the most that are drawn is {MOST_DRAWN:,}: "
            f"lower {option.split()[0]}, or take fewer nodes"
        )
    generator = random.Random(whole(seed, f"{name}: seed", 0))
    for _ in range(TRIES):
        graph = draw(seed=generator)
        if nx.is_connected(graph):
            pairs = np.array(sorted(graph.edges), dtype=np.int64).reshape(-1, 2)
            return _undirected(name, n, pairs[:, 0], pairs[:, 1])
    a, b = (min(part) for part in list(nx.connected_components(graph))[:2])
    raise ValueError(
        f"{name} with {option}: none of {TRIES} draws is connected (in the last, node {a} cannot reach node {b}); "
        f"{remedy}"
    )


def _only_a_line(name: str, line: str) -> Callable[[int], str]:
    def refusal(n: int) -> str:
        if n == 1 or squarest(n)[0] > 1:
            return ""
        nearest = 4 if n <= 3 else max((n - 1, n + 1), key=squarest)  # the neighbours of a larger prime are even
        return (
            f"{name}: n = {n} is prime and leaves only a {line}; the nearest {name} is {nearest}"
            f" = {' x '.join(map(str, squarest(nearest)))} (rows = 1 and cols = {n} if a {line} is meant)"
        )

    return refusal


def _no_power_of_two(n: int) -> str:
    lower, upper = 1 << (n.bit_length() - 1), 1 << n.bit_length()
    nearest = lower if n - lower <= upper - n else upper
    return f"hypercube: n = {n} is not a power of two; the nearest that works is {nearest}" if n != lower else ""


def _torus_gap(n: int | None = None, *, rows: int | None = None, cols: int | None = None) -> float:
    """Eigenvalues (1 + r + c) / (1 + degree), with eigenvalues r and c of the two circles' links."""
    sides = _lattice_shape("torus", n, rows, cols, most=UNLIMITED)
    if math.prod(sides) <= 2:
        return 1.0
    links = 1 + sum(min(side - 1, 2) for side in sides)
    # How far a circle's second eigenvalue lies below its first: 2 - 2 cos(x), kept exact for small x.
    below = min(2.0 if side == 2 else 4 * math.sin(math.pi / side) ** 2 for side in sides if side > 1)
    lowest = sum(1.0 - side if side <= 2 else 2 * math.cos(2 * math.pi * (side // 2) / side) for side in sides)
    return min(below / links, 1 - abs((1 + lowest) / links))


def _exponential_gap(n: int) -> float:
    """A circulant matrix: its eigenvalues are sums of roots of unity."""
    node_count(n, "exponential", most=10**8)  # they are listed one by one
    offsets, j = powers_of_two_below(n), np.arange(1, n)
    total = np.ones(n - 1, dtype=np.complex128)
    for offset in offsets:
        total += np.exp(2j * np.pi * (j * offset % n) / n)
    return float(1 - np.abs(total).max(initial=0.0) / (1 + len(offsets)))


def _one_peer_gap(n: int) -> float:
    """The period's product is circulant, with eigenvalues of modulus |sin(pi j 2^tau / n)| / (2^tau sin(pi j / n)).

    The bound 1 / (2^tau sin(pi j / n)) falls up to n / 2, so the search may stop early; for a power of two all are 0.
    """
    tau = len(powers_of_two_below(n))
    largest, start, chunk = 0.0, n if n == 2**tau else 1, 2**16
    while start <= n // 2 and largest * 2**tau * math.sin(math.pi * start / n) < 1:
        j = np.arange(start, min(start + chunk, n // 2 + 1), dtype=np.float64)
        turns = j * ((2**tau - n) / n)  # sin(pi j 2^tau / n) up to sign, without whole turns
        modulus = np.abs(np.sin(np.pi * turns)) / (2**tau * np.sin(np.pi * j / n))
        largest, start = max(largest, float(modulus.max())), start + chunk
    return (1 - largest) / max(1, tau)


def _near_complete_gap(n: int) -> float:
    """Eigenvalues ±1 / (n - 1) for even n; for odd n (n + 1) / (n (n - 1)) on the pairs that are not linked."""
    return 1.0 if n == 1 else 1 - (1 / (n - 1) if n % 2 == 0 else (n + 1) / (n * (n - 1)))


def _matching_gap(n: int, seed: int = 0) -> float:
    """1 - sqrt((tr E[P^T P] - 1) / (n - 1)); P is a projection on the pairs' means, and its trace is their number."""
    whole(seed, "random_matching: seed", 0)
    return 1.0 if n == 1 else 1 - math.sqrt((n - n // 2 - 1) / (n - 1))


def _base_graph_gap(n: int, k: int = 1) -> float:
    """One period is the mean."""
    if min(whole(k, "base_graph: k", 1), n) > LARGEST:  # divisors up to k are tried one by one
        raise ValueError(f"base_graph: k = {k:,}; give at most {LARGEST:,}")
    return 1 / base_graph_period(n, k)


def _nearly_square(s: int) -> int:
    """r x r and r x (r + 1): a lattice of 2 x p nodes is a ring in disguise."""
    return 1 if s == 1 else ((s + 2) // 2) * ((s + 3) // 2)


FAMILIES: dict[str, Family] = {
    family.build.__name__: family
    for family in (
        Family(ring, lambda n: _torus_gap(rows=1, cols=n)),
        Family(torus, _torus_gap, _only_a_line("torus", "ring"), _nearly_square, lattice=True),
        Family(grid, None, _only_a_line("grid", "path"), _nearly_square, lattice=True),
        Family(complete, lambda n: 1.0, dense=True),
        Family(near_complete, _near_complete_gap, lambda n: NO_TWO * (n == 2), lambda s: s + (s > 1), dense=True),
        Family(star, lambda n: 1.0 if n <= 2 else 1 / n),  # 1 - 1/n on differences between leaves
        # eigenvalues 1 - 2 j / (log2(n) + 1)
        Family(hypercube, lambda n: 1.0 if n == 1 else 2 / n.bit_length(), _no_power_of_two, lambda s: 1 << (s - 1)),
        Family(exponential, _exponential_gap),
        Family(one_peer_exponential, _one_peer_gap),
        Family(base_graph, _base_graph_gap),
        # eigenvalues (1 + exp(2 pi i j / n)) / 2, of modulus cos(pi j / n)
        Family(directed_ring, lambda n: 1.0 if n == 1 else 2 * math.sin(math.pi / (2 * n)) ** 2),
        Family(erdos_renyi),
        Family(random_regular),
        Family(random_matching, _matching_gap, drawn=True, dense=True),
    )
}
TOPOLOGIES: dict[str, Callable[..., Topology]] = {name: family.build for name, family in FAMILIES.items()}


def make(name: str, n: int | None = None, **choices: object) -> Topology:
    """A topology by name: `make("ring", 16)`, `make("base_graph/8", 16, k=2)`, `make("torus", rows=3, cols=4, late=1)`.

    "ring/8" says every = 8, gossip in every 8th round only; see `channel`, whose options all topologies take.

        >>> from klatsch import topology
        >>> graph = topology.make("base_graph", 16)
        >>> graph.period, graph.exact_after
        (4, 4)
    """
    own, travel = _parted(name, choices)
    graph = family(name).build(n, **own)
    if not isinstance(graph, Topology):
        made = f"{label(split(name)[0])} returns a {type(graph).__name__}"
        raise ValueError(f"{made}; return a Topology, such as topology.ring(n)")
    return channel(graph, **travel)


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, n, ...)` takes besides n; all take those of `channel`."""
    return *family(name).options, *CHANNEL


def spectral_gap(name: str, n: int, **choices: object) -> float:
    """The spectral gap rho of `make(name, n, ...)`, in closed form where one is known: there n may be a million.

    >>> from klatsch import topology
    >>> [f"{topology.spectral_gap('torus', n):.1e}" for n in (100, 10_000, 1_000_000)]
    ['7.6e-02', '7.9e-04', '7.9e-06']
    """
    (own, travel), known = _parted(name, choices), family(name)
    changed = travel.get("late", 0) >= travel["every"] or travel.get("loss") or damps(travel.get("wire", AS_THEY_ARE))
    if known.gap is None or changed:  # the weights are
        return make(name, n, **choices).spectral_gap
    # A lattice of given sides may have an n that is refused without them: its closed form checks.
    gap = known.gap(n if known.lattice else known.checked(n, UNLIMITED), **own)
    return gap / int(travel["every"])


def nth_size(name: str, s: int) -> int:
    """The s-th size (from 1) at which a family keeps its shape; for most families that is s."""
    return family(name).nth_size(s)


def family(name: str) -> Family:
    """The family of "ring" or "ring/8"; for your own "file.py:function" it knows the builder only."""
    kind, _ = split(name)
    return Family(load("topology", kind)) if is_own(kind) else named("topology", kind, FAMILIES)


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
    """The options of the family, and those of the channel, of which the name may hold `every`; no others."""
    if "meets" in choices and "meets" not in options(name):
        asked = f"meets={choices['meets']!r}"
        raise ValueError(f"{name} has no option 'meets', which is an argument of simulate: simulate(..., {asked})")
    check_options(name, choices, options(name))
    kind, between = split(name)
    own = {option: value for option, value in choices.items() if option not in CHANNEL}
    travel = {option: value for option, value in choices.items() if option in CHANNEL}
    if "every" in travel:
        if kind != name:
            raise ValueError(f"{name} with every = {travel['every']!r}: the name says that; leave one of them out")
        rounds_between(travel["every"])
    return own, {"every": between} | travel


# The Base-(k+1) Graph: n = p q, where p holds all prime factors up to k + 1. Each of p groups of q nodes averages
# exactly by the simple Base-(k+1) Graph; then the groups average, factor by factor. If it is shorter, all n nodes use
# the simple graph.


def base_graph_rounds(n: int, k: int) -> list[WeightedLinks]:
    """Algorithm 3: hyper-hypercubes for the factors up to k + 1, the simple graph for the rest."""
    nodes, rounds = np.arange(n), [Round() for _ in range(base_graph_period(n, k))]
    if _simple_length(n, k) < _composed_length(n, k):
        _simple(rounds, nodes, k)
    else:
        groups = nodes.reshape(_split(n, k))
        first = _simple_length(groups.shape[1], k)
        for group in groups:
            _simple(rounds[:first], group, k)
        for column in groups.T:
            _hyper_hypercube(rounds[first:], column, k)
    empty: WeightedLinks = (nodes[:0], nodes[:0], np.array([]))
    joined = [zip(empty, *links, strict=True) for links in rounds]
    return [tuple(np.concatenate(part) for part in parts) for parts in joined]  # type: ignore[misc]


def base_graph_period(n: int, k: int = 1) -> int:
    """The number of rounds of `base_graph(n, k)`, without building it."""
    return max(1, min(_simple_length(n, k), _composed_length(n, k)))


def _hyper_hypercube(rounds: list[Round], nodes: Nodes, k: int) -> None:
    """Algorithm 1, for numbers of nodes without prime factors above k + 1: one factor per round, over and over."""
    shape = _factors(len(nodes), k)
    assert shape is not None
    cube = nodes.reshape(shape)
    for links, axis in zip(rounds, cycle(range(len(shape))), strict=False):  # a single node rests
        links.append(_cliques(np.moveaxis(cube, axis, -1).reshape(-1, shape[axis])))


def _simple(rounds: list[Round], nodes: Nodes, k: int) -> None:
    """Algorithm 2, for any number of nodes n: one block of nodes for each digit of n in base k + 1."""
    digits = _digits(len(nodes), k)
    if len(digits) == 1:
        _hyper_hypercube(rounds, nodes, k)
        return
    sizes = [a * (k + 1) ** p for a, p in digits]
    blocks = np.split(nodes, np.cumsum(sizes)[:-1])

    # First all blocks find their own means at the same time; one that is done repeats its rounds.
    first = _simple_length(sizes[0], k)
    for block in blocks:
        _hyper_hypercube(rounds[:first], block, k)

    # Then block l meets all later blocks: each later node meets one node from each of the a_l parts of block l and
    # takes its share of their mean. Afterwards the mean of every part of block l is the overall mean.
    for start, (block, (a, p)) in enumerate(zip(blocks, digits, strict=True), first):
        later = blocks[start - first + 1 :]
        parts = block.reshape(a, (k + 1) ** p) if later else block.reshape(1, -1)
        if later:
            meeting, others = rounds[start], np.concatenate(later)
            met, resting = parts[:, : len(others)].ravel(), parts[:, len(others) :].ravel()
            weight = len(block) / (a * (len(block) + len(others)))
            meeting.append((met, np.tile(others, a), np.full(len(met), weight)))
            full = len(resting) // (k + 1) * (k + 1)
            rest = (resting[:full].reshape(-1, k + 1), resting[full:].reshape(1, -1))
            meeting += [_cliques(groups) for groups in rest if groups.size]
        # Last, each part averages inside while the later blocks go on.
        for part in parts:
            _hyper_hypercube(rounds[start + bool(later) :], part, k)


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
    products = [(divisor, *rest) for divisor in divisors if (rest := _factors(n // divisor, k)) is not None]
    return min(products, key=len, default=None)


def _cliques(groups: Nodes) -> WeightedLinks:
    """Every row of `groups` averages all its nodes."""
    side = groups.shape[1]
    i, j = np.triu_indices(side, k=1)
    a, b = groups[:, i].ravel(), groups[:, j].ravel()
    return a, b, np.full(len(a), 1.0 / side)
