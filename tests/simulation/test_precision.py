"""float32 errs as float64 does: a short version of benchmarks/precision.py, which goes further."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.machine import KERNEL

SPEC = importlib.util.spec_from_file_location("precision", Path(__file__).parents[2] / "benchmarks" / "precision.py")
precision = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(precision)
FEW = ("sgp", "dat-sgp", "dadam", "dat-d2-adam")  # of those without a kernel; engines are equal (test_simulate.py)
CASES = [pytest.param(case, "fused", marks=KERNEL) for case in precision.CASES if not precision.divides(case)]
CASES += [(case, "torch") for case in FEW]


@pytest.mark.slow
@pytest.mark.parametrize("case, engine", CASES)
def test_float32_errs_as_float64(case, engine):
    exact, rough = (precision.errors(case, engine, 1_000, dtype) for dtype in (torch.float64, torch.float32))
    assert exact.isfinite().all()
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0)
