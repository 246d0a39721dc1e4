"""Patterns: how nodes combine their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number
from klatsch.rules.base import Flow, Graph, Rule, State, blend, descend, joined, learning_rate, of, positive, share
from klatsch.rules.directions import Direction, is_zero, sgd


@dataclass(frozen=True, eq=False)
class Pattern(Rule):
    """How nodes combine their steps.

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        direction: what a node makes of its gradient; the gradient itself by default.
    """

    lr: Given
    direction: Direction = field(default_factory=sgd)
    decays, ignores_scale = of("direction.decays"), of("direction.ignores_scale")

    def __post_init__(self) -> None:
        columns.settle(self, lr=learning_rate(self.lr))
        if not isinstance(self.direction, Direction):
            raise ValueError(f"direction = {self.direction!r}; give one, such as rules.momentum(0.9)")

    @property
    def parts(self) -> tuple[str, ...]:
        direction = self.direction.short or type(self.direction).__name__
        return super().parts if direction == "sgd" else (*super().parts, direction)

    def init(self, x: Tensor) -> State:
        return joined(self.name, {"w": x}, self.direction.init(x))

    def step(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The direction of a round, and its part of the next state."""
        return self.direction(self.seen(s), grad, flow, t)

    @property
    def settings(self) -> dict[str, Number]:
        return {name: v for name, v in vars(self.direction).items() if not isinstance(v, bool)}

    def with_settings(self, **values: Number) -> Self:
        return columns.replaced(self, direction=columns.replaced(self.direction, **values))

    def check_graph(self, graph: Graph, name: str = "") -> None:
        needs_doubly_stochastic(graph, name or self.name)


@dataclass(frozen=True, eq=False)
class Plain(Pattern):
    """Gossip as it is; mini-batch SGD on the complete graph.

        atc:  u = w - lr s;   w <- u + flow(u)            s = direction(g)
        cta:  w <- w + flow(w) - lr s

    In cta the iterate travels while the gradient is computed.

    Args:
        order: "atc" (adapt, then combine) or "cta" (combine, then adapt).

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017, Algorithm 1.
    """

    order: str = "atc"
    short: ClassVar[str] = "plain"

    @property
    def met(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.direction.gossips else ("w",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ("atc", "cta"):
            raise ValueError(f"order = {self.order!r}; choose atc (adapt, then combine) or cta (combine, then adapt)")

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        step, kept = self.step(s, grad, flow, t)
        if self.order == "atc":
            (w,) = flow.mix(descend(s["w"], step, lr))
        else:
            (w,) = flow.mix(s["w"])
            w = descend(w, step, lr)
        return {"w": w} | kept


@dataclass(frozen=True, eq=False)
class Remembering(Rule):
    """Plain gossip with a momentum v of its own instead of a direction.

    Args:
        lr: as in `Pattern`.
        momentum: a number from 0 up to but not including 1; 0 is plain gossip.
    """

    lr: Given
    momentum: Given = 0.9

    def __post_init__(self) -> None:
        columns.settle(self, lr=learning_rate(self.lr), momentum=share("momentum", self.momentum))

    def init(self, x: Tensor) -> State:
        return {"w": x, "v": x * 0.0}


@dataclass(frozen=True, eq=False)
class DecentLaM(Remembering):
    """Plain gossip with a momentum that remembers flows, too: large-batch momentum.

        u = w - lr g;   v <- momentum v + w - (u + flow(u));   w <- w - v

    w - mix(u) is lr times the gradient that plain gossip follows in effect. Local momentum amplifies its bias on
    heterogeneous data by 1 / (1 - momentum)^2; this form does not. The paper accumulates v / lr, which is the same for
    a constant learning rate.

    References:
        Yuan et al., "DecentLaM: decentralized momentum SGD for large-batch deep training", 2021.
    """

    short: ClassVar[str] = "decentlam"

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (mixed,) = flow.mix(descend(s["w"], grad, lr))
        v = self.momentum * s["v"] + s["w"] - mixed
        return {"w": s["w"] - v, "v": v}

    def check_graph(self, graph: Graph, name: str = "") -> None:
        needs_static_symmetric(graph, name or self.name)  # momentum remembers what the last round's matrix did
        if (graph.loss or graph.late or graph.every > 1) and not is_zero(self.momentum):
            raise ValueError(
                f"{name or self.name} on {graph.name}: its momentum repeats flows of links that are lost, late or "
                "silent by now, and diverges; use d2 or dat-d2 for local steps and late messages or lost ones"
            )


@dataclass(frozen=True, eq=False)
class QuasiGlobal(Remembering):
    """Plain gossip whose momentum follows the models after gossip, and so nearly that of the whole network.

        w_new = mix(w - momentum v - lr g);   v <- momentum v + (1 - momentum) (w - w_new);   w <- w_new

    Local momentum accumulates what a node's own data want; the displacement w - w_new has the neighbours in it. The
    paper accumulates v / lr, which is the same for a constant learning rate.

    References:
        Lin et al., "Quasi-global momentum: accelerating decentralized deep learning on heterogeneous data", 2021,
        Algorithm 1 (QG-DSGDm).
    """

    short: ClassVar[str] = "qg"

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (w,) = flow.mix(descend(descend(s["w"], grad, lr), s["v"], self.momentum))
        return {"w": w, "v": blend(s["w"] - w, s["v"], self.momentum)}

    def check_graph(self, graph: Graph, name: str = "") -> None:
        needs_doubly_stochastic(graph, name or self.name)
        _needs_flows_in_time(graph, name or self.name, self.momentum)


@dataclass(frozen=True, eq=False)
class DiLoCo(Pattern):
    """Local steps, and every H rounds an outer step with Nesterov momentum along what the network has moved.

        u = w - lr s;   m = u + flow(u);                                            s = direction(g)
        every H rounds:   gap = anchor - m;   drift <- outer_momentum drift + gap;
                          anchor <- anchor - outer_lr (gap + outer_momentum drift);   w <- anchor
        else:             w <- m

    On the complete graph with every = H it is DiLoCo; with outer_lr = 1 and outer_momentum = 0 it is local SGD, which
    is `Plain` there. On other graphs every node has an anchor of its own.

    Args:
        outer_lr: learning rate of the outer steps.
        outer_momentum: a number from 0 up to but not including 1.

    References:
        Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, Algorithm 1.
    """

    outer_lr: Given = 0.7
    outer_momentum: Given = 0.9
    short: ClassVar[str] = "diloco"

    def __post_init__(self) -> None:
        super().__post_init__()
        columns.settle(
            self,
            outer_lr=positive("outer_lr", self.outer_lr, "0.7"),
            outer_momentum=share("outer_momentum", self.outer_momentum),
        )

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"anchor": x, "drift": x * 0.0})

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        step, kept = self.step(s, grad, flow, t)
        (m,) = flow.mix(descend(s["w"], step, lr))
        gap = s["anchor"] - m
        drift = self.outer_momentum * s["drift"] + gap
        anchor = s["anchor"] - self.outer_lr * (gap + self.outer_momentum * drift)
        outer = 1.0 - flow.silent  # an `if` would not do: engines hand in many rounds at once
        fields = {"w": (m, anchor), "anchor": (s["anchor"], anchor), "drift": (s["drift"], drift)}
        return {name: blend(old, new, outer) for name, (old, new) in fields.items()} | kept

    def check_graph(self, graph: Graph, name: str = "") -> None:
        super().check_graph(graph, name)
        _needs_flows_in_time(graph, name or self.name, self.outer_momentum)


