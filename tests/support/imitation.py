"""Kernels for a GPU, run line by line with torch on a CPU: what Triton is asked to compute, without it."""

from types import SimpleNamespace

import torch

from klatsch.ranks import kernels


class Pointer:
    """A vector's place; whatever is added to it, it stands for the whole vector."""

    def __init__(self, vector):
        self.vector = vector

    def __add__(self, at):
        return self


LANGUAGE = SimpleNamespace(
    float32=torch.float32,
    load=lambda place, mask=None, other=None: place.vector.clone(),
    store=lambda place, value, mask=None: place.vector.copy_(torch.as_tensor(value)) if mask is None or mask else None,
    sum=torch.sum,
    sqrt_rn=torch.sqrt,
    div_rn=lambda a, b: a / b,
    abs=torch.abs,
    where=lambda chosen, a, b: torch.where(chosen, torch.as_tensor(a, dtype=torch.float32), b),
)


class Kernel:
    """A kernel with some lines; kernel[grid](...) runs them once for all programs."""

    def __init__(self, body, vectors, factors):
        self.body, self.vectors, self.factors = "\n".join(map(str.strip, body.splitlines())), vectors, factors

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *values, enable_fp_fusion):
        *given, wide = values
        vectors, factors = given[: self.vectors], given[self.vectors :]
        assert (len(factors), enable_fp_fusion) == (self.factors, False)
        assert {len(v) for v in vectors} <= {1, wide}
        names = {f"p{k}": Pointer(v) for k, v in enumerate(vectors)} | {f"c{k}": c for k, c in enumerate(factors)}
        exec(self.body, {"tl": LANGUAGE, "at": None, "inside": None, **names})


def imitate():
    """Make nodes on the CPU compute with kernels from now on."""
    kernels.available = lambda device: True
    kernels.compiled = Kernel
