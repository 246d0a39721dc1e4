"""Directions: what a node makes of a gradient; and the outer step: what happens beside mixing."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number, WeightMatrix
from klatsch.rules.base import Flow, State, blend, descend, positive, share

if TYPE_CHECKING:
    from klatsch.topology import Topology


class Direction:
    """What a node makes of a gradient: a frozen dataclass, whose numbers groups of parameters may set."""

    short: ClassVar[str] = ""  # its name as a part, if not that of its class
    graph: ClassVar[str] = "base_graph"  # on which it does best, if its pattern takes graphs that change
    shared: bool | str = False  # whether it gossips, and what
    travels: tuple[str, ...] = ()  # fields of its state that gossip beside the iterate, in its message
    decays: bool = False  # whether it needs the query point, as s["query"]
    ignores_scale: bool = False  # whether a factor on all gradients of a node changes nothing
    needs_shapes: bool = False  # whether it needs whole vectors, and `matrices`
    matrices: tuple[WeightMatrix, ...] = ()  # among the parameters, which engines set

    @property
    def gossips(self) -> str:
        """The option that makes it gossip, if it does."""
        return "shared" if self.shared else ""

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
    def travels(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("m",) if self.shared is True else ()

    def init(self, x: Tensor) -> State:
        """A buffer, unless nothing needs to be remembered."""
        return {} if is_zero(self.momentum) else {"m": x * 0.0}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        if "m" not in s:
            return grad, {}
        if isinstance(grad, Tensor) and isinstance(self.momentum, float):
            m = torch.add(grad, s["m"], alpha=self.momentum)  # in one pass through memory
        else:
            m = self.momentum * s["m"] + grad
        if self.shared == "first":
            (m,) = flow.mix(m)
        return m, {"m": m}


@dataclass(frozen=True, eq=False)
class Hooked(Momentum):
    """SGD with an all-reduce of compressed gradients, as DDP with a communication hook; on the complete graph.

        fp16            m <- momentum m + mean(g);   s = m        rounded to float16 before and after the mean
        powersgd(r)     g <- g + e;   P = orthonormal(mean(g Q));   Q <- mean(g^T P);   e <- g - P Q^T
                        m <- momentum m + P Q^T;   s = m

    PowerSGD approximates a gradient by a matrix of rank r: for each weight matrix that a problem names (not the last
    layer) it sends two thin factors, one after the other, where that halves the numbers at least. All others travel
    whole, with P. What the approximation leaves out, e, is added to a node's next gradient, and Q is where the next one
    begins. Both are torch's hooks but for the order of roundings, and PowerSGD begins in the first round.

    Args:
        momentum: a number from 0 up to but not including 1.
        hook: "fp16", or "powersgd(1)" with any rank.

    References:
        Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
        optimization", 2019, Algorithms 1 and 2.
    """

    shared: bool | str = field(default=False, init=False)
    hook: str = "fp16"
    short: ClassVar[str] = "hooked"
    gossips = "hook"
    graph = "complete"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hook != "fp16" and not self.rank:
            raise ValueError(f"hook = {self.hook!r}; give fp16, or powersgd(1), with a rank from 1 up")

    @property
    def rank(self) -> int:
        """Of PowerSGD's approximation; 0 without it."""
        rank = re.fullmatch(r"powersgd\((\d{1,6})\)", str(self.hook))
        return int(rank[1]) if rank else 0

    @property
    def needs_shapes(self) -> bool:  # type: ignore[override]
        return bool(self.rank)

    @property
    def grows(self) -> float:
        """The power of the number of parameters with which its bytes grow: factors by the width of a model."""
        return 0.5 if self.rank else 1.0

    def bytes(self, numbers: int) -> int:
        """What travels of a gradient of so many numbers."""
        saved = sum(m.outputs * m.inputs - self.rank * (m.outputs + m.inputs) for m in self._thin)
        return 4 * (numbers - saved) if self.rank else 2 * numbers

    def init(self, x: Tensor) -> State:
        """Beside the momentum, what PowerSGD has left out, and its first Q: the same on all nodes."""
        if not self.rank:
            return super().init(x)
        q = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return super().init(x) | {"e": x * 0.0, "q": x * 0.0 + q.to(x)}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        if self.rank:
            mean, kept = self._low(s, grad + s["e"], flow)
        else:
            (mean,), kept = flow.mix(grad.half().to(grad.dtype)), {}
            mean = mean.half().to(grad.dtype)
        step, more = super().__call__(s, mean, flow, t)
        return step, kept | more

    def _low(self, s: State, g: Tensor, flow: Flow) -> tuple[Tensor, State]:
        """The mean of g over all nodes by factors, which lie where their matrix begins in a vector."""
        thin, left, right = self._thin, g.clone(), torch.zeros_like(g)
        for matrix in thin:
            left[..., matrix.start : matrix.end] = 0.0
            self._factor(left, matrix, matrix.outputs).copy_(matrix.of(g) @ self._factor(s["q"], matrix, matrix.inputs))
        (mean,) = flow.mix(left)
        P = [orthonormal(self._factor(mean, matrix, matrix.outputs)) for matrix in thin]
        for matrix, p in zip(thin, P, strict=True):
            self._factor(right, matrix, matrix.inputs).copy_(matrix.of(g).mT @ p)
        (q,) = flow.mix(right)
        mean, e = mean.clone(), torch.zeros_like(g)
        for matrix, p in zip(thin, P, strict=True):
            low = matrix.of(mean).copy_(p @ self._factor(q, matrix, matrix.inputs).mT)
            matrix.of(e).copy_(matrix.of(g) - low)
        return mean, {"e": e, "q": q}

    @property
    def _thin(self) -> list[WeightMatrix]:
        """The matrices of which factors are sent."""
        r = self.rank
        return [m for m in self.matrices if r and 2 * r * (m.outputs + m.inputs) < m.outputs * m.inputs]

    def _factor(self, vector: Tensor, matrix: WeightMatrix, rows: int) -> Tensor:
        """A view of a factor with so many rows."""
        numbers = vector[..., matrix.start : matrix.start + rows * self.rank]
        return numbers.view(*vector.shape[:-1], rows, self.rank)


