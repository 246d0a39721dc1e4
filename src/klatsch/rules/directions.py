"""Directions: what a node makes of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number
from klatsch.rules.base import Flow, State, blend, positive, share


class Direction:
    """What a node makes of a gradient: a frozen dataclass, whose numbers groups of parameters may set."""

    short: ClassVar[str] = ""  # its name as a part, if not that of its class
    gossips: str = ""  # the option that makes it gossip, if it does
    travels: tuple[str, ...] = ()  # fields of its state that gossip beside the iterate, in its message
    decays: bool = False  # whether it needs the query point, as s["query"]
    ignores_scale: bool = False  # whether a factor on all gradients of a node changes nothing

    def init(self, x: Tensor) -> State:
        """Its part of the state."""
        return {}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The direction of a round, and its part of the next state."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(self, s, grad, flow, t)")


@dataclass(frozen=True, eq=False)
class Momentum(Direction):
    """Momentum, on every node or of the network; 0 is the gradient itself.

        m <- momentum m + g;   s = m

    Where data differ, a momentum of one's own runs after one's own data. A shared one gossips: beside the iterate in
    one message (m <- mix(m) after the step), or before the step in a message of its own ("first": s = m = mix(m)).

    Args:
        momentum: a number from 0 up to but not including 1.
        shared: gossip the momentum: true, or "first".
    """

    momentum: Given = 0.0
    shared: bool | str = False
    short: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        columns.settle(self, momentum=share("momentum", self.momentum))
        if self.shared not in (False, True, "first"):
            raise ValueError(f"shared = {self.shared!r}; give true, false, or first to gossip momentum before the step")
        if self.shared and is_zero(self.momentum):
            raise ValueError(f"shared = {self.shared!r} with momentum = 0: nothing to share; give a momentum")

    @property
    def gossips(self) -> str:  # type: ignore[override]
        return "shared" if self.shared else ""

    @property
    def travels(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("m",) if self.shared is True else ()

    def init(self, x: Tensor) -> State:
        """A buffer, unless nothing needs to be remembered."""
        return {} if is_zero(self.momentum) else {"m": x * 0.0}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The momentum."""
        if "m" not in s:
            return grad, {}
        if isinstance(grad, Tensor) and isinstance(self.momentum, float):
            m = torch.add(grad, s["m"], alpha=self.momentum)  # in one pass through memory
        else:
            m = self.momentum * s["m"] + grad
        if self.shared == "first":
            (m,) = flow.mix(m)
        return m, {"m": m}


sgd = momentum = Momentum  # as in rules.Plain(0.1, rules.momentum(0.9)), or rules.sgd()


@dataclass(frozen=True, eq=False)
class Adam(Direction):
    """Steps of one size in every coordinate, whatever the size of its gradients: AdamW.

        m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        s = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay q

    q is the point where the gradient was taken. With moments of its own, every node divides its gradient by that
    gradient's own size: where data differ, the nodes' steps then do not cancel at the optimum. `Tracked` divides the
    gradient of the network, which vanishes there. A shared v is gossiped in every round, and the nodes' v then differ
    by a share of about 1 - beta2.

    Args:
        beta1: of the first moment, from 0 up to but not including 1; 0 keeps none, as schedule-free AdamW.
        beta2: of the second moment, likewise.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, a share of q that the step takes away.
        shared: gossip the second moment; else every node has its own.
        reduced: gossip gradients before anything is made of them, so that a node normalises the gradient of its
            neighbourhood. On the complete graph this is AdamW with an all-reduce; without it, nodes there average
            steps that each has normalised by itself.

    References:
        Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
        Chen et al., "On the convergence of decentralized adaptive gradient methods", 2023, for a shared v.
    """

    beta1: Given = 0.9
    beta2: Given = 0.999
    eps: Given = 1e-8
    weight_decay: Given = 0.0
    shared: bool = False
    reduced: bool = False
    short: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        columns.settle(
            self,
            beta1=share("beta1", self.beta1),
            beta2=share("beta2", self.beta2),
            eps=positive("eps", self.eps, "1e-8"),
            weight_decay=columns.hyper("weight_decay", self.weight_decay, lambda v: v >= 0, "a number from 0 up"),
        )
        if not isinstance(self.shared, bool):
            raise ValueError(f"shared = {self.shared!r}; give true to gossip the second moment, or false")
        if not isinstance(self.reduced, bool):
            raise ValueError(f"reduced = {self.reduced!r}; give true to gossip gradients first, or false")

    @property
    def gossips(self) -> str:  # type: ignore[override]
        return "shared" * self.shared or "reduced" * self.reduced

    @property
    def decays(self) -> bool:  # type: ignore[override]
        return not is_zero(self.weight_decay)

    @property
    def ignores_scale(self) -> bool:  # type: ignore[override]
        return not self.gossips

    def init(self, x: Tensor) -> State:
        """The moments, without a first one that nothing needs."""
        return ({} if is_zero(self.beta1) else {"m": x * 0.0}) | {"v": x * 0.0}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The normalised gradient."""
        v = s["v"]
        if self.reduced:
            (grad,) = flow.mix(grad)
        if self.shared:  # late or rounded flows may pull it below 0
            v = flow.mix(v)[0].clamp(min=0.0)
        kept = {"v": blend(grad * grad, v, self.beta2)}
        if "m" in s:
            kept["m"] = blend(grad, s["m"], self.beta1)
        size = (kept["v"] / (1.0 - self.beta2**t)).sqrt() + self.eps
        step = kept.get("m", grad) / (size * (1.0 - self.beta1**t))
        return (step + self.weight_decay * s["query"] if self.decays else step), kept


adam = Adam


def is_zero(number: Number) -> bool:
    """Whether a hyper-parameter is 0 in all columns."""
    return isinstance(number, float) and number == 0
