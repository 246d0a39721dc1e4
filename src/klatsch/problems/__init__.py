"""What a node minimises, and the table of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from klatsch.arguments import check_options, named
from klatsch.columns import WeightMatrix
from klatsch.own import explained, is_own, label
from klatsch.problems.base import Headline, Logistic, Problem, Quadratic, checked, shapes
from klatsch.problems.classification import FashionMNIST, ImageClassification
from klatsch.problems.fashion_mnist import Images
from klatsch.problems.least_squares import LeastSquares
from klatsch.problems.logistic import LogisticRegression
from klatsch.problems.prediction import Language
from klatsch.problems.sharded import dirichlet
from klatsch.problems.stacks import lenet
from klatsch.problems.supervised import Supervised, of_any

__all__ = ["PROBLEMS", "FashionMNIST", "Headline", "ImageClassification", "Images", "Language", "LeastSquares"]
__all__ += ["Logistic", "LogisticRegression", "Problem", "Quadratic", "Supervised", "WeightMatrix", "check"]
__all__ += ["check_headline", "checked", "declared", "dirichlet", "kind", "lenet", "make", "of_any", "options"]
__all__ += ["shapes"]

PROBLEMS: dict[str, Callable[..., Problem]] = {
    "least-squares": LeastSquares,
    "logistic": LogisticRegression,
    "fashion-mnist": FashionMNIST,
    "language": Language,
}


def make(name: str, nodes: int, **choices: Any) -> Problem:
    """A problem by name: `make("least-squares", 16, noise=1.0, heterogeneity=10.0)`.

    Your own problem is "file.py:Name"; the file is executed.
    """
    check_options(name, choices, options(name))
    with explained(name):
        return checked(kind(name)(nodes, **choices), f"{label(name)} gives")


def kind(name: str) -> Callable[..., Problem]:
    """The class or function that makes a problem."""
    return of_any(named("problem", name, PROBLEMS))


def declared(name: str) -> type[Problem]:
    """The class of a problem, known before one is made; of a function, the one that it says it returns."""
    maker = kind(name)
    if not isinstance(maker, type):
        with suppress(Exception):  # an annotation may be anything
            maker = inspect.signature(maker, eval_str=True).return_annotation
        return maker if isinstance(maker, type) and issubclass(maker, Problem) else Problem
    if not issubclass(maker, Problem):
        raise ValueError(f"{label(name)} is no problem; let the class derive from klatsch.problems.Problem")
    return maker


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, nodes, ...)` takes besides the number of nodes."""
    return tuple(inspect.signature(kind(name)).parameters)[1:]


def check(name: str, nodes: int, **choices: Any) -> None:
    """Refuse what `make` would refuse, if possible without fetching a data set."""
    check_options(name, choices, options(name))
    with explained(name):
        if check := declared(name).check:
            check(nodes, **choices)
            return
        problem = make(name, nodes, **choices)
        if is_own(name):
            start = torch.as_tensor(problem.start()).double().reshape(-1)
            for asked, (got, shape) in shapes(problem, start).items():
                if got != shape:
                    raise ValueError(f"{label(name)}: {asked} has shape {got}; give {shape}")
            check_headline(name, problem, declared(name).headline)


def check_headline(name: str, problem: Problem, headline: Headline) -> None:
    """Refuse a problem of one's own whose headline does not tell the columns of a run apart."""
    own, M, C = type(problem).__name__, int(problem.nodes), max(2, problem.columns)
    with explained(name):
        metrics = problem.metrics(torch.as_tensor(problem.start()).double().reshape(-1).expand(M, C, -1))
        wanted = headline.metric if isinstance(headline, Headline) else headline
        if wanted not in metrics or not isinstance(headline, Headline):
            says = "" if isinstance(kind(name), type) else f", and let the function say that it returns one: -> {own}"
            raise ValueError(
                f"{label(name)} has no metric {wanted!r} to choose learning rates by; give {own} headline = "
                f"problems.Headline({next(iter(metrics), 'loss')!r}, 'what it is'){says}"
            )
        value = metrics[headline.metric]
        if np.shape(value) != (C,):
            raise ValueError(f"{label(name)}: {wanted} of {C} columns is {value!r}; give a tensor of {C} numbers")
