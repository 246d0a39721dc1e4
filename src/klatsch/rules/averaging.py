"""Anytime weights: how the query point x averages the iterates w.

With weights alpha_t > 0 and delta_t = alpha_t / alpha_{1:t}, the average moves by x <- (1 - delta_t) x + delta_t w
(Section 4.1 of the paper). The larger the later weights, the sooner x forgets its start and the faster it moves.

    >>> from klatsch import averaging
    >>> averaging.linear().delta(9)
    0.2
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from klatsch import columns
from klatsch.arguments import whole
from klatsch.columns import Given, Number

Rounds = int | Tensor  # the round t = 1, 2, 3, ..., or several
LARGEST_DEGREE = 50  # up to here alpha_t is a number for a million rounds; it grows like t^p


@runtime_checkable
class Averaging(Protocol):
    """Anytime weights as functions of the round."""

    def alpha(self, t: Rounds) -> Number:
        """The weight alpha_t, which also scales the step on w."""
        ...

    def delta(self, t: Rounds) -> Number:
        """The share delta_t of the new iterate in the average."""
        ...


@dataclass(frozen=True)
class Polynomial:
    """alpha_t = t (t + 1) ... (t + p - 1), a polynomial of degree p, with delta_t = (p + 1) / (t + p) exactly.

    These rising products, rather than t^p, have partial sums in closed form, so that x is the alpha-weighted average of
    w to the last digit at any t. For p = 0 and p = 1 both are the same: the paper's constant and linear weights.
    """

    p: int

    def __post_init__(self) -> None:
        if whole(self.p, "polynomial(p) with p", 0) > LARGEST_DEGREE:
            raise ValueError(
                f"polynomial(p) with p = {self.p}: weights like t^{self.p} soon exceed every number; "
                f"give p from 0 to {LARGEST_DEGREE}, such as 2"
            )

    def alpha(self, t: Rounds) -> Number:
        """The product t (t + 1) ... (t + p - 1); 1 for p = 0."""
        product: Number = 1.0
        for k in range(self.p):
            product = product * (t + k)
        if isinstance(product, float) and math.isinf(product):
            raise ValueError(f"polynomial({self.p}) at round {t}: its weight exceeds every number; give a smaller p")
        return product

    def delta(self, t: Rounds) -> Number:
        """(p + 1) / (t + p)."""
        return (self.p + 1) / (t + self.p)

    def __str__(self) -> str:
        return {0: "constant", 1: "linear"}.get(self.p, f"polynomial({self.p})")


@dataclass(frozen=True, eq=False)
class Fixed:
    """alpha_t = 1 and delta_t = 1 - gamma: an exponential moving average, for non-convex problems (Section 5.2)."""

    gamma: Number

    def __post_init__(self) -> None:
        wanted = "a number from 0 up to but not including 1, such as 0.9"
        columns.settle(self, gamma=columns.hyper("gamma", self.gamma, lambda v: (v >= 0) & (v < 1), wanted))

    def alpha(self, t: Rounds) -> Number:
        """1, at every round."""
        return 1.0

    def delta(self, t: Rounds) -> Number:
        """1 - gamma, at every round."""
        return 1.0 - self.gamma

    def __str__(self) -> str:
        return f"fixed({self.gamma:g})" if isinstance(self.gamma, float) else "fixed(per column)"


def constant() -> Polynomial:
    """alpha_t = 1, delta_t = 1 / t: the plain average (the paper's least-squares runs)."""
    return Polynomial(0)


def linear() -> Polynomial:
    """alpha_t = t, delta_t = 2 / (t + 1) (Theorem 4.1)."""
    return Polynomial(1)


def polynomial(p: int) -> Polynomial:
    """alpha_t = t (t + 1) ... (t + p - 1), delta_t = (p + 1) / (t + p)."""
    return Polynomial(p)


def fixed(gamma: Given) -> Fixed:
    """alpha_t = 1, delta_t = 1 - gamma (the paper's image runs use gamma = 0.9)."""
    return Fixed(gamma)


NAMES = {"constant": constant, "linear": linear, "polynomial": polynomial, "fixed": fixed}


def parse(text: object) -> Averaging:
    """Weights from a word, for command lines and study files: "linear", "polynomial(2)", "fixed(0.9)"."""
    if isinstance(text, Averaging):
        return text
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([-+.\w]*)\s*\))?\s*", text) if isinstance(text, str) else None
    if match is None or match[1] not in NAMES:
        raise ValueError(f"averaging = {text!r}; choose from constant, linear, polynomial(p), fixed(gamma)")
    name, argument = match[1], match[2]
    if name in ("constant", "linear"):
        if argument:
            raise ValueError(f"averaging = {text!r}; {name} takes no number")
        return constant() if name == "constant" else linear()
    try:
        return polynomial(int(argument or "")) if name == "polynomial" else fixed(float(argument or ""))
    except ValueError as error:
        if argument is None or "invalid literal" in str(error) or "could not convert" in str(error):
            raise ValueError(f"averaging = {text!r}; write polynomial(2) or fixed(0.9), with a number") from None
        raise
