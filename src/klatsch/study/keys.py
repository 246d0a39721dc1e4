"""What the key of a run is made of: everything that determines its result, as plain data that JSON can hold.

Rules are described as they were before 0.2, when each was a class with fields: what is new enters only where it differs
from its default. So runs of older stores are found, and done again only where the result is another one.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from functools import cache
from typing import Any

from klatsch import own, rules
from klatsch.columns import described
from klatsch.rules import averaging
from klatsch.study.grids import Options

REVISION = 1  # raised when the same settings give other results than before

FIELDS = {  # what the rules were before 0.2, and what they had
    "dsgd": ("DSGD", ("lr", "momentum", "average")),
    "dat": ("DAT", ("lr", "averaging", "order", "momentum")),
    "d2": ("D2", ("lr",)),
    "gt": ("GradientTracking", ("lr", "average")),
    "sgp": ("PushSum", ("lr",)),
    "decentlam": ("DecentLaM", ("lr", "momentum")),
    "dat-gt": ("DATTracking", ("lr", "averaging")),
    "dat-d2": ("DATD2", ("lr", "averaging")),
    "dat-sgp": ("DATPush", ("lr", "averaging")),
}


def digest(facts: Options) -> str:
    """The key of a run: SHA-256 of its facts."""
    return hashlib.sha256(json.dumps(_plain(facts), sort_keys=True).encode()).hexdigest()


def named_part(name: str, settings: Options, source: str | None) -> list[Any]:
    """A problem or a graph; one of somebody's own is known by its file's content, wherever that is."""
    return [name, settings] if source is None else [own.part_of(name), source, settings]


def rule(name: str, options: Options, lazy_graph: bool, source: str | None) -> tuple[list[Any], bool]:
    """A rule, and whether it mixes with (I + P) / 2.

    D2 is lazy by itself, which is the same as D2 as published on a lazy graph.
    """
    if name not in FIELDS:
        return named_part(name, options, source), lazy_graph
    standard = defaults(rules.RULES[name])
    values = standard | options
    lazy = values.pop("lazy", True)
    kind, fields = FIELDS[name]
    facts = {"type": kind} | {field: _form(field, values[field]) for field in fields}
    facts |= {o: _form(o, v) for o, v in values.items() if o not in fields and v != standard[o]}
    if name == "d2":
        facts |= {"lazy": "twice"} if lazy and lazy_graph else {}
        return [name, facts], lazy_graph or lazy
    facts |= {"lazy": False} if not lazy else {}
    return [name, facts], lazy_graph


@cache
def defaults(function: Any) -> Options:
    """The options of a function that have a default."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def _form(option: str, value: Any) -> Any:
    """An option in one way of writing it."""
    if option in ("average", "averaging") and value is not None:
        return described(averaging.parse(value))
    return value


def _plain(value: Any) -> Any:
    """Plain data in which 1.0 and 1 are the same, while large whole numbers stay exact."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
