"""How a learning rate changes over a run whose length is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from klatsch import columns
from klatsch.arguments import named, whole

# What is left of the learning rate when a share p of the rounds is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "cosine": lambda p: (1.0 + math.cos(math.pi * p)) / 2.0,
    "linear": lambda p: 1.0 - p,
}


@dataclass(frozen=True)
class Decay:
    """A learning rate for a rule: `rules.make("dsgd", lr=rules.Decay(0.1, "cosine", steps=10_000))`.

    Round 1 has the whole learning rate. "cosine" and "linear" end near 0, as torch's CosineAnnealingLR(T_max=steps) and
    LinearLR(start_factor=1, end_factor=0, total_iters=steps) do.

    Args:
        lr: the learning rate of the first round, or a list with one per column.
        schedule: "constant", "cosine" or "linear", or a list with one per column.
        steps: the rounds of the whole run.
    """

    lr: float | Sequence[float]
    schedule: str | Sequence[str] = "cosine"
    steps: int = 1

    def __post_init__(self) -> None:
        whole(self.steps, "steps", 1)
        columns.hyper("lr", self.lr, lambda v: v > 0, "a number above 0, such as 0.01")
        names = self.schedule if isinstance(self.schedule, list | tuple) else [self.schedule]
        for name in names:
            named("schedule", name, SCHEDULES)
        if isinstance(self.lr, Sequence) and len(names) != len(self.lr) and names is self.schedule:
            raise ValueError(f"{len(names)} schedules for {len(self.lr)} learning rates; give one, or one for each")

    def __call__(self, t: int) -> float | list[float]:
        """The learning rates of round t."""
        p = min((t - 1) / self.steps, 1.0)
        if isinstance(self.schedule, str):
            left = SCHEDULES[self.schedule](p)
            return [lr * left for lr in self.lr] if isinstance(self.lr, Sequence) else self.lr * left
        rates = self.lr if isinstance(self.lr, Sequence) else [self.lr] * len(self.schedule)
        return [lr * SCHEDULES[name](p) for lr, name in zip(rates, self.schedule, strict=True)]
