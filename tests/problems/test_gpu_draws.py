"""The kernel that draws on a GPU: its source, run on a CPU, draws what torch does."""

import pytest
import torch

from klatsch import native
from klatsch.problems import draws
from tests.support import emulated
from tests.support.machine import CUDA


@emulated.needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seeds, size", [(5, 4), (torch.tensor([3, 1 << 40, 3]), 5)])
def test_normals_of_the_kernel_are_those_of_torch(seeds, size, dtype, monkeypatch):
    monkeypatch.setattr(native, "gpu_kernel", emulated.kernel)
    t, nodes, result = torch.tensor([1, 100_000]), torch.tensor([0, 7, 100]), torch.zeros(2, 3, size, dtype=dtype)
    assert draws._by_kernel(seeds, draws.NOISE, t, nodes, result)
    expected = draws.normals(seeds, draws.NOISE, t, nodes, size, dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("device", [CUDA])
def test_a_gpu_draws_what_a_cpu_does(device):
    t, nodes = torch.arange(1, 50), torch.arange(20)
    here, there = (draws.normals(3, draws.NOISE, t.to(d), nodes.to(d), 51) for d in ("cpu", device))
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-14)
