"""Update rules, each written once as pure algebra, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from klatsch.algorithms.core import Algorithm, Mix
from klatsch.algorithms.d2 import D2, DATD2
from klatsch.algorithms.dat import DAT
from klatsch.algorithms.decentlam import DecentLaM
from klatsch.algorithms.dsgd import DSGD
from klatsch.algorithms.push_sum import DATPush, PushSum
from klatsch.algorithms.tracking import DATTracking, GradientTracking
from klatsch.arguments import check_options, named

__all__ = [
    "ALGORITHMS",
    "D2",
    "DAT",
    "DATD2",
    "DSGD",
    "PER_COLUMN",
    "Algorithm",
    "DATPush",
    "DATTracking",
    "DecentLaM",
    "GradientTracking",
    "Mix",
    "PushSum",
    "make",
    "options",
]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "dsgd": DSGD,
    "dat": DAT,
    "d2": D2,
    "gt": GradientTracking,
    "sgp": PushSum,
    "decentlam": DecentLaM,
    "dat-gt": DATTracking,
    "dat-d2": DATD2,
    "dat-sgp": DATPush,
}

PER_COLUMN = ("lr", "momentum")  # options that may differ between the columns of one run


def make(name: str, **choices: Any) -> Algorithm:
    """A rule by name: `make("dat", lr=1e-3, averaging="linear", order="cta", momentum=0.9)`.

    Raises:
        ValueError: the name is unknown, the rule has no such option or needs one, or a value is not allowed.
    """
    check_options(name, choices, options(name))
    if "lr" not in choices:
        raise ValueError(f"{name} needs a learning rate: make({name!r}, lr=0.01)")
    return ALGORITHMS[name](**choices)


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, ...)` takes."""
    return tuple(field.name for field in fields(named("rule", name, ALGORITHMS)))  # type: ignore[arg-type]
