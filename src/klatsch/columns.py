"""Hyper-parameters: a number, or one number per column of a stacked run.

A column is one configuration of a rule (a learning rate, a momentum, a noise level...). A list of numbers becomes a
tensor (C, 1), which broadcasts against state tensors (M, C, d). In the last axis lie the parameters, and among them the
weight matrices that some directions need whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from klatsch.arguments import number, shown

Number = float | Tensor
"""A checked hyper-parameter: one number for all columns, or a tensor (C, 1); (M, C, 1) where networks differ."""
Given = Any
"""A hyper-parameter as users give it: a number, or a list, array or tensor with one number per column."""

Object = TypeVar("Object")


def hyper(name: str, value: Given, holds: Callable[[Any], Any], wanted: str) -> Number:
    """Check a hyper-parameter: `holds` says, also elementwise, whether a number is allowed; `wanted` is the remedy."""
    if isinstance(value, bool | str | bytes | int | float | np.number) or value is None:
        return number(name, value, holds, wanted)
    try:
        column = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name} = {shown(value)}; give {wanted}, or a list with one number per column") from None
    if column.ndim == 0:
        return number(name, column.item(), holds, wanted)
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.ndim != 1 or column.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(column.shape)}; give {wanted}, or a list with one number per column")
    if not column.is_floating_point():
        column = column.double()
    wrong = ~(torch.isfinite(column) & holds(column))
    if wrong.any():
        raise ValueError(f"{name} = {column[wrong][0].item():g} in column {int(wrong.nonzero()[0])}; give {wanted}")
    return column[:, None] if len(column) > 1 else float(column)  # ranks hold plain vectors, without columns


def count(*objects: object) -> int:
    """The number of columns C that these objects (rules, problems...) have together."""
    lists = [(name, len(v)) for each in objects for name, v in _tensors(each) if len(v) != 1]
    for name, C in lists:
        if lists[0][1] != C:
            raise ValueError(
                f"{lists[0][0]} has {lists[0][1]} columns but {name} has {C}; "
                "give every list the same length, or a single number"
            )
    return lists[0][1] if lists else 1


def mapped(thing: Object, function: Callable[[Tensor], Tensor]) -> Object:
    """A copy of a frozen rule with every per-column tensor replaced, for a device or a block."""
    parts = _parts(thing)
    new = {name: function(v) if isinstance(v, Tensor) else mapped(v, function) for name, v in parts.items()}
    return replaced(thing, **new) if parts else thing


def formed(thing: Object) -> Object:
    """A copy with every list of numbers as a column; the thing itself where there is none."""
    lists = {name: value for name, value in _parts(thing).items() if value is not getattr(thing, name)}
    return replaced(thing, **lists) if lists else thing


def joined(things: Sequence[Object], nodes: Sequence[int]) -> Object:
    """The rules of several networks, each of so many nodes, as one: where numbers differ, a tensor (M, C, 1).

    Learning rates are left to the engine, which passes them to every update.
    """
    parts, new = [_parts(thing) for thing in things], dict[str, object]()
    for name, first in parts[0].items():
        each = [part.get(name) for part in parts]
        if name == "lr" or all(described(value) == described(first) for value in each):
            continue
        if all(isinstance(value, float | Tensor) for value in each):
            new[name] = spread(each, nodes)
        elif _parts(first) and len({type(value) for value in each}) == 1:
            new[name] = joined(each, nodes)
        else:
            raise ValueError(f"{name} differs between rules that run together ({shown(described(each[0]))} and others)")
    return replaced(things[0], **new)


def spread(values: Sequence[Any], nodes: Sequence[int]) -> Tensor:
    """The numbers of several networks, each a number or a tensor (C, 1), for all of their nodes: (M, C, 1)."""
    tensors = [torch.as_tensor(value, dtype=torch.float64).reshape(-1, 1) for value in values]
    columns = max(map(len, tensors))
    return torch.cat([v.expand(count, columns, 1) for v, count in zip(tensors, nodes, strict=True)])


def replaced(thing: Object, **values: object) -> Object:
    """A copy with other fields, past the checks of the constructor; for engines."""
    other = copy.copy(thing)
    settle(other, **values)
    return other


def settle(thing: object, **values: object) -> None:
    """Set fields of a frozen dataclass that is being made."""
    for name, value in values.items():
        object.__setattr__(thing, name, value)


def described(thing: object) -> object:
    """A rule as data that JSON can hold: equal for equal rules."""
    if is_dataclass(thing) and not isinstance(thing, type):
        return {"type": type(thing).__name__} | {name: described(part) for name, part in _parts(thing).items()}
    if isinstance(thing, Tensor):
        return thing.flatten().tolist()
    if callable(thing):
        return "a function"  # runs compare what it returns
    if isinstance(thing, str | int | float | bool | None):
        return thing
    is_opaque = type(thing).__repr__ is object.__repr__  # which has its address, another one in every process
    return type(thing).__name__ if is_opaque else repr(thing)


def flattened(name: str, thing: object, spelled: bool = False) -> dict[str, object]:
    """A rule and its parts as plain facts by name ("rule", "lr", "averaging p"), so that an error can name one.

    `spelled` shows parts that have a text of their own as users write them: "averaging" as "constant".
    """
    is_rule = name in ("rule", "base")
    is_made = is_dataclass(thing) and not isinstance(thing, type)
    if not is_rule and not is_made:
        return {name: described(thing)}
    if spelled and not is_rule and type(thing).__str__ is not object.__str__:
        return {name: str(thing)}
    facts: dict[str, object] = {name: type(thing).__name__}
    for part, value in (_parts(thing) if is_made else vars(thing)).items():  # a user's rule may be any object
        facts |= flattened(part if is_rule else f"{name} {part}", value, spelled)
    return facts


def _tensors(thing: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, Tensor):
        yield "lr(1)", thing
    for name, value in _parts(thing).items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from _tensors(value)


def _parts(thing: object) -> dict[str, object]:
    """The fields of a dataclass; a list where a user's rule says `float` is one number per column."""
    if not is_dataclass(thing) or isinstance(thing, type):
        return {}
    parts = {}
    for field in fields(thing):
        value, kind = getattr(thing, field.name), str(field.type)
        several = isinstance(value, list | tuple | np.ndarray) or (isinstance(value, Tensor) and value.ndim == 1)
        if several and "[" not in kind and "float" in re.split(r"\W+", kind):
            value = hyper(field.name, value, lambda v: v == v, "a finite number")
        parts[field.name] = value
    return parts


class WeightMatrix(NamedTuple):
    """A weight matrix among the parameters: row by row from `start` on."""

    start: int
    outputs: int  # its rows, as in nn.Linear; those of a convolution are its kernels
    inputs: int
    turned: bool = False  # whether it lies there column by column

    @property
    def end(self) -> int:
        return self.start + self.outputs * self.inputs

    def of(self, vector: Tensor) -> Tensor:
        """A view of its numbers in vectors, (..., d), as a matrix (..., outputs, inputs)."""
        rows, columns = (self.inputs, self.outputs) if self.turned else (self.outputs, self.inputs)
        matrix = vector[..., self.start : self.end].view(*vector.shape[:-1], rows, columns)
        return matrix.mT if self.turned else matrix

    def wide(self, vector: Tensor) -> Tensor:
        """The same as a matrix that is at least as wide as high."""
        matrix = self.of(vector)
        return matrix.mT if self.outputs > self.inputs else matrix
