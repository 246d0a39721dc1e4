"""Your own graph, from networkx."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from scipy.sparse import csr_array

from klatsch.topology.graph import Stochastic, Topology
from klatsch.topology.matrix import SUM_TOLERANCE, Matrix, metropolis_hastings, with_self_weights
from klatsch.topology.validation import check_connected

if TYPE_CHECKING:
    import networkx as nx  # loaded by those who have such a graph

Node = TypeVar("Node", bound=Hashable)


def from_networkx(
    graph: nx.Graph[Hashable],
    *,
    weight: str | None = None,
    stochastic: Stochastic = "doubly",
    name: str = "from_networkx",
) -> Topology:
    """A topology from a networkx graph: nodes 0 to n - 1 keep their numbers, others are numbered as `list(graph)`.

    Args:
        graph: an undirected graph, or a directed one in which u -> v means that u sends to v.
        weight: the edge attribute that holds P_vu for the edge u -> v; the rest up to 1 is the self-weight. Without
            it, undirected graphs get Metropolis–Hastings weights, directed ones for push-sum 1 / (out-degree + 1).
        stochastic: which sums must be 1: "doubly", "rows" or "columns" (push-sum).
        name: what to call it.
    """
    import networkx as nx

    if not isinstance(graph, nx.Graph):
        raise ValueError(f"{name} takes a networkx graph, not a {type(graph).__name__}; matrices go to from_matrices")
    nodes = list(graph)
    if set(nodes) == set(range(len(nodes))):  # nodes that are numbers keep them, in whatever order they were added
        nodes = sorted(nodes)  # type: ignore[type-var]
    if not nodes:
        raise ValueError(f"{name}: the graph has no nodes; give at least one")
    if graph.is_multigraph():
        raise ValueError(
            f"{name}: the graph is a multigraph; merge parallel edges first,"
            f" for example with nx.{'DiGraph' if graph.is_directed() else 'Graph'}(graph)"
        )
    loops = sorted(map(repr, nx.nodes_with_selfloops(graph)))
    if loops:
        raise ValueError(
            f"{name}: node {loops[0]} has a self-loop; remove it, for example with"
            " graph.remove_edges_from(nx.selfloop_edges(graph)): its self-weight is what its links leave of 1"
        )
    if graph.is_directed() and weight is None and stochastic != "columns":
        raise ValueError(
            f"{name}: the graph is directed, and Metropolis–Hastings weights need an undirected one;"
            ' take graph.to_undirected(), give weight="ATTRIBUTE", or stochastic="columns" for push-sum'
        )
    P = _matrix(graph, nodes, weight, stochastic, name)
    check_connected(name, (P,), label=lambda i: repr(nodes[i]))
    return Topology(name, (P,), stochastic)


def _matrix(
    graph: nx.Graph[Hashable], nodes: list[Hashable], weight: str | None, stochastic: Stochastic, name: str
) -> Matrix:
    size, number = len(nodes), {node: i for i, node in enumerate(nodes)}
    ends = np.array([(number[u], number[v]) for u, v in graph.edges], dtype=np.int64).reshape(-1, 2)
    sender, receiver = ends[:, 0], ends[:, 1]
    if weight is not None:
        given = [(edge, data.get(weight)) for *edge, data in graph.edges(data=True)]
        for edge, value in given:
            if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
                raise ValueError(
                    f"{name}: edge {tuple(edge)} has {weight} = {value!r}; give every edge a number from 0 to 1"
                )
        values = np.array([value for _, value in given], dtype=np.float64)
    elif graph.is_directed():
        values = 1.0 / (1 + np.bincount(sender, minlength=size)[sender])
    else:
        return metropolis_hastings(size, sender, receiver)
    if not graph.is_directed():
        sender, receiver = np.concatenate([sender, receiver]), np.concatenate([receiver, sender])
        values = np.concatenate([values, values])
    # Row i of a matrix for push-sum is what node i sends, up to a transpose.
    line, here, there = ("column", sender, receiver) if stochastic == "columns" else ("row", receiver, sender)
    sums = np.bincount(here, weights=values, minlength=size)
    if (over := sums > 1 + SUM_TOLERANCE).any():  # here, where the sum that the user gave is still known
        i = int(np.argmax(over))
        raise ValueError(
            f"{name}: the weights of node {nodes[i]!r} ({line} {i}) sum to {sums[i]:.12g} and leave no self-weight;"
            " scale them so that they sum to 1 or less"
        )
    P = with_self_weights(size, here, there, values)
    return csr_array(P.T) if stochastic == "columns" else P
