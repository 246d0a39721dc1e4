"""Anytime: gradients at an average x of a pattern's iterates w; weights of the average; and a plain average.

With weights alpha_t > 0 and delta_t = alpha_t / alpha_{1:t}, the average is x <- (1 - delta_t) x + delta_t w
(Section 4.1 of the paper). The larger the later weights, the sooner x forgets its start and the faster it moves.

    >>> from klatsch import averaging
    >>> averaging.linear().delta(9)
    0.2
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from klatsch import columns
from klatsch.arguments import number, whole
from klatsch.columns import Given, Number, WeightMatrix
from klatsch.rules.base import Flow, Rule, State, blend, checked, joined, of, share

if TYPE_CHECKING:
    from klatsch.topology import Topology

Rounds = int | Tensor  # the round t = 1, 2, 3, ..., or several
TINY = torch.finfo(torch.float32).tiny
LARGEST_DEGREE = 50  # alpha_t, which grows like t^p, stays finite for a million rounds


class Averaging:
    """Weights of an average as functions of the round; your own derive from this class."""

    def alpha(self, t: Rounds) -> Number:
        """The weight alpha_t, which also scales the step on w."""
        return 1.0

    def delta(self, t: Rounds) -> Number:
        """The share delta_t of the new iterate in the average."""
        raise NotImplementedError(f"{type(self).__name__} has no delta(self, t)")

    def init(self, x: Tensor) -> State:
        """What the weights remember at the start."""
        return {}

    def turn(self, s: State, t: int, lr: Number) -> tuple[Number, State]:
        """The share of the new iterate in the average, and what the weights remember."""
        return self.delta(t), {}


@dataclass(frozen=True)
class Polynomial(Averaging):
    """alpha_t = t (t + 1) ... (t + p - 1), a polynomial of degree p, with delta_t = (p + 1) / (t + p) exactly.

    Unlike t^p, these products have sums in closed form, so that x is the alpha-weighted average of w to the last digit
    at any t. For p = 0 and p = 1 both are the same: the paper's constant and linear weights.
    """

    p: int

    def __post_init__(self) -> None:
        whole(self.p, "polynomial(p) with p", 0, LARGEST_DEGREE)

    def alpha(self, t: Rounds) -> Number:
        product: Number = 1.0
        for k in range(self.p):
            product = product * (t + k)
        if isinstance(product, float) and math.isinf(product):
            raise ValueError(f"polynomial({self.p}) at round {t}: its weight exceeds every number; give a smaller p")
        return product

    def delta(self, t: Rounds) -> Number:
        return (self.p + 1) / (t + self.p)

    def __str__(self) -> str:
        return {0: "constant", 1: "linear"}.get(self.p, f"polynomial({self.p})")


@dataclass(frozen=True, eq=False)
class Fixed(Averaging):
    """alpha_t = 1 and delta_t = 1 - gamma: an exponential moving average, for non-convex problems.

    The paper's image runs use gamma = 0.9 (Section 5.2).
    """

    gamma: Given

    def __post_init__(self) -> None:
        columns.settle(self, gamma=share("gamma", self.gamma))

    def delta(self, t: Rounds) -> Number:
        return 1.0 - self.gamma  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"fixed({self.gamma:g})" if isinstance(self.gamma, float) else "fixed(per column)"


@dataclass(frozen=True)
class Rate(Averaging):
    """alpha_t = 1 and delta_t in proportion to the largest learning rate so far, to a power p.

    A warm-up then counts for little in the average, and a decay changes nothing, as in Schedule-Free optimizers, where
    p = 2. The state remembers the largest rate and the mean of its powers.
    """

    p: float = 2.0

    def __post_init__(self) -> None:
        number("lr(p) with p", self.p, lambda v: v >= 0, "a number from 0 up, such as 2")

    def init(self, x: Tensor) -> State:
        return {"peak": x[..., :1] * 0.0, "pace": x[..., :1] * 0.0}

    def turn(self, s: State, t: int, lr: Number) -> tuple[Number, State]:
        if isinstance(lr, Tensor) and lr.shape[-1] > 1:
            raise ValueError(
                f"averaging = {self}: groups of parameters have different learning rates, which it cannot follow; "
                "give all groups one, or averaging = 'constant'"
            )
        peak = torch.clamp(s["peak"], min=lr)
        weight = peak**self.p  # a kernel can square alone
        pace = s["pace"] + (weight - s["pace"]) / t  # the mean, which rounding leaves alone while the rate stays
        return weight / (t * pace).clamp(min=TINY), {"peak": peak, "pace": pace}

    def __str__(self) -> str:
        return f"lr({self.p:g})"


constant = partial(Polynomial, 0)  # alpha_t = 1, delta_t = 1 / t: the plain average (the paper's least squares)
linear = partial(Polynomial, 1)  # alpha_t = t, delta_t = 2 / (t + 1) (Theorem 4.1)
polynomial, fixed, by_rate = Polynomial, Fixed, Rate
FORMS: dict[str, tuple[Callable[..., Averaging], Callable[[str], float]]]
FORMS = {"polynomial": (Polynomial, int), "fixed": (Fixed, float), "lr": (Rate, float)}


def parse(text: object) -> Averaging:
    """Weights from a text, such as "linear", "polynomial(2)", "fixed(0.9)" or "lr(2)"."""
    if isinstance(text, Averaging):
        return text
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([-+.\w]*)\s*\))?\s*", text) if isinstance(text, str) else None
    name, argument = match.groups() if match else ("", None)
    if name in ("constant", "linear"):
        if argument:
            raise ValueError(f"averaging = {text!r}; {name} takes no number")
        return constant() if name == "constant" else linear()
    if name not in FORMS:
        raise ValueError(
            f"averaging = {text!r}; choose from constant, linear, polynomial(p), fixed(gamma), lr(p), or give weights "
            "of a class that derives from klatsch.averaging.Averaging"
        )
    kind, read = FORMS[name]
    try:
        value = read(argument or "")
    except ValueError:
        raise ValueError(f"averaging = {text!r}; write polynomial(2), fixed(0.9) or lr(2), with a number") from None
    return kind(value)


@dataclass(frozen=True, eq=False)
class Around(Rule):
    """A rule around another one, with its learning rate, settings and needs."""

    base: Rule
    averages = True
    lr, met, parts, push, pushed = of("base.lr"), of("base.met"), of("base.parts"), of("base.push"), of("base.pushed")
    graph, decays, ignores_scale = of("base.graph"), of("base.decays"), of("base.ignores_scale")
    scales, settings, needs_shapes = of("base.scales"), of("base.settings"), of("base.needs_shapes")
    iterate, query, hook = of("base.iterate"), of("base.query"), of("base.hook")

    def __post_init__(self) -> None:
        columns.settle(self, base=checked(self.base))
        if self.base.averages:
            raise ValueError(f"{self.base.name} returns an average already; give the pattern alone")

    def at(self, s: State, v: Tensor) -> Tensor:
        return self.base.at(s, v)

    def check_graph(self, graph: Topology, name: str = "") -> None:
        self.base.check_graph(graph, name or self.name)

    def on(self, graph: Topology) -> Self:
        return columns.replaced(self, base=self.base.on(graph))

    def shaped(self, matrices: Sequence[WeightMatrix]) -> Self:
        return columns.replaced(self, base=self.base.shaped(matrices))

    def with_settings(self, **values: Number) -> Self:
        return columns.replaced(self, base=self.base.with_settings(**values))


@dataclass(frozen=True, eq=False)
class Anytime(Around):
    """Gradients at an average x of the base's iterates (Section 4.1), which is gossiped as well.

        w <- the base's step with lr alpha_t and the gradient at beta x + (1 - beta) w
        x <- (1 - delta_t) (x + flow(x)) + delta_t w      with the whole flow in w, even if the base takes half of it

    x is what you evaluate and keep. Over `Plain` this is the paper's DAT-SGD (Algorithm 2). The paper averages first
    and gossips then, which is the same, since gossip is linear; here x can travel while the gradient is computed. With
    beta = 1 gradients are taken at x, as in the paper; with less, the network mean is Schedule-Free SGD on the mean
    gradient.

    Args:
        base: a pattern.
        averaging: anytime weights: constant, linear, polynomial(p), fixed(gamma) or lr(p).
        beta: where gradients are taken, between w (0) and x (1).

    References:
        Eisen, Dorfman and Levy, "Enhancing parallelism in decentralized stochastic convex optimization", 2025.
        Defazio et al., "The road less scheduled", 2024, for beta < 1.
    """

    averaging: Averaging = "constant"  # type: ignore[assignment]  # or a text, which is parsed
    beta: Given = 1.0
    short: ClassVar[str] = "anytime"

    def __post_init__(self) -> None:
        super().__post_init__()
        columns.settle(self, averaging=parse(self.averaging), beta=share("beta", self.beta, "to 1"))

    @property
    def met(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.base.met, "x") if self.base.met else ()

    @property
    def pushed(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.base.pushed, "x") if self.base.pushed else ()

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.base.parts, self.short)

    def init(self, x: Tensor) -> State:
        return joined(self.name, self.base.init(x), {"x": x} | self.averaging.init(x))

    def query(self, s: State) -> Tensor:
        at_average = isinstance(self.beta, float) and self.beta == 1
        return self.at(s, s["x"] if at_average else blend(s["w"], s["x"], self.beta))

    def output(self, s: State) -> Tensor:
        return self.at(s, s["x"])

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (x,) = flow.mix(s["x"])
        new = self.base.update(self.seen(s), grad, flow, t, lr * self.averaging.alpha(t))
        delta, kept = self.averaging.turn(s, t, lr)
        return new | kept | {"x": blend(x, self.base.mixed(s, new), delta)}


@dataclass(frozen=True, eq=False)
class Averaged(Around):
    """The base itself, but its output is the average of its iterates.

        a <- (1 - delta_t) a + delta_t w

    Args:
        base: a pattern.
        average: weights: constant (all alike), linear, polynomial(p), fixed(gamma) or lr(p).
    """

    average: Averaging  # or a text, which is parsed
    short: ClassVar[str] = "averaged"

    def __post_init__(self) -> None:
        super().__post_init__()
        columns.settle(self, average=parse(self.average))

    def init(self, x: Tensor) -> State:
        return joined(self.name, self.base.init(x), {"a": x} | self.average.init(x))

    def output(self, s: State) -> Tensor:
        return s["a"]

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        new = self.base.update(s, grad, flow, t, lr)
        delta, kept = self.average.turn(s, t, lr)
        return new | kept | {"a": blend(s["a"], self.base.iterate(new), delta)}
