"""Optimizers for PyTorch scripts under torchrun: replace the optimizer, and ranks gossip with their neighbours.

    optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.1, topology="ring", momentum=0.9)

Each is `Gossip` with a rule, and takes its keywords, too: group, weight_decay, timeout, on_failure, quorum,
on_nonfinite, start_equal, any_graph.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT as Params

from klatsch import rules
from klatsch.optim.buffers import average_, recalibrate
from klatsch.optim.checkpointer import Checkpointer
from klatsch.optim.gossip import Gossip
from klatsch.ranks.failures import LinkError, NonFiniteError, QuorumError
from klatsch.rules.anytime import Averaging
from klatsch.rules.base import LearningRate as Rate
from klatsch.topology import Topology

__all__ = ["D2", "DATD2", "DATSGD", "DSGD", "Checkpointer", "Gossip", "GradientTracking", "LinkError"]
__all__ += ["NonFiniteError", "QuorumError", "average_", "recalibrate"]

Graph = Topology | str
# Neural networks are not convex: x must forget its past. The paper's choice for them (Section 5.2).
FORGETFUL = "fixed(0.9)"


class DATSGD(Gossip):
    """Decentralized Anytime SGD: gradients at a moving average x of the iterates, or near it; see `rules.Anytime`.

    The averaging is a momentum: with fixed(gamma), a single machine takes exactly the steps of
    torch.optim.SGD(lr=(1 - gamma) * lr, momentum=gamma). So in place of SGD with lr=0.1 and momentum=0.9, use lr=1.0
    and the default fixed(0.9) without momentum; both together smooth twice, and need smaller steps.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        topology: a Topology, or the name of one, such as "ring", or "ring/8" to gossip in every 8th round.
        averaging: how x averages: "fixed(0.9)" for networks, "constant" or "linear" for convex problems.
        order: "atc", the paper's; or "cta", which waits for messages only if the network is slower than the gradient.
        momentum: local momentum, on top of the averaging.
        beta: where gradients are taken, between the iterate (0) and x (1, the paper's). Below 1 the model holds that
            point while it trains; `eval()` puts x into it.
        rest: keywords of `Gossip`.
    """

    def __init__(
        self,
        params: Params,
        lr: Rate,
        topology: Graph = "ring",
        *,
        averaging: str | Averaging = FORGETFUL,
        order: str = "atc",
        momentum: float = 0.0,
        beta: float = 1.0,
        **rest: Any,
    ) -> None:
        super().__init__(params, rules.dat(lr, averaging, order, momentum, beta), topology, **rest)


class DSGD(Gossip):
    """Decentralized SGD, the baseline; see `rules.Plain`. On "complete" it is mini-batch SGD."""

    def __init__(
        self,
        params: Params,
        lr: Rate,
        topology: Graph = "ring",
        *,
        momentum: float = 0.0,
        order: str = "atc",
        **rest: Any,
    ) -> None:
        super().__init__(params, rules.dsgd(lr, momentum, order=order), topology, **rest)


class D2(Gossip):
    """D2, for data that differ between ranks, on every static symmetric graph; see `rules.Corrected`."""

    def __init__(
        self, params: Params, lr: Rate, topology: Graph = "ring", *, momentum: float = 0.0, **rest: Any
    ) -> None:
        super().__init__(params, rules.d2(lr, momentum), topology, **rest)


class GradientTracking(Gossip):
    """Gradient tracking, for data that differ between ranks; see `rules.Tracked`."""

    def __init__(
        self, params: Params, lr: Rate, topology: Graph = "ring", *, momentum: float = 0.0, **rest: Any
    ) -> None:
        super().__init__(params, rules.gt(lr, momentum), topology, **rest)


class DATD2(Gossip):
    """Anytime averaging over D2 iterates, for data that differ between ranks; `beta` as in DATSGD."""

    def __init__(
        self,
        params: Params,
        lr: Rate,
        topology: Graph = "ring",
        *,
        averaging: str | Averaging = FORGETFUL,
        momentum: float = 0.0,
        beta: float = 1.0,
        **rest: Any,
    ) -> None:
        super().__init__(params, rules.dat_d2(lr, averaging, momentum, beta), topology, **rest)
