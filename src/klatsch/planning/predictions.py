"""Predicted error and rounds: the rates of the theory, with measured constants.

The theory only bounds the numerical constants of a rate. Here each of its three parts has a constant fitted to
simulations of the paper's least-squares problem (benchmarks/calibration.py), which predicts the usual case, not the
worst. `UNCALIBRATED` sets them all to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch import rules, theory
from klatsch.arguments import named
from klatsch.channels.rehearsal import rehearse
from klatsch.own import is_own
from klatsch.theory import UNIT, Constants, Number, Rate, RateFunction

MOST_ROUNDS = 1e30  # more are never reached

Array = NDArray[np.float64]


class Calibration(NamedTuple):
    """The constants of the three parts of a rate."""

    statistical: float = 1.0
    network: float = 1.0
    optimization: float = 1.0


def dat_d2_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> Rate:
    """DAT with D2's correction: no rate is proved; taken as DAT's without heterogeneity, which it removes."""
    return theory.dat_rate(M, T, rho, replace(constants, zeta=0.0))


class Rule(NamedTuple):
    """An update rule as the planner sees it."""

    name: str
    rate: RateFunction
    update: rules.Rule | None  # None for an all-reduce
    vectors: int = 1  # that a round mixes
    proved: bool = True

    @property
    def eager(self) -> int:
        """Vectors that travel while the gradient is computed."""
        return 0 if self.update is None else len(rehearse(self.update, torch.zeros(1)).early)

    @property
    def late(self) -> int:
        """Vectors that are sent when the gradient is there."""
        return self.vectors - self.eager


ALL_REDUCE = "all-reduce"
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("dsgd", theory.dsgd_rate, rules.make("dsgd", lr=1.0)),
        Rule("dat", theory.dat_rate, rules.make("dat", lr=1.0), 2),
        Rule("dat (cta)", theory.dat_rate, rules.make("dat", lr=1.0, order="cta"), 2),
        Rule("gt", theory.gt_rate, rules.make("gt", lr=1.0), 2),
        Rule("dat-d2", dat_d2_rate, rules.make("dat-d2", lr=1.0), 2, proved=False),
        Rule(ALL_REDUCE, theory.minibatch_rate, None),
    )
}

# Fitted to where simulated curves turn (network), and to their height on the complete graph (the others).
TURNS = {"gt": 8e-6, "dat-d2": 8e-6}
CALIBRATION: Mapping[str, Calibration] = {name: Calibration(0.08, TURNS.get(name, 8e-4), 5e-3) for name in RULES}
UNCALIBRATED: Mapping[str, Calibration] = {name: Calibration() for name in RULES}


def rule_named(name: str) -> Rule:
    """A rule of `RULES`."""
    if name not in RULES and (name in rules.RULES or is_own(name)):
        raise ValueError(f"no convergence rate is known for {name}; choose from {', '.join(RULES)}")
    return named("rule", name, RULES)


def predicted(rule: Rule, M: Number, T: Number, rho: Number, constants: Constants, by: Calibration) -> Rate:
    """The parts of the error after T rounds.

    The network's part carries a factor 1 - rho: where a round averages exactly, all machines agree, and a rule is
    mini-batch SGD.
    """
    statistical, network, optimization = rule.rate(M, T, rho, constants)
    if rule.name in ("dsgd", "gt"):  # L D1^2 / (rho T) is L D1^2 / T and a part of the network
        optimization, network = optimization * rho, network + optimization * (1 - rho)
    return Rate(by.statistical * statistical, by.network * (1 - rho) * network, by.optimization * optimization)


def rounds_to(target: float, rule: Rule, M: Array, rho: Array, constants: Constants, by: Calibration) -> Array:
    """The first round at which the predicted error is at most `target`, for every M; inf where it never is."""

    def reached(T: Array) -> NDArray[np.bool_]:
        return np.asarray(predicted(rule, M, T, rho, constants, by).total <= target)

    high = np.ones_like(M)
    while not np.all(done := reached(high) | (high >= MOST_ROUNDS)):
        high = np.where(done, high, 2 * high)
    low = np.where(high > 1, high / 2, 0.0)
    while np.any(high - low > np.maximum(1.0, 1e-9 * high)):  # beyond 1e9 rounds one more does not matter
        middle = np.maximum(np.floor((low + high) / 2), 1.0)
        there = reached(middle)
        low, high = np.where(there, low, middle), np.where(there, middle, high)
    return np.where(reached(high), high, np.inf)