@dataclass(frozen=True, eq=False)
class Tracked(Pattern):
    """Gradient tracking: y follows the mean gradient over the network, so that heterogeneity does no harm.

        z <- z + flow(y);   y <- g + z;   u = w - lr s;   w <- u + flow(u)          s = direction(y)

    z sums to 0 over the nodes. This is y <- mix(y) + g - g_prev of the literature, written with flows.

    References:
        Koloskova et al., "An improved analysis of gradient tracking for decentralized machine learning", 2021.
    """

    short: ClassVar[str] = "tracked"
    ignores_scale = False  # what it divides is the network's gradient

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"y": x * 0.0, "z": x * 0.0})

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        z = s["z"] + flow(s["y"])[0]
        y = grad + z
        step, kept = self.step(s, y, flow, t)
        (w,) = flow.mix(descend(s["w"], step, lr))
        return {"w": w, "y": y, "z": z} | kept


@dataclass(frozen=True, eq=False)
class Corrected(Pattern):
    """D2, or exact diffusion: y remembers what flows took away and returns it, so heterogeneity does no harm.

        u = w - lr s - y / H;   f = flow(u) / 2;   w <- u + f;   y <- y - f         s = direction(g)

    y sums to 0 over the nodes. For H = 1 this is D2 with the matrix (I + P) / 2, which is stable on every symmetric
    graph:

        w <- mix(2 w - w_prev - (lr s - lr_prev s_prev)),   first step mix(w - lr s)

    With flows it does not drift in float32, and it works with local steps: in silent rounds y stays, and y / H steers
    the steps. H is the graph's, and longer where flows arrive late.

    Args:
        lazy: halve the flow; if false, D2 as published, which is not stable on every graph.

    References:
        Tang et al., "D2: decentralized training over decentralized data", 2018, Algorithm 1.
        Alghunaim, "Local exact-diffusion for decentralized optimization and learning", 2023, for H > 1.
    """

    lazy: bool = True
    every: int = field(default=1, kw_only=True)  # H, which `on` sets
    short: ClassVar[str] = "corrected"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lazy, bool):
            raise ValueError(f"lazy = {self.lazy!r}; give true, or false for D2 as published")

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"y": x * 0.0})

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        step, kept = self.step(s, grad, flow, t)
        u = descend(descend(s["w"], step, lr), s["y"], 1.0 / self.every)
        (f,) = flow(u)
        part = 0.5 if self.lazy else 1.0
        return {"w": descend(u, f, -part), "y": descend(s["y"], f, part)} | kept

    @property
    def scales(self) -> dict[str, float]:  # type: ignore[override]
        return {"y": float(self.every)}  # y / H answers the gradients

    def mixed(self, s: State, new: State) -> Tensor:
        return new["w"] + (s["y"] - new["y"]) if self.lazy else new["w"]  # w took half of the flow, y the other half

    def on(self, graph: Graph) -> Self:
        # y answers flows that are as old as they are late, and would swing ever further with its whole weight.
        return columns.replaced(self, every=graph.every + 2 * graph.late)

    def check_graph(self, graph: Graph, name: str = "") -> None:
        name = name or self.name
        needs_static_symmetric(graph, name)
        # Rounding may lift an even ring's -1/3 above it.
        if not self.lazy and (smallest := graph.smallest_eigenvalue) <= -1 / 3 + 1e-9:
            raise ValueError(
                f"{name} with lazy = false on {graph.name}: the smallest eigenvalue of P is {smallest:.4g}, and D2 as "
                "published needs more than -1/3; leave lazy out"
            )


