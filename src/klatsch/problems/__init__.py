"""What a node minimises, and the table of names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

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
    known = options(name)
    for choice in choices:
        if choice not in known:
            raise ValueError(f"{name} has no option {choice!r}; it takes {', '.join(known)}")
    return PROBLEMS[name](nodes, **choices)


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, nodes, ...)` takes beside the number of nodes."""
    if not isinstance(name, str) or name not in PROBLEMS:
        close = difflib.get_close_matches(str(name).lower(), PROBLEMS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"unknown problem {name!r}{hint} There are {', '.join(PROBLEMS)}")
    return tuple(inspect.signature(PROBLEMS[name]).parameters)[1:]
