"""Checks of what users pass in, shared by all rooms: one clear error with the value and the remedy."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from klatsch import own

Thing = TypeVar("Thing")

OWN = ("rule", "problem", "topology")  # what may be given as "file.py:name"


def whole(value: object, name: str, least: int, most: int = (1 << 63) - 1) -> int:
    """Check a whole number and make it a plain int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        bounds = f"from {least} up" if most == (1 << 63) - 1 else f"from {least} to {most}"
        raise ValueError(f"{name} = {shown(value)}; give a whole number {bounds}")
    return int(value)


def number(name: str, value: object, holds: Callable[[float], bool], wanted: str) -> float:
    """Check a finite number and make it a plain float; `wanted` is the remedy in the error."""
    value = value.item() if isinstance(value, np.generic) else value  # float32 would overflow in the comparison below
    real = isinstance(value, int | float | np.number) and not isinstance(value, bool | np.complexfloating)
    if not real or not abs(value) <= sys.float_info.max or not holds(float(value)):  # type: ignore[arg-type]
        raise ValueError(f"{name} = {shown(value)}; give {wanted}")
    return float(value)  # type: ignore[arg-type]


def named(kind: str, name: object, table: Mapping[str, Thing]) -> Thing:
    """What a name means in a table, or in a user's file."""
    if own.is_own(name) and kind in OWN:
        return own.load(kind, str(name))  # type: ignore[no-any-return]
    if not isinstance(name, str) or name not in table:
        yours = "; your own is FILE.py:NAME" if kind in OWN and ":" in str(name) else ""
        raise ValueError(f"unknown {kind} {name!r}; {there_are(str(name).lower(), table, cutoff=0.4)}{yours}")
    return table[name]


def there_are(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """What a misspelt name may have meant: "did you mean rows? There are rows, cols"."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    hint = f"did you mean {close[0]}? There" if close else "there"
    return f"{hint} are {', '.join(known)}"


def check_options(owner: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse an option that something does not have."""
    for option in given:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no option besides n"
            raise ValueError(f"{owner} has no option {option!r}; {takes}")


def printable(content: Any) -> Any:
    """Plain data as they are, unless they hold a text that would command a terminal."""
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{shown(value)} cannot be printed; give one line of text")
        if isinstance(value, dict | list | tuple):
            left += [*value, *value.values()] if isinstance(value, dict) else value
    return content


def kind_of(thing: object) -> str:
    """What a thing is, for errors: "a float", "the class Plain"."""
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def shown(value: object) -> str:
    """A value as an error shows it, shortened if long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
