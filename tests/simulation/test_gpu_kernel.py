"""The kernel that runs many rounds on a GPU computes what plain operations do: there, and its source on a CPU."""

from functools import partial

import pytest
import torch

import klatsch
from klatsch import native, problems, rules
from klatsch import topology as tp
from klatsch.simulation import fused, simulate_together
from tests.support import emulated, table
from tests.support.machine import CUDA

NARROW = 2_000  # bytes of shared memory: several parts of the columns, and several passes over the nodes


@pytest.fixture
def imitated(monkeypatch):
    """A GPU of two blocks per cluster, where there is none; its device."""
    monkeypatch.setattr(fused.KernelStack, "place", "cpu")
    monkeypatch.setattr(fused, "BLOCKS", emulated.BLOCKS)
    monkeypatch.setattr(fused, "CLUSTERS", 1)
    monkeypatch.setattr(fused, "WARP", 1)
    monkeypatch.setattr(fused, "MOST_TILE", 2)
    monkeypatch.setattr(native, "shared_memory", lambda device: 40_000)
    monkeypatch.setattr(native, "gpu_kernel", emulated.kernel)
    return "cpu"


@pytest.fixture(params=[pytest.param("imitated", marks=emulated.needs_compiler), CUDA])
def device(request):
    return request.getfixturevalue("imitated") if request.param == "imitated" else request.param


def equal(device, problem, rule, graph, dtype=torch.float64, steps=11):
    """A run by the kernel and one by plain operations."""
    choices = {"record": [4, steps], "dtype": dtype, "progress": False, "device": device}
    plain, fast = (klatsch.simulate(problem, rule, graph, steps, engine=e, **choices) for e in ("torch", "cuda kernel"))
    assert fast.engine == "cuda kernel"
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    for name, expected in plain.state.items():
        torch.testing.assert_close(fast.state[name], expected, rtol=rounding, atol=rounding)


CASES = [
    ("dat", tp.one_peer_exponential(5), 4, torch.float64),
    ("dat, beta", tp.random_matching(5), 5, torch.float64),
    ("dat-gt", tp.directed_ring(3), 1, torch.float64),
    ("dat-d2", tp.ring(1), 3, torch.float64),
    ("gt", tp.star(5), 3, torch.float32),
    ("kgt", tp.every(tp.ring(4), 3), 6, torch.float64),
    ("dat, momentum", tp.torus(25), 50, torch.float64),  # as in the paper's figure
]


@pytest.mark.slow
@pytest.mark.parametrize("name, graph, dim, dtype", CASES)
def test_a_rule_as_a_kernel_computes_what_plain_operations_do(device, name, graph, dim, dtype):
    problem = problems.LeastSquares(graph.size, dim=dim, noise=[1.0, 2.0, 3.0])
    equal(device, problem, table.RULES[name]([0.01, 0.02, 0.03]), graph, dtype)


def test_columns_that_do_not_fit_together_run_in_parts_and_nodes_in_passes(device, monkeypatch):
    monkeypatch.setattr(native, "shared_memory", lambda device: NARROW)
    monkeypatch.setattr(fused, "MOST_THREADS", 5)
    equal(device, problems.LeastSquares(6, dim=4, noise=[1.0] * 3), rules.make("dsgd", [0.01, 0.02, 0.03]), tp.ring(6))


def test_networks_of_a_stack_have_their_own_graphs_and_learning_rates(device):
    seen = [(3, tp.ring(3)), (4, tp.random_matching(4)), (2, tp.one_peer_exponential(2))]
    several = [problems.LeastSquares(M, dim=3, noise=[1.0, 2.0], seed=M) for M, _ in seen]
    graphs = [graph for _, graph in seen]
    for lrs in ([[0.01, 0.02]] * 3, [[0.01, 0.02], [0.03, 0.01], [0.02, 0.02]]):
        for given in (
            [rules.make("dat", lr) for lr in lrs],
            [rules.make("dat", rules.Decay(lr, "cosine", 9)) for lr in lrs],
        ):
            choices = {"record": [3, 9], "device": device, "progress": False}
            plain, fast = (
                simulate_together(several, given, graphs, 9, engine=engine, **choices)
                for engine in ("torch", "cuda kernel")
            )
            for one, other in zip(plain, fast, strict=True):
                torch.testing.assert_close(other.output, one.output, rtol=1e-12, atol=1e-12)


def test_long_runs_on_a_gpu_take_the_kernel(imitated, monkeypatch):
    monkeypatch.setattr(fused.FusedStack, "place", "elsewhere")
    run = partial(klatsch.simulate, problems.LeastSquares(2, dim=2), rules.make("dsgd", 0.01), tp.ring(2))
    monkeypatch.setattr(fused.KernelStack, "pays_from", 30)
    engines = [run(steps, [steps], progress=False).engine for steps in (29, 30)]
    assert engines == ["torch", "cuda kernel"]


def test_what_does_not_fit_or_is_no_linear_rule_is_refused_with_the_reason(imitated, monkeypatch):
    def refused(rule, match, nodes=4):
        problem = problems.LeastSquares(nodes, dim=3)
        with pytest.raises(ValueError, match=match):
            klatsch.simulate(problem, rule, tp.ring(nodes), 5, engine="cuda kernel", progress=False)

    refused(rules.make("dadam", 0.1), "engine='auto'")
    refused(rules.make("dsgd", 0.1), "1700 nodes of 3 parameters do not fit", nodes=1700)
    monkeypatch.setattr(fused, "MOST_THREADS", 1)
    refused(rules.make("dsgd", 0.1), "3 parameters are too many")
    monkeypatch.undo()
    refused(rules.make("dsgd", 0.1), "it runs on cuda only")
