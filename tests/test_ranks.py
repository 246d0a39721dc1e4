"""Ranks and rows are the same numbers: real processes over gloo against the stacked engine."""

import pytest
import torch

import klatsch
from tests.rank_scenarios import LR, RANK_GRAPHS, RANK_RULES, ROUNDS, graph_of, problem_of
from tests.ranks import Ranks

SIZES = (4, 6)


@pytest.fixture(scope="module", params=SIZES)
def outcome(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"parity{request.param}")
    Ranks(folder, request.param, "parity").succeed(300)
    return request.param, [torch.load(folder / f"parity-{rank}") for rank in range(request.param)]


@pytest.mark.parametrize("name", RANK_GRAPHS)
@pytest.mark.parametrize("label", RANK_RULES)
def test_ranks_are_the_rows_of_the_simulation(outcome, label, name):
    size, ranks = outcome
    rule, options = RANK_RULES[label]
    algorithm, graph = klatsch.algorithms.make(rule, lr=LR, **options), graph_of(rule, name, size)
    try:
        expected = klatsch.simulate(problem_of(size), algorithm, graph, ROUNDS, engine="torch")
    except ValueError:  # not defined there
        assert f"{label} | {name}" not in ranks[0]
        return
    for rank, found in enumerate(ranks):
        x, output = found[f"{label} | {name}"]
        torch.testing.assert_close(x, algorithm.query(expected.state)[rank, 0], rtol=0, atol=1e-10)
        torch.testing.assert_close(output, expected.output[rank, 0], rtol=0, atol=1e-10)
        assert x.abs().max() > 0.01
