"""What a node minimises, and the table of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from klatsch.arguments import check_options, named
from klatsch.problems.core import DISTANCE, Headline, Problem, Quadratic
from klatsch.problems.images import ImageClassification
from klatsch.problems.labelled import Images
from klatsch.problems.least_squares import LeastSquares
from klatsch.problems.logistic import LogisticRegression
from klatsch.problems.networks import lenet
from klatsch.problems.paper_images import FashionMNIST
from klatsch.problems.partition import dirichlet

__all__ = [
    "PROBLEMS",
    "FashionMNIST",
    "Headline",
    "ImageClassification",
    "Images",
    "LeastSquares",
    "LogisticRegression",
    "Problem",
    "Quadratic",
    "check",
    "dirichlet",
    "headline",
    "large_is_good",
    "lenet",
    "make",
    "make_ready",
    "options",
    "rounds_per_epoch",
]

PROBLEMS: dict[str, Callable[..., Problem]] = {
    "least-squares": LeastSquares,
    "logistic": LogisticRegression,
    "fashion-mnist": FashionMNIST,
}


def make(name: str, nodes: int, **choices: Any) -> Problem:
    """A problem by name: `make("least-squares", 16, noise=1.0, heterogeneity=10.0)`.

    Raises:
        ValueError: the name is unknown, the problem has no such option, or a value is not allowed.
    """
    check_options(name, choices, options(name))
    return PROBLEMS[name](nodes, **choices)


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, nodes, ...)` takes beside the number of nodes."""
    return tuple(inspect.signature(named("problem", name, PROBLEMS)).parameters)[1:]


def check(name: str, nodes: int, **choices: Any) -> None:
    """Refuse what `make` would refuse, but without a data set that may have to be downloaded.

    Raises:
        ValueError: the name is unknown, the problem has no such option, or a value is not allowed.
    """
    check_options(name, choices, options(name))
    getattr(PROBLEMS[name], "check", PROBLEMS[name])(nodes, **choices)


def make_ready(name: str) -> None:
    """Fetch what a problem needs, once, before many processes want it.

    Raises:
        ValueError: it cannot be had.
    """
    getattr(named("problem", name, PROBLEMS), "ready", lambda: None)()


def rounds_per_epoch(name: str, nodes: int, **choices: Any) -> int | None:
    """Rounds in which so many nodes go through the data of a problem once; None where it has no data set."""
    count = getattr(named("problem", name, PROBLEMS), "rounds_per_epoch", None)
    return None if count is None else int(count(nodes, **choices))


def large_is_good(name: str) -> Collection[str]:
    """The metrics of a problem that are good when large; all others are errors of some kind."""
    found: Collection[str] = getattr(named("problem", name, PROBLEMS), "worst", ())
    return found


def headline(name: str) -> Headline:
    """The metric of a problem by which learning rates are chosen."""
    found: Headline = getattr(named("problem", name, PROBLEMS), "headline", DISTANCE)
    return found
