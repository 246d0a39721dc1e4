"""Optimizers for PyTorch scripts under torchrun: replace the optimizer, and ranks gossip with their neighbours.

    optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1, momentum=0.9)     # instead of torch.optim.SGD

`GossipSGD`, `GossipAdamW` and `GossipMuon` are what we recommend, with defaults of our own: torch's SGD, AdamW and Muon
with gossip, which take their learning rates and schedules. The others are named after a rule, with its defaults:
`DATSGD` is the paper's, and with beta=0.9 needs no schedule. All take the keywords of `Gossip`: group, mesh, every,
late, wire, catch_up, weight_decay, timeout, on_failure, quorum, on_nonfinite, start_equal, weight, any_graph, log. On
slow networks, wire="int8" sends a quarter of the bytes, "int4" an eighth; docs/ranks.md has a table of what to take for
images and for transformers.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch.optim.optimizer import ParamsT as Params

from klatsch import rules
from klatsch.optim.checkpointer import Checkpointer
from klatsch.optim.gossip import Gossip
from klatsch.optim.groups import BETAS, pair
from klatsch.optim.points import average_, merged, recalibrate
from klatsch.ranks.failures import LinkError, NonFiniteError, QuorumError
from klatsch.rules.base import LearningRate
from klatsch.topology import Topology

__all__ = ["D2", "DATD2", "DATSGD", "DSGD", "Checkpointer", "DATAdamW", "Gossip", "GossipAdamW", "GossipMuon"]
__all__ += ["GossipSGD", "GradientTracking", "LinkError", "NonFiniteError", "QuorumError", "average_", "merged"]
__all__ += ["recalibrate"]


class Named(Gossip):
    """A rule by name, with its defaults or some of our own, which the signature shows."""

    __signature__: ClassVar[inspect.Signature]
    _rule: ClassVar[str]
    _defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, *, rule: str = "", **defaults: Any) -> None:
        if not rule:  # derived from one of ours
            return
        taken = inspect.signature(rules.kind(rule)).parameters
        own = {name: defaults.get(name, option.default) for name, option in taken.items()}
        if "beta1" in own:
            own["betas"] = tuple(own.pop(beta) for beta in BETAS)
        graph = rules.make(rule, **{"lr": 1.0} | defaults).graph
        shown = {"params": inspect.Parameter.empty, "lr": own["lr"], "topology": graph} | own
        kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 3 + [inspect.Parameter.KEYWORD_ONLY] * len(own)
        parameters = [inspect.Parameter(n, kind, default=v) for (n, v), kind in zip(shown.items(), kinds, strict=False)]
        cls.__signature__ = inspect.Signature(
            [*parameters, inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]
        )
        cls._rule, cls._defaults, cls.own_options = rule, defaults, tuple(own)

    def __init__(
        self, params: Params, lr: LearningRate | None = None, topology: Topology | str | None = None, **options: Any
    ) -> None:
        choices = {name: options.pop(name) for name in self.own_options if name in options}
        if "betas" in choices:
            choices |= zip(BETAS, pair(choices.pop("betas")), strict=True)
        if lr is not None:
            choices["lr"] = lr
        elif self.__signature__.parameters["lr"].default is inspect.Parameter.empty:
            raise ValueError(f"there is no learning rate; give {type(self).__name__}(model.parameters(), lr=0.1), say")
        super().__init__(params, rules.make(self._rule, **self._defaults | choices), topology, **options)


class GossipSGD(Named, rule="dsgd", momentum=0.9, shared=True):
    """SGD with gossip of models and momentum; see `rules.Momentum`. On one rank it is torch.optim.SGD.

    Take the learning rate and schedule of torch.optim.SGD with momentum=0.9. The model always holds the point to
    evaluate and save.

    Args:
        params: parameters, or groups of them, also with their own "lr", "momentum" and "weight_decay".
        topology: a Topology, or the name of one, such as "ring", or "base_graph/8" to gossip in every 8th round.
        order: "atc", mix after the step; or "cta", mix before it, which waits for messages only if the network is
            slower than the gradient.
        momentum: of the network; 0 is plain D-SGD, which sends half as much.
        shared: gossip the momentum in the message of the model; "first" sends it before the step, in a message of its
            own; False leaves it to every rank, and sends half as much, but is worse where data differ between ranks.
        average: return an average of the iterates, such as "fixed(0.999)", instead of the last one; `eval()` then puts
            it into the model, to evaluate or save.
        options: keywords of `Gossip`.
    """

    def __init__(
        self, params: Params, lr: LearningRate | None = None, topology: Topology | str | None = None, **options: Any
    ) -> None:
        if options.get("momentum") == 0:
            options = {"shared": False} | options  # there is nothing to share
        super().__init__(params, lr, topology, **options)


class DATSGD(Named, rule="dat"):
    """Decentralized Anytime SGD: gradients at, or near, an average x of the iterates; see `rules.Anytime`.

    By default as in the paper, which trains its networks with averaging="fixed(0.9)" and momentum=0.9. With beta=0.9
    it needs no learning rate schedule: the mean over the network is Schedule-Free SGD. The model then holds the point
    where gradients are taken, between x and the iterate; `eval()` puts x into it, to evaluate or save. In place of
    torch.optim.SGD with lr=0.1 and momentum=0.9, start with lr=1.0 (docs/ranks.md has more).

    Args:
        topology: as in GossipSGD.
        averaging: how x averages: "constant", all iterates alike; "linear", more of the later ones; "fixed(0.9)", a
            moving average, which is a momentum: with beta=1 a single machine takes exactly the steps of
            torch.optim.SGD(lr=0.1 * lr, momentum=0.9).
        order: "atc", the paper's; or "cta", as in GossipSGD.
        momentum: momentum on top of the averaging; 0 by default.
        shared: gossip the momentum; False by default.
        beta: where gradients are taken, between the iterate (0) and x (1; the model then always holds x, and there is
            nothing to switch).
    """


class DSGD(Named, rule="dsgd"):
    """Decentralized SGD, the baseline; see `rules.Plain`. On "complete" it is mini-batch SGD."""


class D2(Named, rule="d2"):
    """D2, for data that differ between ranks, on every static symmetric graph; see `rules.Corrected`."""


class GradientTracking(Named, rule="gt"):
    """Gradient tracking, for data that differ between ranks; see `rules.Tracked`."""


class DATD2(Named, rule="dat-d2"):
    """DATSGD over D2 iterates, for data that differ between ranks; with beta=0.9 it needs no schedule."""


class GossipAdamW(Named, rule="dadam", lr=1e-3, weight_decay=0.01, shared=True):
    """AdamW on every rank, with gossip of gradients and models; see `rules.Adam`. On one rank it is torch.optim.AdamW.

    Take the learning rate, warm-up and decay of AdamW.

    Args:
        params: parameters, or groups of them, also with their own "betas", "eps" and "weight_decay".
        topology: as in GossipSGD; on a ring it learns better than on graphs with one neighbour per round.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        shared: gossip gradients, too, before anything is made of them; False sends one vector less, and learns more
            slowly (docs/language.md); "v" gossips the second moment instead.
        order: as in GossipSGD.
    """


class GossipMuon(Named, rule="muon", lr=1e-3, weight_decay=0.1, shared=True):
    """Muon for matrices, AdamW for the rest, with gossip of gradients and models; see `rules.Muon` for its options.

    On one rank it is torch.optim.Muon with adjust_lr_fn="match_rms_adamw", and torch.optim.AdamW. Take the learning
    rate, warm-up and decay of AdamW. Parameters with two axes or more are matrices, except in groups with "matrices":
    False: give embeddings and the last layer such a group. It needs whole matrices, and so takes no mesh.
    """


class DATAdamW(Named, rule="dat-adam", lr=2.5e-3):
    """Decentralized anytime AdamW: no schedule but a warm-up. On one rank it is Schedule-Free AdamW.

    The model holds the point where gradients are taken; `eval()` puts x into it, to evaluate or save. Options as in
    GossipAdamW, and:

    Args:
        lr: learning rate, with a warm-up such as `rules.Decay(2.5e-3, "constant/1000", steps)`; larger than AdamW's.
        beta: where gradients are taken, between the iterate (0) and x (1): the first of schedule-free AdamW's betas.
        betas: of the two moments; the first is 0 by default, since beta takes its place.
        weight_decay: decoupled weight decay, at the point where gradients are taken; 0 by default.
        averaging: how x averages: "lr(2)", in proportion to the square of the largest learning rate so far; or as in
            DATSGD.
        shared: False by default.
    """
