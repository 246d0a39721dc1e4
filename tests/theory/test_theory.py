"""The paper's formulas: constants, special cases, exponents."""

import math
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest

from klatsch import theory
from klatsch import topology as tp

PROBLEM = theory.Constants(L=3.0, D1=2.0, sigma=1.5, zeta=0.7)


def test_constants_of_theorem_4_1():
    assert pytest.approx(5120 * 9) == PROBLEM.K**2
    assert PROBLEM.sigma_tilde**2 == pytest.approx(2 * 1.5**2 + 0.7**2)


def test_the_learning_rate_is_the_smallest_of_four():
    """Each of the four choices of Theorem 4.1 decides somewhere; written down once more by hand."""
    K = math.sqrt(5120)
    rate = theory.dat_learning_rate
    assert rate(1, 1, 1.0, theory.Constants(sigma=0)) == pytest.approx(1 / K)
    assert rate(1, 10, 0.1, theory.Constants(sigma=0)) == pytest.approx(0.01 / K)
    assert rate(1, 10**6, 1.0, theory.Constants(sigma=0)) == pytest.approx(1 / (24 * 10**6))
    assert rate(4, 10**6, 1.0, theory.Constants(sigma=9)) == pytest.approx(2 / (math.sqrt(3) * 9 * 1e9))
    hetero = theory.Constants(sigma=0, zeta=100)
    assert rate(4, 10**6, 0.5, hetero) == pytest.approx(math.sqrt(1 / (2 * K * 100)) * 0.5 / 10**6)


def test_the_bound_follows_from_the_learning_rate():
    """The last step of the proof: with this eta, the sum before Lemma D.6 over alpha_{1:T} stays below the bound."""
    every = [PROBLEM, theory.Constants(), theory.Constants(sigma=0, zeta=3), theory.Constants(sigma=0)]
    for M, T, rho, constants in product([1, 16, 400], [1, 30, 1000, 10**6], [1.0, 0.3, 0.01], every):
        c, eta = constants, theory.dat_learning_rate(M, T, rho, constants)
        before = (
            2 * c.D1**2 / eta + 6 * c.sigma**2 * eta * T**3 / M + 8 * c.K**2 * c.sigma_tilde**2 * eta**3 * T**4 / rho**4
        )
        proven = before / (T * (T + 1) / 2)
        stated = theory.dat_bound(M, T, rho, constants).total
        assert proven <= stated * (1 + 1e-12)
        assert proven >= stated / 8  # and the bound is not far above it, so a wrong constant would show


def test_bound_with_numbers_worked_out_by_hand():
    statistical, network, optimization = theory.dat_bound(4, 100, 0.5, theory.Constants())
    K, sigma_tilde = math.sqrt(5120), math.sqrt(2)
    assert statistical == pytest.approx(8 * math.sqrt(3) / 20)
    assert network == pytest.approx(8 * math.sqrt(2 * K * sigma_tilde) / 50 + 4 * K / 2500)
    assert optimization == pytest.approx(0.96)
    local = theory.dat_local_bound(4, 100, 0.5, theory.Constants())
    apart = 8 * math.sqrt(5) * 4 * sigma_tilde / 2500
    assert local.total == pytest.approx(2 * (statistical + network + optimization) + apart)


def test_corollary_4_2_is_the_consensus_bound_times_LM():
    """Its extra term is L M Gamma_T with the largest eta^2 the theorem allows, D1 rho^2 / (2 K sigma~ T^2)."""
    M, T, rho, c = 9, 10**5, 0.2, PROBLEM
    eta = math.sqrt(c.D1 / (2 * c.K * c.sigma_tilde)) * rho / T
    extra = theory.dat_local_bound(M, T, rho, c).total - 2 * theory.dat_bound(M, T, rho, c).total
    assert extra == pytest.approx(c.L * M * theory.consensus_bound(eta, rho, c), rel=1e-9)


def test_consensus_bound_only_where_the_lemma_holds():
    limit = 0.25 / math.sqrt(5120)
    assert theory.consensus_bound(limit, 0.5) == pytest.approx(2560 * 2 * limit**2 / 0.5**4)
    with pytest.raises(ValueError, match=r"eta = 0.1; give a number from 0 up to rho\^2 / K"):
        theory.consensus_bound(0.1, 0.5)


