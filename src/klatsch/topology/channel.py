"""How messages travel on a graph: how often, how late, and in which encoding."""

from __future__ import annotations

import math
from dataclasses import replace

from klatsch.arguments import whole
from klatsch.topology import validation
from klatsch.topology.graph import Topology, check_topology
from klatsch.topology.matrix import Matrix, identity

CHANNEL = ("every", "late", "wire")


def channel(topology: Topology, every: int = 1, late: int = 0, wire: str = validation.WIRES[0]) -> Topology:
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
        wire: "float32" (numbers as they are), "bfloat16" (half the bytes of float32), or "int8" (a quarter: differences
            to what neighbours hold already, with a scale per 256 numbers; on static graphs).

    References:
        Koloskova et al., "A unified theory of decentralized SGD with changing topology and local updates", 2020, for
        local steps. Koloskova et al., "Decentralized stochastic optimization and gossip algorithms with compressed
        communication", 2019, Algorithm 1, for differences.
    """
    check_topology("channel", topology)
    seldom = _every(topology, every)
    late = whole(late, "late", 0, validation.LATEST)
    if topology.late and (late or seldom.every > topology.every):
        raise ValueError(f"{topology.name} is late already; give every and late together, to a graph without")
    if late:
        seldom = replace(seldom, name=f"{seldom.name} late {late}", matrices=_damped(seldom, late), late=late)
    validation.check_wire(seldom.name, wire, seldom.changes)
    if wire == seldom.wire:
        return seldom
    return replace(seldom, name=f"{seldom.name} {wire}", wire=wire)


def every(topology: Topology, H: int) -> Topology:
    """The same graph with gossip in rounds H, 2H, 3H, ... only; see `channel`."""
    check_topology("every", topology)
    return channel(topology, every=H)


def _every(topology: Topology, H: int) -> Topology:
    rounds_between, speaking = validation.rounds_between, topology.speaking
    between = rounds_between(rounds_between(H) * topology.every, len(speaking))
    if between == topology.every:
        return topology
    name = topology.name.removesuffix(f"/{topology.every}") if topology.every > 1 else topology.name
    matrices = [identity(topology.size)] * (between * len(speaking))
    matrices[between - 1 :: between] = speaking
    return replace(topology, name=f"{name}/{between}", matrices=tuple(matrices), every=between)


def _damped(topology: Topology, late: int) -> tuple[Matrix, ...]:
    """The matrices with weights small enough for pulls that arrive when `k` newer values are on their way.

    A mode of the disagreement follows v <- v - mu v_k, with the v of k mixes ago and mu an eigenvalue of I - P. It dies
    out if mu < 2 sin(pi / (4 k + 2)) (Levin and May 1976); half of that leaves room for rules that look back.
    """
    k = late // topology.every
    limit = math.sin(math.pi / (4 * k + 2))
    matrices, itself = list(topology.matrices), identity(topology.size)
    speaking = [
        validation.canonical(itself + min(1.0, limit / top) * (P - itself), topology.name) if k and top > 0 else P
        for P in topology.speaking
        for top in [_largest(topology, P)]
    ]
    matrices[topology.every - 1 :: topology.every] = speaking
    return tuple(matrices)


def _largest(topology: Topology, P: Matrix) -> float:
    """The largest eigenvalue of I - P, or a bound on it (Gershgorin's)."""
    if topology.symmetric and not topology.changes:
        return 1.0 - topology.smallest_eigenvalue
    return 2.0 * float(1.0 - P.diagonal().min())
