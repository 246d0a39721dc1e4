"""An update rule as a short list of linear steps and flows, found by running the rule once on symbols.

Most rules are linear in their vectors: the new state combines old fields, the gradient and flows, with coefficients
that depend only on round and column. Running `update` on symbols records these combinations, so that the kernel can
compute them row by row in one pass through memory. A rule that does anything else, such as the division of push-sum,
raises NotLinearError and runs with plain operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klatsch.columns import Number
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import Silent

LINEAR, MIX, FLOW = range(3)  # kinds of operations, numbered as in the kernel


class NotLinearError(TypeError):
    """The rule does something other than adding, scaling and flows."""


class Operation(NamedTuple):
    """One step of a program: `out` is a combination of registers, or the mix or flow of one."""

    kind: int
    out: int
    inputs: tuple[int, ...]
    coefficients: tuple[int, ...]  # places in the list of coefficients; empty unless linear


@dataclass
class Program:
    """A rule as operations on registers: first the fields of the state, then the gradient, then results."""

    fields: int
    query: int = 0
    before: int = 0  # operations before the gradient, which make the query point
    operations: list[Operation] = field(default_factory=list)
    coefficients: list[Number] = field(default_factory=list)
    level: list[int] = field(default_factory=list)  # by register: how many flows come before it
    next_state: list[int] = field(default_factory=list)

    @property
    def gradient(self) -> int:
        return self.fields

    def by_level(self) -> list[Operation]:
        """The operations in order of level: each needs only its own row and the results of lower levels."""
        return sorted(self.operations, key=lambda operation: self.level[operation.out])

    def needs_rows_only(self, register: int) -> bool:
        """Whether a register is used only within its level and row, so that one row of memory is enough."""
        if register < self.fields or register in self.next_state:
            return False
        users = [operation for operation in self.operations if register in operation.inputs]
        return all(user.kind == LINEAR and self.level[user.out] == self.level[register] for user in users)

    def new_register(self, level: int) -> int:
        self.level.append(level)
        return len(self.level) - 1

    def add(self, kind: int, terms: dict[int, Number]) -> int:
        """Add an operation; returns its register."""
        out = self.new_register(max(self.level[register] for register in terms) + (kind != LINEAR))
        first = len(self.coefficients)
        self.coefficients += terms.values() if kind == LINEAR else ()
        self.operations.append(Operation(kind, out, tuple(terms), tuple(range(first, len(self.coefficients)))))
        return out


class Symbol:
    """A vector known only as a combination of registers."""

    def __init__(self, program: Program, terms: dict[int, Number]) -> None:
        self.program, self.terms = program, terms

    def register(self) -> int:
        """The register that holds it, computed now if necessary."""
        if len(self.terms) == 1:
            ((register, coefficient),) = self.terms.items()
            if isinstance(coefficient, float) and coefficient == 1.0:
                return register
        self.terms = {self.program.add(LINEAR, self.terms): 1.0}
        return next(iter(self.terms))

    def __add__(self, other: object) -> Symbol:
        if not isinstance(other, Symbol):
            raise NotLinearError(f"a vector plus a {type(other).__name__}")
        terms = dict(self.terms)
        for register, coefficient in other.terms.items():
            terms[register] = terms[register] + coefficient if register in terms else coefficient
        left = {register: c for register, c in terms.items() if isinstance(c, Tensor) or c != 0.0}
        return Symbol(self.program, left or terms)

    def __mul__(self, factor: object) -> Symbol:
        if not isinstance(factor, int | float | Tensor):
            raise NotLinearError(f"a vector times a {type(factor).__name__}")
        return Symbol(self.program, {register: coefficient * factor for register, coefficient in self.terms.items()})

    def __truediv__(self, divisor: Number) -> Symbol:
        return self * (1.0 / divisor)  # a symbol as divisor is a TypeError

    def __neg__(self) -> Symbol:
        return self * -1.0

    def __sub__(self, other: Symbol) -> Symbol:
        return self + -other

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> Symbol:
        """Tensor * symbol arrives here, as does any other torch function of a symbol."""
        if function.__name__.strip("_").removeprefix("r") == "mul" and len(args) == 2 and not kwargs:
            factor, symbol = args if isinstance(args[1], Symbol) else args[::-1]
            if isinstance(symbol, Symbol):
                return symbol * factor
        raise NotLinearError(f"torch.{function.__name__} of a vector")


def trace(rule: Rule, state: State, t: Tensor, lr: Number, silent: Silent = False) -> Program:
    """Run a rule once on symbols, with the field names of a state.

    `t` holds the rounds, (len(t), 1, 1), whose coefficients are found at once: two or more, so that a rule that asks
    about a single round (`if t == 1`) fails. `silent` says which of them are. Learning rates and hyper-parameters
    broadcast against (len(t), C, 1).
    """
    program = Program(fields=len(state))
    # Any: symbols and a tensor of rounds stand in for tensors and a number.
    symbols: Any = {name: Symbol(program, {program.new_register(0): 1.0}) for name in state}
    gradient: Any = Symbol(program, {program.new_register(0): 1.0})
    times: Any = t

    def exchange(kind: int, *vectors: Symbol) -> tuple[Any, ...]:
        return tuple(Symbol(program, {program.add(kind, {vector.register(): 1.0}): 1.0}) for vector in vectors)

    try:
        query: Any = rule.query(symbols)
        program.query, program.before = query.register(), len(program.operations)
        flow = Flow(partial(exchange, FLOW), partial(exchange, MIX), silent)
        following: Any = rule.update(symbols, gradient, flow, times, lr)
        for name in state:
            register = following[name].register()
            if register in program.next_state:  # equal fields still need a place each
                register = program.add(LINEAR, {register: 1.0})
            program.next_state.append(register)
    except NotLinearError:
        raise
    except Exception as error:  # anything that symbols or a tensor of rounds do not support
        raise NotLinearError(f"the rule cannot be written as linear steps ({error})") from error
    return program


def coefficient_table(program: Program, rounds: int, columns: int, dtype: torch.dtype) -> Tensor:
    """All coefficients of a program, (rounds, coefficients, columns)."""
    table = torch.empty(rounds, len(program.coefficients), columns, dtype=dtype)
    for k, coefficient in enumerate(program.coefficients):
        # (rounds, C, 1), (C, 1) or (1, C, 1): drop the parameter axis.
        table[:, k] = coefficient[..., 0] if isinstance(coefficient, Tensor) and coefficient.ndim else coefficient
    return table
