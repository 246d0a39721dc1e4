"""Where a plan's numbers come from: a problem by name or from a Python file, or constants from a probe's JSON."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from klatsch import own, problems
from klatsch.arguments import check_options, whole
from klatsch.files import json_of, text_of
from klatsch.problems import Headline, Problem
from klatsch.theory import Constants

NODES, MOST_NODES = 16, 1 << 16  # by default, and at most
SURROGATE_DIM, SURROGATE_NODES = 20, 64
LOSS = Headline("loss_gap", "f(x) - f* of the mean of nodes")
TINY, MOST_PARAMS = 1e-50, 10**15  # smaller numbers, and those above 1 / TINY, are mistakes


def problem_of(text: str, nodes: int | None = None, **options: object) -> Problem:
    """A problem by name, such as "least-squares", or from your own function: "file.py:function".

    The function may take the number of nodes. Its file is executed.
    """
    if nodes is not None:
        whole(nodes, "nodes", 1, MOST_NODES)
    if ".py" not in text:
        return problems.make(text, NODES if nodes is None else nodes, **options)
    make, function = own.load("problem", text), own.part_of(text)
    takes = inspect.signature(make).parameters
    takes_nodes = bool(takes)
    check_options(function, options, list(takes)[1:])
    if nodes is not None and not takes_nodes:
        raise ValueError(f"{function} takes no number of nodes; leave -n out, or let it take one")
    with own.explained(text):
        given = [NODES if nodes is None else nodes] if takes_nodes else []
        made = problems.checked(make(*given, **options), f"{text} gives")
        shapes = problems.shapes(made, torch.as_tensor(made.start()).reshape(-1))
    for asked, (got, wanted) in shapes.items():
        if math.prod(got) != math.prod(wanted):
            raise ValueError(
                f"{text}: {asked} of {type(made).__name__} does not fit {made.nodes} nodes and {made.dim} parameters; "
                "see problems.Problem"
            )
    if nodes is not None and made.nodes != nodes:
        raise ValueError(
            f"{function}({nodes}) gives a problem with nodes = {made.nodes}; let it use the number it is given"
        )
    return made


def of_any_size(text: str, machines: int, **options: object) -> tuple[Callable[[int, int], Problem], bool]:
    """A function that gives the problem for 1, 2, 4, ... `machines` nodes and a seed; and whether the seed counts.

    All have the same data, where the problem can be put on fewer nodes. A function in a file must take the number of
    nodes, and may take a seed.
    """
    if own.is_own(text):
        takes = inspect.signature(own.load("problem", text)).parameters
        if not set(takes) - {"seed"}:
            name = own.part_of(text)
            raise ValueError(f"{name} takes no number of nodes, and has to run with 1, 2, 4, ...; let it take one")
        for nodes in range(1, min(2, machines) + 1):
            made = problem_of(text, nodes, **options)
            problems.check_headline(text, made, made.headline)
        seeded = "seed" in takes
        return lambda nodes, seed: problem_of(text, nodes, **options, **{"seed": seed} if seeded else {}), seeded
    whole = problem_of(text, machines, **options) if problems.declared(text).on_fewer is not None else None

    def make(nodes: int, seed: int) -> Problem:
        if whole is None or whole.on_fewer is None:
            return problem_of(text, nodes, **{**options, "seed": seed})
        return whole.on_fewer(nodes, seed)

    return make, True


def surrogate(constants: Constants, machines: int) -> Callable[[int, int], Problem]:
    """Least squares with these constants, as a function of nodes and a seed, where only the constants are known.

    Matrices are scaled so that L is right, the optimum is at distance D1, the nodes' gradients there are zeta apart,
    and noise is sigma, on 64 nodes; fewer have the mean of several. It is strongly convex, which a problem with these
    constants need not be.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pool = max(machines, SURROGATE_NODES)  # the same data, whatever the number of machines
    A = draw(pool, SURROGATE_DIM, SURROGATE_DIM)
    A *= (constants.L / float(torch.linalg.matrix_norm(A, 2).max() ** 2)) ** 0.5
    away = draw(SURROGATE_DIM)
    away *= constants.D1 / away.norm()
    # Gradients at the optimum, A_i' (A_i x - b_i): apart by zeta, and zero in the mean.
    forces = draw(pool, SURROGATE_DIM)
    forces -= forces.mean(0)
    apart = float(forces.square().sum(-1).mean().sqrt())
    forces *= constants.zeta / apart if apart > 0 else 0.0
    b = A @ away + torch.linalg.solve(A.mT, forces[:, :, None])[:, :, 0]
    whole = problems.LeastSquares.from_arrays(A, b, noise=constants.sigma)

    def make(nodes: int, seed: int) -> Problem:
        problem = whole.on_fewer(nodes, seed)
        problem.headline = LOSS
        return problem

    return make


class Measured(NamedTuple):
    """The content of a probe's file."""

    constants: Constants
    params: int
    gradient_seconds: float


def read_probe(path: Path) -> Measured:
    """The numbers in a file of `klatsch probe`."""
    remedy = "write one with klatsch probe PROBLEM -o FILE"
    try:
        text = text_of(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; {remedy}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; {remedy}") from None
    try:
        content = json_of(text)
    except ValueError:
        raise ValueError(f"{path} is not JSON; {remedy}") from None

    def number(name: str, part: str = "", least: float = 0.0, most: float = 1 / TINY) -> float:
        shown = f"{name}: {part}" if part else name
        value = content.get(name) if isinstance(content, Mapping) else None
        value = value.get(part) if part and isinstance(value, Mapping) else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise ValueError(f"{path} holds no number {shown!r}; {remedy}")
        if not least <= value <= most:
            raise ValueError(f"{path}: {shown} = {value:g}; give a number from {least:g} to {most:g}, or {remedy}")
        return float(value)

    values = {}
    for name in ("L", "D1", "sigma", "zeta"):
        value, low, high = (number(name, part) for part in ("value", "low", "high"))
        if not low <= value <= max(high, TINY):
            raise ValueError(f"{path}: {name} = {value:g} is not between low = {low:g} and high = {high:g}; {remedy}")
        values[name] = value
    params = number("params", least=1, most=MOST_PARAMS)
    if not params.is_integer():
        raise ValueError(f"{path}: params = {params:g}; give a whole number, or {remedy}")
    return Measured(Constants(**values), int(params), number("gradient_seconds", least=TINY))
