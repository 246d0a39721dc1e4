"""Updates as one kernel per slice on a GPU, instead of a launch and a pass through memory for every operation.

Between two flows a rule is elementwise. So it runs once on symbols, which write down what it does to a number, and
Triton compiles that: all vectors are read once, and all results written. The next round writes the same down with other
coefficients, and the kernel is there. What cannot be written down runs with plain operations.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from klatsch.ranks.failures import warn

THREADS = 1024  # numbers that one program computes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # computed with in float32
# What the operations of a rule, by name without underscores, do to numbers.
FORMULAS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "rsub": "({1} - {0})",
    "mul": "({0} * {1})",
    "truediv": "tl.div_rn({0}, {1})",
    "rtruediv": "tl.div_rn({1}, {0})",
    "neg": "(-{0})",
    "square": "({0} * {0})",
    "sqrt": "tl.sqrt_rn({0})",
    "abs": "tl.abs({0})",
    "lerp": "({0} + {2} * ({1} - {0}))",
    "maximum": "tl.where({0} < {1}, {1}, {0})",  # keeps what is not a number
    "clone": "{0}",
    "zeros_like": "(0.0 * {0})",
}
ALSO = {"radd": "add", "rmul": "mul", "div": "truediv", "true_divide": "truediv", "rdiv": "rtruediv"}
FORMULAS |= {name: FORMULAS[other] for name, other in ALSO.items()}


WORKING: set[str] = set()  # kernels that have run: if another one fails, something is missing, such as a C compiler


class NotElementwiseError(TypeError):
    """Something is done to vectors that a kernel cannot do number by number."""


class Script:
    """What is done to the numbers of some vectors: lines of a kernel, its vectors and its coefficients."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.vectors: list[Tensor] = []
        self.factors: list[float] = []
        self._places: dict[tuple[int, int], str] = {}
        self._stores: list[str] = []

    def symbol(self, vector: Tensor) -> Any:
        """A symbol that stands for a vector, or for a single number; a symbol stands for itself."""
        if isinstance(vector, Symbol):
            return vector
        key = vector.data_ptr(), vector.numel()
        if key not in self._places:
            if not vector.is_contiguous():
                raise NotElementwiseError("a vector with gaps")
            if vector.dtype not in DTYPES:
                raise NotElementwiseError(f"a vector of {vector.dtype}")
            k = len(self.vectors)
            self.vectors.append(vector)
            place = f"p{k}" if vector.numel() == 1 else f"p{k} + at, mask=inside"
            self._places[key] = self._named(f"tl.load({place}).to(tl.float32)")
        return Symbol(self, self._places[key])

    def store(self, target: Tensor, value: object) -> None:
        """Write a value where a vector lies, when all is read."""
        self.symbol(target)
        here = target.data_ptr(), target.numel()
        k = next(k for k, v in enumerate(self.vectors) if (v.data_ptr(), v.numel()) == here)
        self._stores.append(f"tl.store(p{k} + at, {self.text(value)}, mask=inside)")

    def text(self, value: object) -> str:
        """A value as it stands in a line."""
        if isinstance(value, Symbol):
            return value.name
        if isinstance(value, int | float):
            self.factors.append(float(value))
            return f"c{len(self.factors) - 1}"
        if isinstance(value, Tensor) and value.ndim <= 1:
            return str(self.symbol(value).name)
        raise NotElementwiseError(f"a {type(value).__name__}")

    def write(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Write an operation down."""
        operation, in_place = name.strip("_"), name.endswith("_") and not name.startswith("_")
        if operation == "copy" and isinstance(args[0], Tensor):
            self.store(*args)
            return args[0]
        if operation == "clamp" and options.keys() == {"min"}:
            operation, args = "maximum", (args[0], options.pop("min"))
        if "alpha" in options:
            args = args[0], self.write("mul", (args[1], options.pop("alpha")), {})
        if operation not in FORMULAS or options or (in_place and not isinstance(args[0], Symbol)):
            raise NotElementwiseError(f"{name} of a vector")
        result = self._named(FORMULAS[operation].format(*map(self.text, args)))
        if in_place:
            args[0].name = result
        return args[0] if in_place else Symbol(self, result)

    def run(self) -> None:
        """Compute all that was stored."""
        wide = max(v.numel() for v in self.vectors)
        if wide == 0:
            return
        if any(v.numel() not in (1, wide) for v in self.vectors):
            raise NotElementwiseError("vectors of several lengths")
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
            raise NotElementwiseError("no kernel") from error
        WORKING.add(body)

    def _named(self, formula: str) -> str:
        self.lines.append(f"v{len(self.lines)} = {formula}")
        return f"v{len(self.lines) - 1}"


class Symbol:
    """A vector of which only its name in a script is known."""

    def __init__(self, script: Script, name: str) -> None:
        self.script, self.name = script, name

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Any torch function with a symbol among its arguments arrives here."""
        script = next((v.script for v in args if isinstance(v, Symbol)), None)
        if script is None:
            raise NotElementwiseError(f"{function.__name__} of vectors")
        return script.write(function.__name__, args, dict(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.strip("_") not in FORMULAS.keys() | {"clamp"}:
            raise NotElementwiseError(f"{name} of a vector")
        return lambda *args, **options: self.script.write(name, (self, *args), options)


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: args[0].script.write(name, args, {})


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: object) -> Any:
        raise NotElementwiseError(f"{name} of a vector")

    return refuse


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg"):
    setattr(Symbol, f"__{_name}__", _operator(_name))
for _name in (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "bool",
    "len",
    "iter",
    "getitem",
    "float",
    "int",
    "abs",
    "pow",
    "rpow",
):
    setattr(Symbol, f"__{_name}__", _refusal(_name))  # else Python would answer for some of them


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
