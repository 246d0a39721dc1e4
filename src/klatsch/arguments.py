"""Checks of what users pass in, shared by all rooms: one clear error with the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

import numpy as np

from klatsch import own

Thing = TypeVar("Thing")

OWN = ("rule", "problem", "topology")  # what may be given as "file.py:name"


def whole(value: object, name: str, least: int) -> int:
    """Check a whole number and make it a plain int.

    Raises:
        ValueError: it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 1 << 63:
        raise ValueError(f"{name} = {value!r}; give a whole number from {least} up")
    return int(value)


def named(kind: str, name: object, table: Mapping[str, Thing]) -> Thing:
    """What a name stands for in a table, or in a file of one's own.

    Raises:
        ValueError: nothing of that name; with the nearest one, and all there are.
    """
    if own.is_own(name) and kind in OWN:
        return own.load(kind, str(name))  # type: ignore[no-any-return]
    if not isinstance(name, str) or name not in table:
        close = difflib.get_close_matches(str(name).lower(), table, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"unknown {kind} {name!r}{hint} There are {', '.join(table)}")
    return table[name]


def check_options(owner: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse an option that something does not have.

    Raises:
        ValueError: with the first such option, and those there are.
    """
    for option in given:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no option beside n"
            raise ValueError(f"{owner} has no option {option!r}; {takes}")
