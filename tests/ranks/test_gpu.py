"""Ranks on a GPU: NCCL with one process, and gloo with tensors that go through pinned memory."""

import pytest
import torch

import klatsch
from tests.support.rank_scenarios import RANK_CASES, RANK_RULES, ROUNDS, lr_of, problem_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_one_process_over_nccl(tmp_path, launch, backend):
    launch(1, "nccl", backend=backend).succeed()
    ends = torch.load(tmp_path / "ends")
    assert torch.isfinite(ends["cuda"]).all()
    if "cpu" in ends:
        torch.testing.assert_close(ends["cuda"], ends["cpu"], rtol=1e-3, atol=1e-4)


def test_gloo_with_tensors_on_a_gpu(tmp_path, launch):
    launch(4, "parity", device="cuda").succeed()
    ranks = [torch.load(tmp_path / f"parity-{rank}") for rank in range(4)]
    assert len(ranks[0]) > 30
    for label, (rule, options) in RANK_RULES.items():
        for name in RANK_CASES[label]:
            if f"{label} | {name}" not in ranks[0]:
                continue
            algorithm, graph = klatsch.rules.make(rule, lr=lr_of(label), **options), klatsch.topology.make(name, 4)
            expected = klatsch.simulate(problem_of(4), algorithm, graph, ROUNDS, record=1, engine="torch")
            for rank, found in enumerate(ranks):
                x = found[f"{label} | {name}"][0]
                torch.testing.assert_close(x, algorithm.query(expected.state)[rank, 0], rtol=0, atol=1e-10)
