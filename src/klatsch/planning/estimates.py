"""Measured constants: numbers with intervals, and how many gradients they took."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from klatsch.theory import Constants


class Estimate(NamedTuple):
    """A measured number, an interval around it, and how many gradients of single nodes it took.

    The interval is one of 95 % confidence for sigma and zeta. For L it is the residual of power iteration, or what two
    sets of mini-batches say; for D1 two standard errors and what seems to be left of the way.
    """

    value: float
    low: float
    high: float
    samples: int


class Stage(NamedTuple):
    """Noise and heterogeneity at a point of the way from the start to the optimum."""

    place: str
    sigma: Estimate
    zeta: Estimate


@dataclass(frozen=True)
class Probe:
    """The constants of a problem, as measured."""

    problem: str
    nodes: int
    params: int
    sigma: Estimate  # the largest along the way
    zeta: Estimate  # at the end of it: the optimum where that is known, else where a short run came to
    L: Estimate
    D1: Estimate
    stages: tuple[Stage, ...]
    gradient_seconds: float  # of one node's gradient, on this machine

    @property
    def constants(self) -> Constants:
        """For the theory."""
        return Constants(self.L.value, self.D1.value, self.sigma.value, self.zeta.value)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        stages = [
            {"place": stage.place, "sigma": stage.sigma._asdict(), "zeta": stage.zeta._asdict()}
            for stage in self.stages
        ]
        plain = {name: value._asdict() if isinstance(value, Estimate) else value for name, value in own.items()}
        return plain | {"stages": stages}
