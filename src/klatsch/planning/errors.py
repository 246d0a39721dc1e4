"""Errors along a run: what is measured as an error, when it reaches a target, and where it is heading."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from klatsch.problems import Problem
from klatsch.simulation import Result

Array = NDArray[np.float64]

AROUND = 1  # points on each side with which an error is averaged: a dip by chance is not there to stay
ROUNDING = 1e-6  # by which an error may be below 0
HEADING = 30.0  # how many times as many rounds a fit may add


def gap(problem: Problem, result: Result) -> Array:
    """The problem's metric as an error, which falls: 1 - accuracy."""
    values = result.metrics[problem.headline.metric].cpu().numpy().astype(float)
    metric, largest = problem.headline.metric, problem.headline.largest
    errors = np.where(np.isfinite(values), 1.0 - values if largest else values, np.inf)
    if (errors < -ROUNDING).any():
        wanted = "a share from 0 to 1" if largest else "0 or more"
        raise ValueError(f"{metric} is {values.flat[errors.argmin()]:.3g}; a plan needs {wanted}")
    return np.maximum(errors, 0.0)


def smoothed(errors: Array) -> Array:
    """Errors, each the geometric mean of those around it, (len(steps), C); zeros count as the smallest other one."""
    if not (errors > 0).any():
        return errors
    logs = np.log(np.maximum(errors, errors[errors > 0].min()))
    padded = np.pad(logs, ((AROUND, AROUND), (0, 0)), mode="edge")
    return np.asarray(np.exp(np.mean([padded[k : k + len(logs)] for k in range(2 * AROUND + 1)], axis=0)))


def crossing(steps: Sequence[int], errors: Array, target: float) -> float:
    """The round at which errors fall to the target for the first time, between two that are known."""
    below = np.flatnonzero(errors <= target)
    if not len(below):
        return math.inf
    k = int(below[0])
    if k == 0 or not errors[k] > 0:
        return float(steps[k])
    (a, b), (high, low) = (steps[k - 1], steps[k]), (errors[k - 1], errors[k])
    share = math.log(high / target) / math.log(high / low) if math.isfinite(high) and target > 0 else 1.0
    return float(a * (b / a) ** share)


def fitted(steps: Sequence[int], errors: Array, target: float) -> float:
    """The round at which errors that go on to fall as they do, by a power of the rounds, reach the target."""
    late = [k for k, step in enumerate(steps) if step >= steps[-1] / 4]
    x, y = np.log([steps[k] for k in late]), errors[late]
    if len(late) < 4 or not (np.isfinite(y).all() and (y > 0).all()) or target <= 0:
        return math.inf
    slope, height = np.polyfit(x, np.log(y), 1)
    if slope > -0.02:
        return math.inf
    rounds = math.exp(min((math.log(target) - height) / slope, 700.0))
    return rounds if rounds <= HEADING * steps[-1] else math.inf
