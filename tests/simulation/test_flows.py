"""Flows of all nodes at once."""

import pytest
import torch

from klatsch import topology as tp
from klatsch.simulation.mixing import StackedMix


@pytest.mark.parametrize("graph", [tp.star(6), tp.hypercube(8), tp.complete(7), tp.erdos_renyi(40)], ids=str)
def test_equal_values_do_not_flow_however_large_they_are(graph):
    """Rules add flows up, so the rounding of large numbers must not be in them."""
    flow = StackedMix(graph, dtype=torch.float32, device=torch.device("cpu")).in_round(1)
    (found,) = flow((torch.randn(1, 2, 50) * 1e6).expand(graph.size, -1, -1))
    assert not found.any()
