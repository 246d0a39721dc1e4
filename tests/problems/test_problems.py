"""Problems: data as in the paper, exact optima, and randomness that depends on (seed, t, node) only."""

import email
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

import klatsch
from klatsch import problems
from klatsch.problems import ImageClassification, Images, Language, LeastSquares, LogisticRegression, dirichlet, draws
from klatsch.problems.base import Convex
from tests.support.comparisons import assert_same_to_rounding

TEXT = str(Path(email.__file__).parent)
PIXELS = Images(*2 * (torch.arange(840).reshape(210, 1, 2, 2).to(torch.uint8), torch.arange(210) % 3))


def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


# Small instances of every problem that has a name, which shared tests try, and of some that have none.
MAKE = {
    "least-squares": lambda nodes, seed=0: LeastSquares(nodes, dim=6, noise=[1.0, 3.0], heterogeneity=2.0, seed=seed),
    "logistic": lambda nodes, seed=0: LogisticRegression(nodes, dim=6, samples=40, batch=3, seed=seed),
    "fashion-mnist": lambda nodes, seed=0: ImageClassification(tiny, PIXELS, nodes, 1.0, batch=3, seed=seed),
    "language": lambda nodes, seed=0: Language(
        nodes, 1.0, batch=2, context=8, width=8, depth=1, heads=2, folder=TEXT, test=5, seed=seed
    ),
    "own least squares": lambda nodes, seed=0: LeastSquares.from_arrays(
        np.random.default_rng(5).normal(size=(nodes, 9, 6)),
        np.random.default_rng(6).normal(size=(nodes, 9)),
        noise=1.0,
        seed=seed,
    ),
}
KINDS = dict.fromkeys([*problems.PROBLEMS, *MAKE])
CONVEX = [kind for kind in KINDS if issubclass(problems.PROBLEMS.get(kind, LeastSquares), Convex)]
every_problem = pytest.mark.parametrize("kind", KINDS)
every_convex_problem = pytest.mark.parametrize("kind", CONVEX)


def made(kind, nodes, seed=0):
    assert kind in MAKE, f"the problem {kind!r} has no entry in MAKE; add one"
    return MAKE[kind](nodes, seed=seed)


