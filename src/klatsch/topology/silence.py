"""Local steps: gossip in every H-th round only, and silence in between."""

from __future__ import annotations

from klatsch.own import is_own
from klatsch.topology.validation import rounds_between
from klatsch.topology.graph import Topology
from klatsch.topology.matrix import identity


def every(topology: Topology, H: int) -> Topology:
    """The same graph in rounds H, 2H, 3H, ..., and silence in the others: H - 1 local steps, then one with gossip.

    Messages per round and the spectral gap fall to one H-th. A graph that changes uses its next matrix each time.

    Args:
        topology: any graph.
        H: rounds from one mix to the next; 1 leaves the graph as it is.

    Raises:
        ValueError: H is no whole number from 1 up, or the period would be too long.

    References:
        Koloskova et al., "A unified theory of decentralized SGD with changing topology and local updates", 2020.
    """
    if not isinstance(topology, Topology):
        raise ValueError(f"every takes a Topology, not a {type(topology).__name__}; make one with from_matrices")
    between = rounds_between(rounds_between(H) * topology.every, len(topology.speaking))
    if between == topology.every:
        return topology
    name = topology.name.removesuffix(f"/{topology.every}") if topology.every > 1 else topology.name
    matrices = [identity(topology.size)] * (between * len(topology.speaking))
    matrices[between - 1 :: between] = topology.speaking
    return Topology(f"{name}/{between}", tuple(matrices), topology.stochastic, topology.lattice, between)


def split(name: str) -> tuple[str, int]:
    """The family of graphs and the rounds between two mixes that a name says: ("ring", 8) for "ring/8".

    Raises:
        ValueError: what stands behind the stroke is no whole number from 1 up.
    """
    if not isinstance(name, str) or "/" not in name:
        return name, 1
    family, _, H = name.rpartition("/") if is_own(name) else name.partition("/")
    if is_own(H):  # a folder stands before that stroke
        return name, 1
    if not (H.isascii() and H.isdigit() and len(H) < 10 and int(H) > 0):
        raise ValueError(
            f"topology {name!r}: {H!r} is no number of rounds; write {family}/8 for gossip in every 8th round"
        )
    return family, rounds_between(int(H))
