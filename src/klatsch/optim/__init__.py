"""Optimizers for PyTorch scripts under torchrun: replace the optimizer, and ranks gossip with their neighbours.

    optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.1, topology="ring", momentum=0.9)

Each is `Gossip` with a rule. They share the keywords of `Gossip`: group, weight_decay, timeout, on_failure, quorum,
on_nonfinite, start_equal, any_graph.
"""

from __future__ import annotations

from typing import Any

from klatsch import algorithms
from klatsch import topology as topologies
from klatsch.engine.agreement import members
from klatsch.engine.failures import LinkError, NonFiniteError, QuorumError
from klatsch.optim.average import average_
from klatsch.optim.checkpointer import Checkpointer
from klatsch.optim.gossip import Gossip
from klatsch.topology import Topology

__all__ = [
    "D2",
    "DATD2",
    "DATSGD",
    "DSGD",
    "Checkpointer",
    "Gossip",
    "GradientTracking",
    "LinkError",
    "NonFiniteError",
    "QuorumError",
    "average_",
]

# Networks are no convex problem: x must forget where it was long ago. The paper's choice for them (Section 5.2).
AVERAGING = "fixed(0.9)"


class DATSGD(Gossip):
    """Decentralized Anytime SGD: gradients at a moving average x of the iterates; see `algorithms.DAT`.

    The averaging is a momentum: with fixed(gamma), one machine alone takes exactly the steps of
    torch.optim.SGD(lr=(1 - gamma) * lr, momentum=gamma). So from SGD with lr=0.1 and momentum=0.9 go to lr=1.0 and the
    default fixed(0.9), without a momentum of its own; both together smooth twice, and need smaller steps.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        topology: a Topology, or the name of one.
        averaging: how x averages: "fixed(0.9)" for networks, "constant" or "linear" for convex problems.
        order: "atc", the paper's; or "cta", where no message is waited for unless the network is slower than the
            gradient.
        momentum: local momentum, on top of the averaging.
        rest: keywords of `Gossip`.
    """

    def __init__(
        self,
        params: Any,
        lr: Any,
        topology: Topology | str = "ring",
        *,
        averaging: Any = AVERAGING,
        order: str = "atc",
        momentum: float = 0.0,
        **rest: Any,
    ) -> None:
        rule = algorithms.DAT(lr=lr, averaging=averaging, order=order, momentum=momentum)
        super().__init__(params, rule, topology, **rest)


class DSGD(Gossip):
    """Decentralized SGD, the baseline; see `algorithms.DSGD`. On "complete" it is mini-batch SGD."""

    def __init__(
        self, params: Any, lr: Any, topology: Topology | str = "ring", *, momentum: float = 0.0, **rest: Any
    ) -> None:
        super().__init__(params, algorithms.DSGD(lr=lr, momentum=momentum), topology, **rest)


class D2(Gossip):
    """D2, for data that differ between ranks; see `algorithms.D2`.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        topology: a Topology, or the name of one. Where D2 would not be stable on a graph that is given by name, such as
            an even ring, it mixes with (I + P) / 2.
        rest: keywords of `Gossip`.
    """

    def __init__(self, params: Any, lr: Any, topology: Topology | str = "ring", **rest: Any) -> None:
        rule = algorithms.D2(lr=lr)
        if isinstance(topology, str):
            topology = _stable(rule, topologies.make(topology, len(members(rest.get("group")))))
        super().__init__(params, rule, topology, **rest)


class GradientTracking(Gossip):
    """Gradient tracking, for data that differ between ranks; see `algorithms.GradientTracking`."""

    def __init__(self, params: Any, lr: Any, topology: Topology | str = "ring", **rest: Any) -> None:
        super().__init__(params, algorithms.GradientTracking(lr=lr), topology, **rest)


class DATD2(Gossip):
    """Anytime averaging over D2 iterates, for data that differ between ranks; see `algorithms.DATD2`."""

    def __init__(
        self, params: Any, lr: Any, topology: Topology | str = "ring", *, averaging: Any = AVERAGING, **rest: Any
    ) -> None:
        super().__init__(params, algorithms.DATD2(lr=lr, averaging=averaging), topology, **rest)


def _stable(rule: algorithms.D2, graph: Topology) -> Topology:
    """The graph, or its lazy form if only that is stable; a graph that D2 cannot use at all stays, to be refused."""
    if graph.period > 1 or not graph.symmetric:
        return graph
    try:
        rule.check_graph(graph)
    except ValueError:
        return topologies.lazy(graph)
    return graph