@pytest.mark.parametrize("rate", [*theory.RATES.values(), theory.dat_bound, theory.dat_local_bound])
def test_everything_falls_with_rounds_and_takes_arrays(rate):
    T = np.logspace(0, 9, 60)
    totals = rate(16, T, 0.1, PROBLEM).total
    assert totals.shape == T.shape
    assert (np.diff(totals) < 0).all()
    assert rate(16, math.inf, 0.1, PROBLEM).total == 0
    assert totals[7] == pytest.approx(rate(16, float(T[7]), 0.1, PROBLEM).total)


def test_small_integers_do_not_overflow():
    M = T = np.int32(100_000)
    assert theory.dat_rate(M, T, 0.5).statistical == pytest.approx(1e-5)


@pytest.mark.parametrize("rate", [theory.dat_rate, theory.dsgd_rate, theory.gt_rate, theory.dat_bound])
def test_better_connected_is_better(rate):
    assert (np.diff(rate(16, 1000, np.linspace(0.01, 1, 50), PROBLEM).total) < 0).all()


def test_the_complete_graph_recovers_the_central_rate():
    """Theorem 4.1 with rho = 1: the same orders as mini-batch SGD, so a constant apart at every M and T; D-SGD not."""
    M, T = (a.ravel() for a in np.meshgrid(10.0 ** np.arange(0, 7), 10.0 ** np.arange(0, 13)))
    central = theory.minibatch_rate(M, T).total
    assert (theory.dat_rate(M, T, 1.0).total / central).max() < 4
    assert (theory.dsgd_rate(M, T, 1.0).total / central).max() > 10
    for N in (1e6, 1e9, 1e12):
        dat, server = (theory.largest_machines(rule, N, "complete") for rule in ("dat", "minibatch"))
        assert server / 4 < dat <= server


def test_terms_of_the_baselines():
    c = PROBLEM
    statistical, network, optimization = theory.dsgd_rate(9, 1000, 0.2, c)
    assert statistical == pytest.approx(2 * 1.5 / math.sqrt(9000))
    # the same in Koloskova's form: T = sqrt(L) D1^2 (sigma / sqrt(rho) + zeta / rho) / eps^(3/2), solved for eps
    from_sigma = (math.sqrt(c.L) * c.D1**2 * c.sigma / (math.sqrt(0.2) * 1000)) ** (2 / 3)
    from_zeta = (math.sqrt(c.L) * c.D1**2 * c.zeta / (0.2 * 1000)) ** (2 / 3)
    assert network == pytest.approx(from_sigma + from_zeta)
    assert optimization == pytest.approx(3 * 4 / 200)
    assert theory.gt_rate(9, 1000, 0.2, c).network == pytest.approx(from_sigma)
    assert theory.minibatch_rate(9, 1000, 0.2, c) == (statistical, 0, pytest.approx(12 / 1000))


def test_table_1():
    exponent = theory.parallelism_exponent
    ring, torus, near_complete = 2, 1, 0
    assert [exponent("dsgd", g) for g in (ring, torus, near_complete)] == [
        Fraction(1, 8),
        Fraction(1, 6),
        Fraction(1, 4),
    ]
    assert [exponent("dat", g) for g in (ring, torus, near_complete)] == [
        Fraction(1, 6),
        Fraction(1, 4),
        Fraction(1, 2),
    ]
    assert exponent("minibatch", ring) == Fraction(1, 2)
    assert exponent("dsgd", ring, heterogeneous=True) == Fraction(1, 12)
    assert exponent("gt", ring, heterogeneous=True) == Fraction(1, 8)
    assert theory.parallelism_bound("dat", 1e6, 0.1) == pytest.approx(100)
    assert theory.parallelism_bound("dsgd", 1e8, 0.25) == pytest.approx(50)
    assert theory.parallelism_bound("dsgd", 1e8, 0.25, heterogeneous=True) == pytest.approx(25)


