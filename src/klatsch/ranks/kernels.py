"""Updates as one kernel per slice on a GPU, instead of a launch and a pass through memory for every operation.

Triton compiles what a rule does to a number (`wire.program`): all vectors are read once, and all results written. What
one kernel of a round has written, the next ones read instead of computing it again. The next round writes the same down
with other coefficients, and the kernel is there.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import cache, partial
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


Term = tuple[str, tuple[float, ...]]  # an operation and the numbers of its terms, "factor" or a "vector" by its place


class Formulas:
    """What the kernels of a round compute, every formula once: what one of them has written, the next ones read.

    Vectors are known by their address, and are kept for so long.
    """

    def __init__(self) -> None:
        self.terms: list[Term] = []  # by number
        self.vectors: dict[int, Tensor] = {}  # by term
        self.written: dict[int, Tensor] = {}  # by term: where it lies
        self.doubtful: dict[int, int] = {}  # by term: the neighbour that has sent it, while that may not be finite
        self._flags: dict[int, Tensor] = {}  # by neighbour: where kernels say that something was not
        self._numbers: dict[Term, int] = {}

    def term(self, operation: str, *inputs: float) -> int:
        """The number of a formula."""
        if (term := (operation, inputs)) not in self._numbers:
            self._numbers[term] = len(self.terms)
            self.terms.append(term)
        return self._numbers[term]

    def vector(self, vector: Tensor) -> int:
        """The term of a vector, or of a single number in memory."""
        if not vector.is_contiguous():
            raise NotTraceableError("a vector with gaps")
        if vector.dtype not in DTYPES:
            raise NotTraceableError(f"a vector of {vector.dtype}")
        term = self.term("vector", *_place(vector))
        self.vectors.setdefault(term, vector)
        return term

    def flag(self, term: int) -> Tensor | None:
        """Where to say that a vector is not finite, if that is in doubt."""
        if (source := self.doubtful.get(term)) is None:
            return None
        if source not in self._flags:
            self._flags[source] = self.vectors[term].new_zeros(1, dtype=torch.float32)
        return self._flags[source]

    def refused(self) -> list[int]:
        """The neighbours that have sent what is not finite, as far as it was read."""
        said = torch.cat([*self._flags.values()]).tolist() if self._flags else []
        sources, self._flags = [*self._flags], {}
        return [source for source, wrong in zip(sources, said, strict=True) if wrong]


class Script(Tracer):
    """A kernel: what it writes, the lines that compute that, and the vectors and coefficients in them."""

    def __init__(self, formulas: Formulas | None = None) -> None:
        self.formulas = formulas or Formulas()
        self.lines: list[str] = []
        self.vectors: list[Tensor] = []
        self.factors: list[float] = []
        self._stores: list[tuple[Tensor, int]] = []
        self._afterwards: list[Callable[[], object]] = []
        self._names: dict[int, str] = {}  # by term
        self._pointers: dict[tuple[int, int], str] = {}  # by address and length

    def symbol(self, vector: Tensor) -> Any:
        """A symbol that stands for a vector, or for a single number; a symbol stands for itself."""
        return vector if isinstance(vector, Symbol) else Symbol(self, self.formulas.vector(vector))

    def heard(self, vector: Tensor, source: int | None) -> Symbol:
        term = self.formulas.vector(vector)
        if source is not None:
            self.formulas.doubtful[term] = source
        return Symbol(self, term)

    def result(self, operation: str, *inputs: object) -> int | None:
        terms = [term for v in inputs if (term := self._term(v)) is not None]
        return self.formulas.term(operation, *terms) if len(terms) == len(inputs) else None

    def store(self, target: Tensor, value: object) -> None:
        """Write a value where a vector lies, when all is read."""
        self.formulas.vector(target)
        if (term := self._term(value)) is None:
            raise NotTraceableError("what is not known yet")
        self._stores.append((target, term))

    def afterwards(self, value: Symbol, numbers: int, work: Callable[[Tensor], object]) -> None:
        like = next(iter(self.formulas.vectors.values()))
        vector = like.new_empty(numbers, dtype=torch.float32)
        self.store(vector, value)
        self._afterwards.append(partial(work, vector))

    def run(self) -> None:
        """Compute all that was stored and does not lie there."""
        formulas, stores = self.formulas, []
        for target, term in self._stores:
            there = formulas.written.get(term, formulas.vectors.get(term))
            if there is None or _place(there) != _place(target):
                place, value = self._pointer(target), self._name(term)
                at, mask = ("", "") if target.numel() == 1 else (" + at", ", mask=inside")
                stores.append(f"tl.store({place}{at}, {value}{mask})")
        if stores:
            self._launch("\n    ".join((*self.lines, *stores)))
        places = {_place(target) for target, _ in self._stores}
        kept = {term: v for term, v in formulas.written.items() if _place(v) not in places}
        formulas.written = kept | {term: target for target, term in self._stores if target.dtype is torch.float32}
        for work in self._afterwards:
            work()

    def _launch(self, body: str) -> None:
        wide = max(v.numel() for v in self.vectors)
        if wide == 0:
            return
        if any(v.numel() not in (1, wide) for v in self.vectors):
            raise NotTraceableError("vectors of several lengths")
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

    def _term(self, value: object) -> int | None:
        """The term of a value; None if it is not known yet."""
        if isinstance(value, int | float):
            return self.formulas.term("factor", float(value))
        if isinstance(value, Symbol):
            return value.known  # type: ignore[no-any-return]
        if isinstance(value, Tensor) and value.ndim <= 1:
            return self.formulas.vector(value)
        raise NotTraceableError(f"a {type(value).__name__}")

    def _name(self, term: int) -> str:
        """The name of a term in the lines, which compute it."""
        if term not in self._names:
            operation, inputs = self.formulas.terms[term]
            vector = self.formulas.written.get(term, self.formulas.vectors.get(term))
            if operation == "factor":
                self.factors.append(*inputs)
                self._names[term] = f"c{len(self.factors) - 1}"
            elif vector is None:
                self._names[term] = self._line(FORMULAS[operation].format(*map(self._name, map(int, inputs))))
            else:
                single = vector.numel() == 1
                place = self._pointer(vector) + ("" if single else " + at, mask=inside, other=0.0")
                name = self._names[term] = self._line(f"tl.load({place}).to(tl.float32)")
                if (flag := self.formulas.flag(term)) is not None:
                    size = f"{name} * {name}" if single else f"tl.sum({name} * {name}, 0)"
                    self.lines.append(f'tl.store({self._pointer(flag)}, 1.0, mask=~({size} < float("inf")))')
        return self._names[term]

    def _pointer(self, vector: Tensor) -> str:
        if _place(vector) not in self._pointers:
            self._pointers[_place(vector)] = f"p{len(self.vectors)}"
            self.vectors.append(vector)
        return self._pointers[_place(vector)]

    def _line(self, formula: str) -> str:
        self.lines.append(f"v{len(self.lines)} = {formula}")
        return f"v{len(self.lines) - 1}"


def _place(vector: Tensor) -> tuple[int, int]:
    return vector.data_ptr(), vector.numel()


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
    space: dict[str, object] = {"tl": triton.language}
    exec(compile(source, file, "exec"), space)
    return triton.jit(space["update"])
