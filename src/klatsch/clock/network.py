"""What takes time: gradients (by a number, one for each node, a distribution or a trace), and messages over links."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from klatsch.arguments import named, number, whole
from klatsch.files import text_of

Array = NDArray[np.float64]
Nodes = NDArray[np.int64]

MOST_NODES = 10**6  # with times of their own
SECONDS = "a positive number of seconds, such as 0.05"
# Goodput of TCP (94 % of the line) in bytes per second, and seconds until a message arrives.
NETWORKS = {
    "1gbe": (0.94e9 / 8, 1e-4),
    "10gbe": (0.94e10 / 8, 5e-5),
    "100gbe": (0.94e11 / 8, 2e-5),
    "wan": (0.94e8 / 8, 5e-2),
}


class NoLinkError(ValueError):
    """A graph needs a link that the network does not have."""


class ByContent:
    """Equal and hashed by its fields, of which some are arrays."""

    def _content(self) -> list[object]:
        fields = vars(self).values()
        return [(v.shape, v.astype(float).tobytes()) if isinstance(v, np.ndarray) else v for v in fields]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(tuple(self._content()))


# --- gradients ------------------------------------------------------------------------------------------------------


class Times:
    """Seconds of gradients, drawn for every node and round by itself."""

    name = "gradient"  # in errors
    nodes: int | None = None  # of how many nodes they are; None for any number
    mean: float  # over nodes and rounds

    def draw(self, rounds: int, nodes: int, numbers: Generator) -> Array:
        """Seconds of the gradients of some rounds, (rounds, nodes)."""
        raise NotImplementedError(f"{type(self).__name__} has no draw(rounds, nodes, numbers)")

    def drawing(self, nodes: int, seed: int | Generator) -> Callable[[int, int], Array]:
        """A function of a first round and how many, to be called for one piece of a run after the other."""
        numbers = np.random.default_rng(seed)
        return lambda first, rounds: self.draw(rounds, nodes, numbers)

    def of_first(self, nodes: int) -> Times:
        """The times of the first nodes."""
        return self


class Law(NamedTuple):
    """A distribution: its numbers, each with a check and a remedy, its mean, and how it is drawn."""

    takes: dict[str, tuple[Callable[[float], bool], str]]
    mean: Callable[..., float]
    draw: Callable[..., Array]  # of a generator, a shape and the numbers


POSITIVE = (lambda v: v > 0, SECONDS)
LAWS = {
    # A node is done with its gradient at any moment, however long it has worked.
    "exponential": Law({"mean": POSITIVE}, lambda mean: mean, lambda g, shape, mean: g.exponential(mean, shape)),
    # The logarithm is normal with this spread: 0.1 is a quiet machine, 1 a busy one.
    "lognormal": Law(
        {"mean": POSITIVE, "spread": (lambda v: 0 <= v <= 5, "a number from 0 to 5, such as 0.5")},
        lambda mean, spread: mean,
        lambda g, shape, mean, spread: g.lognormal(np.log(mean) - spread**2 / 2, spread, shape),
    ),
    # Always the same, but k times as long with probability p: stragglers.
    "slow": Law(
        {
            "seconds": POSITIVE,
            "k": (lambda v: v >= 1, "a factor from 1 up, such as 10"),
            "p": (lambda v: 0 <= v <= 1, "a probability from 0 to 1, such as 0.01"),
        },
        lambda seconds, k, p: seconds * (1 + p * (k - 1)),
        lambda g, shape, seconds, k, p: seconds * np.where(g.random(shape) < p, k, 1.0),
    ),
}


@dataclass(frozen=True)
class Random(Times):
    """Times of one of `LAWS`, independent of each other."""

    law: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for (name, check), value in zip(LAWS[self.law].takes.items(), self.values, strict=True):
            number(f"{self.law}'s {name}", value, *check)

    @property
    def mean(self) -> float:  # type: ignore[override]
        return LAWS[self.law].mean(*self.values)

    def draw(self, rounds: int, nodes: int, numbers: Generator) -> Array:
        return LAWS[self.law].draw(numbers, (rounds, nodes), *self.values)


@dataclass(frozen=True, eq=False)
class Trace(ByContent, Times):
    """Measured times: a row for each round, and a column for each node, or one for all.

    Nodes go through their column from a random row on, and begin again at its end, so that slow spells stay together.
    With a single row, times are the same in every round.
    """

    rows: Array
    name: str = "trace"

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
        return self.drawing(nodes, numbers)(0, rounds)

    def drawing(self, nodes: int, seed: int | Generator) -> Callable[[int, int], Array]:
        count, each = len(self.rows), np.arange(nodes)
        rows = np.broadcast_to(self.rows, (count, nodes))
        begin = np.random.default_rng(seed).integers(count, size=nodes)
        if count == 1:
            return lambda first, rounds: np.broadcast_to(rows, (rounds, nodes))
        return lambda first, rounds: rows[(np.arange(first, first + rounds)[:, None] + begin) % count, each]


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
    if call and (call[2] is not None or call[1] in LAWS):
        takes, values = named("distribution", call[1], LAWS).takes, _numbers(call[2] or "")
        if len(values) != len(takes):
            wanted = f"{call[1]}({', '.join(takes)}), in seconds"
            raise ValueError(f"gradient = {given!r} has {len(values)} numbers; give {wanted}")
        return Random(call[1], tuple(values))
    values = _numbers(given) if isinstance(given, str) else [*given] if isinstance(given, Sequence) else [given]
    if not values:
        raise ValueError(f"gradient = {given!r} has no number; give {SECONDS}")
    return Trace(np.array([[number("gradient", value, *POSITIVE) for value in values]]), "gradient")


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


# --- links ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """Links that are all alike.

    Args:
        bandwidth: bytes per second of a node's link, in each direction.
        latency: seconds until a message arrives, not counting its bytes.
    """

    bandwidth: float
    latency: float
    name = "the network"  # in errors
    nodes: ClassVar[int | None] = None  # for how many nodes it is; None for any number

    def __post_init__(self) -> None:
        number("bandwidth", self.bandwidth, lambda v: v > 0, "a positive number of bytes per second, such as 1.2e8")
        number("latency", self.latency, lambda v: v >= 0, "0 or a positive number of seconds")

    def of(self, nodes: int) -> Links:
        """The links as they are between so many nodes, the first ones of a fixed number."""
        return self

    def between(self, sender: Nodes, receiver: Nodes) -> tuple[Array, Array]:
        """Bytes per second and latency from some nodes to others; 0 bytes where there is no link."""
        return np.full(sender.shape, self.bandwidth), np.full(sender.shape, self.latency)


@dataclass(frozen=True)
class Sites(Links):
    """Nodes at several sites, in order: links of one kind inside a site, and of another one between them.

    Args:
        sizes: how many nodes each site has; or how many sites share the nodes, whatever their number.
        inside: the links of a site.
        bandwidth: bytes per second between sites.
        latency: seconds between sites.
    """

    sizes: tuple[int, ...] | int
    inside: Links

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sizes, int):
            whole(self.sizes, "sites", 1, MOST_NODES)

    @property
    def nodes(self) -> int | None:  # type: ignore[override]
        return None if isinstance(self.sizes, int) else sum(self.sizes)

    def of(self, nodes: int) -> Sites:
        if isinstance(self.sizes, int):
            return replace(self, sizes=tuple(len(some) for some in np.array_split(np.arange(nodes), self.sizes)))
        return replace(self, sizes=tuple(np.diff(np.minimum(np.cumsum((0, *self.sizes)), nodes)).tolist()))

    def between(self, sender: Nodes, receiver: Nodes) -> tuple[Array, Array]:
        if isinstance(self.sizes, int):
            raise ValueError(f"{self.sizes} sites of how many nodes? Ask for links.of(nodes)")
        site = np.repeat(np.arange(len(self.sizes)), self.sizes)
        same = site[sender] == site[receiver]
        near, far = self.inside.between(sender, receiver), super().between(sender, receiver)
        return np.where(same, near[0], far[0]), np.where(same, near[1], far[1])


@dataclass(frozen=True)
class Uneven(Links):
    """Nodes whose links differ: a pair has the bandwidth of the slower one.

    Args:
        factor: between the fastest and the slowest that there may be, around `bandwidth`.
        seed: of the node's bandwidths, whose logarithms are spread evenly; that of a node is the same in any number.
    """

    factor: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("factor", self.factor, lambda v: v >= 1, "a factor from 1 up, such as 4")
        whole(self.seed, "seed", 0)

    def between(self, sender: Nodes, receiver: Nodes) -> tuple[Array, Array]:
        drawn = np.random.default_rng(self.seed).random(1 + max((*sender, *receiver), default=0))
        rates = self.bandwidth * self.factor ** (drawn - 0.5)
        return np.minimum(rates[sender], rates[receiver]), np.full(sender.shape, self.latency)


@dataclass(frozen=True, eq=False)
class Table(ByContent, Links):
    """A link for every pair of nodes.

    Args:
        rates: bytes per second from the node of a row to that of a column, (M, M); 0 where there is no link.
        delays: seconds, likewise; by default `latency` for all.
    """

    rates: Array
    delays: Array | None = None
    name: str = "links"

    @classmethod
    def read(cls, rates: str | Path, latency: float | str | Path = 0.0) -> Table:
        """From a CSV file with the bytes per second, and a number of seconds or another file with them."""
        if isinstance(latency, int | float):
            return cls(1.0, float(latency), table(Path(rates)), None, str(rates))
        return cls(1.0, 0.0, table(Path(rates)), table(Path(latency)), str(rates))

    @classmethod
    def completed(cls, rates: Array, delays: Array, name: str) -> Table:
        """From links of which some are known; one of 0 bytes per second is as good as the widest way over others."""
        over, trips = rates, np.where(rates > 0, delays, np.inf)
        for k in range(len(rates)):
            rate, trip = np.minimum(over[:, k, None], over[k]), trips[:, k, None] + trips[k]
            better = (rate > over) | ((rate == over) & (trip < trips))
            over, trips = np.where(better, rate, over), np.where(better, trip, trips)
        over, trips = np.where(rates > 0, rates, over), np.where((delays > 0) | (over == 0), delays, trips)
        np.fill_diagonal(over, 0.0)
        return cls(1.0, 0.0, over, trips, name)

    def __post_init__(self) -> None:
        super().__post_init__()
        for values, unit in ((self.rates, "bytes per second"), (self.delays, "seconds")):
            if values is None:
                continue
            if values.ndim != 2 or values.shape[0] != values.shape[1] or values.shape != self.rates.shape:
                raise ValueError(f"{self.name} has {' x '.join(map(str, values.shape))} {unit}; give M rows of M")
            for i, j in np.argwhere(~np.isfinite(values) | (values < 0)):
                raise ValueError(
                    f"{self.name}, row {i + 1}, column {j + 1}: {values[i, j]:g} {unit}; give 0 or a positive number"
                )

    @property
    def nodes(self) -> int | None:  # type: ignore[override]
        return len(self.rates)

    def of(self, nodes: int) -> Table:
        if nodes == self.nodes:
            return self
        delays = None if self.delays is None else self.delays[:nodes, :nodes]
        return replace(self, rates=self.rates[:nodes, :nodes], delays=delays)

    def between(self, sender: Nodes, receiver: Nodes) -> tuple[Array, Array]:
        delays = np.full(sender.shape, self.latency) if self.delays is None else self.delays[sender, receiver]
        return self.rates[sender, receiver], delays


def links(given: Links | str, bandwidth: float | None = None, latency: float | None = None) -> Links:
    """Links by the name of a network ("1gbe", "10gbe", "100gbe", "wan"), or from a CSV file of bytes per second."""
    if isinstance(given, Links):
        return given
    if given.lower().endswith(".csv"):
        if bandwidth is not None:
            raise ValueError(f"{given} has the bandwidths; leave bandwidth = {bandwidth:g} out")
        return Table.read(given, latency or 0.0)
    usual = named("network", given.lower(), NETWORKS)
    return Links(usual[0] if bandwidth is None else bandwidth, usual[1] if latency is None else latency)


def table(path: Path) -> Array:
    """The numbers of a CSV file, (rows, columns); a first row of names is left out."""
    try:
        text = text_of(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a CSV file with rows of numbers") from None
    rows = [row for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    if rows and not any(_is_number(cell) for cell in rows[0]):
        rows = rows[1:]
    if not rows:
        raise ValueError(f"{path} has no numbers; give rows of numbers with commas between them")
    for k, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(f"{path}, row {k} has {len(row)} numbers, but row 1 has {len(rows[0])}; make them equal")
        if wrong := [cell.strip() for cell in row if not _is_number(cell)]:
            raise ValueError(f"{path}, row {k}: {wrong[0]!r} is not a number; put one in its place")
    return np.array([[float(cell) for cell in row] for row in rows])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