@pytest.mark.parametrize("rule, family, zeta", [
    ("dat", "ring", 0.0), ("dat", "torus", 0.0), ("dat", "ring", 1.0), ("dat", "torus", 1.0),
    ("dsgd", "ring", 0.0), ("dsgd", "torus", 0.0), ("dsgd", "ring", 1.0), ("dsgd", "torus", 1.0),
    ("gt", "ring", 1.0), ("dat", "near_complete", 0.0), ("dsgd", "near_complete", 0.0), ("minibatch", "ring", 0.0),
])  # fmt: skip
def test_largest_machines_grows_as_table_1_says(rule, family, zeta):
    """The slope of log M over log N for N in powers of ten, on the actual rho(M) of the built family."""
    N = 10.0 ** np.arange(20, 41)
    M = [float(theory.largest_machines(rule, samples, family, theory.Constants(zeta=zeta))) for samples in N]
    slope = np.polyfit(np.log(N), np.log(M), 1)[0]
    gap_exponent = {"ring": 2, "torus": 1, "near_complete": 0}[family]
    expected = theory.parallelism_exponent(rule, gap_exponent, heterogeneous=zeta > 0)
    assert slope == pytest.approx(float(expected), abs=0.004)


@cache
def built_gap(family, M):
    return tp.make(family, M).spectral_gap


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, rule, N",
    [
        *((family, "dat", 300) for family in ("ring", "torus", "hypercube", "one_peer_exponential", "base_graph")),
        *(("grid", rule, N) for rule, N in (("dat", 10**6), ("dsgd", 3_000), ("gt", 10**6), ("minibatch", 300))),
        *(("ring", rule, N) for rule, N in (("dat", 10**6), ("dsgd", 3_000), ("gt", 10**6))),
        *(("star", rule, N) for rule, N in (("dsgd", 3_000), ("minibatch", 300))),
    ],
)
def test_largest_machines_is_the_last_one_that_pays(rule, family, N):
    """Against a plain loop over sizes, on the gaps of the built graphs."""
    constants = theory.Constants(sigma=3.0, zeta=0.5)

    def pays(M):
        statistical, network, optimization = theory.RATES[rule](M, N / M, built_gap(family, M), constants)
        return M <= N and network + optimization <= statistical

    found = theory.largest_machines(rule, N, family, constants)
    sizes = [M for s in range(1, 100) if (M := tp.nth_size(family, s)) <= 70]
    if found <= 64:
        assert found == max((M for M in sizes if pays(M)), default=1)
    elif found < 300:
        following = next(M for s in range(1, 400) if (M := tp.nth_size(family, s)) > found)
        assert pays(found)
        assert not pays(following)
    else:
        assert all(pays(M) for M in sizes)


def test_largest_machines_passes_over_small_sizes_that_a_family_refuses():
    """A path of three nodes, the smallest near-complete graph, mixes badly; four nodes do not."""
    assert theory.largest_machines("dsgd", 1e5, "near_complete", theory.Constants(zeta=1)) == 4
    assert theory.largest_machines("dat", 1e4, "random_regular", degree=6) > 6
    assert theory.largest_machines("dat", 1e4, "erdos_renyi", p=0.5) > 1


@pytest.mark.parametrize(
    "family, options, divisor, N", [("random_regular", {"degree": 3}, 2, 1e7), ("torus", {"rows": 3}, 3, 1e9)]
)
def test_largest_machines_passes_over_large_sizes_that_a_family_refuses(family, options, divisor, N):
    """Cubic graphs have an even number of nodes, a torus of three rows a multiple of three."""
    found = theory.largest_machines("dat", N, family, **options)
    assert found > 64
    assert found % divisor == 0
    for M, expected in ((found, True), (2 * found, False)):
        rate = theory.dat_rate(M, N / M, tp.make(family, M, **options).spectral_gap)
        assert (rate.network + rate.optimization <= rate.statistical) == expected


def test_largest_machines_by_a_function_and_with_options():
    assert theory.largest_machines("dat", 1e9, lambda M: 1.0) == theory.largest_machines("dat", 1e9, "complete")
    wider = theory.largest_machines("dat", 1e8, "base_graph", k=4)
    assert wider > theory.largest_machines("dat", 1e8, "base_graph", k=1)
    assert theory.largest_machines("dat", 1e9, "ring", theory.Constants(sigma=0)) == 1
    assert theory.largest_machines("minibatch", 1, "ring") == 1
    assert theory.largest_machines("dat", 1e9, "ring", theory.Constants(D1=0)) == 1
    assert theory.largest_machines("dat", 1e16, "one_peer_exponential") > 1e6


