"""Options of a study that are lists: all combinations of them, counted first; and options in words, for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

from klatsch import arguments

MOST_RUNS = 100_000  # of one study, which takes some seconds to write out
MOST_SETTINGS = 1_000  # of its problem, which is tried with each

Options = dict[str, Any]


def several(value: object) -> list[Any]:
    """A list without duplicates; a single value becomes a list of one."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        raise ValueError("the list is empty; give at least one entry")
    found: dict[Any, Any] = {}
    for entry in entries:  # may be a table, or a mistake that is refused later
        found.setdefault(entry if isinstance(entry, str | int | float) else (repr(entry),), entry)
    return list(found.values())


def axis(name: str, value: object) -> list[Any]:
    """The values of an option: a value, or a flat list of them."""
    if isinstance(value, list | tuple) and not value:
        raise ValueError(f"{name} = []; the list is empty, give at least one entry")
    for entry in (values := several(value)):
        if isinstance(entry, list | tuple | dict):
            raise ValueError(f"{name} = {arguments.shown(entry)}; give a value, or a flat list of values")
    return values


def count(options: Mapping[str, object]) -> int:
    """How many combinations of options there are."""
    return math.prod(len(axis(name, value)) for name, value in options.items())


def combinations(options: Mapping[str, object], most: int = MOST_RUNS) -> list[Options]:
    """All combinations of options, some of which are lists."""
    if (number := count(options)) > most:
        raise ValueError(f"a grid of {number:,} settings; the limit is {most:,}: shorten its lists")
    axes = [axis(name, value) for name, value in options.items()]
    return [dict(zip(options, chosen, strict=True)) for chosen in product(*axes)]


def counted(number: int, word: str) -> str:
    """A number of things in words."""
    return f"1 {word}" if number == 1 else f"{number:,} {word}s"


def shown(value: object) -> str:
    """A value for a table."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def in_words(options: Mapping[str, object]) -> str:
    """Options for a table, such as "noise 1, heterogeneity 10"."""
    return ", ".join(f"{name} {shown(value)}" for name, value in options.items())
