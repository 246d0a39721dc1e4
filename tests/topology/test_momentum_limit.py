"""The outer momentum beyond which disagreement grows by itself."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp

CHANGING = ("one_peer_exponential", "base_graph", "exponential", "directed_ring")


class Pushed(problems.Problem):
    """Forces in the first round only; what nodes do then is gossip's doing."""

    dim = 6

    def __init__(self, nodes):
        self.nodes = nodes

    def start(self):
        return torch.zeros(self.dim, dtype=torch.float64)

    def grad(self, x, t, nodes=None):
        forces = torch.randn(self.nodes, 1, self.dim, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        return forces * (t == 1)

    def metrics(self, x):
        return {"apart": (x - x.mean(0)).square().sum(-1).mean(0)}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("M", [6, 16])
def test_disagreement_shrinks_below_the_limit_and_grows_above(name, M):
    """In runs of the rule itself, for both kinds of momentum and any outer learning rate."""
    graph = tp.make(name, M)
    for eta, nesterov in ((1.0, True), (0.3, False)):
        ends = []
        for momentum in (graph.momentum_limit - 0.03, graph.momentum_limit + 0.03):
            rule = rules.make("plain+outer", 0.1, outer_lr=eta, outer_momentum=momentum, nesterov=nesterov)
            run = klatsch.simulate(Pushed(M), rule, graph, 600, record=[300, 600], any_graph=True)
            ends.append(run.metrics["apart"].flatten().tolist())
        (before, below), (earlier, above) = ends
        assert below < 0.5 * before, ends
        assert above > 2 * earlier, ends


def test_random_pairs_have_the_limit_of_the_mean_square():
    """Of four nodes there are three matchings: squares of disagreement follow the mean of kron(A, A)."""
    pairs = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    matrices = []
    for matching in pairs:
        P = np.zeros((4, 4))
        for i, j in itertools.chain(matching):
            P[np.ix_([i, j], [i, j])] = 0.5
        matrices.append(P - 0.25)

    def radius(g):
        rounds = [np.block([[P + g * np.eye(4), -g * np.eye(4)], [np.eye(4), np.zeros((4, 4))]]) for P in matrices]
        return np.abs(np.linalg.eigvals(sum(np.kron(A, A) for A in rounds) / 3)).max()

    limit = tp.random_matching(4).momentum_limit
    assert radius(limit) < 1 + 1e-6 < radius(limit + 2e-3)


def test_the_table_in_the_documents():
    text = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
    table = re.search(r"\| graph \| M = 8 \| 16 \| 64 \|\n\|.*\n((\|.*\n)+)", text)[1]
    for line in table.splitlines():
        names, *limits = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names):
            assert [f"{tp.make(name, M).momentum_limit:g}" for M in (8, 16, 64)] == limits, name


def test_where_no_limit_is_known():
    for graph in (
        tp.make("ring", 8, loss=0.1),
        tp.make("ring", 8, wire="topk(0.1)"),
        tp.make("one_peer_exponential", 8, every=4, late=2),
        tp.base_graph(130),
        tp.one_peer_exponential(600),
        tp.from_matrices([[0.7, 0.5], [0.3, 0.5]], stochastic="columns"),
    ):
        assert graph.momentum_limit is None
    seldom = tp.every(tp.one_peer_exponential(8), 4)
    assert seldom.momentum_limit == tp.one_peer_exponential(8).momentum_limit
    assert tp.ring(1).momentum_limit == tp.random_matching(1).momentum_limit == 1.0


def test_more_is_refused_with_the_limit():
    one_peer = tp.one_peer_exponential(16)
    for momentum in (0.9, [0.1, 0.9]):
        with pytest.raises(ValueError, match=r"outer_momentum = 0.9, .* from 0.555 up; .* ring, .* any_graph=True"):
            rules.make("diloco", 0.1, outer_momentum=momentum).check_graph(one_peer)
    rules.make("gasloc", 0.1).check_graph(one_peer)
    rules.make("diloco", 0.1).check_graph(tp.ring(16))
    rules.make("diloco", 0.1).check_graph(tp.make("base_graph", 16, loss=0.1))