@dataclass(frozen=True, eq=False)
class Push(Pattern):
    """Stochastic gradient push (SGP), for directed graphs whose links have no way back.

        u = w - lr s;   w <- u + flow(u);   weight <- weight + flow(weight)         s = direction(g(w / weight))

    There a node can choose how to split what it sends (the columns of P sum to 1) but not what it receives, so values
    drift to nodes that hear much. A weight that drifts the same way is gossiped too, and divides the values.

    References:
        Assran et al., "Stochastic gradient push for distributed deep learning", 2019, Algorithm 1.
    """

    short: ClassVar[str] = "push"
    push = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if option := self.direction.gossips:
            raise ValueError(f"{self.name} with {option} = true: push-sum would gossip sums; leave {option} out")

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"weight": x[..., :1] * 0.0 + 1.0})

    def at(self, s: State, v: Tensor) -> Tensor:
        return v / s["weight"]

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (weight,) = flow.mix(s["weight"])
        step, kept = self.step(s, grad, flow, t)
        (w,) = flow.mix(descend(s["w"], step, lr))
        return {"w": w, "weight": weight} | kept

    def check_graph(self, graph: Graph, name: str = "") -> None:
        if not graph.column_stochastic:
            raise ValueError(
                f"{name or self.name} on {graph.name}: the columns of P do not sum to 1, so that mass is lost; build "
                "the graph with stochastic='columns', or use dsgd or dat on a doubly stochastic graph"
            )


def needs_doubly_stochastic(graph: Graph, rule: str) -> None:
    """Refuse a graph on which mixing does not keep the network mean."""
    if not graph.doubly_stochastic:
        raise ValueError(
            f"{rule} on {graph.name}: the matrix is not doubly stochastic, so mixing does not keep the network "
            "mean; use sgp or dat-sgp with a column-stochastic graph, or allow it with any_graph=True (--any-graph)"
        )


def needs_static_symmetric(graph: Graph, rule: str) -> None:
    """Refuse a graph that is directed or changes: rules that look back at the last round are not stable there."""
    if graph.changes or not graph.symmetric:
        kinds = {"directed": graph.directed, "time-varying": graph.changes, "not symmetric": not graph.symmetric}
        reason = " and ".join([kind for kind, true in kinds.items() if true][:2])
        raise ValueError(
            f"{rule} on {graph.name}: the graph is {reason}, and {rule} needs one symmetric matrix for all rounds; "
            "use a static graph such as ring or torus, or another rule such as dat or gt, "
            "or allow it with any_graph=True (--any-graph)"
        )


def _needs_flows_in_time(graph: Graph, rule: str, momentum: Number) -> None:
    """Refuse flows that arrive after the next mix, where a momentum carries them on."""
    if graph.late >= graph.every and graph.late and not is_zero(momentum):
        raise ValueError(
            f"{rule} on {graph.name}: its momentum carries on flows that are late already, and diverges; use late up "
            f"to every - 1 = {graph.every - 1}, or another rule such as dat"
        )
