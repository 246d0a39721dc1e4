"""Hyper-parameters: a number, or one number per column of a stacked run.

A column is one configuration of the same rule (a learning rate, a momentum, a noise level...). A list of numbers
becomes a tensor of shape (C, 1), which broadcasts against state tensors (M, C, d).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Number = float | Tensor
"""A hyper-parameter once it is checked: one number for all columns, or a tensor (C, 1)."""

Object = TypeVar("Object")


def hyper(name: str, value: object, holds: Callable[[Any], Any], wanted: str) -> Number:
    """Check a hyper-parameter and bring it into form.

    Args:
        name: what to call it in the error.
        value: a number, or a list, array or tensor with one number per column.
        holds: whether a number is allowed; must also work elementwise.
        wanted: the remedy, for the error.

    Raises:
        ValueError: with the first value that is not allowed.
    """
    refusal = f"{name} = {_shown(value)}; give {wanted}"
    if isinstance(value, bool | str | bytes) or value is None:
        raise ValueError(refusal)
    if isinstance(value, int | float | np.number):
        number = float(value)
        if not math.isfinite(number) or not holds(number):
            raise ValueError(refusal)
        return number
    try:
        column = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{refusal}, or a list with one number per column") from None
    if column.ndim == 0:
        return hyper(name, column.item(), holds, wanted)
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.ndim != 1 or column.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(column.shape)}; give {wanted}, or a list with one number per column")
    if not column.is_floating_point():
        column = column.double()
    wrong = ~(torch.isfinite(column) & holds(column))
    if wrong.any():
        raise ValueError(f"{name} = {column[wrong][0].item():g} in column {int(wrong.nonzero()[0])}; give {wanted}")
    return column[:, None] if len(column) > 1 else float(column)  # one column is no columns: ranks hold plain vectors


def count(*objects: object) -> int:
    """The number of columns C that these objects (rules, problems...) speak of together.

    Raises:
        ValueError: two of them disagree.
    """
    found = 1
    first = ""
    for name, tensor in (pair for each in objects for pair in _tensors(each)):
        if tensor.shape[0] != 1:
            if found not in (1, tensor.shape[0]):
                raise ValueError(
                    f"{first} has {found} columns but {name} has {tensor.shape[0]}; "
                    "give every list the same length, or a single number"
                )
            found, first = tensor.shape[0], name
    return found


def mapped(thing: Object, function: Callable[[Tensor], Tensor]) -> Object:
    """A copy of a frozen rule with every per-column tensor replaced (moved to a device, cut to a block...)."""
    if not is_dataclass(thing):
        return thing
    other = copy.copy(thing)
    for field in fields(thing):
        value = _formed(thing, field)
        if isinstance(value, Tensor):
            object.__setattr__(other, field.name, function(value))
        else:
            object.__setattr__(other, field.name, mapped(value, function))
    return other


def replaced(thing: Object, **values: Any) -> Object:
    """A copy with fields set as they are, past the checks of the constructor; for engines."""
    other = copy.copy(thing)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


def described(thing: object) -> object:
    """A rule as plain data that JSON can hold: what decides whether two runs are the same."""
    if is_dataclass(thing) and not isinstance(thing, type):
        return {"type": type(thing).__name__} | {f.name: described(_formed(thing, f)) for f in fields(thing)}
    if isinstance(thing, Tensor):
        return thing.flatten().tolist()
    if callable(thing):
        return "a function"  # told apart by what it returns, not by its name
    return thing if isinstance(thing, str | int | float | bool | None) else repr(thing)


def flattened(name: str, thing: object) -> dict[str, Any]:
    """A rule and its parts as plain facts by name, so that an error can name the one that differs.

    Of a rule: "rule", "base" and "averaging" are types, "lr" and "averaging p" are values.
    """
    is_rule = name in ("rule", "base")
    if is_dataclass(thing) and not isinstance(thing, type):
        parts = {field.name: _formed(thing, field) for field in fields(thing)}
    elif is_rule and hasattr(thing, "__dict__"):  # one of somebody's own may be any object
        parts = vars(thing)
    else:
        return {name: described(thing)}
    found: dict[str, Any] = {name: type(thing).__name__}
    for part, value in parts.items():
        found |= flattened(part if is_rule else f"{name} {part}", value)
    return found


def _tensors(thing: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, Tensor):
        yield "lr(1)", thing
    elif is_dataclass(thing):
        for field in fields(thing):
            value = _formed(thing, field)
            if isinstance(value, Tensor):
                yield field.name, value
            elif not isinstance(value, type):
                yield from _tensors(value)


def _formed(thing: object, field: Field[Any]) -> object:
    """A field's value; a list where a rule of somebody's own says `float` is one number per column."""
    value = getattr(thing, field.name)
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    if not isinstance(value, list | tuple | np.ndarray) or "[" in kind or "float" not in re.split(r"\W+", kind):
        return value
    return hyper(field.name, value, lambda v: v == v, "a finite number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
