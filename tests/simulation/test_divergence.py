"""Where a column began to diverge: the first node and round, however the run was cut, saved and computed."""

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.simulation import simulate_together
from tests.support.machine import CUDA, ENGINES, KERNEL
from tests.support.rank_scenarios import Poisoned, problem_of
from tests.support.table import RULES, sampled, trajectory

HERE = [Poisoned.NODE, Poisoned.ROUND]
FINITE = [-1, -1]


@pytest.mark.parametrize("rule", sampled(RULES))
def test_the_node_whose_gradient_is_not_a_number_is_named(rule):
    """Not those of its neighbours that come first in the list, nor all, which a dense product reaches at once."""
    size, record = ((6, range(30, 40)), (30, [45]))[[*RULES].index(rule) % 2]  # dense and sparse mixing
    result = klatsch.simulate(Poisoned(size), RULES[rule]([1e-3, 2e-3]), tp.lazy(tp.ring(size)), 45, record=record)
    assert result.diverged.tolist() == [False, True]
    assert result.diverged_at.tolist() == [FINITE, HERE]


def reference(problem, rule, graph, steps):
    """Step by step: the round after which an output is not finite, and the nodes whose gradients led there."""
    states = trajectory(rule, graph, problem, steps)
    t = next(t for t, state in enumerate(states) if not rule.output(state).isfinite().all())
    gradients = problem.grad(rule.query(states[t - 1]), t)
    return (~gradients.isfinite().all(-1)).flatten().nonzero().flatten().tolist(), t


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["dsgd", "dat, momentum", "gt", "d2"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_overflow_is_found_in_the_round_of_the_plain_loop(rule, device):
    """Several columns of one piece, each in its own round; a single node is steep, and goes first."""
    rule = RULES[rule]
    A = torch.ones(6, 1, 1, dtype=torch.float64)
    A[3] = 30.0
    problem, graph = problems.LeastSquares.from_arrays(A, torch.ones(6, 1)), tp.lazy(tp.ring(6))
    rates = [1e-4, 0.5, 5.0, 50.0]
    result = klatsch.simulate(problem, rule(rates), graph, 250, record=[250], device=device)
    assert result.diverged.tolist() == [False, True, True, True]
    assert len(set(result.diverged_at[:, 1].tolist())) == 4
    for c in (1, 2, 3):
        nodes, t = reference(problem, rule(rates[c]), graph, int(result.diverged_at[c, 1]) + 1)
        assert result.diverged_at[c].tolist() == [nodes[0] if nodes else 3, t]
        assert nodes in ([], [3])


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engines_agree(dtype):
    problem, graph = problems.LeastSquares(30, dim=5), tp.ring(30)
    rule = rules.make("dsgd", [0.001, 1.0, 2.0, 1e30])
    result = klatsch.simulate(problem, rule, graph, 400, record=[3, 400], dtype=dtype, engine="fused")
    plain = klatsch.simulate(problem, rule, graph, 400, record=50, dtype=dtype, engine="torch")
    assert result.engine == "fused"
    assert result.diverged.tolist() == [False, True, True, True]
    assert result.diverged_at[:, 1].tolist() == plain.diverged_at[:, 1].tolist()  # bits: whole numbers
    assert result.diverged_at[:, 0].tolist() == plain.diverged_at[:, 0].tolist()  # bits: whole numbers
    assert result.diverged_at[1, 1] > result.diverged_at[2, 1] > result.diverged_at[3, 1]


@ENGINES
@pytest.mark.parametrize("moment", [20, 400])
def test_a_run_that_was_stopped_or_continued_still_knows(engine, moment, tmp_path):
    call = problems.LeastSquares(6, dim=5), rules.make("dsgd", [0.001, 1.0, 0.5]), tp.ring(6)
    whole = klatsch.simulate(*call, 900, record=[900], engine=engine)
    assert whole.diverged.tolist() == [False, True, True]
    told = []

    def tell(rounds):
        told.append(rounds)
        if sum(told) >= moment:
            raise KeyboardInterrupt

    saved = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        klatsch.simulate(*call, 900, record=[900], engine=engine, checkpoint=saved, checkpoint_every=0, progress=tell)
    resumed = klatsch.simulate(*call, 900, record=[900], engine=engine, checkpoint=saved)
    half = klatsch.simulate(*call, moment, record=[moment], engine=engine)
    more = klatsch.simulate(*call, 900, record=[900], engine=engine, after=half)
    read = klatsch.simulate(*call, 900, record=[900], engine=engine, checkpoint=saved)
    for other in (resumed, more, read):
        assert torch.equal(other.diverged_at, whole.diverged_at)  # bits: whole numbers


def test_networks_in_one_stack_count_their_own_nodes():
    A = torch.ones(4, 1, 1, dtype=torch.float64) * 0.1
    calm, wild = (problems.LeastSquares.from_arrays(A.clone(), torch.ones(4, 1)) for _ in range(2))
    A[2] = 1e3
    wild = problems.LeastSquares.from_arrays(A, torch.ones(4, 1))
    rule, graphs = rules.make("dsgd", [1e-7, 0.1, 0.2]), [tp.ring(4)] * 3
    results = simulate_together([calm, wild, calm], rule, graphs, 200, record=[200])
    assert [result.diverged_at.tolist() for result in results[::2]] == [[FINITE] * 3] * 2
    alone = klatsch.simulate(wild, rule, graphs[1], 200, record=[200], engine="torch")
    assert results[1].diverged_at.tolist() == alone.diverged_at.tolist()  # bits: whole numbers
    assert results[1].diverged_at[:, 0].tolist() == [-1, 2, 2]


def test_ranks_find_what_the_simulation_finds(launch, tmp_path):
    launch(4, "diverge").succeed()
    found, ring = iter(torch.load(tmp_path / "diverged")), tp.ring(4)
    for rule in ("dsgd", "dat", "gt"):
        assert next(found).tolist() == [FINITE, HERE]
        rule = rules.make(rule, lr=[1e-3, 1e6, 1e300])
        expected = klatsch.simulate(problem_of(4), rule, ring, 60, record=[7, 50], engine="torch")
        assert expected.diverged.tolist() == [False, True, True]
        assert torch.equal(next(found), expected.diverged_at)  # bits: whole numbers


def test_a_result_tells_where():
    result = klatsch.simulate(Poisoned(6), rules.make("dsgd", [0.1, 0.2]), tp.ring(6), 100)
    assert "100 rounds, columns: 2 (column 1 diverged first on node 2 in round 37), best" in repr(result)
    calm = klatsch.simulate(Poisoned(6), rules.make("dsgd", 0.1), tp.ring(6), 30)
    assert "30 rounds, columns: 1, best" in repr(calm)
    many = klatsch.simulate(problems.LeastSquares(4), rules.make("dsgd", [1e300] * 5), tp.ring(4), 30)
    assert "columns: 5 (column 0 diverged first on node 0 in round " in repr(many)
    assert ", and 2 more), best" in repr(many)


class Counted(Poisoned):
    asked = 0

    def grad(self, x, t, nodes=None):
        self.asked += 1
        return super().grad(x, t, nodes)


def test_a_run_that_stays_finite_computes_nothing_twice():
    calm, wild = Counted(6), Counted(6)
    klatsch.simulate(calm, rules.make("dsgd", [0.1, 0.2]), tp.ring(6), 36, record=[36])
    assert calm.asked == 36
    klatsch.simulate(wild, rules.make("dsgd", [0.1, 0.2]), tp.ring(6), 1500, record=[1500])
    assert wild.asked <= 1500 + 64  # the piece in which it happened, once more
