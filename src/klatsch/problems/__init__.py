"""What a node minimises, and the table of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from klatsch.arguments import check_options, named
from klatsch.problems.core import Problem, Quadratic
from klatsch.problems.least_squares import LeastSquares
from klatsch.problems.logistic import LogisticRegression
from klatsch.problems.partition import dirichlet

__all__ = ["PROBLEMS", "LeastSquares", "LogisticRegression", "Problem", "Quadratic", "dirichlet", "make", "options"]

PROBLEMS: dict[str, Callable[..., Problem]] = {"least-squares": LeastSquares, "logistic": LogisticRegression}


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
