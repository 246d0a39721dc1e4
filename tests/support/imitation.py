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


class Address:
    """Where a tensor's numbers are, one by one."""

    def __init__(self, tensor, at=0):
        self.tensor, self.at = tensor, at

    def __add__(self, further):
        return Address(self.tensor, self.at + further)


def load_blocks(place, mask, other):
    return torch.where(mask, place.tensor.view(-1)[torch.where(mask, place.at, 0)], other)


def store_blocks(place, value, mask):
    place.tensor.view(-1)[place.at[mask]] = value[mask]


def blocks_of(program):
    """What the kernels of encodings see as Triton's language, for one program."""
    kinds = {name: getattr(torch, name) for name in ("int8", "int32", "int64", "float32", "bfloat16")}
    return SimpleNamespace(
        **kinds,
        program_id=lambda axis: torch.tensor(program),
        arange=torch.arange,
        load=load_blocks,
        store=store_blocks,
        cast=lambda v, dtype, bitcast: v.view(dtype),
        max=torch.amax,
        sum=torch.sum,
        abs=torch.abs,
        where=torch.where,
        div_rn=torch.div,
        static_range=range,
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
