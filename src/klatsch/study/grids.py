"""Grids: values and lists of values, counted before they are written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

MOST_RUNS = 100_000  # of one study, which takes some seconds to write out
MOST_SETTINGS = 1_000  # of its problem, which is tried with each

Options = dict[str, Any]


def several(value: Any) -> Any:
    """A list as it is, anything else as a list of one; named twice is run once."""
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise ValueError("the list is empty; give at least one entry")
    plain = str | int | float  # anything else is a table, or a mistake that is told later
    found: dict[Any, Any] = {}
    for entry in entries:
        found.setdefault(entry if isinstance(entry, plain) else (repr(entry),), entry)
    return list(found.values())


def counted(number: int, word: str) -> str:
    """A number of things in words."""
    return f"1 {word}" if number == 1 else f"{number:,} {word}s"


def combinations(options: Mapping[str, Any], most: int = MOST_RUNS) -> list[Options]:
    """All combinations of options, of which some are lists."""
    axes = _axes(options)
    if (number := count(options)) > most:
        raise ValueError(f"a grid of {number:,} settings; {most:,} are the most, make its lists shorter")
    return [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]


def count(options: Mapping[str, Any]) -> int:
    """How many combinations there are."""
    return math.prod(len(values) for values in _axes(options).values())


def _axes(options: Mapping[str, Any]) -> dict[str, list[Any]]:
    for name, value in options.items():
        if isinstance(value, list | tuple) and not value:
            raise ValueError(f"{name} = []; the list is empty, give at least one entry")
    axes = {name: several(value) for name, value in options.items()}
    for name, values in axes.items():
        for value in values:
            if isinstance(value, list | tuple | dict):
                raise ValueError(f"{name} = {short(value)}; give a value, or a flat list of values")
    return axes


def short(value: object) -> str:
    """A value for a message, which stays one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown(value: object) -> str:
    """A value for a table."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
