"""What a rule computes, written down: `update` runs on symbols, which hand each operation to a tracer.

Between two flows a rule is elementwise, so what it does to one number is what it does to all. The fused engine adds up
linear operations (`simulation.fused`), ranks on a GPU compile all of them to one kernel (`ranks.kernels`). What cannot
be written down runs with plain operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

# What may be done to vectors, by the names of torch's functions without underscores.
OPERATIONS = ("add", "sub", "mul", "truediv", "neg", "square", "sqrt", "abs", "lerp", "maximum", "clone", "zeros_like")
ALSO = {"radd": "add", "rmul": "mul", "div": "truediv", "true_divide": "truediv"}
TURNED = {"rsub": "sub", "rtruediv": "truediv", "rdiv": "truediv"}  # with the operands the other way round
REFUSED = (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "iter", "getitem", "float", "int", "abs", "rpow"),
    *("iadd", "isub", "imul", "itruediv"),  # fields of a state may share memory, symbols do not
)


class NotTraceableError(TypeError):
    """Something is done to vectors that cannot be written down."""


class Tracer(ABC):
    """Writes down what is done to vectors."""

    in_place = True  # whether operations on a vector's own memory can be written down

    @abstractmethod
    def result(self, operation: str, *inputs: Any) -> Any:
        """What a symbol knows of the result of an operation on symbols and numbers."""

    def store(self, target: Tensor, value: object) -> None:
        """Write a value where a vector lies."""
        raise NotTraceableError("copy_ to a vector")

    def heard(self, vector: Tensor, source: int | None) -> Symbol:
        """A symbol for a message, with the neighbour that has sent it if its numbers may not be finite."""
        raise NotTraceableError("a message")

    def afterwards(self, value: Symbol, numbers: int, work: Callable[[Tensor], object]) -> None:
        """Do something with a value once it is computed, as a vector of its own with so many numbers."""
        raise NotTraceableError("a vector of its own")

    def write(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Write an operation down, as torch names and calls it."""
        operation, in_place = name.strip("_"), name.endswith("_") and not name.startswith("_")
        if operation == "copy" and isinstance(args[0], Tensor):
            self.store(*args)
            return args[0]
        if operation in TURNED and len(args) == 2:
            operation, args = TURNED[operation], args[::-1]
        operation = ALSO.get(operation, operation)
        if operation == "pow" and args[1:] == (2.0,):
            operation, args = "square", args[:1]
        if operation == "clamp" and options.keys() == {"min"}:
            operation, args = "maximum", (args[0], options.pop("min"))
        if "alpha" in options:
            args = args[0], Symbol(self, self.result("mul", args[1], options.pop("alpha")))
        if operation not in OPERATIONS or options or (in_place and not (self.in_place and isinstance(args[0], Symbol))):
            raise NotTraceableError(f"{name} of a vector")
        result = self.result(operation, *args)
        if in_place:
            args[0].known = result
        return args[0] if in_place else Symbol(self, result)


class Symbol:
    """A vector of which only that is known which its tracer has to know."""

    def __init__(self, tracer: Tracer, known: Any) -> None:
        self.tracer, self.known = tracer, known

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Any torch function with a symbol among its arguments arrives here."""
        tracer = next((v.tracer for v in args if isinstance(v, Symbol)), None)
        if tracer is None:
            raise NotTraceableError(f"{function.__name__} of vectors")
        return tracer.write(function.__name__, args, dict(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.strip("_") not in (*OPERATIONS, *ALSO, "clamp"):
            raise NotTraceableError(f"{name} of a vector")
        return lambda *args, **options: self.tracer.write(name, (self, *args), options)


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: args[0].tracer.write(name, args, {})


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: object) -> Any:
        raise NotTraceableError(f"{name} of a vector")

    return refuse


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow"):
    setattr(Symbol, f"__{_name}__", _operator(_name))
for _name in REFUSED:  # else Python would answer for some of them
    setattr(Symbol, f"__{_name}__", _refusal(_name))
