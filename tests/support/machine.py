"""What this machine has, and what tests are skipped without it."""

import os
from pathlib import Path

import pytest
import torch

from klatsch import native

KERNEL = pytest.mark.skipif(native.why_not() is not None, reason=f"no fused engine: {native.why_not()}")
ENGINES = pytest.mark.parametrize("engine", ["torch", pytest.param("fused", marks=KERNEL)])
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DATA = Path(os.environ.get("KLATSCH_DATA", Path(__file__).parents[3] / "shared" / "fashion-mnist"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="name the folder with Fashion-MNIST in $KLATSCH_DATA")
