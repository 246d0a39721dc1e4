"""Who talks to whom, and with which weights.

Every graph is one immutable `Topology`: a period of sparse gossip matrices. Make one by its function (`ring(16)`), by
its name (`make("ring", 16)`), or from your own graph (`from_networkx`, `from_matrices`). `every(graph, H)`, or the name
"ring/8", gossips in some rounds only; `channel` says how messages travel.
"""

from klatsch.topology.comparison import Summary, compare, summarize
from klatsch.topology.drawing import draw
from klatsch.topology.families import (
    FAMILIES,
    TOPOLOGIES,
    Family,
    base_graph,
    complete,
    directed_ring,
    erdos_renyi,
    exponential,
    grid,
    hypercube,
    make,
    near_complete,
    nth_size,
    one_peer_exponential,
    options,
    random_matching,
    random_regular,
    ring,
    spectral_gap,
    star,
    torus,
)
from klatsch.topology.graph import Topology, channel, every, from_matrices, from_networkx, lazy

__all__ = ["FAMILIES", "TOPOLOGIES", "Family", "Summary", "Topology"]
__all__ += ["channel", "compare", "draw", "every", "from_matrices", "from_networkx", "lazy", "make", "nth_size"]
__all__ += ["options", "spectral_gap", "summarize"]
__all__ += ["base_graph", "complete", "directed_ring", "erdos_renyi", "exponential", "grid", "hypercube"]
__all__ += ["near_complete", "one_peer_exponential", "random_matching", "random_regular", "ring", "star", "torus"]
