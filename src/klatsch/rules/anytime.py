"""Averages of a pattern's iterates: anytime, where gradients are taken at the average too, and a plain one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from klatsch import columns
from klatsch.columns import Given, Number
from klatsch.rules.averaging import Averaging, constant, parse
from klatsch.rules.base import Flow, Graph, Rule, State, blend, checked, joined, share


@dataclass(frozen=True, eq=False)
class Around(Rule):
    """A rule around another one, whose learning rate, settings and needs it has."""

    base: Rule

    def __post_init__(self) -> None:
        if isinstance(self.base, Around):
            raise ValueError(f"{self.base.name} returns an average already; give the pattern alone")
        columns.settle(self, base=checked(self.base))

    @property
    def lr(self) -> Given:
        return self.base.lr

    @property
    def push(self) -> bool:  # type: ignore[override]
        return self.base.push

    @property
    def name(self) -> str:
        return self.base.name

    def at(self, s: State, v: Tensor) -> Tensor:
        return self.base.at(s, v)

    def iterate(self, s: State) -> Tensor:
        return self.base.iterate(s)

    def query(self, s: State) -> Tensor:
        return self.base.query(s)

    def check_graph(self, graph: Graph, name: str = "") -> None:
        self.base.check_graph(graph, name or self.name)

    def on(self, graph: Graph) -> Self:
        return columns.replaced(self, base=self.base.on(graph))

    @property
    def settings(self) -> dict[str, Number]:
        return self.base.settings

    def with_settings(self, **values: Number) -> Self:
        return columns.replaced(self, base=self.base.with_settings(**values))


@dataclass(frozen=True, eq=False)
class Anytime(Around):
    """Gradients at an average x of the base's iterates (Section 4.1), which is gossiped as well.

        w <- the base's step with lr alpha_t and the gradient at beta x + (1 - beta) w
        x <- (1 - delta_t) (x + flow(x)) + delta_t w      with the whole flow in w, where the base takes half of it

    x is what you evaluate and keep. Over `Plain` it is the paper's DAT-SGD (Algorithm 2): there x mixes the average
    with w before it is gossiped, which is the same since gossip is linear; here x can travel while the gradient is
    computed. With beta = 1 gradients are taken at x, as in the paper. With less, the network mean is Schedule-Free SGD
    on the mean gradient.

    Args:
        base: a pattern.
        averaging: anytime weights: constant, linear, polynomial(p) or fixed(gamma).
        beta: where gradients are taken, between w (0) and x (1).

    References:
        Eisen, Dorfman and Levy, "Enhancing parallelism in decentralized stochastic convex optimization", 2025.
        Defazio et al., "The road less scheduled", 2024, for beta < 1.
    """

    averaging: Averaging = field(default_factory=constant)
    beta: Given = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        columns.settle(self, averaging=parse(self.averaging), beta=share("beta", self.beta, "to 1"))

    @property
    def name(self) -> str:
        return "dat" if self.base.name == "dsgd" else f"dat-{self.base.name}"

    def init(self, x: Tensor) -> State:
        return joined(self.name, self.base.init(x), {"x": x})

    def query(self, s: State) -> Tensor:
        at_average = isinstance(self.beta, float) and self.beta == 1
        return self.at(s, s["x"] if at_average else blend(s["w"], s["x"], self.beta))

    def output(self, s: State) -> Tensor:
        return self.at(s, s["x"])

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (x,) = flow.mix(s["x"])
        new = self.base.update(s, grad, flow, t, lr * self.averaging.alpha(t))
        return new | {"x": blend(x, self.base.mixed(s, new), self.averaging.delta(t))}


@dataclass(frozen=True, eq=False)
class Averaged(Around):
    """The base itself, but it returns the average of its iterates instead of the last one.

        a <- (1 - delta_t) a + delta_t w

    Args:
        base: a pattern.
        average: weights: constant (all alike), linear, polynomial(p) or fixed(gamma).
    """

    average: Averaging = field(default_factory=constant)

    def __post_init__(self) -> None:
        super().__post_init__()
        columns.settle(self, average=parse(self.average))

    def init(self, x: Tensor) -> State:
        return joined(self.name, self.base.init(x), {"a": x})

    def output(self, s: State) -> Tensor:
        return s["a"]

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        new = self.base.update(s, grad, flow, t, lr)
        return new | {"a": blend(s["a"], self.base.iterate(new), self.average.delta(t))}
