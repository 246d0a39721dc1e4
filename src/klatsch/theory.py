"""The paper's bounds as functions: how the error falls, and up to how many machines a rule pays.

A *bound* carries the explicit constants of the appendix and is a guarantee (`dat_bound`, `dat_local_bound`,
`consensus_bound`). A *rate* is the same kind of expression with every numerical constant set to 1, as the literature
states it, so that rules compare. There M, T and rho may be arrays, to draw a curve in one call:

    T = np.logspace(2, 6)
    plt.loglog(T, theory.dat_rate(M=16, T=T, rho=0.05).total)

References are to Eisen, Dorfman and Levy, "Enhancing parallelism in decentralized stochastic convex optimization",
ICML 2025, unless another paper is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from klatsch import topology as topologies
from klatsch.arguments import check_options, named, number
from klatsch.topology.spectrum import last

Number = float | NDArray[np.float64]

LARGEST = 1e50  # of a constant: larger ones are mistakes, whose powers overflow
SMALL = 64  # steps that are all tried: small graphs of a family need not follow its trend

# a and b of Table 1's bounds M <= rho^a N^b.
POWERS = {
    "dat": (Fraction(1), Fraction(1, 2)),
    "dsgd": (Fraction(1, 2), Fraction(1, 4)),
    "dsgd, heterogeneous": (Fraction(1), Fraction(1, 4)),
    "gt": (Fraction(1, 2), Fraction(1, 4)),
    "minibatch": (Fraction(0), Fraction(1, 2)),
}


def check_network(M: Number, T: Number, rho: Number) -> None:
    """Check machines, rounds and gap, each a number or an array."""
    for name, value, least, most, wanted in (
        ("M", M, 1.0, math.inf, "a number of machines from 1 up"),
        ("T", T, 1.0, math.inf, "a number of rounds from 1 up"),
        ("rho", rho, np.finfo(float).tiny, 1.0, "a spectral gap above 0 and up to 1"),
    ):
        values = np.asarray(value)
        if not isinstance(value, int | float) and values.dtype.kind not in "iuf":
            raise ValueError(f"{name} = {value}; give a number, not a {type(value).__name__}")
        if not np.all((values >= least) & (values <= most)):
            raise ValueError(f"{name} = {value}; give {wanted}")


@dataclass(frozen=True)
class Constants:
    """What the theory needs to know of a problem; by default all are 1, and data homogeneous.

    Args:
        L: smoothness of every f_i (Assumption 2.1).
        D1: distance ||w_1 - x*|| from the start to the optimum.
        sigma: standard deviation of a stochastic gradient (Assumption 2.2).
        zeta: heterogeneity, the root mean square distance of nodes' gradients from their mean (Assumption 2.3).
    """

    L: float = 1.0
    D1: float = 1.0
    sigma: float = 1.0
    zeta: float = 0.0

    def __post_init__(self) -> None:
        number("L", self.L, lambda v: 0 < v <= LARGEST, f"a positive number up to {LARGEST:g}")
        for name, value in (("D1", self.D1), ("sigma", self.sigma), ("zeta", self.zeta)):
            number(name, value, lambda v: 0 <= v <= LARGEST, f"0 or a positive number up to {LARGEST:g}")

    @property
    def K(self) -> float:
        """K with K^2 = 5120 L^2 (Theorem 4.1)."""
        return math.sqrt(5120) * self.L

    @property
    def sigma_tilde(self) -> float:
        """sigma~ with sigma~^2 = 2 sigma^2 + zeta^2 (Theorem 4.1)."""
        return math.sqrt(2 * self.sigma**2 + self.zeta**2)


UNIT = Constants()


class ExcessLoss(NamedTuple):
    """An expected excess loss as the sum of its parts."""

    statistical: Number  # what averaging N = M T noisy samples leaves
    network: Number  # what talking only to neighbours adds
    optimization: Number  # what remains without noise

    @property
    def total(self) -> Number:
        """The excess loss itself."""
        return self.statistical + self.network + self.optimization

    @property
    def mostly_statistical(self) -> bool | NDArray[np.bool_]:
        """Whether noise is at least half of it, as for a central server."""
        return self.network + self.optimization <= self.statistical


def dat_learning_rate(M: int, T: int, rho: float, constants: Constants = UNIT) -> float:
    """The learning rate of Theorem 4.1 for linear weights alpha_t = t.

    eta = min{ 1 / (24 L T), rho^2 / K, D1 sqrt(M) / (sqrt(3) sigma T^(3/2)), sqrt(D1 / (2 K sigma~)) rho / T }.
    """
    check_network(M, T, rho)
    c = constants
    return min(
        1 / (24 * c.L * T),
        rho**2 / c.K,
        c.D1 * math.sqrt(M) / (math.sqrt(3) * c.sigma * T**1.5) if c.sigma > 0 else math.inf,
        math.sqrt(c.D1 / (2 * c.K * c.sigma_tilde)) * rho / T if c.sigma_tilde > 0 else math.inf,
    )


def dat_bound(M: Number, T: Number, rho: Number, constants: Constants = UNIT) -> ExcessLoss:
    """Theorem 4.1 with the constants of its proof (Appendix B): E f(x-bar_T) - f* with `dat_learning_rate`.

    8 sqrt(3) D1 sigma / sqrt(M T) + 8 sqrt(2) D1^(3/2) sqrt(K sigma~) / (rho T) + 96 L D1^2 / T + 4 K D1^2 / (rho T)^2.
    """
    check_network(M, T, rho)
    c = constants
    return ExcessLoss(
        8 * math.sqrt(3) * c.D1 * c.sigma / (M**0.5 * T**0.5),
        8 * math.sqrt(2) * c.D1**1.5 * math.sqrt(c.K * c.sigma_tilde) / (rho * T) + 4 * c.K * c.D1**2 / (rho * T) ** 2,
        96 * c.L * c.D1**2 / T,
    )


def dat_local_bound(M: Number, T: Number, rho: Number, constants: Constants = UNIT) -> ExcessLoss:
    """Corollary 4.2 with the constants of its proof (Appendix B.1): E f(x_T^i) - f* at every single machine.

    Twice `dat_bound` plus 8 sqrt(5) M D1 sigma~ / (rho T)^2 for the distance from the mean.
    """
    statistical, network, optimization = dat_bound(M, T, rho, constants)
    apart = 8 * math.sqrt(5) * M * constants.D1 * constants.sigma_tilde / (rho * T) ** 2
    return ExcessLoss(2 * statistical, 2 * network + apart, 2 * optimization)


def consensus_bound(eta: float, rho: float, constants: Constants = UNIT) -> float:
    """Lemma C.3: Gamma_t <= 2560 sigma~^2 eta^2 / rho^4 for linear weights, eta <= rho^2 / K and every round t."""
    check_network(1, 1, rho)
    limit = rho**2 / constants.K
    # The learning rate of Theorem 4.1 may equal the limit, up to rounding.
    number("eta", eta, lambda v: 0 <= v <= limit * (1 + 1e-12), f"a number from 0 up to rho^2 / K = {limit:.6g}")
    return 2560 * constants.sigma_tilde**2 * eta**2 / rho**4


def dat_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> ExcessLoss:
    """DAT-SGD (Theorem 4.1; the last term from Appendix B).

    sigma D1 / sqrt(M T) + D1^(3/2) sqrt(L sigma~) / (rho T) + L D1^2 / T + L D1^2 / (rho T)^2.
    """
    check_network(M, T, rho)
    c = constants
    return ExcessLoss(
        c.D1 * c.sigma / (M**0.5 * T**0.5),
        c.D1**1.5 * math.sqrt(c.L * c.sigma_tilde) / (rho * T) + c.L * c.D1**2 / (rho * T) ** 2,
        c.L * c.D1**2 / T,
    )


def dsgd_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> ExcessLoss:
    """D-SGD (Eq. 3, with L and D1 as in the original).

    sigma D1 / sqrt(M T) + L^(1/3) D1^(4/3) (sigma^(2/3) rho^(1/3) + zeta^(2/3)) / (rho T)^(2/3) + L D1^2 / (rho T).

    References:
        Koloskova et al., "A unified theory of decentralized SGD with changing topology and local updates", 2020,
        Theorem 2, convex case.
    """
    check_network(M, T, rho)
    c = constants
    spread = c.sigma ** (2 / 3) * rho ** (1 / 3) + c.zeta ** (2 / 3)
    return ExcessLoss(
        c.D1 * c.sigma / (M**0.5 * T**0.5),
        c.L ** (1 / 3) * c.D1 ** (4 / 3) * spread / (rho * T) ** (2 / 3),
        c.L * c.D1**2 / (rho * T),
    )


def gt_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> ExcessLoss:
    """Gradient tracking (Table 2): D-SGD's rate without the heterogeneity zeta.

    References:
        Koloskova, Lin and Stich, "An improved analysis of gradient tracking for decentralized machine learning", 2021.
    """
    return dsgd_rate(M, T, rho, replace(constants, zeta=0.0))


def minibatch_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> ExcessLoss:
    """Mini-batch SGD with a server (Section 2.1): sigma D1 / sqrt(M T) + L D1^2 / T; rho plays no part.

    References:
        Dekel et al., "Optimal distributed online prediction using mini-batches", 2012.
    """
    check_network(M, T, rho)
    c = constants
    statistical = c.D1 * c.sigma / (M**0.5 * T**0.5)
    return ExcessLoss(statistical, 0.0 * statistical, c.L * c.D1**2 / T)


RATES: dict[str, Callable[..., ExcessLoss]] = {
    "dat": dat_rate,
    "dsgd": dsgd_rate,
    "gt": gt_rate,
    "minibatch": minibatch_rate,
}


def parallelism_bound(rule: str, N: float, rho: float, *, heterogeneous: bool = False) -> float:
    """The order of M up to which a rule keeps the rate O(1 / sqrt(N)) for N = M T samples (Table 1, all constants 1).

    minibatch sqrt(N); dat rho sqrt(N); dsgd and gt rho^(1/2) N^(1/4), and dsgd rho N^(1/4) on heterogeneous data.

        >>> from klatsch import theory
        >>> [round(theory.parallelism_bound(rule, N=1e8, rho=0.1), 1) for rule in ("minibatch", "dat", "dsgd")]
        [10000.0, 1000.0, 31.6]
    """
    on_gap, on_samples = _powers(rule, heterogeneous)
    number("N", N, lambda v: v >= 1, "a number of samples from 1 up")
    check_network(1, 1, rho)
    return float(rho ** float(on_gap) * N ** float(on_samples))


def parallelism_exponent(rule: str, gap_exponent: int, *, heterogeneous: bool = False) -> Fraction:
    """The power of N in Table 1 for a family with 1 / rho = O(M^gap_exponent): 2 for the ring, 1 for the torus.

    M <= rho^a N^b and rho = M^-g give M <= N^(b / (1 + a g)).

        >>> from klatsch import theory
        >>> [str(theory.parallelism_exponent(rule, 2)) for rule in ("dat", "dsgd")]  # on a ring
        ['1/6', '1/8']
    """
    on_gap, on_samples = _powers(rule, heterogeneous)
    number("gap_exponent", gap_exponent, lambda v: v >= 0, "a power from 0 up, such as 2 for the ring")
    return on_samples / (1 + on_gap * gap_exponent)


def largest_machines(
    rule: str, N: float, topology: str | Callable[[int], float], constants: Constants = UNIT, **choices: object
) -> int:
    """The largest M for which N = M T samples still bring the statistical rate, solved with the actual rho(M).

    It pays as long as the network and optimization terms together do not exceed sigma D1 / sqrt(N). Torus and grid grow
    as r x r and r x (r + 1), the hypercube by powers of two. The first 64 steps are all tried, larger by bisection:
    the result pays and the next size does not. If rho(M) ripples, as for exponential and base_graph, single larger
    sizes may pay and single smaller ones may not. Without noise M is 1.

    Args:
        rule: "dat", "dsgd", "gt" or "minibatch".
        N: total number of samples.
        topology: a topology's name, such as "ring" or "ring/8", or your own function from M to rho.
        constants: of the problem.
        choices: options of the named topology, such as k of base_graph.
    """
    rate = named("rate", rule, RATES)
    number("N", N, lambda v: 1 <= v <= 1e100, "a number of samples from 1 to 1e100")
    if not isinstance(topology, str) and not callable(topology):
        kind = type(topology).__name__
        raise ValueError(f"topology is a {kind}; give a family's name, such as 'ring', or a function from M to rho")
    if constants.sigma * constants.D1 == 0:
        return 1

    def pays(M: int, rho: float) -> bool:
        return bool(rate(M, N / M, rho, constants).mostly_statistical)

    if not isinstance(topology, str):
        return _last(lambda M: M <= N and pays(M, topology(M)))
    check_options(topology, choices, topologies.options(topology))

    @cache
    def gap(M: int) -> float | ValueError:
        try:
            return topologies.spectral_gap(topology, M, **choices)
        except ValueError as refusal:
            return refusal

    def machines(step: int) -> int:
        """The size of this step, or the next that the family has: for an odd degree, an even one."""
        M = topologies.nth_size(topology, step)
        return next((size for size in range(M, M + SMALL) if isinstance(gap(size), float)), M)

    def step_pays(step: int) -> bool:
        M = machines(step)
        rho = gap(M) if M <= N else None
        if isinstance(rho, ValueError) and step > SMALL:  # the smallest graphs may have too few neighbours
            raise rho
        return isinstance(rho, float) and pays(M, rho)

    return machines(_last(step_pays))


def transient_iterations(rule: str, M: int, rho: float, constants: Constants = UNIT) -> float:
    """Rounds T until the statistical term dominates, as with a central server (Section 4.2; Pu et al. 2021).

    Of order M / rho^2 for dat and M^3 / rho^2 for dsgd (M^3 / rho^4 on heterogeneous data); inf without noise.
    """
    rate = named("rate", rule, RATES)
    check_network(M, 1, rho)
    if constants.sigma * constants.D1 == 0:
        return math.inf
    return float(1 + last(lambda T: not rate(M, T, rho, constants).mostly_statistical))


def rounds_to_error(rule: str, epsilon: float, M: int, rho: float, constants: Constants = UNIT) -> int:
    """Rounds T until the rate reaches epsilon (Table 2, solved exactly)."""
    rate = named("rate", rule, RATES)
    number("epsilon", epsilon, lambda v: 1e-100 < v < math.inf, "a positive error, above 1e-100")
    check_network(M, 1, rho)
    return 1 + last(lambda T: bool(rate(M, T, rho, constants).total > epsilon))


def _last(holds: Callable[[int], bool]) -> int:
    """The last step from 1 at which `holds`, at least 1: all small steps are tried, larger ones by bisection."""
    low = max((step for step in range(1, SMALL + 1) if holds(step)), default=1)
    return low if low < SMALL else last(holds, low)


def _powers(rule: str, heterogeneous: bool) -> tuple[Fraction, Fraction]:
    """The powers a and b of M <= rho^a N^b."""
    named("rate", rule, RATES)
    return POWERS["dsgd, heterogeneous" if rule == "dsgd" and heterogeneous else rule]
