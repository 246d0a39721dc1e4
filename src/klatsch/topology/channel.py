"""How messages travel on a graph: how often, how late, and in which encoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.sparse import csr_array, diags_array

from klatsch.topology import validation
from klatsch.topology.graph import Topology, check_topology
from klatsch.topology.matrix import SUM_TOLERANCE, Matrix, identity, mapped

# The options of a channel, with their defaults.
CHANNEL = {"every": 1, "late": 0, "wire": validation.WIRES[0], "loss": 0.0, "one_way": False}
BLOCK = 256  # numbers that share a scale in int8
FEW_BITS = 14  # of weights for bfloat16: its 8 bits and these fit into the 24 of float32, with 2 to spare


def channel(
    topology: Topology,
    every: int = 1,
    late: int = 0,
    wire: str = validation.WIRES[0],
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
        wire: "float32" (numbers as they are), "bfloat16" (half the bytes of float32), or "int8" (a quarter: differences
            to what neighbours hold already, with a scale per 256 numbers; on static graphs).
        loss: the probability that a message is lost, drawn for every link and round by a seed that all know. Both
            directions of a link are lost together, and its weight stays with its ends, so a symmetric graph keeps the
            mean.
        one_way: every message is lost by itself, so that mixing does not keep the network mean.

    References:
        Koloskova et al., "A unified theory of decentralized SGD with changing topology and local updates", 2020, for
        local steps. Koloskova et al., "Decentralized stochastic optimization and gossip algorithms with compressed
        communication", 2019, Algorithm 1, for differences.
    """
    check_topology("channel", topology)
    seldom = _every(topology, every)
    late = validation.rounds_late(late)
    if topology.late and (late or seldom.every > topology.every):
        raise ValueError(f"{topology.name} is late already; give every and late together, to a graph without")
    if late:
        matrices = _respoken(seldom, lambda P: _damped(seldom, P, late))
        seldom = replace(seldom, name=f"{seldom.name} late {late}", matrices=matrices, late=late)
    validation.check_wire(seldom.name, wire, seldom.changes)
    if wire != seldom.wire:
        matrices = _respoken(seldom, _short) if wire == "bfloat16" else seldom.matrices
        seldom = replace(seldom, name=f"{seldom.name} {wire}", matrices=matrices, wire=wire)
    if loss or one_way:
        ways = " one way" * bool(one_way)
        seldom = replace(seldom, name=f"{seldom.name} loss {loss}{ways}", loss=loss, one_way=one_way)
    return seldom


def check_channel(
    every: object = 1,
    late: object = 0,
    wire: object = validation.WIRES[0],
    loss: object = 0.0,
    one_way: object = False,
) -> None:
    """Check the options of a channel, whatever the graph."""
    validation.rounds_between(every)
    validation.rounds_late(late)
    validation.check_wire("", wire, changes=False)
    validation.check_loss("a graph", loss, one_way, wire)


def encoded_bytes(wire: str, numbers: int) -> int:
    """The bytes of a vector as it travels."""
    scales = -(-numbers // BLOCK)  # of int8, in bfloat16
    return {"float32": 4 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 2 * scales}[wire]


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


def _respoken(topology: Topology, change: Callable[[Matrix], Matrix]) -> tuple[Matrix, ...]:
    """The matrices of a graph with those of rounds with gossip changed."""
    matrices = list(topology.matrices)
    matrices[topology.every - 1 :: topology.every] = mapped(topology.speaking, change)
    return tuple(matrices)


def _damped(topology: Topology, P: Matrix, late: int) -> Matrix:
    """The matrix with weights small enough for pulls that arrive when `k` newer values are on their way.

    A mode of the disagreement follows v <- v - mu v_k, with the v of k mixes ago and mu an eigenvalue of I - P. It dies
    out if mu < 2 sin(pi / (4 k + 2)) (Levin and May 1976); half of that leaves room for rules that look back.
    """
    k, top, itself = late // topology.every, _largest(topology, P), identity(topology.size)
    if k == 0 or top <= 0:
        return P
    limit = math.sin(math.pi / (4 * k + 2))
    return validation.canonical(itself + min(1.0, limit / top) * (P - itself), topology.name)


def _short(P: Matrix) -> Matrix:
    """The matrix with weights of few bits, rounded down, such as 5461 / 2^14 for 1/3.

    Nodes whose bfloat16 values stay a step apart pull each other to and fro for ever. With these weights, pulls are
    multiples of the smallest step of float32 there, so that no sum is rounded, and the network mean does not creep.
    """
    links = csr_array(P - diags_array(P.diagonal()))
    links.eliminate_zeros()
    if not links.nnz:
        return P
    unit = 2.0 ** max(FEW_BITS, 6 - math.floor(math.log2(links.data.min())))
    links.data = np.floor(links.data * unit + 1e-6) / unit
    own = 1.0 - links.sum(axis=1)
    even = np.allclose(links.sum(axis=0), links.sum(axis=1), rtol=0, atol=SUM_TOLERANCE)
    return csr_array(links + diags_array(own)) if even else P


def _largest(topology: Topology, P: Matrix) -> float:
    """The largest eigenvalue of I - P, or a bound on it (Gershgorin's)."""
    if topology.symmetric and not topology.changes:
        return 1.0 - topology.smallest_eigenvalue
    return 2.0 * float(1.0 - P.diagonal().min())
