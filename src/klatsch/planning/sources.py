"""Where a plan's numbers come from: a problem by name or from a Python file, and constants from a probe's JSON."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from klatsch import problems
from klatsch.files import json_of, text_of
from klatsch.planning.hardware import TINY
from klatsch.planning.task import MOST_PARAMS
from klatsch.problems import Problem
from klatsch.theory import Constants

NODES = 16  # where nothing is said


def problem_of(text: str, nodes: int | None = None, **options: Any) -> Problem:
    """A problem by name, such as "least-squares", or made by a function of one's own: "file.py:function".

    The function is called with the number of nodes if it takes an argument; its file is run, so it must be trusted.

    Raises:
        ValueError: there is no such problem, file or function, or what it gives is no problem.
    """
    if ".py" not in text:
        return problems.make(text, NODES if nodes is None else nodes, **options)
    name, _, function = text.rpartition(":")
    path = Path(name)
    if not name or not function or path.suffix != ".py":
        raise ValueError(f"{text!r}; give FILE.py:FUNCTION, or a problem's name: {', '.join(problems.PROBLEMS)}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give FILE.py:FUNCTION of a file that exists")
    if options:
        raise ValueError(f"{', '.join(options)}: options are for problems by name; let {function} set them")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _explained(f"{path} cannot be run"):
        spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"{path} has no function {function}; give one that returns a problem")
    takes_nodes = bool(inspect.signature(make).parameters)
    if nodes is not None and not takes_nodes:
        raise ValueError(f"{function} in {path} takes no number of nodes; leave -n out, or let it take one")
    with _explained(f"{text} fails"):
        made = make(NODES if nodes is None else nodes) if takes_nodes else make()
    problem = problems.adopted(made, f"{text} gives")
    _try(text, problem)
    return problem


def _try(text: str, problem: Problem) -> None:
    """Ask a problem of somebody's own what the probe will ask it.

    Raises:
        ValueError: it fails, or gives gradients of another shape.
    """
    with _explained(f"{text} gives a problem that fails"):
        start = torch.as_tensor(problem.start()).reshape(-1)
        M, d = int(problem.nodes), int(problem.dim)
        sizes = {"start()": start.numel() - d}
        for nodes in (None, [0]):
            m = M if nodes is None else 1
            asked = "grad(x, 1)" if nodes is None else "grad(x, 1, [0])"
            sizes[asked] = torch.as_tensor(problem.grad(start.expand(m, 1, d), 1, nodes)).numel() - m * d
    if wrong := [name for name, difference in sizes.items() if difference]:
        raise ValueError(
            f"{text}: {wrong[0]} of {type(problem).__name__} has another size than {M} nodes and {d} parameters say; "
            "see problems.Problem"
        )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn whatever somebody's own code raises into one line; Ctrl-C stays what it is."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{what} ({type(error).__name__}: {reason}); put it right first") from None


class Measured(NamedTuple):
    """What a probe's file holds."""

    constants: Constants
    ranges: dict[str, tuple[float, float]]  # of the constants, by name
    params: int
    gradient_seconds: float


def read_probe(path: Path) -> Measured:
    """What `klatsch probe --json` printed.

    Raises:
        ValueError: the file is missing, is none of these, or holds what cannot have been measured.
    """
    remedy = "write one with klatsch probe --json"
    try:
        text = text_of(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; {remedy}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text; {remedy}") from None
    try:
        content = json_of(text)
    except ValueError:
        raise ValueError(f"{path} is no JSON; {remedy}") from None

    def number(name: str, part: str = "", least: float = 0.0, most: float = 1 / TINY) -> float:
        shown = f"{name}: {part}" if part else name
        value = content.get(name) if isinstance(content, Mapping) else None
        value = value.get(part) if part and isinstance(value, Mapping) else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise ValueError(f"{path} holds no number {shown!r}; {remedy}")
        if not least <= value <= most:
            raise ValueError(f"{path}: {shown} = {value:g}; give a number from {least:g} to {most:g}, or {remedy}")
        return float(value)

    def interval(name: str) -> tuple[float, float]:
        low, value, high = (number(name, part) for part in ("low", "value", "high"))
        if not low <= value <= max(high, TINY):
            raise ValueError(
                f"{path}: {name} = {value:g} is not between its low = {low:g} and its high = {high:g}; {remedy}"
            )
        return low, high

    names = ("L", "D1", "sigma", "zeta")
    constants = Constants(**{name: number(name, "value") for name in names})
    ranges = {name: interval(name) for name in names}
    params = number("params", least=1, most=MOST_PARAMS)
    if not params.is_integer():
        raise ValueError(f"{path}: params = {params:g}; give a whole number, or {remedy}")
    return Measured(constants, ranges, int(params), number("gradient_seconds", least=TINY))
