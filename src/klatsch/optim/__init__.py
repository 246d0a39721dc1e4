"""Optimizers for PyTorch scripts under torchrun: replace the optimizer, and ranks gossip with their neighbours.

    optimizer = klatsch.optim.DATSGD(model.parameters(), lr=1.0, topology="ring")
    ...                      # train as ever, without a schedule
    optimizer.eval()         # puts x, the point to evaluate and save, into the model

Each is `Gossip` with a rule, and takes its keywords, too: group, every, late, wire, catch_up, weight_decay, timeout,
on_failure, quorum, on_nonfinite, start_equal, weight, any_graph. On slow networks, wire="int8" sends a quarter of the
bytes; docs/ranks.md has a table of what to take for images and for transformers.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT as Params

from klatsch import rules
from klatsch.optim.buffers import average_, merged, recalibrate
from klatsch.optim.checkpointer import Checkpointer
from klatsch.optim.gossip import Gossip
from klatsch.optim.groups import pair
from klatsch.ranks.failures import LinkError, NonFiniteError, QuorumError
from klatsch.rules.anytime import Averaging
from klatsch.rules.base import LearningRate as Rate
from klatsch.topology import Topology

__all__ = ["D2", "DATD2", "DATSGD", "DSGD", "PAPER", "Checkpointer", "DATAdamW", "DAdamW", "Gossip"]
__all__ += ["GradientTracking", "LinkError", "NonFiniteError", "QuorumError", "average_", "merged", "recalibrate"]

Graph = Topology | str
# What the paper trains its networks with (Section 5.2): DATSGD(params, lr, **PAPER).
PAPER: dict[str, Any] = {"averaging": "fixed(0.9)", "momentum": 0.9, "beta": 1.0}


class DATSGD(Gossip):
    """Decentralized Anytime SGD: gradients at a moving average x of the iterates, or near it; see `rules.Anytime`.

    The defaults need no learning rate schedule: x averages all iterates alike, and gradients are taken between x and
    the iterate. The mean over the network is then Schedule-Free SGD. The model holds the point where gradients are
    taken; `eval()` puts x into it, to evaluate or save. In place of torch.optim.SGD with lr=0.1 and momentum=0.9, start
    with lr=1.0. `**PAPER` are the settings of the paper's networks, which need a smaller learning rate than SGD.
    docs/ranks.md has more on learning rates.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        topology: a Topology, or the name of one, such as "ring", or "ring/8" to gossip in every 8th round.
        averaging: how x averages: "constant", all iterates alike; "linear", more of the later ones; "fixed(0.9)", a
            moving average, which is a momentum: with beta=1 a single machine takes exactly the steps of
            torch.optim.SGD(lr=0.1 * lr, momentum=0.9).
        order: "atc", the paper's; or "cta", which waits for messages only if the network is slower than the gradient.
        momentum: local momentum, on top of the averaging.
        beta: where gradients are taken, between the iterate (0) and x (1, as in the paper; the model then always holds
            x, and there is nothing to switch).
        rest: keywords of `Gossip`.
    """

    def __init__(
        self,
        params: Params,
        lr: Rate,
        topology: Graph = "ring",
        *,
        averaging: str | Averaging = "constant",
        order: str = "atc",
        momentum: float = 0.0,
        beta: float = 0.9,
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
    """Anytime averaging over D2 iterates, for data that differ between ranks; options and `eval()` as in DATSGD."""

    def __init__(
        self,
        params: Params,
        lr: Rate,
        topology: Graph = "ring",
        *,
        averaging: str | Averaging = "constant",
        momentum: float = 0.0,
        beta: float = 0.9,
        **rest: Any,
    ) -> None:
        super().__init__(params, rules.dat_d2(lr, averaging, momentum, beta), topology, **rest)


class DAdamW(Gossip):
    """AdamW on every rank, with gossip of gradients and models; see `rules.Adam`. On one rank it is torch.optim.AdamW.

    Take the learning rate, warm-up and decay of AdamW.

    Args:
        params: parameters, or groups of them, also with their own "betas", "eps" and "weight_decay".
        lr: learning rate.
        topology: as in DATSGD.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        shared: gossip the second moment, for data that differ between ranks; it is one more vector in every round.
        reduced: gossip gradients, too, before anything is made of them; False sends one vector less, and learns more
            slowly (docs/language.md).
        order: as in DATSGD.
        rest: keywords of `Gossip`.
    """

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        topology: Graph = "ring",
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        shared: bool = False,
        reduced: bool = True,
        order: str = "atc",
        **rest: Any,
    ) -> None:
        rule = rules.dadam(lr, *pair(betas), eps, weight_decay, shared, order=order, reduced=reduced)
        super().__init__(params, rule, topology, **rest)


class DATAdamW(Gossip):
    """Decentralized anytime AdamW: no schedule but a warm-up. On one rank it is Schedule-Free AdamW.

    The model holds the point where gradients are taken; `eval()` puts x into it, to evaluate or save.

    Args:
        params: as in DAdamW.
        lr: learning rate, with a warm-up such as `rules.Decay(2.5e-3, "constant/1000", steps)`; larger than AdamW's.
        topology: as in DATSGD.
        beta: where gradients are taken, between the iterate (0) and x (1): the first of schedule-free AdamW's betas.
        betas: of the two moments; 0 keeps no first one, since beta takes its place.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, at the point where gradients are taken.
        averaging: how x averages: "lr(2)", in proportion to the square of the largest learning rate so far; or as in
            DATSGD.
        shared: as in DAdamW.
        reduced: as in DAdamW.
        order: as in DATSGD.
        rest: keywords of `Gossip`.
    """

    def __init__(
        self,
        params: Params,
        lr: Rate = 2.5e-3,
        topology: Graph = "ring",
        *,
        beta: float = 0.9,
        betas: tuple[float, float] = (0.0, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        averaging: str | Averaging = "lr(2)",
        shared: bool = False,
        reduced: bool = False,
        order: str = "atc",
        **rest: Any,
    ) -> None:
        rule = rules.dat_adam(lr, averaging, beta, *pair(betas), eps, weight_decay, shared, order, reduced)
        super().__init__(params, rule, topology, **rest)