def test_dat_uses_more_machines_than_dsgd():
    for family in ("ring", "torus", "one_peer_exponential", "base_graph"):
        for N in (1e6, 1e8, 1e10):
            for zeta in (0.0, 1.0):
                c = theory.Constants(zeta=zeta)
                assert theory.largest_machines("dat", N, family, c) >= theory.largest_machines("dsgd", N, family, c)


def test_transient_iterations_have_the_papers_orders():
    """O(M / rho^2) for DAT, O(M^3 / rho^2) for D-SGD, and O(M^3 / rho^4) with heterogeneity (Section 4.2)."""
    hetero = theory.Constants(zeta=1.0)
    cases = [("dat", theory.Constants(), 1, 2), ("dsgd", theory.Constants(), 3, 2), ("dsgd", hetero, 3, 4)]
    for rule, c, in_M, in_rho in cases:
        by_M = [theory.transient_iterations(rule, M, 1e-4, c) for M in (10**4, 10**5)]
        by_rho = [theory.transient_iterations(rule, 10**4, rho, c) for rho in (1e-5, 1e-6)]
        assert math.log10(by_M[1] / by_M[0]) == pytest.approx(in_M, abs=0.05), rule
        assert math.log10(by_rho[1] / by_rho[0]) == pytest.approx(in_rho, abs=0.05), rule
    assert theory.transient_iterations("dat", 4, 0.5, theory.Constants(sigma=0)) == math.inf
    T = int(theory.transient_iterations("dat", 16, 0.05))
    for rounds, dominated in ((T, True), (T - 1, False)):
        statistical, network, optimization = theory.dat_rate(16, rounds, 0.05)
        assert (statistical >= network + optimization) == dominated


def test_rounds_to_error_is_the_first_round_that_reaches_it():
    for rule, rate in theory.RATES.items():
        T = theory.rounds_to_error(rule, 0.01, 16, 0.05, PROBLEM)
        assert rate(16, T, 0.05, PROBLEM).total <= 0.01 < rate(16, T - 1, 0.05, PROBLEM).total
    assert theory.rounds_to_error("dat", 1e9, 16, 0.05) == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: theory.Constants(L=0), "L = 0; give a positive number"),
        (lambda: theory.Constants(sigma=-1), "sigma = -1; give 0 or a positive number"),
        (lambda: theory.Constants(zeta=math.nan), "zeta = nan"),
        (lambda: theory.Constants(D1=math.inf), "D1 = inf"),
        (lambda: theory.dat_rate(0, 10, 0.5), "M = 0; give a number of machines from 1 up"),
        (lambda: theory.dat_rate(1, 0, 0.5), "T = 0"),
        (lambda: theory.dat_rate(1, 10, 0.0), "rho = 0.0; give a spectral gap above 0 and up to 1"),
        (lambda: theory.dat_bound(1, 10, 1.5), "rho = 1.5"),
        (lambda: theory.dat_rate(1, 10, np.array([0.5, math.nan])), "rho = "),
        (lambda: theory.largest_machines("adam", 1e6, "ring"), "unknown rate 'adam'"),
        (lambda: theory.largest_machines("dat", 0, "ring"), "N = 0"),
        (lambda: theory.largest_machines("dat", 1e300, "ring"), "N = 1e\\+300"),
        (lambda: theory.largest_machines("dat", "1e8", "ring"), "N = '1e8'"),
        (lambda: theory.largest_machines("dat", 1e8, tp.ring(4)), "topology is a Topology; give a family's name"),
        (lambda: theory.dat_rate(16, 100, tp.ring(4)), "rho = .*; give a number, not a Topology"),
        (lambda: theory.dat_rate("16", 100, 0.1), "M = 16; give a number, not a str"),
        (lambda: theory.Constants(L="1"), "L = '1'; give a positive number"),
        (lambda: theory.largest_machines("dat", 1e6, "rign"), "did you mean ring"),
        (lambda: theory.largest_machines("dat", 1e6, "ring", k=2), "ring has no option 'k'"),
        (lambda: theory.rounds_to_error("dat", 0, 4, 0.5), "epsilon = 0"),
        (lambda: theory.rounds_to_error("dat", 1e-200, 4, 0.5), "epsilon = 1e-200"),
        (lambda: theory.parallelism_bound("dat", 1e6, 2.0), "rho = 2.0"),
        (lambda: theory.parallelism_exponent("dat", -1), "gap_exponent = -1"),
        (lambda: theory.transient_iterations("dat", 4, -1), "rho = -1"),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
