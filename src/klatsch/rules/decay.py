"""How a learning rate changes over a run whose length is known."""

from __future__ import annotations

import math
import re
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

    "cosine" and "linear" end near 0, as torch's CosineAnnealingLR(T_max=steps) and LinearLR(start_factor=1,
    end_factor=0, total_iters=steps) do. "cosine/100" warms up first: over 100 rounds the rate grows to the whole one,
    and decays in those that are left; "cosine/5%" takes a share of the rounds.

    Args:
        lr: the whole learning rate, that of round 1 without a warm-up, or a list with one per column.
        schedule: "constant", "cosine" or "linear", each also with a warm-up, or a list with one per column.
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
            check_schedule(name)
        if isinstance(self.lr, Sequence) and len(names) != len(self.lr) and names is self.schedule:
            raise ValueError(f"{len(names)} schedules for {len(self.lr)} learning rates; give one, or one for each")

    def __call__(self, t: int) -> float | list[float]:
        """The learning rates of round t."""
        if isinstance(self.schedule, str):
            left = _left(self.schedule, t, self.steps)
            return [lr * left for lr in self.lr] if isinstance(self.lr, Sequence) else self.lr * left
        rates = self.lr if isinstance(self.lr, Sequence) else [self.lr] * len(self.schedule)
        return [lr * _left(name, t, self.steps) for lr, name in zip(rates, self.schedule, strict=True)]


def check_schedule(text: object) -> None:
    """Refuse a text that names no schedule."""
    name, _, warmup = text.partition("/") if isinstance(text, str) else (text, "", "")
    named("schedule", name, SCHEDULES)
    if text != name and not re.fullmatch(r"\d+|\d+(\.\d+)?%", warmup):
        raise ValueError(f"schedule = {text!r}; write {name}/100 for a warm-up of 100 rounds, or {name}/5%")


def _left(text: str, t: int, steps: int) -> float:
    """What a schedule leaves of the learning rate in round t of so many."""
    name, _, warmup = text.partition("/")
    rounds = float(warmup[:-1]) / 100 * steps if warmup.endswith("%") else float(warmup or 0)
    if t < rounds:
        return t / rounds
    return SCHEDULES[name](min((t - 1 - rounds) / max(steps - rounds, 1), 1.0) if t > rounds else 0.0)