@every_problem
def test_a_node_asked_alone_sees_its_row(kind):
    problem = made(kind, 7)
    x = torch.randn(7, 2, problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in (1, 2, 1000):
        whole = problem.grad(x, t)
        torch.testing.assert_close(whole, problem.gradient(x, problem.draw(torch.tensor([t]))[0]), rtol=0, atol=1e-13)
        for i in (0, 3, 6):
            torch.testing.assert_close(problem.grad(x[i : i + 1], t, nodes=[i]), whole[i : i + 1], rtol=0, atol=1e-13)
        torch.testing.assert_close(problem.grad(x[[5, 2]], t, nodes=[5, 2]), whole[[5, 2]], rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="from 0 to 6"):
        problem.grad(x[:1], 1, nodes=[7])


@every_problem
def test_rounds_nodes_and_seeds_draw_differently_and_repeat(kind):
    problem, other = made(kind, 5), made(kind, 5, seed=1)
    x = torch.randn(5, problem.columns, problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert torch.equal(problem.grad(x, 3), problem.grad(x, 3))  # bits: same call
    assert not torch.equal(problem.grad(x, 3), problem.grad(x, 4))
    assert not torch.equal(problem.draw(torch.tensor([3])), other.draw(torch.tensor([3])))
    assert problem.fingerprint() == made(kind, 5).fingerprint() != other.fingerprint()
    drawn = problem.draw(torch.arange(1, 50)).reshape(49 * 5, -1)
    assert len(torch.unique(drawn, dim=0)) > 240
    copied = pickle.loads(pickle.dumps(problem))
    assert torch.equal(copied.grad(x, 3), problem.grad(x, 3))  # bits: same call


@every_convex_problem
def test_the_optimum_is_one_and_gradients_are_unbiased(kind):
    problem = made(kind, 4)
    C = len(problem.optimum)
    at = problem.optimum.expand(4, C, problem.dim)
    assert problem.gradient(at, None).mean(0).abs().max() < 1e-10 * problem.L
    many = problem.draw(torch.arange(1, 4001))
    mean = torch.stack([problem.gradient(at, drawn) for drawn in many]).mean(0)
    spread = torch.stack([problem.gradient(at, drawn) for drawn in many[:400]]).std(0)
    assert ((mean - problem.gradient(at, None)).abs() < 5 * spread / 4000**0.5 + 1e-12).all()
    for name, values in problem.metrics(at).items():
        assert values.abs().max() < 1e-20, name
    for name, values in problem.metrics(at + 0.1).items():
        assert (values > 1e-4).all(), name


@every_convex_problem
def test_smoothness_bounds_every_node_and_is_reached_or_nearly(kind):
    problem = made(kind, 5)
    generator = torch.Generator().manual_seed(2)
    C = problem.columns
    x, y = torch.randn(2, 5, C, problem.dim, dtype=torch.float64, generator=generator)
    ratio = (problem.gradient(x, None) - problem.gradient(y, None)).norm(dim=-1) / (x - y).norm(dim=-1)
    assert (ratio <= problem.L * (1 + 1e-12)).all()
    if (parts := problem.quadratic()) is not None:
        torch.testing.assert_close(problem.L, max(np.linalg.norm(h.numpy(), 2) for h in parts.H), rtol=1e-10, atol=0)


def test_least_squares_is_the_papers_problem():
    """Section 5.1, rebuilt from its parts."""
    problem = LeastSquares(2000, dim=20, noise=3.0, heterogeneity=5.0)
    H, rows, scale, _ = problem.quadratic()
    # H_i = A_i' A_i with standard normal A_i: mean d I, and the determinant's logarithm of a Wishart matrix
    torch.testing.assert_close(H.mean(0), 20.0 * torch.eye(20, dtype=torch.float64), rtol=0, atol=1.5)
    expected = sum(stats.chi2(20 - k).expect(np.log) for k in range(20))
    assert float(torch.logdet(H).mean()) == pytest.approx(expected, abs=0.3)
    # A'b = H (x# - delta_i): the nodes' own optima scatter around x# with variance zeta² / d in every direction
    own = -torch.linalg.solve(H, (scale[0] @ rows))
    assert float(own.std(0).mean()) == pytest.approx(5.0 / 20**0.5, rel=0.02)
    calm = LeastSquares(2000, dim=20, heterogeneity=0.0).quadratic()
    centre = -torch.linalg.solve(calm.H, (calm.scale[0] @ calm.rows))
    torch.testing.assert_close(centre, centre[:1].expand_as(centre), rtol=0, atol=1e-6)
    assert (own.mean(0) - centre[0]).abs().max() < 5 * 5.0 / 20**0.5 / 2000**0.5
    # and the noise has variance sigma² in all
    x = torch.zeros(2000, 1, 20, dtype=torch.float64)
    xi = problem.grad(x, 1) - problem.gradient(x, None)
    assert float(xi.square().sum(-1).mean()) == pytest.approx(9.0, rel=0.03)


def test_constants_of_least_squares():
    problem = LeastSquares(9, dim=5, heterogeneity=[0.0, 3.0])
    H, rows, scale, _ = problem.quadratic()
    for c in range(2):
        offset = (scale[c] @ rows).numpy()
        best = np.linalg.solve(H.mean(0).numpy(), -offset.mean(0))
        np.testing.assert_allclose(problem.optimum[c], best, rtol=1e-9, atol=1e-12)
        slopes = np.einsum("iab,b->ia", H.numpy(), best) + offset
        assert float(problem.zeta[c]) == pytest.approx(np.sqrt((slopes**2).sum(1).mean()), rel=1e-9, abs=1e-9)
        assert float(problem.D1[c]) == pytest.approx(np.linalg.norm(best))
    assert problem.zeta[0] < 1e-10


def test_node_data_do_not_depend_on_the_number_of_nodes():
    few, many = LeastSquares(3, dim=4), LeastSquares(9, dim=4)
    assert_same_to_rounding(few.quadratic().H, many.quadratic().H[:3])


def test_from_arrays_finds_what_numpy_finds():
    generator = np.random.default_rng(0)
    A, b = generator.normal(size=(4, 10, 3)), generator.normal(size=(4, 10))
    problem = LeastSquares.from_arrays(A, b)
    best = np.linalg.lstsq(A.reshape(40, 3), b.reshape(40), rcond=None)[0]
    np.testing.assert_allclose(problem.optimum[0], best, rtol=1e-10)
    x = torch.randn(4, 1, 3, dtype=torch.float64)
    expected = np.einsum("ina,in->ia", A, np.einsum("ina,ia->in", A, x[:, 0].numpy()) - b)
    np.testing.assert_allclose(problem.grad(x, 1)[:, 0], expected, rtol=1e-10, atol=1e-10)
    loss = 0.5 * ((A.reshape(40, 3) @ np.ones(3) - b.reshape(40)) ** 2).sum() / 4
    least = 0.5 * ((A.reshape(40, 3) @ best - b.reshape(40)) ** 2).sum() / 4
    ones = torch.ones(4, 1, 3, dtype=torch.float64)
    assert float(problem.metrics(ones)["loss_gap"]) == pytest.approx(loss - least)


def test_logistic_regression_from_arrays_finds_what_scipy_finds():
    generator = np.random.default_rng(1)
    features = generator.normal(size=(60, 4))
    labels = np.where(features[:, 0] + generator.normal(size=60) > 0, "yes", "no") == "yes"
    problem = LogisticRegression.from_arrays(features, labels.astype(int), nodes=6, l2=0.1, batch=2)

    def loss(x):
        return np.logaddexp(0, -(2 * labels - 1) * (features @ x)).mean() + 0.05 * x @ x

    found = optimize.minimize(loss, np.zeros(4), tol=1e-14)
    np.testing.assert_allclose(problem.optimum[0], found.x, atol=1e-6)
    assert float(problem.loss(problem.optimum)[0]) == pytest.approx(loss(problem.optimum[0].numpy()), rel=1e-12)
    for l2 in (1e-6, 1e-3, 10.0):  # a Newton step from there, in NumPy, is the error that is left
        problem = LogisticRegression.from_arrays(features, labels, nodes=6, l2=l2)
        x, signs = problem.optimum[0].numpy(), 2 * labels - 1
        chance = 1 / (1 + np.exp(signs * (features @ x)))
        slope = l2 * x - (chance * signs) @ features / 60
        curvature = (features.T * chance * (1 - chance)) @ features / 60 + l2 * np.eye(4)
        assert np.linalg.norm(np.linalg.solve(curvature, slope)) < 1e-10
    x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
    gradients = torch.autograd.grad(problem.loss(x[0, :1]).sum(), x)[0][0, :1]
    exact = problem.gradient(x.detach()[:1, :1].expand(6, 1, 4), None).mean(0)
    torch.testing.assert_close(gradients, exact)


def test_data_that_are_split_already_stay_where_they_are():
    generator = np.random.default_rng(2)
    features, labels = generator.normal(size=(4, 10, 3)), generator.random((4, 10)) < 0.5
    problem = LogisticRegression.from_arrays(features, labels)
    assert problem.nodes == 4
    np.testing.assert_array_equal(problem.labels, labels)  # bits: whole numbers
    x = torch.zeros(4, 1, 3, dtype=torch.float64)
    expected = -np.einsum("in,ina->ia", (2 * labels - 1) / 2, features) / 10
    np.testing.assert_allclose(problem.gradient(x, None)[:, 0], expected, atol=1e-14)


@pytest.mark.parametrize("nodes", [1, 2, 7, 16, 50])
@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_partition(nodes, alpha):
    labels = np.repeat(np.arange(10), [100, 50, 200, 10, 100, 100, 40, 100, 150, 150])
    shards = dirichlet(labels, nodes, alpha, seed=3)
    assert shards.shape == (nodes, 1000 // nodes)
    assert len(np.unique(shards)) == shards.size
    np.testing.assert_array_equal(shards, dirichlet(labels, nodes, alpha, seed=3))  # bits: same call
    if nodes == 16:
        assert not np.array_equal(shards, dirichlet(labels, nodes, alpha, seed=4))
        largest = np.mean([np.bincount(labels[shard]).max() / len(shard) for shard in shards])
        assert largest > 0.6 if alpha <= 0.1 else largest < 0.35 if alpha == 100 else True


@every_problem
def test_a_rank_may_ask_with_a_plain_vector_of_any_dtype(kind):
    problem = made(kind, 4)
    x = torch.randn(problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if problem.columns > 1:
        with pytest.raises(ValueError, match=rf"shape \({problem.dim},\); give \(1, 2, {problem.dim}\)"):
            problem.grad(x, 5, nodes=[2])
        return
    whole = problem.grad(x.expand(4, 1, -1), 5)
    assert_same_to_rounding(problem.grad(x, 5, nodes=[2]), whole[2, 0])
    assert_same_to_rounding(problem.grad(x.expand(4, -1), 5), whole[:, 0])
    rough = problem.grad(x.float(), 5, nodes=[2])
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, whole[2, 0].float(), rtol=1e-4, atol=1e-4)


def test_draws_are_normal_and_independent():
    z = draws.normals(7, draws.NOISE, torch.arange(1, 2001), torch.arange(10), 51).numpy()
    assert stats.kstest(z[:200].ravel(), "norm").pvalue > 0.01
    assert stats.kstest((z[:, :, 3] ** 2).ravel(), stats.chi2(1).cdf).pvalue > 0.01
    for a, b in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[..., 1:], z[..., :-1])):  # rounds, nodes, places
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
        assert abs(np.corrcoef(a.ravel() ** 2, b.ravel() ** 2)[0, 1]) < 5 / np.sqrt(a.size)
    other = draws.normals(8, draws.NOISE, torch.arange(1, 2001), torch.arange(10), 51).numpy()
    assert abs(np.corrcoef(z.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(z.size)
    rough = draws.normals(7, draws.NOISE, torch.arange(1, 2001), torch.arange(10), 51, torch.float32)
    np.testing.assert_allclose(rough, z, rtol=1e-4, atol=1e-4)


def test_draws_match_a_plain_splitmix64():
    """The hash against Python's own whole numbers."""

    def splitmix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    key = splitmix((11 * golden + draws.BATCHES + 1) % 2**64)
    key = splitmix((key + 5 * golden) % 2**64)
    key = splitmix((key + 3 * golden) % 2**64)
    expected = [(splitmix((key + (j + 1) * golden) % 2**64) >> 32) * 1000 >> 32 for j in range(20)]
    found = draws.whole_numbers(11, draws.BATCHES, torch.tensor([5]), torch.tensor([3]), 20, 1000)
    assert found[0, 0].tolist() == expected


def test_whole_numbers_are_even():
    drawn = draws.whole_numbers(1, draws.BATCHES, torch.arange(1, 1001), torch.arange(10), 32, 7).flatten()
    assert stats.chisquare(np.bincount(drawn, minlength=7)).pvalue > 0.001
    assert (drawn.min(), drawn.max()) == (0, 6)


@pytest.mark.parametrize("name", [name for name, kind in problems.PROBLEMS.items() if kind.ready is None])
def test_names(name):
    problem = problems.make(name, 4, seed=2)
    assert problem.nodes == 4
    if "dim" in problems.options(name):
        assert problems.make(name, 4, dim=3).dim == 3
    assert "nodes" not in problems.options(name)
    assert str(problem.nodes) in repr(problem)


class Wrapper:
    """What delegates to a problem, but is none."""

    def __init__(self, problem):
        self.problem = problem

    def __getattr__(self, name):
        return getattr(self.problem, name)


class Sizeless(problems.Problem):
    start = grad = metrics = None


@pytest.mark.parametrize(
    "problem, what",
    [
        (Wrapper(LeastSquares(4)), "a Wrapper"),
        (3, "an? int"),
        (LeastSquares, "the class LeastSquares"),
        (Sizeless(), "a Sizeless without nodes and dim"),
    ],
)
def test_only_problems_are_problems(problem, what):
    rule, graph = klatsch.rules.make("dsgd", 0.1), klatsch.topology.ring(4)
    with pytest.raises(ValueError, match=rf"problem is {what}; give .* that derives from klatsch\.problems\.Problem"):
        klatsch.simulate(problem, rule, graph, 20)


@pytest.mark.parametrize("headline", ["distance", "loss_gap"])
def test_a_brief_look_is_the_headline_alone(headline):
    problem = LogisticRegression(3, dim=6, samples=40)
    problem.headline = problems.Headline(headline, "")
    x = torch.randn(3, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = problem.briefly().to(torch.float64, torch.device("cpu")).metrics(x)
    assert list(found) == [headline]
    assert_same_to_rounding(found[headline], problem.metrics(x)[headline])


def test_problems_of_ones_own_are_never_brief():
    """They may measure what they like, and pass on to others what they do not have."""

    class Wide(LeastSquares):
        def metrics(self, x):
            found = super().metrics(x)
            return found | {"ratio": found["loss_gap"] / found["distance"]}

    class Passing(problems.Problem):
        nodes, dim = 2, 3
        start, grad, metrics = (lambda self, *given: None for _ in range(3))

        def __getattr__(self, name):
            return getattr(self.other, name)  # without end where there is none

    for problem in (Wide(2, dim=3), Passing()):
        assert problem.briefly() is problem


def test_a_function_says_what_it_makes(tmp_path):
    """Its class has the headline."""
    file = tmp_path / "own.py"
    file.write_text(
        "from klatsch import problems\n"
        "class Own(problems.LeastSquares):\n"
        "    headline = problems.Headline('loss_gap', 'loss')\n"
        "def made(nodes: int) -> Own:\n    return Own(nodes, 3)\n"
        "def silent(nodes):\n    return made(nodes)\n"
        "def odd(nodes) -> nonsense:\n    return made(nodes)\n"
    )
    assert problems.declared(f"{file}:made").headline.metric == "loss_gap"
    for name in ("silent", "odd"):
        assert problems.declared(f"{file}:{name}") is problems.Problem
