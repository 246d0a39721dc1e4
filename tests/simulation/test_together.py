"""Several networks in one stack are the same runs as one after the other."""

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.simulation import simulate_together

CONFIGS = {"noise": [1.0, 10.0, 1.0], "heterogeneity": [1.0, 1.0, 10.0]}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
FAMILIES = {
    "ring": tp.ring,
    "torus": tp.torus,
    "one peer": tp.one_peer_exponential,  # periods 2, 4 and 3
}


def networks(family):
    sizes = [(4, 0), (9, 0), (6, 1), (4, 1)]
    return [problems.LeastSquares(n, dim=6, seed=seed, **CONFIGS) for n, seed in sizes], [
        FAMILIES[family](n) for n, _ in sizes
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", ["dat", "dsgd", "gt"])
def test_each_network_is_what_it_is_alone(rule, family, device):
    several, graphs = networks(family)
    rule = rules.make(rule, lr=[0.01, 0.002, 0.001])
    results = simulate_together(several, rule, graphs, 100, record=[1, 13, 100], device=device)
    for problem, graph, result in zip(several, graphs, results, strict=True):
        alone = klatsch.simulate(problem, rule, graph, 100, record=[1, 13, 100], engine="torch")
        assert result.steps == alone.steps
        assert result.rounds == 100
        assert result.origin == alone.origin
        torch.testing.assert_close(result.output.cpu(), alone.output, rtol=1e-10, atol=1e-12)
        for name, values in alone.metrics.items():
            torch.testing.assert_close(result.metrics[name], values, rtol=1e-8, atol=1e-13)


def different(name):
    """Four rules that differ only in numbers: per column, as a schedule, or for all columns."""
    rates = (
        [0.01, 0.002, 0.001],
        rules.Decay([0.02, 0.01, 0.005], "cosine", 200),
        0.003,
        rules.Decay(0.01, "linear", 200),
    )
    options = {
        "dsgd": [{"momentum": m} for m in (0.9, 0.5, [0.1, 0.2, 0.3], 0.0)],
        "dat": [{"beta": b, "averaging": "fixed(0.9)"} for b in (0.9, 1.0, [0.7, 0.8, 0.9], 0.5)],
        "dat-gt": [{}] * 4,
    }
    return [rules.make(name, lr=lr, **own) for lr, own in zip(rates, options[name], strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dsgd", "dat", "dat-gt"])
def test_each_network_may_have_numbers_of_its_own(name, device):
    several, graphs = networks("ring")
    each = different(name)
    results = simulate_together(several, each, graphs, 100, record=[1, 13, 100], device=device)
    for problem, rule, graph, result in zip(several, each, graphs, results, strict=True):
        alone = klatsch.simulate(problem, rule, graph, 100, record=[1, 13, 100], engine="torch")
        assert result.origin == alone.origin
        torch.testing.assert_close(result.output.cpu(), alone.output, rtol=1e-10, atol=1e-12)


def test_rules_of_several_networks_differ_only_in_numbers():
    several, graphs = networks("ring")
    with pytest.raises(ValueError, match="averaging differs between rules that run together"):
        simulate_together(
            several[:2], [rules.make("dat", 0.1), rules.make("dat", 0.1, averaging="fixed(0.9)")], graphs[:2], 20
        )
    with pytest.raises(ValueError, match="3 rules for 2 problems; give one rule, or one for each problem"):
        simulate_together(several[:2], [rules.make("dat", 0.1)] * 3, graphs[:2], 20)


def test_a_stopped_stack_of_several_rules_goes_on_with_the_same_bits(tmp_path):
    several, graphs = networks("ring")
    each = different("dat")
    whole = simulate_together(several, each, graphs, 200)
    file = tmp_path / "stack"
    with pytest.raises(KeyboardInterrupt):
        simulate_together(several, each, graphs, 200, checkpoint=file, progress=stop_after(100))
    results = simulate_together(several, each, graphs, 200, checkpoint=file)
    for one, other in zip(whole, results, strict=True):
        assert torch.equal(one.output, other.output)  # bits: same call
    with pytest.raises(ValueError, match="belongs to another run"):
        simulate_together(several, each[::-1], graphs, 200, checkpoint=file)


def stop_after(rounds):
    done = []

    def stop(more):
        done.append(more)
        if sum(done) > rounds:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("rule", ["dsgd", "gt", "d2"])
def test_a_network_that_diverges_does_not_take_the_others_along(rule):
    calm = problems.LeastSquares.from_arrays(torch.ones(4, 1, 1) * 0.1, torch.ones(4, 1))
    wild = problems.LeastSquares.from_arrays(torch.ones(4, 1, 1) * 1e3, torch.ones(4, 1))
    first, second = simulate_together([wild, calm], rules.make(rule, [0.1, 0.2]), [tp.ring(4)] * 2, 200)[::-1]
    assert not first.diverged.any()
    assert second.diverged.all()
    assert torch.isfinite(first.output).all()
    assert torch.isinf(second.output).all()
    assert torch.isfinite(first.metrics["distance"]).all()
    assert torch.isinf(second.metrics["distance"][-1]).all()


def test_a_stopped_stack_goes_on_with_the_same_bits(tmp_path):
    several, graphs = networks("one peer")
    rule = rules.make("dat", 0.01)
    whole = simulate_together(several, rule, graphs, 300)
    file = tmp_path / "stack"
    with pytest.raises(KeyboardInterrupt):
        simulate_together(several, rule, graphs, 300, checkpoint=file, progress=stop_after(150))
    resumed = []
    results = simulate_together(several, rule, graphs, 300, checkpoint=file, progress=resumed.append)
    assert resumed[0] > 150  # what was done before
    for one, other in zip(whole, results, strict=True):
        assert torch.equal(one.output, other.output)  # bits: same call
        assert all(torch.equal(one.metrics[name], other.metrics[name]) for name in one.metrics)  # bits: same call
    with pytest.raises(ValueError, match="belongs to another run: networks"):
        simulate_together(several[:3], rule, graphs[:3], 300, checkpoint=file)


@pytest.mark.parametrize(
    "several, graphs, words",
    [
        ([], [], "0 problems"),
        ([problems.LeastSquares(4)], [], "one topology per problem"),
        ([problems.LeastSquares(4), problems.LeastSquares(4, dim=3)], [tp.ring(4)] * 2, "same parameters"),
        ([problems.LeastSquares(4), problems.LeastSquares(4, noise=2.0)], [tp.ring(4)] * 2, "noise levels"),
        ([problems.LogisticRegression(4)] * 2, [tp.ring(4)] * 2, "LogisticRegression cannot be run in one stack"),
        ([problems.LeastSquares(4)], [tp.ring(5)], "the same number"),
    ],
)
def test_what_does_not_fit_is_refused(several, graphs, words):
    with pytest.raises(ValueError, match=words):
        simulate_together(several, rules.make("dat", 0.01), graphs, 10)


def test_several_networks_do_not_continue_one_result():
    problem, graph = problems.LeastSquares(4, dim=3), tp.ring(4)
    one = klatsch.simulate(problem, rules.make("dat", 0.01), graph, 5)
    with pytest.raises(ValueError, match="after continues one result, but there are 2 problems; give one problem"):
        simulate_together([problem, problem], rules.make("dat", 0.01), [graph, graph], 10, after=one)
