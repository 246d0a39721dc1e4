"""How the error falls with rounds, machines and connectivity: the paper's bounds, and rates to compare rules by.

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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from klatsch.arguments import number

Number = float | NDArray[np.float64]


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
    """What the theory needs to know of a problem; all 1, and homogeneous data, unless said otherwise.

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
        number("L", self.L, lambda v: 0 < v < math.inf, "a positive number")
        for name, value in (("D1", self.D1), ("sigma", self.sigma), ("zeta", self.zeta)):
            number(name, value, lambda v: 0 <= v < math.inf, "0 or a positive number")

    @property
    def K(self) -> float:
        """K with K^2 = 5120 L^2 (Theorem 4.1)."""
        return math.sqrt(5120) * self.L

    @property
    def sigma_tilde(self) -> float:
        """sigma~ with sigma~^2 = 2 sigma^2 + zeta^2 (Theorem 4.1)."""
        return math.sqrt(2 * self.sigma**2 + self.zeta**2)


UNIT = Constants()


class Rate(NamedTuple):
    """An expected excess loss as the sum of its parts."""

    statistical: Number  # what averaging N = M T noisy samples allows at best
    network: Number  # what talking only to neighbours adds
    optimization: Number  # what remains without noise

    @property
    def total(self) -> Number:
        """The excess loss itself."""
        return self.statistical + self.network + self.optimization


RateFunction = Callable[..., Rate]  # of M, T, rho = 1 and constants = UNIT


def dat_learning_rate(M: int, T: int, rho: float, constants: Constants = UNIT) -> float:
    """The learning rate of Theorem 4.1 for linear weights alpha_t = t.

    eta = min{ 1 / (24 L T), rho^2 / K, D1 sqrt(M) / (sqrt(3) sigma T^(3/2)), sqrt(D1 / (2 K sigma~)) rho / T }.
    """
    check_network(M, T, rho)
    c = constants
    choices = [1 / (24 * c.L * T), rho**2 / c.K]
    if c.sigma > 0:
        choices.append(c.D1 * math.sqrt(M) / (math.sqrt(3) * c.sigma * T**1.5))
    if c.sigma_tilde > 0:
        choices.append(math.sqrt(c.D1 / (2 * c.K * c.sigma_tilde)) * rho / T)
    return min(choices)


def dat_bound(M: Number, T: Number, rho: Number, constants: Constants = UNIT) -> Rate:
    """Theorem 4.1 with the constants of its proof (Appendix B): E f(x-bar_T) - f* with `dat_learning_rate`.

    8 sqrt(3) D1 sigma / sqrt(M T) + 8 sqrt(2) D1^(3/2) sqrt(K sigma~) / (rho T) + 96 L D1^2 / T + 4 K D1^2 / (rho T)^2.
    """
    check_network(M, T, rho)
    c = constants
    return Rate(
        8 * math.sqrt(3) * c.D1 * c.sigma / (M**0.5 * T**0.5),
        8 * math.sqrt(2) * c.D1**1.5 * math.sqrt(c.K * c.sigma_tilde) / (rho * T) + 4 * c.K * c.D1**2 / (rho * T) ** 2,
        96 * c.L * c.D1**2 / T,
    )


def dat_local_bound(M: Number, T: Number, rho: Number, constants: Constants = UNIT) -> Rate:
    """Corollary 4.2 with the constants of its proof (Appendix B.1): E f(x_T^i) - f* at every single machine.

    Twice `dat_bound` plus 8 sqrt(5) M D1 sigma~ / (rho T)^2 for the distance from the mean.
    """
    statistical, network, optimization = dat_bound(M, T, rho, constants)
    apart = 8 * math.sqrt(5) * M * constants.D1 * constants.sigma_tilde / (rho * T) ** 2
    return Rate(2 * statistical, 2 * network + apart, 2 * optimization)


def consensus_bound(eta: float, rho: float, constants: Constants = UNIT) -> float:
    """Lemma C.3: Gamma_t <= 2560 sigma~^2 eta^2 / rho^4 for linear weights, eta <= rho^2 / K and every round t."""
    check_network(1, 1, rho)
    limit = rho**2 / constants.K
    # The learning rate of Theorem 4.1 may equal the limit, so rounding is forgiven.
    number("eta", eta, lambda v: 0 <= v <= limit * (1 + 1e-12), f"a number from 0 up to rho^2 / K = {limit:.6g}")
    return 2560 * constants.sigma_tilde**2 * eta**2 / rho**4


def dat_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> Rate:
    """DAT-SGD (Theorem 4.1; the last term from Appendix B).

    sigma D1 / sqrt(M T) + D1^(3/2) sqrt(L sigma~) / (rho T) + L D1^2 / T + L D1^2 / (rho T)^2.
    """
    check_network(M, T, rho)
    c = constants
    return Rate(
        c.D1 * c.sigma / (M**0.5 * T**0.5),
        c.D1**1.5 * math.sqrt(c.L * c.sigma_tilde) / (rho * T) + c.L * c.D1**2 / (rho * T) ** 2,
        c.L * c.D1**2 / T,
    )


def dsgd_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> Rate:
    """D-SGD (Eq. 3, with L and D1 as in the original).

    sigma D1 / sqrt(M T) + L^(1/3) D1^(4/3) (sigma^(2/3) rho^(1/3) + zeta^(2/3)) / (rho T)^(2/3) + L D1^2 / (rho T).

    References:
        Koloskova et al., "A unified theory of decentralized SGD with changing topology and local updates", 2020,
        Theorem 2, convex case.
    """
    check_network(M, T, rho)
    c = constants
    spread = c.sigma ** (2 / 3) * rho ** (1 / 3) + c.zeta ** (2 / 3)
    return Rate(
        c.D1 * c.sigma / (M**0.5 * T**0.5),
        c.L ** (1 / 3) * c.D1 ** (4 / 3) * spread / (rho * T) ** (2 / 3),
        c.L * c.D1**2 / (rho * T),
    )


def gt_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> Rate:
    """Gradient tracking (Table 2): D-SGD's rate without the heterogeneity zeta.

    References:
        Koloskova, Lin and Stich, "An improved analysis of gradient tracking for decentralized machine learning", 2021.
    """
    return dsgd_rate(M, T, rho, replace(constants, zeta=0.0))


def minibatch_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> Rate:
    """Mini-batch SGD with a server (Section 2.1): sigma D1 / sqrt(M T) + L D1^2 / T; rho plays no part.

    References:
        Dekel et al., "Optimal distributed online prediction using mini-batches", 2012.
    """
    check_network(M, T, rho)
    c = constants
    statistical = c.D1 * c.sigma / (M**0.5 * T**0.5)
    return Rate(statistical, 0.0 * statistical, c.L * c.D1**2 / T)


RATES: dict[str, RateFunction] = {"dat": dat_rate, "dsgd": dsgd_rate, "gt": gt_rate, "minibatch": minibatch_rate}
