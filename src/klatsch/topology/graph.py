"""The one type for every communication graph: a period of sparse gossip matrices.

Round t (from 1) mixes with `topology.matrix(t)`: v_i <- sum_j P_ij v_j, where P_ij weighs what node i hears from j.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, issparse

from klatsch import own
from klatsch.arguments import number, whole
from klatsch.topology import channel as channels
from klatsch.topology import spectrum
from klatsch.topology.matrix import (
    SUM_TOLERANCE,
    Matrix,
    canonical,
    check_connected,
    check_matrices,
    depth,
    even,
    identity,
    is_averaging,
    lossy,
    mapped,
    metropolis_hastings,
    moved,
    places,
    sums_to_one,
    with_self_weights,
)

if TYPE_CHECKING:
    import networkx as nx  # loaded only for such a graph

    from klatsch.encodings import Encoding

Stochastic = Literal["doubly", "rows", "columns"]
STEP = 1.5  # how far nodes move to their neighbours while these learn what a number is


@dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """A communication graph with its weights, immutable, one sparse matrix per round of its period.

    Args:
        name: what to call it in tables and errors.
        matrices: the gossip matrices P of one period, one per round; dense or sparse.
        stochastic: which sums are 1: "doubly" (rows and columns, so that mixing keeps the network mean), "rows", or
            "columns" (directed graphs for push-sum).
        lattice: rows and columns where the nodes form a lattice; for drawing only.
        every, late, wire, loss, one_way: how messages travel; see `channel`. Silent rounds have the identity.
        shuffle: a seed, by which nodes change places before every round; without it they stay. See `places`.
        all_reduce: whether nodes average by an all-reduce, in which every weight is 1 / M; false wherever messages are
            rounded, late or lost.
    """

    name: str
    matrices: tuple[Matrix, ...]
    stochastic: Stochastic = "doubly"
    lattice: tuple[int, int] | None = None
    every: int = 1
    late: int = 0
    wire: str = channels.AS_THEY_ARE
    loss: float = 0.0
    one_way: bool = False
    all_reduce: bool = False
    shuffle: int | None = None

    def __post_init__(self) -> None:
        if self.stochastic not in (known := get_args(Stochastic)):
            raise ValueError(f"{self.name}: stochastic = {self.stochastic!r}; choose from {', '.join(known)}")
        given = tuple(self.matrices)
        numbers = {id(P): k for k, P in reversed(list(enumerate(given, 1)))}
        matrices = tuple(mapped(given, lambda P: canonical(P, f"{self.name}, matrix {numbers[id(P)]}")))
        every = whole(self.every, "every", 1, channels.LONGEST)
        if self.shuffle is not None:
            vars(self).update(shuffle=whole(self.shuffle, f"{self.name}: seed", 0))
        check_matrices(self.name, matrices, self.stochastic, every, self.shuffle is not None)
        late = channels.rounds_late(self.late)
        channels.check_wire(self.name, self.wire, drawn=self.shuffle is not None)
        loss = channels.check_loss(self.name, self.loss, self.one_way, self.wire)
        all_reduce = bool(self.all_reduce) and not (late or self.wire != channels.AS_THEY_ARE or loss)
        if all_reduce and not all(map(is_averaging, matrices[every - 1 :: every])):
            weights = f"give every weight as 1 / {matrices[0].shape[0]}"
            raise ValueError(f"{self.name} with all_reduce = True: {weights}, or leave all_reduce out")
        for P in matrices:
            for part in (P.data, P.indices, P.indptr):
                part.flags.writeable = False
        vars(self).update(matrices=matrices, every=every, late=late, loss=loss, all_reduce=all_reduce)

    @property
    def size(self) -> int:
        """Number of nodes M."""
        return int(self.matrices[0].shape[0])

    @property
    def period(self) -> int:
        """Rounds after which the matrices repeat, but for places and losses, which are drawn anew in every round."""
        return len(self.matrices)

    @cached_property
    def speaking(self) -> tuple[Matrix, ...]:
        """The matrices of the rounds in which nodes talk: all of them, unless `every` is above 1."""
        return self.matrices[self.every - 1 :: self.every]

    def speaks(self, t: int) -> bool:
        """Whether nodes talk in round t; if not, they send nothing and wait for nothing."""
        return (self._phase(t) + 1) % self.every == 0

    def matrix(self, t: int) -> Matrix:
        """The gossip matrix P of round t = 1, 2, 3, ..., without the messages that are lost in it."""
        P = self.matrices[self._phase(t)]
        P = P if self.shuffle is None else moved(P, self.places(t))
        return P if not self.loss else lossy(P, self.loss, self.one_way, t, by_rows=self.stochastic != "columns")

    def neighbors(self, i: int, t: int = 1) -> NDArray[np.int64]:
        """The nodes that node i hears in round t, without itself, in ascending order."""
        return self._others(self.matrices, i, t)

    def receivers(self, i: int, t: int = 1) -> NDArray[np.int64]:
        """The nodes that hear node i in round t; equal to `neighbors` unless the graph is directed."""
        return self._others(self._transposed, i, t)

    def places(self, t: int) -> NDArray[np.int64]:
        """Who stands in which place in round t: the k-th one does what the matrix of this phase says of node k.

        A random order by `shuffle` and t alone, so that all ranks draw the same, and any round can be the first.
        """
        whole(t, "round t", 1)
        return np.arange(self.size) if self.shuffle is None else places(self.size, self.shuffle, t)

    @property
    def changes(self) -> bool:
        """Whether nodes mix with different matrices over time; silent rounds do not count."""
        return len(self.speaking) > 1 or self.shuffle is not None

    @cached_property
    def encoding(self) -> Encoding:
        """How numbers travel."""
        return channels.encoding(self.wire)

    @property
    def delay(self) -> int:
        """Rounds until neighbours know what a number is, on average, beyond those that a message travels."""
        return 0 if self.wire == channels.AS_THEY_ARE else round(self.encoding.delay * self.every)

    @cached_property
    def audiences(self) -> tuple[int, ...]:
        """By matrix of `speaking`, a number for who hears whom in it; equal links have the same number.

        Where messages are differences to what neighbours hold, they hold a copy for every number.
        """
        numbers: dict[bytes, int] = {}
        return tuple(numbers.setdefault(P.indptr.tobytes() + P.indices.tobytes(), len(numbers)) for P in self.speaking)

    def audience(self, t: int) -> int:
        """The number of who hears whom in round t, or in the next one in which nodes talk."""
        return self.audiences[self._phase(t) // self.every]

    @cached_property
    def _transposed(self) -> tuple[Matrix, ...]:
        return tuple(mapped(self.matrices, lambda P: canonical(P.T, self.name)))

    @cached_property
    def copies(self) -> int:
        """The most vectors that a node holds for each that it sends: what others know of it, and what it knows of them.

        Those who hear it late will know more than they do now, which are two vectors.
        """
        links = dict(zip(self.audiences, self.speaking, strict=True)).values() if self.encoding.remembers else ()
        heard = sum((np.diff(P.indptr) - (P.diagonal() > 0) for P in links), np.zeros(self.size, dtype=np.int64))
        return len(links) * (2 if self.late else 1) + int(heard.max())

    @cached_property
    def symmetric(self) -> bool:
        """Whether every P equals its transpose, as Definition 2.4 of the paper asks."""
        return not self.one_way and all(spectrum.is_symmetric(P) for P in self.speaking)

    @cached_property
    def directed(self) -> bool:
        """Whether some link carries messages one way only in a round."""
        return any(P.multiply(P.T).nnz < P.nnz for P in self.speaking)

    @cached_property
    def row_stochastic(self) -> bool:
        """Whether every row sums to 1, so that mixing is averaging."""
        if self.loss and self.stochastic == "columns":  # a lost weight stays in its column
            return False
        return all(sums_to_one(P, axis=1) for P in self.speaking)

    @cached_property
    def column_stochastic(self) -> bool:
        """Whether every column sums to 1, so that mixing keeps the sum over nodes."""
        if self.loss and self.stochastic != "columns" and not self.symmetric:  # a lost weight stays in its row
            return False
        return all(sums_to_one(P, axis=0) for P in self.speaking)

    @property
    def doubly_stochastic(self) -> bool:
        """Whether rows and columns sum to 1, so that mixing keeps the network mean."""
        return self.row_stochastic and self.column_stochastic

    @cached_property
    def union(self) -> Matrix:
        """The matrices of a period added up: who ever hears whom; the mean of them where nodes are shuffled."""
        total = sum(self.speaking[1:], start=self.speaking[0])
        return total if self.shuffle is None else even(self.size, total.trace())

    @cached_property
    def edges(self) -> int:
        """Distinct links used over one period: pairs of nodes, or arrows if the graph is directed."""
        arrows = _arrows(self.union)
        return arrows if self.directed else arrows // 2

    @cached_property
    def degree(self) -> int:
        """The largest number of nodes that one node hears or is heard by in one round."""
        return max(
            int((heard - (P.diagonal() > 0)).max())
            for P in self.speaking
            for heard in (np.diff(P.indptr), np.bincount(P.indices, minlength=self.size))
        )

    @cached_property
    def messages(self) -> float:
        """Messages that a node sends per round, on average over nodes and rounds."""
        return sum(map(_arrows, self.speaking)) / (self.size * self.period)

    @cached_property
    def spectral_gap(self) -> float:
        """The spectral gap `rho = 1 - |lambda_2|` (Definition 2.5); over a period of rounds `(1 - |lambda_2|) / tau`.

        There lambda_2 is that of the product P_tau ... P_1 (Koloskova et al. 2020, Assumption 4): a period that
        averages exactly has rho = 1 / tau, and gossip in every H-th round has 1 / H of the gap. Property 2.6 holds for
        symmetric and circulant graphs and their products; other directed graphs may start more slowly. Where messages
        are lost, it is the gap of the mean matrix. Where nodes are shuffled, lambda_2 is the root of the second
        eigenvalue of E[P^T P]: by this factor a round shrinks the disagreement in the mean square, from every start.
        """
        # An exact mean has lambda_2 = 0, which a solver finds only to the root of a rounding error.
        return (1.0 - (0.0 if self.exact_after is not None else self._second_modulus)) / self.period

    @cached_property
    def smallest_eigenvalue(self) -> float:
        """The smallest eigenvalue of a static symmetric P; D2 needs it above -1/3 (Tang et al. 2018)."""
        if self.changes or not self.symmetric:
            kind = "time-varying" if self.changes else "not symmetric"
            raise ValueError(f"{self.name} is {kind}: a smallest eigenvalue needs one symmetric matrix, such as ring's")
        return spectrum.smallest_eigenvalue(self.speaking[0])

    @cached_property
    def momentum_limit(self) -> float | None:
        """The outer momentum up to which disagreement does not grow by itself; None where it is not known.

        The learning rates do not matter, nor does Nesterov. It is 1 on static symmetric graphs, and in the mean square
        where nodes are shuffled; it is unknown where messages are late, lost or sparse, and for large changing graphs.
        """
        if self.late or self.delay or self.loss or not self.doubly_stochastic:
            return None
        return spectrum.momentum_limit(self.speaking, self.shuffle is not None)

    @cached_property
    def exact_after(self) -> int | None:
        """Rounds after which every node holds the exact mean, or None if mixing only tends to it."""
        mixes = spectrum.exact_after(self._expected) if self.doubly_stochastic and not self.loss else None
        return None if mixes is None else mixes * self.every

    @property
    def averages_exactly(self) -> bool:
        """Whether one period ends with the exact mean at every node."""
        return self.exact_after is not None and self.exact_after <= self.period

    @cached_property
    def rounds_to_halve(self) -> int:
        """Rounds after which the distance from the mean is halved, from the worst start."""
        mixes = spectrum.rounds_to_halve(self._expected, self.doubly_stochastic, lambda: self._second_modulus)
        return mixes * self.every

    def effective_neighbors(self, gamma: float) -> float:
        """How many independent nodes one node seems to average over when memory decays by gamma per round.

        For x <- P (sqrt(gamma) x + noise), it is the variance 1 / (1 - gamma) of a single node over the mean variance
        of x (Vogels et al. 2022, "Beyond spectral gap", Section 3): about degree + 1 for gamma = 0 and M for gamma ->
        1. Beyond 500 nodes (2,000 if static and symmetric) it is an estimate, within a few percent.
        """
        if not self.doubly_stochastic:
            raise ValueError(
                f"{self.name} is not doubly stochastic: effective neighbours need a graph that keeps the mean"
            )
        number("gamma", gamma, lambda v: 0 <= v < 1, "a number from 0 up to but not including 1, such as 0.95")
        return spectrum.effective_neighbors(self._expected, gamma, self.every)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the matrices and the channel: equal for equal graphs on every machine."""
        silence = f" every {self.every}" if self.every > 1 else ""
        digest = hashlib.sha256(f"{self.size} {self.period}{silence}{self._travel}{self._shuffled}".encode())
        for P in self.speaking:
            digest.update(P.indptr.astype("<i8").tobytes())
            digest.update(P.indices.astype("<i8").tobytes())
            digest.update(P.data.astype("<f8").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[object, ...]:
        # By the constructor: a copy in another process is checked and read-only, too.
        return type(self), tuple(vars(self)[field.name] for field in fields(self))

    def __repr__(self) -> str:
        period = f", period {self.period}" if len(self.speaking) > 1 else self._shuffled
        silence = f", every {self.every} rounds" if self.every > 1 else ""
        return f"<Topology {self.name}: {self.size} nodes, {self.edges} edges{period}{silence}{self._travel}>"

    @property
    def _travel(self) -> str:
        """How messages travel, where that is special: ", late 7, int8"."""
        late, wire = f", late {self.late}" * (self.late > 0), f", {self.wire}" * (self.wire != channels.AS_THEY_ARE)
        wire = f", {own.label(self.wire)} {own.digest(self.wire)[:8]}" if own.is_own(self.wire) else wire
        loss = f", loss {self.loss:g}{' one way' * self.one_way}" * bool(self.loss)
        return late + wire + loss

    @property
    def _shuffled(self) -> str:
        return "" if self.shuffle is None else f", shuffled by seed {self.shuffle}"

    @cached_property
    def _second_modulus(self) -> float:
        return spectrum.second_modulus(self._expected)

    @cached_property
    def _expected(self) -> tuple[Matrix, ...]:
        """The matrices of rounds with gossip, or their means where messages are lost.

        Where nodes are shuffled, the root of E[P^T P], which mixes as fast: 1 for the mean, one value for the rest.
        """
        matrices = self.speaking
        if self.loss:
            kept = self.loss * identity(self.size)
            matrices = tuple(mapped(matrices, lambda P: canonical(kept + (1 - self.loss) * P, self.name)))
        if self.shuffle is None:
            return matrices
        second = max(0.0, np.square(matrices[0].data).sum() - 1) / (self.size - 1)
        return (even(self.size, 1 + (self.size - 1) * math.sqrt(second)),)

    def _others(self, matrices: tuple[Matrix, ...], i: int, t: int) -> NDArray[np.int64]:
        """The columns of node i's row in round t, without i."""
        i, P = whole(i, f"{self.name}: node", 0, self.size - 1), matrices[self._phase(t)]
        place = i if self.shuffle is None else int(np.flatnonzero(self.places(t) == i)[0])
        others = P.indices[P.indptr[place] : P.indptr[place + 1]].astype(np.int64)
        others = others if self.shuffle is None else np.sort(self.places(t)[others])
        return np.delete(others, np.flatnonzero(others == i))

    def _phase(self, t: int) -> int:
        return (whole(t, "round t", 1) - 1) % self.period


def from_matrices(
    matrices: object, *, stochastic: Stochastic = "doubly", name: str = "from_matrices", all_reduce: bool = False
) -> Topology:
    """A topology from a square array (NumPy, nested lists, or SciPy sparse), or from a list of them, one per round.

    The other arguments are those of `Topology`.
    """
    if isinstance(matrices, Iterator):
        matrices = list(matrices)
    sparse = isinstance(matrices, list | tuple) and (not matrices or issparse(matrices[0]))
    rounds = matrices if sparse or depth(matrices) == 3 else [matrices]
    return Topology(name, tuple(rounds), stochastic, all_reduce=all_reduce)  # type: ignore[arg-type]


def from_networkx(
    graph: nx.Graph[Hashable],
    *,
    weight: str | None = None,
    stochastic: Stochastic = "doubly",
    name: str = "from_networkx",
) -> Topology:
    """A topology from a networkx graph; nodes keep the numbers 0 to n - 1, or are numbered as in `list(graph)`.

    Args:
        graph: an undirected graph, or a directed one in which u -> v means that u sends to v.
        weight: the edge attribute that holds P_vu for the edge u -> v; the rest up to 1 is the self-weight. Without
            it, undirected graphs get Metropolis–Hastings weights, directed ones for push-sum 1 / (out-degree + 1).
        stochastic: as of `Topology`.
        name: what to call it.
    """
    import networkx as nx

    if not isinstance(graph, nx.Graph):
        raise ValueError(f"{name} takes a networkx graph, not a {type(graph).__name__}; matrices go to from_matrices")
    nodes = list(graph)
    if set(nodes) == set(range(len(nodes))):  # in whatever order they were added
        nodes = sorted(nodes)  # type: ignore[type-var]
    directed, loops = graph.is_directed(), sorted(map(repr, nx.nodes_with_selfloops(graph)))
    simple = f"nx.{'DiGraph' if directed else 'Graph'}(graph)"
    reason = ""
    if not nodes:
        reason = "the graph has no nodes; give at least one"
    elif graph.is_multigraph():
        reason = f"the graph is a multigraph; merge parallel edges first, for example with {simple}"
    elif loops:
        remedy = "remove it, for example with graph.remove_edges_from(nx.selfloop_edges(graph))"
        reason = f"node {loops[0]} has a self-loop; {remedy}: its self-weight is what its links leave of 1"
    elif directed and weight is None and stochastic != "columns":
        remedy = 'take graph.to_undirected(), give weight="ATTRIBUTE", or stochastic="columns" for push-sum'
        reason = f"the graph is directed, and Metropolis–Hastings weights need an undirected one; {remedy}"
    if reason:
        raise ValueError(f"{name}: {reason}")
    P = _matrix(graph, nodes, weight, stochastic, name)
    check_connected(name, (P,), label=lambda i: repr(nodes[i]))
    return Topology(name, (P,), stochastic)


def _matrix(
    graph: nx.Graph[Hashable], nodes: list[Hashable], weight: str | None, stochastic: Stochastic, name: str
) -> Matrix:
    size, place = len(nodes), {node: i for i, node in enumerate(nodes)}
    ends = np.array([(place[u], place[v]) for u, v in graph.edges], dtype=np.int64).reshape(-1, 2)
    sender, receiver = ends[:, 0], ends[:, 1]
    if weight is not None:
        wanted = "every edge a number from 0 to 1"
        given = {edge: graph.edges[edge].get(weight) for edge in graph.edges}
        checked = (number(f"{name}: edge {edge} has {weight}", w, math.isfinite, wanted) for edge, w in given.items())
        values = np.array(list(checked))
    elif graph.is_directed():
        values = 1.0 / (1 + np.bincount(sender, minlength=size)[sender])
    else:
        return metropolis_hastings(size, sender, receiver)
    if not graph.is_directed():
        sender, receiver = np.concatenate([sender, receiver]), np.concatenate([receiver, sender])
        values = np.concatenate([values, values])
    # For push-sum, the transpose: row i is what node i sends.
    line, own, other = ("column", sender, receiver) if stochastic == "columns" else ("row", receiver, sender)
    sums = np.bincount(own, weights=values, minlength=size)
    if (over := sums > 1 + SUM_TOLERANCE).any():  # Topology would no longer know the user's sum
        i = int(np.argmax(over))
        raise ValueError(
            f"{name}: the weights of node {nodes[i]!r} ({line} {i}) sum to {sums[i]:.12g} and leave no self-weight;"
            " scale them so that they sum to 1 or less"
        )
    P = with_self_weights(size, own, other, values)
    return csr_array(P.T) if stochastic == "columns" else P


def lazy(topology: Topology) -> Topology:
    """The same graph with (I + P) / 2: half as fast, but no eigenvalue below 0 (what D2 wants on an even ring)."""
    check_topology("lazy", topology)
    itself = identity(topology.size)
    halved = mapped(topology.speaking, lambda P: canonical((itself + P) / 2.0, topology.name))
    return _rewritten(topology, f"lazy {topology.name}", halved, topology.every, all_reduce=False)


def channel(
    topology: Topology,
    every: int = 1,
    late: int = 0,
    wire: str = channels.AS_THEY_ARE,
    loss: float = 0.0,
    one_way: bool = False,
) -> Topology:
    """The same graph over links that are used seldom, slowly or with few bytes.

    In rounds with gossip every node sends its value v to its neighbours; the pull of the neighbours' values arrives
    `late` rounds later, and is zero in rounds where nothing arrives. Both ends see the same rounded values, so the
    network mean stays as it is.

    Args:
        topology: a graph; without late messages, if it is to get some.
        every: H, gossip in rounds H, 2H, 3H, ..., and silence in the others: H - 1 local steps, then one with gossip.
            Messages per round and the spectral gap fall to one H-th. A graph that changes uses its next matrix each
            time.
        late: rounds that a message may travel, while gradients are computed. Below `every`, mixing is as before. From
            there on a pull arrives after the next value has been sent, and neighbours overreact to each other: weights
            are damped so that this dies out, which slows mixing down. Choose every - 1 at most if you can.
        wire: "float32" (numbers as they are), "bfloat16" (half the bytes of float32), "int8" (a quarter: differences to
            what neighbours hold already, with a scale per 256 numbers), "int4" (an eighth, with a scale per 64),
            "topk(0.01)" (of each block of 256 differences the largest share, in 3 bytes each; weights are damped, since
            neighbours know numbers late), or your own encoding "file.py:name", which is executed. Differences need a
            graph that repeats: where it changes periodically, neighbours hold a copy for each round of a period.
        loss: the probability that a message is lost, drawn for every link and round by a seed that all know. Both
            directions of a link are lost together, and its weight stays with its ends, so a symmetric graph keeps the
            mean.
        one_way: every message is lost by itself, so that mixing does not keep the network mean.

    References:
        Koloskova et al., "A unified theory of decentralized SGD with changing topology and local updates", 2020, for
        local steps. Koloskova et al., "Decentralized stochastic optimization and gossip algorithms with compressed
        communication", 2019, Algorithm 1, for differences and the largest of them.
    """
    check_topology("channel", topology)
    speaking: Sequence[Matrix] = topology.speaking
    name, between = topology.name, channels.rounds_between(every) * topology.every
    if channels.rounds_between(between, len(speaking)) != topology.every:
        name = f"{name.removesuffix(f'/{topology.every}') if topology.every > 1 else name}/{between}"
    late = channels.rounds_late(late)
    if topology.late and (late or between > topology.every):
        raise ValueError(f"{topology.name} is late already; give every and late together, to a graph without")
    if late:
        speaking, name = mapped(speaking, partial(_damped, topology, late // between)), f"{name} late {late}"
    channels.check_wire(name, wire, drawn=topology.shuffle is not None)
    if wire != topology.wire:
        speaking = mapped(speaking, partial(_encodable, channels.encoding(wire)))
        name = f"{name} {own.label(wire)}"
    if loss or one_way:
        name = f"{name} loss {loss}{' one way' * bool(one_way)}"
    else:
        loss, one_way = topology.loss, topology.one_way
    if name == topology.name:  # which says all that is special
        return topology
    facts = {"late": late or topology.late, "wire": wire, "loss": loss, "one_way": one_way}
    return _rewritten(topology, name, speaking, between, **facts)


def every(topology: Topology, H: int) -> Topology:
    """The same graph with gossip in rounds H, 2H, 3H, ... only; see `channel`."""
    check_topology("every", topology)
    return channel(topology, every=H)


def _rewritten(topology: Topology, name: str, speaking: Sequence[Matrix], every: int, **facts: Any) -> Topology:
    """The graph with these matrices in every H-th round, and silence in the others."""
    matrices = [identity(topology.size)] * (every * len(speaking))
    matrices[every - 1 :: every] = speaking
    return replace(topology, name=name, matrices=tuple(matrices), every=every, **facts)


def _damped(topology: Topology, k: int, P: Matrix) -> Matrix:
    """The matrix with weights small enough for pulls that arrive when k newer values are on their way.

    A mode of the disagreement follows v <- v - mu v_k, with the v of k mixes ago and mu an eigenvalue of I - P. It dies
    out if mu < 2 sin(pi / (4 k + 2)) (Levin and May 1976); half of that leaves room for rules that look back.
    """
    if k == 0:
        return P
    # The largest eigenvalue of I - P, or a bound on it (Gershgorin's).
    exact = topology.symmetric and not topology.changes
    top = 1.0 - topology.smallest_eigenvalue if exact else 2.0 * float(1.0 - P.diagonal().min())
    if top <= 0:
        return P
    itself, limit = identity(topology.size), math.sin(math.pi / (4 * k + 2))
    return canonical(itself + min(1.0, limit / top) * (P - itself), topology.name)


def _encodable(encoding: Encoding, P: Matrix) -> Matrix:
    """The matrix with weights as an encoding needs them.

    Until neighbours know what a number is, they pull by what they knew, and overreact if they pull too hard. Steps up
    to 2 / delay let the disagreement die out on ring, torus, star, complete, exponential, one_peer_exponential and
    base_graph of 16 nodes, with topk from 1 / 256 to 0.3; on some, 3 / delay did not. Koloskova et al. 2019 (CHOCO-SGD,
    Theorem 2) prove it for steps that are hundreds of times smaller.
    """
    if encoding.delay > STEP:
        itself = identity(P.shape[0])
        P = csr_array(itself + STEP / encoding.delay * (P - itself))
    return P if encoding.weight_bits is None else _short(encoding.weight_bits, P)


def _short(bits: int, P: Matrix) -> Matrix:
    """The matrix with weights of few bits, rounded down, such as 5461 / 2^14 for 1/3.

    Nodes whose rounded values stay a step apart pull each other to and fro for ever. With these weights, pulls are
    multiples of the smallest step of float32 there, so that no sum is rounded, and the network mean does not creep.
    """
    links = csr_array(P - diags_array(P.diagonal()))
    links.eliminate_zeros()
    if not links.nnz:
        return P
    unit = 2.0 ** max(bits, 6 - math.floor(math.log2(links.data.min())))
    links.data = np.floor(links.data * unit + 1e-6) / unit
    own = 1.0 - links.sum(axis=1)
    even = np.allclose(links.sum(axis=0), links.sum(axis=1), rtol=0, atol=SUM_TOLERANCE)
    return csr_array(links + diags_array(own)) if even else P


def check_topology(taker: str, topology: object) -> None:
    """Refuse what is not a Topology."""
    if not isinstance(topology, Topology):
        raise ValueError(f"{taker} takes a Topology, not a {type(topology).__name__}; make one with from_matrices")


def _arrows(P: Matrix) -> int:
    """Entries off the diagonal: messages of one round."""
    return int(P.nnz - np.count_nonzero(P.diagonal()))
