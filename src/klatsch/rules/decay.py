"""How a learning rate changes over a run whose length is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    Round 1 has the whole learning rate, the last one nearly nothing, as torch's CosineAnnealingLR and LinearLR do it.

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
        for name in [self.schedule] if isinstance(self.schedule, str) else self.schedule:
            named("schedule", name, SCHEDULES)

    def __call__(self, t: int) -> float | list[float]:
        """The learning rates of round t."""
        p = min((t - 1) / self.steps, 1.0)
        if isinstance(self.schedule, str):
            left = SCHEDULES[self.schedule](p)
            return [lr * left for lr in self.lr] if isinstance(self.lr, Sequence) else self.lr * left
        rates = self.lr if isinstance(self.lr, Sequence) else [self.lr] * len(self.schedule)
        return [lr * SCHEDULES[name](p) for lr, name in zip(rates, self.schedule, strict=True)]
