"""How tests compare numbers that were computed: to rounding.

The number of columns, nodes and threads decides in which order a library sums, and with it the last bits; where that
shows depends on the machine. Bits are compared only where nothing but the machine's own repetition could differ, and
the line says so (see test_comparisons).
"""

import torch


def assert_same_to_rounding(found, expected, dtype=None):
    """Two ways to the same numbers, vector by vector along the last axis: what a defect changes is far larger.

    Rounding errors are relative to the largest number of a vector, and grow over the rounds of a run to some hundred
    units. What is a difference of nearly equal numbers, as consensus distances are, loses up to half of the digits.

    Args:
        found: a tensor, or what torch makes one of.
        expected: the same, of the same shape.
        dtype: in which they were computed, where that is not their own: metrics are float64 in every run.
    """
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    unit = torch.finfo(dtype or expected.dtype).eps
    found, expected = found.double(), expected.double()
    largest = expected.abs().nan_to_num(posinf=0.0).amax(-1, keepdim=True) if expected.ndim else expected.abs()
    scale = largest.where(largest > 0, 1.0)
    torch.testing.assert_close(found / scale, expected / scale, rtol=unit**0.5, atol=1000 * unit)
