"""What a node minimises, and the table of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from klatsch.arguments import check_options, named
from klatsch.own import explained, is_own, label
from klatsch.problems.base import Headline, Problem, Quadratic, adopted, derived
from klatsch.problems.images.classification import FashionMNIST, ImageClassification
from klatsch.problems.images.fashion_mnist import Images
from klatsch.problems.images.networks import lenet
from klatsch.problems.least_squares import LeastSquares
from klatsch.problems.logistic import LogisticRegression
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
    "adopted",
    "check",
    "declared",
    "dirichlet",
    "headline",
    "kind",
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

    Your own problem is "file.py:Name"; the file is executed.
    """
    check_options(name, choices, options(name))
    with explained(name):
        return adopted(kind(name)(nodes, **choices), f"{label(name)} gives")


def kind(name: str) -> Callable[..., Problem]:
    """The class or function that makes a problem."""
    return named("problem", name, PROBLEMS)


def declared(name: str) -> type[Problem]:
    """What is known of a problem before one is made, with the defaults where your own class or function says less."""
    found = kind(name)
    return found if isinstance(found, type) and issubclass(found, Problem) else derived(found, label(name))


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, nodes, ...)` takes beside the number of nodes."""
    return tuple(inspect.signature(kind(name)).parameters)[1:]


def check(name: str, nodes: int, **choices: Any) -> None:
    """Refuse what `make` would refuse, but without a data set that may have to be downloaded."""
    check_options(name, choices, options(name))
    with explained(name):
        if check := declared(name).check:
            check(nodes, **choices)
        elif is_own(name):
            _check_own(name, kind(name)(nodes, **choices))
        else:
            make(name, nodes, **choices)


def make_ready(name: str) -> None:
    """Fetch what a problem needs, once, before many processes want it."""
    if ready := declared(name).ready:
        ready()


def rounds_per_epoch(name: str, nodes: int, **choices: Any) -> int | None:
    """Rounds in which all nodes go through the data of a problem once; None where it has no data set."""
    count = declared(name).rounds_per_epoch
    return None if count is None else int(count(nodes, **choices))


def large_is_good(name: str) -> Collection[str]:
    """The metrics of a problem that are good when large; all others are errors of some kind."""
    return declared(name).worst


def headline(name: str) -> Headline:
    """The metric of a problem by which learning rates are chosen."""
    return declared(name).headline


def _check_own(name: str, problem: Any) -> None:
    """Check that a user's problem has what the engines ask for."""
    problem = adopted(problem, f"{label(name)} gives")
    M, d, wanted = int(problem.nodes), int(problem.dim), headline(name).metric
    start = torch.as_tensor(problem.start()).double().reshape(-1)
    sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"start()": (tuple(start.shape), (d,))}
    if len(start) == d:
        sizes["grad(x, 1)"] = tuple(problem.grad(start.expand(M, 1, d), 1).shape), (M, 1, d)
        sizes["grad(x, 1, [0])"] = tuple(problem.grad(start.expand(1, 1, d), 1, [0]).shape), (1, 1, d)
    for asked, (got, shape) in sizes.items():
        if got != shape:
            raise ValueError(f"{label(name)}: {asked} has shape {got}; give {shape}")
    if wanted not in (there := problem.metrics(start.expand(M, 1, d))):
        raise ValueError(
            f"{label(name)} has no metric {wanted!r} to choose learning rates by; give {type(problem).__name__} "
            f"headline = problems.Headline({next(iter(there), 'loss')!r}, 'what it is')"
        )
