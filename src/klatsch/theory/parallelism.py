"""How many machines pay, and how many rounds it takes: Table 1, Table 2 and the transient, solved on actual gaps."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache

from klatsch import topology as topologies
from klatsch.arguments import number
from klatsch.theory.rates import RATES, UNIT, Constants, RateFunction, check_network

SMALL = 64  # steps that are all tried, since the smallest graphs of a family need not follow its trend

# a and b of Table 1's bounds M <= rho^a N^b.
POWERS = {
    "dat": (Fraction(1), Fraction(1, 2)),
    "dsgd": (Fraction(1, 2), Fraction(1, 4)),
    "dsgd, heterogeneous": (Fraction(1), Fraction(1, 4)),
    "gt": (Fraction(1, 2), Fraction(1, 4)),
    "minibatch": (Fraction(0), Fraction(1, 2)),
}


def parallelism_bound(rule: str, N: float, rho: float, *, heterogeneous: bool = False) -> float:
    """Up to which order of M a rule keeps the rate O(1 / sqrt(N)) for N = M T samples (Table 1, all constants 1).

    minibatch sqrt(N); dat rho sqrt(N); dsgd and gt rho^(1/2) N^(1/4), and dsgd rho N^(1/4) on heterogeneous data.
    """
    on_gap, on_samples = _powers(rule, heterogeneous)
    number("N", N, lambda v: v >= 1, "a number of samples from 1 up")
    check_network(1, 1, rho)
    return float(rho ** float(on_gap) * N ** float(on_samples))


def parallelism_exponent(rule: str, gap_exponent: int, *, heterogeneous: bool = False) -> Fraction:
    """The power of N in Table 1 for a family with 1 / rho = O(M^gap_exponent): 2 for the ring, 1 for the torus.

    M <= rho^a N^b and rho = M^-g give M <= N^(b / (1 + a g)).
    """
    on_gap, on_samples = _powers(rule, heterogeneous)
    number("gap_exponent", gap_exponent, lambda v: v >= 0, "a power from 0 up, such as 2 for the ring")
    return on_samples / (1 + on_gap * gap_exponent)


def largest_machines(
    rule: str, N: float, topology: str | Callable[[int], float], constants: Constants = UNIT, **choices: object
) -> int:
    """The largest M for which N = M T samples still bring the statistical rate, solved on the actual rho(M).

    It pays as long as the network and optimization terms together do not exceed sigma D1 / sqrt(N). Torus and grid grow
    as r x r and r x (r + 1), the hypercube by powers of two. All of the first 64 steps are tried, larger ones by
    doubling and bisection: the result pays and the next size does not. Where rho(M) ripples, as that of exponential and
    base_graph, single larger sizes may pay, and single smaller ones may not. Without noise M is 1.

    Args:
        rule: "dat", "dsgd", "gt" or "minibatch".
        N: total number of samples.
        topology: a topology's name, such as "ring" or "ring/8", or your own function from M to rho.
        constants: of the problem.
        choices: options of the named topology, such as k of base_graph.
    """
    rate = _rate(rule)
    number("N", N, lambda v: 1 <= v <= 1e100, "a number of samples from 1 to 1e100")
    if not isinstance(topology, str) and not callable(topology):
        kind = type(topology).__name__
        raise ValueError(f"topology is a {kind}; give a family's name, such as 'ring', or a function from M to rho")
    if constants.sigma * constants.D1 == 0:
        return 1

    def pays(M: int, rho: float) -> bool:
        statistical, network, optimization = rate(M, N / M, rho, constants)
        return bool(network + optimization <= statistical)

    if not isinstance(topology, str):
        return _last(lambda M: M <= N and pays(M, topology(M)))
    topologies.builder(topology, choices)  # an unknown name or option shows here

    @cache
    def gap(M: int) -> float | ValueError:
        try:
            return topologies.spectral_gap(topology, M, **choices)
        except ValueError as refusal:
            return refusal

    def machines(step: int) -> int:
        """The size of this step, or the next one that the family allows: an even one for an odd degree, say."""
        M = topologies.nth_size(topology, step)
        return next((size for size in range(M, M + SMALL) if isinstance(gap(size), float)), M)

    def step_pays(step: int) -> bool:
        M = machines(step)
        rho = gap(M) if M <= N else None
        if isinstance(rho, ValueError) and step > SMALL:  # the smallest graphs may not exist, for want of neighbours
            raise rho
        return isinstance(rho, float) and pays(M, rho)

    return machines(_last(step_pays))


def transient_iterations(rule: str, M: int, rho: float, constants: Constants = UNIT) -> float:
    """Rounds T after which the statistical term dominates, as for a central server (Section 4.2; Pu et al. 2021).

    Of order M / rho^2 for dat and M^3 / rho^2 for dsgd (M^3 / rho^4 on heterogeneous data); inf without noise.
    """
    rate = _rate(rule)
    check_network(M, 1, rho)
    if constants.sigma * constants.D1 == 0:
        return math.inf

    def before(T: int) -> bool:
        statistical, network, optimization = rate(M, T, rho, constants)
        return bool(network + optimization > statistical)

    return float(_first_after(before))


def rounds_to_error(rule: str, epsilon: float, M: int, rho: float, constants: Constants = UNIT) -> int:
    """Rounds T until the rate reaches epsilon (Table 2, solved instead of estimated)."""
    rate = _rate(rule)
    number("epsilon", epsilon, lambda v: 1e-100 < v < math.inf, "a positive error, above 1e-100")
    check_network(M, 1, rho)
    return _first_after(lambda T: bool(rate(M, T, rho, constants).total > epsilon))


def _last(holds: Callable[[int], bool]) -> int:
    """The last step from 1 up at which `holds`, at least 1: all small steps are tried, larger ones by bisection."""
    low = max((step for step in range(1, SMALL + 1) if holds(step)), default=1)
    if low < SMALL:
        return low
    high = 2 * low
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _first_after(holds: Callable[[int], bool]) -> int:
    return _last(holds) + 1 if holds(1) else 1


def _powers(rule: str, heterogeneous: bool) -> tuple[Fraction, Fraction]:
    """The powers a and b of M <= rho^a N^b."""
    _rate(rule)
    return POWERS["dsgd, heterogeneous" if rule == "dsgd" and heterogeneous else rule]


def _rate(rule: str) -> RateFunction:
    if not isinstance(rule, str) or rule not in RATES:
        raise ValueError(f"no rate is known for rule {rule!r}; choose from {', '.join(RATES)}")
    return RATES[rule]
