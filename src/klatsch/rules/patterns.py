"""Patterns: how nodes combine their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number, WeightMatrix
from klatsch.rules.base import Flow, Rule, State, Tensors, blend, descend, joined, learning_rate, of, share
from klatsch.rules.directions import Direction, Hooked, Momentum, Outer, is_zero

if TYPE_CHECKING:
    from klatsch.topology import Topology

MOST_DELAYED = 0.5  # of a momentum that carries flows on, where neighbours know numbers late: 0.8 diverged


@dataclass(frozen=True, eq=False)
class Pattern(Rule):
    """How nodes combine their steps.

    Args:
        lr: learning rate: a number, a list with one per column, or a function of t.
        direction: what a node makes of its gradient; the gradient itself by default.
        outer: what happens beside mixing when nodes talk; nothing by default.
    """

    lr: Given
    direction: Direction = field(default_factory=Momentum)
    outer: Outer | None = field(default=None, kw_only=True)
    decays, ignores_scale = of("direction.decays"), of("direction.ignores_scale")
    needs_shapes = of("direction.needs_shapes")

    @property
    def graph(self) -> str:  # type: ignore[override]
        return (self.outer or self.direction).graph

    @property
    def hook(self) -> Hooked | None:  # type: ignore[override]
        return self.direction if isinstance(self.direction, Hooked) else None

    def __post_init__(self) -> None:
        columns.settle(self, lr=learning_rate(self.lr))
        if not isinstance(self.direction, Direction):
            raise ValueError(f"direction = {self.direction!r}; give one, such as rules.momentum(0.9)")
        if not isinstance(self.outer, Outer | None):
            raise ValueError(f"outer = {self.outer!r}; give one, such as rules.outer(0.7, 0.9), or none")
        if self.hook and (self.short != "plain" or self.outer):
            raise ValueError(f"{self.name}: a hook is for an all-reduce of gradients alone; use plain+hooked")

    @property
    def parts(self) -> tuple[str, ...]:
        direction = self.direction.short or type(self.direction).__name__
        others = (direction if direction != "sgd" else "", self.outer.short if self.outer else "")
        return (*super().parts, *filter(None, others))

    def init(self, x: Tensor) -> State:
        kept = self.direction.init(x)
        return joined(self.name, {"w": x}, joined(self.name, kept, self.outer.init(x)) if self.outer else kept)

    def step(self, s: State, grad: Tensor, flow: Flow, t: int) -> tuple[Tensor, State]:
        """The direction of a round, and its part of the next state."""
        return self.direction(self.seen(s), grad, flow, t)

    def combine(self, s: State, u: Tensor, kept: State, flow: Flow) -> State:
        """Gossip of the point u that a step has led to, of what the direction shares, and the outer step."""
        u = self.outer.proposal(s, u, flow) if self.outer else u
        names = self.direction.travels
        (w, *beside), more = self.mix(s, flow, u, *(kept[name] for name in names))
        kept = kept | more | dict(zip(names, beside, strict=True))
        return kept | (self.outer.step(s, u, w, flow) if self.outer else {"w": w})

    def mix(self, s: State, flow: Flow, *tensors: Tensor) -> tuple[Tensors, State]:
        """The iterate and what travels beside it after gossip, and what the pattern remembers of that."""
        return flow.mix(*tensors), {}

    @property
    def settings(self) -> dict[str, Number]:
        return {name: v for name, v in vars(self.direction).items() if not isinstance(v, bool | str | tuple)}

    def with_settings(self, **values: Number) -> Self:
        return columns.replaced(self, direction=columns.replaced(self.direction, **values))

    def on(self, graph: Topology) -> Self:
        return columns.replaced(self, outer=self.outer.on(graph)) if self.outer else self

    def shaped(self, matrices: Sequence[WeightMatrix]) -> Self:
        return columns.replaced(self, direction=columns.replaced(self.direction, matrices=tuple(matrices)))

    def check_graph(self, graph: Topology, name: str = "") -> None:
        needs_doubly_stochastic(graph, name or self.name)
        if self.hook and not (graph.all_reduce and graph.every == 1):
            raise ValueError(
                f"{name or self.name} on {graph.name}: a hook compresses an all-reduce of gradients in every round; "
                "use complete, or another rule with wire = 'int8' on graphs with neighbours"
            )
        if not self.outer:
            return
        needs_flows_in_time(graph, name or self.name, self.outer.outer_momentum)
        most, limit = _largest(self.outer.outer_momentum), graph.momentum_limit
        if most and limit is not None and most > limit:
            raise ValueError(
                f"{name or self.name} on {graph.name}: outer_momentum = {most:g}, and disagreement grows by itself "
                f"from {limit:g} up; use at most that, or a static symmetric graph such as ring, or allow it with "
                "any_graph=True (--any-graph)"
            )


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
        return () if self.direction.gossips or self.outer else ("w",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ("atc", "cta"):
            raise ValueError(f"order = {self.order!r}; choose atc (adapt, then combine) or cta (combine, then adapt)")
        if self.order == "cta" and self.outer:
            raise ValueError("order = 'cta' with an outer step, which needs the local steps before it mixes; use atc")

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        if self.order == "atc":
            step, kept = self.step(s, grad, flow, t)
            return self.combine(s, descend(s["w"], step, lr), kept, flow)
        mixed = dict(zip(names := ("w", *self.direction.travels), flow.mix(*(s[n] for n in names)), strict=True))
        step, kept = self.step(self.seen(s) | mixed, grad, flow, t)
        return kept | {"w": descend(mixed["w"], step, lr)}


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

    def check_graph(self, graph: Topology, name: str = "") -> None:
        needs_static_symmetric(graph, name or self.name)  # momentum remembers what the last round's matrix did
        if (graph.loss or graph.late or graph.delay or graph.every > 1) and not is_zero(self.momentum):
            raise ValueError(
                f"{name or self.name} on {graph.name}: its momentum repeats flows of links that are lost, late or "
                "silent by now, and diverges; use d2 or dat-d2 for local steps and late messages or lost ones"
            )


@dataclass(frozen=True, eq=False)
class QuasiGlobal(Remembering):
    """Plain gossip whose momentum follows the models after gossip, and so nearly that of the whole network.

        w_new = mix(w - momentum v - lr g);   v <- momentum v + (1 - momentum) (w - w_new);   w <- w_new

    Local momentum accumulates what a node's own data want; the displacement w - w_new has the neighbours in it. The
    paper accumulates v / lr, which is the same for a constant learning rate. With gossip in every H-th round v changes
    only then, by the displacement (anchor - w_new) / H from the last such round: it would repeat a single flow in all
    rounds until the next one, and diverge.

    References:
        Lin et al., "Quasi-global momentum: accelerating decentralized deep learning on heterogeneous data", 2021,
        Algorithm 1 (QG-DSGDm).
    """

    every: int = field(default=1, kw_only=True)  # H, which `on` sets
    short: ClassVar[str] = "qg"
    graph = "base_graph"

    def init(self, x: Tensor) -> State:
        return super().init(x) | ({"anchor": x} if self.every > 1 else {})

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (w,) = flow.mix(descend(descend(s["w"], grad, lr), s["v"], self.momentum))
        if "anchor" not in s:
            return {"w": w, "v": blend(s["w"] - w, s["v"], self.momentum)}
        v = blend((s["anchor"] - w) / self.every, s["v"], self.momentum)
        talks = 1.0 - flow.silent
        return {"w": w, "v": blend(s["v"], v, talks), "anchor": blend(s["anchor"], w, talks)}

    def on(self, graph: Topology) -> Self:
        return columns.replaced(self, every=graph.every)

    def check_graph(self, graph: Topology, name: str = "") -> None:
        needs_doubly_stochastic(graph, name or self.name)
        needs_flows_in_time(graph, name or self.name, self.momentum)


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
        return self.combine(s, descend(s["w"], step, lr), kept, flow) | {"y": y, "z": z}


@dataclass(frozen=True, eq=False)
class KGT(Tracked):
    """K-GT, gradient tracking for local steps: y is the mean of the H rounds from mix to mix.

        u = w - lr s;   y <- y + (g + z) / H                                        s = direction(g + z)
        when nodes talk, in one message:   w <- u + flow(u);   z <- z + flow(y);   y <- 0

    For H = 1 on a static graph this is `Tracked`. The paper divides what w has moved by H lr, which is y for a constant
    learning rate without momentum; its eta_s is `outer_lr` with `outer_momentum` = 0.

    References:
        Liu, Lin, Koloskova and Stich, "Decentralized gradient tracking with local steps", 2023.
    """

    every: int = field(default=1, kw_only=True)  # H, which `on` sets
    short: ClassVar[str] = "kgt"

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        tracked = grad + s["z"]
        step, kept = self.step(s, tracked, flow, t)
        y = descend(s["y"], tracked, -1.0 / self.every)
        return self.combine(s | {"y": y}, descend(s["w"], step, lr), kept, flow)

    def mix(self, s: State, flow: Flow, *tensors: Tensor) -> tuple[Tensors, State]:
        *flows, f = flow(*tensors, s["y"])
        mixed = tuple(v + g for v, g in zip(tensors, flows, strict=True))
        return mixed, {"z": s["z"] + f, "y": flow.silent * s["y"]}

    def on(self, graph: Topology) -> Self:
        return columns.replaced(super().on(graph), every=graph.every)

    def check_graph(self, graph: Topology, name: str = "") -> None:
        super().check_graph(graph, name)
        if graph.late:
            raise ValueError(
                f"{name or self.name} on {graph.name}: late = {graph.late}, and flows that arrive late would correct "
                "the wrong local steps; leave late out, or use another rule such as gt"
            )


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
    graph = "ring"  # one that does not change

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lazy, bool):
            raise ValueError(f"lazy = {self.lazy!r}; give true, or false for D2 as published")

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"y": x * 0.0})

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        step, kept = self.step(s, grad, flow, t)
        u = descend(descend(s["w"], step, lr), s["y"], 1.0 / self.every)
        return self.combine(s, u, kept, flow)

    def mix(self, s: State, flow: Flow, *tensors: Tensor) -> tuple[Tensors, State]:
        (u, *beside), (f, *flows) = tensors, flow(*tensors)
        part = 0.5 if self.lazy else 1.0
        mixed = (descend(u, f, -part), *(v + g for v, g in zip(beside, flows, strict=True)))
        return mixed, {"y": descend(s["y"], f, part)}

    @property
    def scales(self) -> dict[str, float]:  # type: ignore[override]
        return {"y": float(self.every)}  # y / H answers the gradients

    def mixed(self, s: State, new: State) -> Tensor:
        return new["w"] + (s["y"] - new["y"]) if self.lazy else new["w"]  # w took half of the flow, y the other half

    def on(self, graph: Topology) -> Self:
        # y answers flows of values that are as old as this, and would swing ever further with its whole weight.
        return columns.replaced(super().on(graph), every=graph.every + 2 * (graph.late + graph.delay))

    def check_graph(self, graph: Topology, name: str = "") -> None:
        name = name or self.name
        super().check_graph(graph, name)
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
    pushed = ("weight", "w")

    def __post_init__(self) -> None:
        super().__post_init__()
        if option := self.direction.gossips:
            raise ValueError(f"{self.name} with {option} = true: push-sum would gossip sums; leave {option} out")
        if self.outer:
            raise ValueError(f"{self.name}: momentum can turn push-sum's weights negative; use plain or tracked")

    def init(self, x: Tensor) -> State:
        return joined(self.name, super().init(x), {"weight": x[..., :1] * 0.0 + 1.0})

    def at(self, s: State, v: Tensor) -> Tensor:
        return v / s["weight"]

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (weight,) = flow.mix(s["weight"])
        step, kept = self.step(s, grad, flow, t)
        return self.combine(s, descend(s["w"], step, lr), kept, flow) | {"weight": weight}

    def check_graph(self, graph: Topology, name: str = "") -> None:
        if not graph.column_stochastic:
            raise ValueError(
                f"{name or self.name} on {graph.name}: the columns of P do not sum to 1, so that mass is lost; build "
                "the graph with stochastic='columns', or use dsgd or dat on a doubly stochastic graph"
            )


def needs_doubly_stochastic(graph: Topology, rule: str) -> None:
    """Refuse a graph on which mixing does not keep the network mean."""
    if not graph.doubly_stochastic:
        raise ValueError(
            f"{rule} on {graph.name}: the matrix is not doubly stochastic, so mixing does not keep the network "
            "mean; use sgp or dat-sgp with a column-stochastic graph, or allow it with any_graph=True (--any-graph)"
        )


def needs_static_symmetric(graph: Topology, rule: str) -> None:
    """Refuse a graph that is directed or changes: rules that look back at the last round are not stable there."""
    if graph.changes or not graph.symmetric:
        kinds = {"directed": graph.directed, "time-varying": graph.changes, "not symmetric": not graph.symmetric}
        reason = " and ".join([kind for kind, true in kinds.items() if true][:2])
        raise ValueError(
            f"{rule} on {graph.name}: the graph is {reason}, and {rule} needs one symmetric matrix for all rounds; "
            "use a static graph such as ring or torus, or another rule such as dat or gt, "
            "or allow it with any_graph=True (--any-graph)"
        )


def needs_flows_in_time(graph: Topology, rule: str, momentum: Number) -> None:
    """Refuse flows that arrive after the next mix, where a momentum carries them on."""
    if graph.late >= graph.every and graph.late and not is_zero(momentum):
        raise ValueError(
            f"{rule} on {graph.name}: its momentum carries on flows that are late already, and diverges; use late up "
            f"to every - 1 = {graph.every - 1}, or another rule such as dat"
        )
    if graph.delay and (most := _largest(momentum)) > MOST_DELAYED:
        raise ValueError(
            f"{rule} on {graph.name}: neighbours know a number after {graph.delay} rounds, and a momentum of {most:g} "
            f"carries on what they knew before, and diverges; use at most {MOST_DELAYED:g}, or wire = 'int8'"
        )


def _largest(momentum: Number) -> float:
    return float(momentum.max()) if isinstance(momentum, Tensor) else momentum