@dataclass(frozen=True, eq=False)
class Adam(Direction):
    """Steps of one size in every coordinate, whatever the size of its gradients: AdamW.

        m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        s = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay q

    q is the point where the gradient was taken. With moments of its own, every node divides its gradient by that
    gradient's own size: where data differ, the nodes' steps then do not cancel at the optimum. `Tracked` divides the
    gradient of the network, which vanishes there. With shared gradients a node normalises those of its neighbourhood;
    on the complete graph this is AdamW with an all-reduce. A shared v is gossiped in every round, and the nodes' v then
    differ by a share of about 1 - beta2.

    Args:
        beta1: of the first moment, from 0 up to but not including 1; 0 keeps none, as schedule-free AdamW.
        beta2: of the second moment, likewise.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, a share of q that the step takes away.
        shared: true to gossip gradients before anything is made of them, or "v"; else every node has its own.

    References:
        Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
        Chen et al., "On the convergence of decentralized adaptive gradient methods", 2023, for a shared v.
    """

    beta1: Given = 0.9
    beta2: Given = 0.999
    eps: Given = 1e-8
    weight_decay: Given = 0.0
    shared: bool | str = False
    short: ClassVar[str] = "adam"
    graph = "ring"  # the more nodes are in what it normalises, the better
    also = "v"  # what it can share instead of gradients

    def __post_init__(self) -> None:
        columns.settle(
            self,
            beta1=share("beta1", self.beta1),
            beta2=share("beta2", self.beta2),
            eps=positive("eps", self.eps, "1e-8"),
            weight_decay=columns.hyper("weight_decay", self.weight_decay, lambda v: v >= 0, "a number from 0 up"),
        )
        if self.shared not in (False, True, self.also):
            raise ValueError(f"shared = {self.shared!r}; give true to gossip gradients first, false, or {self.also}")

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
        v = s["v"]
        if self.shared is True:
            (grad,) = flow.mix(grad)
        if self.shared == "v":  # late or rounded flows may pull it below 0
            v = flow.mix(v)[0].clamp(min=0.0)
        kept = {"v": blend(grad * grad, v, self.beta2)}
        if "m" in s:
            kept["m"] = blend(grad, s["m"], self.beta1)
        step = normalised(kept.get("m", grad), kept["v"], self.beta1, self.beta2, self.eps, t)
        return (step + self.weight_decay * s["query"] if self.decays else step), kept


