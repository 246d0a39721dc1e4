"""Where a plan's numbers come from: a problem by name or from a Python file, and constants from a probe's JSON."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klatsch import problems
from klatsch.problems import Problem
from klatsch.theory import Constants

NEEDED = ("nodes", "dim", "start", "grad", "metrics")


def problem_of(text: str, nodes: int, **options: Any) -> Problem:
    """A problem by name, such as "least-squares", or made by a function of one's own: "file.py:function".

    The function is called with the number of nodes if it takes an argument; its file is run, so it must be trusted.

    Raises:
        ValueError: there is no such problem, file or function, or what it gives is no problem.
    """
    if ".py" not in text:
        return problems.make(text, nodes, **options)
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
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever somebody's own file may raise
        raise ValueError(f"{path} cannot be run ({type(error).__name__}: {error}); put it right first") from None
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"{path} has no function {function}; give one that returns a problem")
    try:
        made = make(nodes) if inspect.signature(make).parameters else make()
    except Exception as error:
        raise ValueError(f"{text} fails ({type(error).__name__}: {error}); put it right first") from None
    if missing := [name for name in NEEDED if not hasattr(made, name)]:
        raise ValueError(
            f"{text} gives a {type(made).__name__} without {', '.join(missing)}; see problems.Problem for what it needs"
        )
    return made  # type: ignore[no-any-return]


def read_probe(path: Path) -> tuple[Constants, int, float]:
    """Constants, parameters and seconds per gradient from what `klatsch probe --json` printed.

    Raises:
        ValueError: the file is missing, or is none of these.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; write one with klatsch probe --json") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON; write one with klatsch probe --json") from None

    def number(name: str) -> float:
        value = content.get(name) if isinstance(content, Mapping) else None
        value = value.get("value") if isinstance(value, Mapping) else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{path} holds no number {name!r}; write one with klatsch probe --json")
        return float(value)

    constants = Constants(**{name: number(name) for name in ("L", "D1", "sigma", "zeta")})
    return constants, int(number("params")), number("gradient_seconds")
