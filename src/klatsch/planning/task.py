"""The task of a plan: a goal, a problem, a model and machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from klatsch.arguments import number, whole
from klatsch.planning.hardware import TINY, Network
from klatsch.planning.predictions import ALL_REDUCE, CALIBRATION, RULES, Calibration, predicted
from klatsch.theory import Constants

BYTES = 4  # of a parameter in float32
MOST_MACHINES, MOST_PARAMS = 1_000_000, 10**15


@dataclass(frozen=True)
class Task:
    """What to reach, and with what.

    Args:
        constants: of the problem; `probe` measures them.
        params: parameters of the model.
        network: the machines.
        samples: how many gradients may be taken in all, N = M T; without a limit if None.
        target: the error E f(x) - f* to be reached; if None, twice what N samples can bring at best.
        machines: most machines to think of.
        efficiency: least speed-up per machine; M machines that are not at least this times M as fast as one do not pay.
        calibration: the constants of the rates.
    """

    constants: Constants
    params: int
    network: Network
    samples: float | None = None
    target: float | None = None
    machines: int = 1024
    efficiency: float = 0.1
    calibration: Mapping[str, Calibration] | None = None

    def __post_init__(self) -> None:
        most = 1 / TINY
        for name, value in asdict(self.constants).items():
            number(name, value, lambda v: v == 0 or TINY <= v <= most, f"0 or a number from {TINY:g} to {most:g}")
        whole(self.params, "params", 1, MOST_PARAMS)
        whole(self.machines, "machines", 1, MOST_MACHINES)
        wanted = "a number from 0 to 1, such as 0.1; 0 for the fastest at any cost"
        number("efficiency", self.efficiency, lambda v: 0 <= v <= 1, wanted)
        if self.samples is None and self.target is None:
            raise ValueError("nothing to plan for; give samples (--samples 1e6), or a target error (--target 0.01)")
        if self.samples is not None:
            number("samples", self.samples, lambda v: 1 <= v <= most, f"a number of samples from 1 to {most:g}")
        if self.target is not None:
            number("target", self.target, lambda v: TINY <= v <= most, "a positive error")

    def by(self, rule: str) -> Calibration:
        """The constants of a rule's rate."""
        return (self.calibration or CALIBRATION)[rule]

    @property
    def vector(self) -> float:
        """Bytes of one vector of parameters."""
        return float(BYTES * self.params)

    @property
    def goal(self) -> float:
        """The error to be reached: the target, or twice what the samples can bring, which one machine always can."""
        if self.target is not None:
            return self.target
        assert self.samples is not None
        alone = predicted(RULES[ALL_REDUCE], 1, self.samples, 1.0, self.constants, self.by(ALL_REDUCE))
        return float(max(2 * alone.statistical, alone.total))

    @property
    def budget(self) -> float | None:
        """The samples by which the largest M is judged: those given, or those whose noise makes half the goal."""
        if self.samples is not None:
            return self.samples
        noise = self.by(ALL_REDUCE).statistical * self.constants.sigma * self.constants.D1
        return max(1.0, (2 * noise / self.goal) ** 2) if noise > 0 else None
