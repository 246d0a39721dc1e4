"""Updates as one kernel per slice on a GPU, instead of a launch and a pass through memory for every operation.

Triton compiles what a rule does to a number (`wire.program`): all vectors are read once, and all results written. The
next round writes the same down with other coefficients, and the kernel is there.
"""

from __future__ import annotations

import linecache
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from klatsch.ranks.failures import warn
from klatsch.wire.program import NotTraceableError, Symbol, Tracer

THREADS = 1024  # numbers that one program computes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # computed with in float32
FORMULAS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "truediv": "tl.div_rn({0}, {1})",
    "neg": "(-{0})",
    "square": "({0} * {0})",
    "sqrt": "tl.sqrt_rn({0})",
    "abs": "tl.abs({0})",
    "lerp": "({0} + {2} * ({1} - {0}))",
    "maximum": "tl.where({0} < {1}, {1}, {0})",  # keeps what is not a number
    "clone": "{0}",
    "zeros_like": "(0.0 * {0})",
}
WORKING: set[str] = set()  # kernels that have run: if another one fails, something is missing, such as a C compiler


class Script(Tracer):
    """Lines of a kernel, with the vectors that it reads and writes, and its coefficients."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.vectors: list[Tensor] = []
        self.factors: list[float] = []
        self._loaded: dict[tuple[int, int], tuple[int, str]] = {}  # by address: the vector's number, and its name
        self._stores: list[str] = []

    def symbol(self, vector: Tensor) -> Any:
        """A symbol that stands for a vector, or for a single number; a symbol stands for itself."""
        return vector if isinstance(vector, Symbol) else Symbol(self, self._load(vector)[1])

    def result(self, operation: str, *inputs: Any) -> str:
        return self._named(FORMULAS[operation].format(*map(self._text, inputs)))

    def store(self, target: Tensor, value: object) -> None:
        """Write a value where a vector lies, when all is read."""
        self._stores.append(f"tl.store(p{self._load(target)[0]} + at, {self._text(value)}, mask=inside)")

    def run(self) -> None:
        """Compute all that was stored."""
        wide = max(v.numel() for v in self.vectors)
        if wide == 0:
            return
        if any(v.numel() not in (1, wide) for v in self.vectors):
            raise NotTraceableError("vectors of several lengths")
        body = "\n    ".join((*self.lines, *self._stores))
        launch = compiled(body, len(self.vectors), len(self.factors))[(-(-wide // THREADS),)]
        try:
            with torch.cuda.device_of(self.vectors[0]):  # type: ignore[no-untyped-call]  # which may not be the current
                # Without fused multiply-adds the bits do not depend on what else a kernel computes.
                launch(*self.vectors, *self.factors, wide, enable_fp_fusion=False)
        except Exception as error:
            if body in WORKING:
                raise
            warn(f"updates run operation by operation, since Triton cannot compile them here: {error}")
            raise NotTraceableError("no kernel") from error
        WORKING.add(body)

    def _load(self, vector: Tensor) -> tuple[int, str]:
        key = vector.data_ptr(), vector.numel()
        if key not in self._loaded:
            if not vector.is_contiguous():
                raise NotTraceableError("a vector with gaps")
            if vector.dtype not in DTYPES:
                raise NotTraceableError(f"a vector of {vector.dtype}")
            k = len(self.vectors)
            self.vectors.append(vector)
            place = f"p{k}" if vector.numel() == 1 else f"p{k} + at, mask=inside"
            self._loaded[key] = k, self._named(f"tl.load({place}).to(tl.float32)")
        return self._loaded[key]

    def _text(self, value: object) -> str:
        """A value as it stands in a line."""
        if isinstance(value, int | float):
            self.factors.append(float(value))
            return f"c{len(self.factors) - 1}"
        if isinstance(value, Symbol) or (isinstance(value, Tensor) and value.ndim <= 1):
            return str(self.symbol(value).known)  # type: ignore[arg-type]
        raise NotTraceableError(f"a {type(value).__name__}")

    def _named(self, formula: str) -> str:
        self.lines.append(f"v{len(self.lines)} = {formula}")
        return f"v{len(self.lines) - 1}"


@cache
def available(device: str) -> bool:
    """Whether there are kernels for a kind of device: Triton comes with torch for GPUs."""
    return device == "cuda" and find_spec("triton") is not None


@cache
def compiled(body: str, vectors: int, factors: int) -> Any:
    """A kernel with these lines."""
    import triton

    names = [*(f"p{k}" for k in range(vectors)), *(f"c{k}" for k in range(factors))]
    source = f"""def update({", ".join(names)}, wide):
    at = tl.program_id(0).to(tl.int64) * {THREADS} + tl.arange(0, {THREADS})
    inside = at < wide
    {body}
"""
    file = f"<klatsch kernel {abs(hash(source)):x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # Triton reads the source again
    space: dict[str, Any] = {"tl": triton.language}
    exec(compile(source, file, "exec"), space)
    return triton.jit(space["update"])