@dataclass(frozen=True, eq=False)
class Muon(Adam):
    """Steps of one size in every direction of a weight matrix: Muon, and AdamW for all other parameters.

        m <- momentum m + (1 - momentum) g;   n = m + momentum (m - m_prev);   s = scale NS(n) + weight_decay q

    NS makes the singular values of a matrix roughly 1, by five Newton-Schulz steps: on a GPU in bfloat16, unless the
    parameters are in float64. n is (1 - momentum) g + momentum m, Nesterov's point. Problems say which parameters are
    matrices, on ranks groups do. With shared gradients a node orthogonalises those of its neighbourhood; on the
    complete graph this is Muon with an all-reduce.

    Args:
        beta1, beta2, eps: of AdamW.
        weight_decay: decoupled weight decay, of both.
        shared: true to gossip gradients before anything is made of them; "momentum" for the momentum of matrices, and
            the gradients of the rest; else every node has its own.
        momentum: of matrices, from 0 up to but not including 1.
        nesterov: whether the momentum looks ahead; n is m without it.
        adjust_lr: the scale of a matrix, as torch calls it: "match_rms_adamw", 0.2 sqrt(max(outputs, inputs)), with
            which the learning rates of AdamW do for both; or "original", sqrt(max(1, outputs / inputs)).
        adam_lr: the learning rate of AdamW in units of lr.

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
        Liu et al., "Muon is scalable for LLM training", 2025, for match_rms_adamw.
    """

    momentum: Given = 0.95
    nesterov: bool = True
    adjust_lr: str = "match_rms_adamw"
    adam_lr: Given = 1.0
    short: ClassVar[str] = "muon"
    graph = "one_peer_exponential"  # on which it was measured, beside an all-reduce
    also = "momentum"
    needs_shapes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        columns.settle(
            self, momentum=share("momentum", self.momentum), adam_lr=positive("adam_lr", self.adam_lr, "0.1")
        )
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov = {self.nesterov!r}; give true or false")
        if self.adjust_lr not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr = {self.adjust_lr!r}; choose match_rms_adamw or original")

    def init(self, x: Tensor) -> State:
        """Both moments of all parameters; the second one of matrices is not used."""
        return {"m": x * 0.0, "v": x * 0.0}

    def __call__(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The orthogonalised momentum of matrices, the normalised one of the rest."""
        inside = grad.new_zeros(grad.shape[-1])  # 1 in matrices
        for matrix in self.matrices:
            inside[matrix.start : matrix.end].fill_(1.0)
        outside, momentum = 1.0 - inside, inside * self.momentum
        beta1 = outside * self.beta1 + momentum
        if self.shared == "momentum":  # gradients elsewhere: a neighbour's momentum by one's own v has any size
            grad, beta1 = blend(grad, s["m"], momentum), outside * self.beta1
        if self.shared:
            (grad,) = flow.mix(grad)
        m, v = blend(grad, s["m"], beta1), blend(grad * grad, s["v"], self.beta2)
        step = self.adam_lr * normalised(m, v, beta1, self.beta2, self.eps, t)
        ahead = m + self.momentum * (m - s["m"]) if self.nesterov else m
        by_shape = defaultdict[tuple[int, ...], list[WeightMatrix]](list)
        for matrix in self.matrices:  # one product takes those of one shape together
            by_shape[tuple(sorted((matrix.outputs, matrix.inputs)))].append(matrix)
        for alike in by_shape.values():
            stacked = torch.stack([matrix.wide(ahead) for matrix in alike])
            for matrix, made in zip(alike, orthogonal(stacked), strict=True):
                matrix.wide(step).copy_(self._scale(matrix) * made)
        if self.decays:
            step = step + self.weight_decay * (outside * self.adam_lr + inside) * s["query"]
        return step, {"m": m, "v": v}

    def _scale(self, matrix: WeightMatrix) -> float:
        if self.adjust_lr == "original":
            return math.sqrt(max(1.0, matrix.outputs / matrix.inputs))
        return 0.2 * math.sqrt(max(matrix.outputs, matrix.inputs))


@dataclass(frozen=True, eq=False)
class Outer:
    """A longer or shorter step along what local steps have moved, and a momentum from mix to mix.

        u: where the steps since the last mix have led from the anchor a
        v = a + outer_lr (u - a);   a <- v + flow(v) + outer_momentum (v - v_prev);   w <- a

    This is GASLoC: momentum accelerates gossip itself, with one vector per message, also where nodes talk in every
    round. On an all-reduce the momentum is that of the mixed v, and the same on all nodes: DiLoCo, whose outer
    optimizer is SGD with Nesterov momentum; with outer_lr = 1 and outer_momentum = 0 it is local SGD. Without Nesterov
    the momentum is that of a, not of v: NoLoCo's step with its gamma = 1, which then needs one vector only.

    Args:
        outer_lr: the share of the local steps that is taken.
        outer_momentum: a number from 0 up to but not including 1, and at most the graph's `momentum_limit`: beyond,
            disagreement grows by itself, whatever outer_lr and nesterov are (`klatsch topology` shows it).
        nesterov: whether momentum looks ahead.

    References:
        Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, Algorithm 1.
        Cagnasso, Belilovsky and Oyallon, "Unifying local communications and local updates for LLM pretraining", 2026.
        Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models", 2025.
    """

    outer_lr: Given = 0.7
    outer_momentum: Given = 0.9
    nesterov: bool = True
    together: bool = field(default=False, kw_only=True)  # whether a mix makes all nodes equal, which `on` sets
    short: ClassVar[str] = "outer"
    graph = "ring"  # on which every momentum is stable

    def __post_init__(self) -> None:
        columns.settle(
            self,
            outer_lr=positive("outer_lr", self.outer_lr, "0.7"),
            outer_momentum=share("outer_momentum", self.outer_momentum),
        )
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov = {self.nesterov!r}; give true, or false for the momentum of NoLoCo")

    def init(self, x: Tensor) -> State:
        """Where the last mix has led, and what the momentum looks back at."""
        return {"anchor": x, "last": x}

    def on(self, graph: Topology) -> Self:
        return columns.replaced(self, together=graph.all_reduce)

    def proposal(self, s: State, u: Tensor, flow: Flow) -> Tensor:
        """What to mix: v, or u where nobody talks. An `if` would not do: engines may hand in many rounds at once."""
        return blend(u, blend(s["anchor"], u, self.outer_lr), 1.0 - flow.silent)

    def step(self, s: State, v: Tensor, mixed: Tensor, flow: Flow) -> State:
        """The iterate after mixing, and what is remembered."""
        now = mixed if self.together else v
        looks = now if self.nesterov else s["anchor"]
        anchor = descend(mixed, looks - s["last"], -1.0 * self.outer_momentum)
        talks = 1.0 - flow.silent
        fields = {"w": (mixed, anchor), "anchor": (s["anchor"], anchor), "last": (s["last"], looks)}
        return {name: blend(old, new, talks) for name, (old, new) in fields.items()}


def normalised(m: Tensor, v: Tensor, beta1: Number, beta2: Number, eps: Number, t: int) -> Tensor:
    """Adam's step: a first moment by the root of a second one, both without the bias of their start at 0."""
    return m / (((v / (1.0 - beta2**t)).sqrt() + eps) * (1.0 - beta1**t))


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices, (..., rows, columns) with rows <= columns, with singular values of roughly 1 (0.7 to 1.2)."""
    a, b, c = 3.4445, -4.7750, 2.0315  # which lift small singular values fastest
    X = matrices.flatten(0, -3)
    X = X.bfloat16() if X.is_cuda and X.dtype == torch.float32 else X
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.to(matrices.dtype).view_as(matrices)


def orthonormal(factors: Tensor) -> Tensor:
    """Factors (..., rows, rank) with orthonormal columns, by Gram and Schmidt: few columns, on any device."""
    columns: list[Tensor] = []
    for column in factors.unbind(-1):
        for other in columns:
            column = column - (column * other).sum(-1, keepdim=True) * other
        columns.append(column / column.norm(dim=-1, keepdim=True).clamp(min=1e-30))
    return torch.stack(columns, -1)


def is_zero(number: Number) -> bool:
    """Whether a hyper-parameter is 0 in all columns."""
    return isinstance(number, float) and number == 0
