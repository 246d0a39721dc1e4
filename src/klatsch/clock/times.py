"""How long a gradient takes: a number, one for each node, a distribution, or a measured trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from klatsch.arguments import named, number, whole
from klatsch.clock.sheets import table

Array = NDArray[np.float64]

MOST_NODES = 10**6  # with times of their own
SECONDS = "a positive number of seconds, such as 0.05"


class Times:
    """Seconds of gradients, drawn for every node and round by itself."""

    name = "gradient"  # in errors
    nodes: int | None = None  # of how many nodes they are; None for any number
    mean: float  # over nodes and rounds

    def draw(self, rounds: int, nodes: int, numbers: Generator) -> Array:
        """Seconds of the gradients of some rounds, (rounds, nodes)."""
        raise NotImplementedError(f"{type(self).__name__} has no draw(rounds, nodes, numbers)")

    def drawing(self, nodes: int, seed: int) -> Callable[[int, int], Array]:
        """A function of a first round and how many, to be called for one piece of a run after the other."""
        numbers = np.random.default_rng(seed)
        return lambda first, rounds: self.draw(rounds, nodes, numbers)

    def of_first(self, nodes: int) -> Times:
        """The times of the first nodes."""
        return self


@dataclass(frozen=True)
class Exponential(Times):
    """Exponential times: a node is done with its gradient at any moment, however long it has worked."""

    mean: float

    def __post_init__(self) -> None:
        number("exponential's mean", self.mean, lambda v: v > 0, SECONDS)

    def draw(self, rounds: int, nodes: int, numbers: Generator) -> Array:
        """Independent of each other."""
        return numbers.exponential(self.mean, (rounds, nodes))


@dataclass(frozen=True)
class Lognormal(Times):
    """Times whose logarithm is normal with this spread: 0.1 is a quiet machine, 1 a busy one."""

    mean: float
    spread: float

    def __post_init__(self) -> None:
        number("lognormal's mean", self.mean, lambda v: v > 0, SECONDS)
        number("lognormal's spread", self.spread, lambda v: 0 <= v <= 5, "a number from 0 to 5, such as 0.5")

    def draw(self, rounds: int, nodes: int, numbers: Generator) -> Array:
        """Independent of each other."""
        return numbers.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread, (rounds, nodes))


@dataclass(frozen=True)
class Slow(Times):
    """Always the same, but k times as long with probability p: stragglers."""

    seconds: float
    k: float
    p: float

    def __post_init__(self) -> None:
        number("slow's seconds", self.seconds, lambda v: v > 0, SECONDS)
        number("slow's k", self.k, lambda v: v >= 1, "a factor from 1 up, such as 10")
        number("slow's p", self.p, lambda v: 0 <= v <= 1, "a probability from 0 to 1, such as 0.01")

    @property
    def mean(self) -> float:  # type: ignore[override]
        return self.seconds * (1 + self.p * (self.k - 1))

    def draw(self, rounds: int, nodes: int, numbers: Generator) -> Array:
        """Independent of each other."""
        return self.seconds * np.where(numbers.random((rounds, nodes)) < self.p, self.k, 1.0)


@dataclass(frozen=True, eq=False)
class Trace(Times):
    """Measured times: a row for each round, and a column for each node, or one for all.

    Nodes go through their column from a random row on, and begin again at its end, so that slow spells stay together.
    With a single row, times are the same in every round.
    """

    rows: Array
    name: str = "trace"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[object, ...]:
        return self.name, self.rows.shape, self.rows.astype(float).tobytes()

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or not self.rows.size or not (np.isfinite(self.rows) & (self.rows > 0)).all():
            raise ValueError(f"{self.name}: give rows of positive seconds, a column for each node, or one for all")

    @property
    def mean(self) -> float:  # type: ignore[override]
        return float(self.rows.mean())

    @property
    def nodes(self) -> int | None:  # type: ignore[override]
        return self.rows.shape[1] if self.rows.shape[1] > 1 else None

    def of_first(self, nodes: int) -> Trace:
        return Trace(self.rows[:, :nodes], self.name)

    def draw(self, rounds: int, nodes: int, numbers: Generator) -> Array:
        """Each node from a row of its own."""
        return self._rows(numbers.integers(len(self.rows), size=nodes), 0, rounds)

    def drawing(self, nodes: int, seed: int) -> Callable[[int, int], Array]:
        """The same, in pieces that follow each other."""
        begin = np.random.default_rng(seed).integers(len(self.rows), size=nodes)
        return lambda first, rounds: self._rows(begin, first, rounds)

    def _rows(self, begin: NDArray[np.int64], first: int, rounds: int) -> Array:
        whole = np.broadcast_to(self.rows, (len(self.rows), len(begin)))
        if len(whole) == 1:
            return np.broadcast_to(whole, (rounds, len(begin)))
        found: Array = whole[(np.arange(first, first + rounds)[:, None] + begin) % len(whole), np.arange(len(begin))]
        return found


DISTRIBUTIONS: dict[str, type[Exponential | Lognormal | Slow]] = {
    "exponential": Exponential,
    "lognormal": Lognormal,
    "slow": Slow,
}


def times(given: Times | float | str | Sequence[float]) -> Times:
    """Times of gradients from a number, a list of them, or a text.

    A text is a number, numbers with commas (one for each node; "15*0.05, 0.2" for 15 nodes alike and one more),
    "exponential(0.05)", "lognormal(0.05, 0.5)" (mean and spread), "slow(0.05, 10, 0.01)" (10 times as long with
    probability 0.01), or the name of a CSV file with a trace.
    """
    if isinstance(given, Times):
        return given
    if isinstance(given, str) and given.lower().endswith(".csv"):
        return Trace(table(Path(given)), given)
    call = re.fullmatch(r"\s*([a-z]+)\s*(?:\((.*)\))?\s*", given) if isinstance(given, str) else None
    if call and (call[2] is not None or call[1] in DISTRIBUTIONS):
        kind = named("distribution", call[1], DISTRIBUTIONS)
        values = _numbers(call[2] or "")
        if len(values) != len(fields(kind)):
            wanted = ", ".join(field.name for field in fields(kind))
            raise ValueError(f"gradient = {given!r} has {len(values)} numbers; give {call[1]}({wanted}), in seconds")
        return kind(*values)
    values = _numbers(given) if isinstance(given, str) else [*given] if isinstance(given, Sequence) else [given]
    if not values:
        raise ValueError(f"gradient = {given!r} has no number; give {SECONDS}")
    return Trace(np.array([[number("gradient", value, lambda v: v > 0, SECONDS) for value in values]]), "gradient")


def _numbers(text: str) -> list[float]:
    try:
        parts = [part.split("*") for part in text.split(",") if part.strip()]
        counted = [(int(*count or ["1"]), float(value)) for *count, value in parts]
    except (ValueError, TypeError):
        raise ValueError(
            f"gradient = {text!r}; give seconds, such as 0.05, or a distribution, such as lognormal(0.05, 0.5)"
        ) from None
    whole(sum(count for count, _ in counted), f"gradient = {text!r}: nodes", 0, MOST_NODES)
    return [value for count, value in counted for _ in range(count)]
