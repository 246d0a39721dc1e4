"""What connects the nodes: one kind of link for all, a table of them, or sites with slow links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from klatsch.arguments import named, number
from klatsch.clock.sheets import table

Array = NDArray[np.float64]
Nodes = NDArray[np.int64]

# Goodput of TCP (94 % of the line) in bytes per second, and seconds until a message arrives.
NETWORKS = {
    "1gbe": (0.94e9 / 8, 1e-4),
    "10gbe": (0.94e10 / 8, 5e-5),
    "100gbe": (0.94e11 / 8, 2e-5),
    "wan": (0.94e8 / 8, 5e-2),
}


class NoLinkError(ValueError):
    """A graph needs a link that the network does not have."""


@dataclass(frozen=True)
class Links:
    """Links that are all alike.

    Args:
        bandwidth: bytes per second of a node's link, in each direction.
        latency: seconds until a message arrives, not counting its bytes.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        number("bandwidth", self.bandwidth, lambda v: v > 0, "a positive number of bytes per second, such as 1.2e8")
        number("latency", self.latency, lambda v: v >= 0, "0 or a positive number of seconds")

    @property
    def name(self) -> str:
        """In errors."""
        return "the network"

    @property
    def nodes(self) -> int | None:
        """For how many nodes it is; None for any number."""
        return None

    def of_first(self, nodes: int) -> Links:
        """The links between the first nodes."""
        return self

    def between(self, sender: Nodes, receiver: Nodes) -> tuple[Array, Array]:
        """Bytes per second and latency from some nodes to others; 0 bytes where there is no link."""
        return np.full(sender.shape, self.bandwidth), np.full(sender.shape, self.latency)


@dataclass(frozen=True)
class Sites(Links):
    """Nodes at several sites, in order: links of one kind inside a site, and of another one between them.

    Args:
        sizes: how many nodes each site has.
        inside: the links of a site.
        bandwidth: bytes per second between sites.
        latency: seconds between sites.
    """

    sizes: tuple[int, ...]
    inside: Links

    @property
    def nodes(self) -> int | None:
        return sum(self.sizes)

    def of_first(self, nodes: int) -> Sites:
        sizes = np.diff(np.minimum(np.cumsum((0, *self.sizes)), nodes))
        return replace(self, sizes=tuple(int(size) for size in sizes))

    def between(self, sender: Nodes, receiver: Nodes) -> tuple[Array, Array]:
        """Fast inside, slow between."""
        site = np.repeat(np.arange(len(self.sizes)), self.sizes)
        same = site[sender] == site[receiver]
        near, far = self.inside.between(sender, receiver), super().between(sender, receiver)
        return np.where(same, near[0], far[0]), np.where(same, near[1], far[1])


@dataclass(frozen=True, eq=False)
class Table(Links):
    """A link for every pair of nodes.

    Args:
        rates: bytes per second from the node of a row to that of a column, (M, M); 0 where there is no link.
        delays: seconds, likewise; by default `latency` for all.
    """

    rates: Array
    delays: Array | None = None
    name: str = "links"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[object, ...]:
        delays = None if self.delays is None else self.delays.tobytes()
        return self.name, self.latency, self.rates.shape, self.rates.tobytes(), delays

    @classmethod
    def read(cls, rates: str | Path, latency: float | str | Path = 0.0) -> Table:
        """From a CSV file with the bytes per second, and a number of seconds or another file with them."""
        found = table(Path(rates))
        if isinstance(latency, int | float):
            return cls(1.0, float(latency), found, None, str(rates))
        return cls(1.0, 0.0, found, table(Path(latency)), str(rates))

    def __post_init__(self) -> None:
        super().__post_init__()
        for values, unit in ((self.rates, "bytes per second"), (self.delays, "seconds")):
            if values is None:
                continue
            if values.ndim != 2 or values.shape[0] != values.shape[1] or values.shape != self.rates.shape:
                raise ValueError(f"{self.name} has {' x '.join(map(str, values.shape))} {unit}; give M rows of M")
            wrong = np.argwhere(~np.isfinite(values) | (values < 0))
            if len(wrong):
                i, j = wrong[0]
                raise ValueError(
                    f"{self.name}, row {i + 1}, column {j + 1}: {values[i, j]:g} {unit}; give 0 or a positive number"
                )

    @property
    def nodes(self) -> int | None:
        return len(self.rates)

    def of_first(self, nodes: int) -> Table:
        some = slice(0, nodes), slice(0, nodes)
        return replace(self, rates=self.rates[some], delays=None if self.delays is None else self.delays[some])

    def between(self, sender: Nodes, receiver: Nodes) -> tuple[Array, Array]:
        """From the table."""
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
    wide, far = (there if own is None else own for there, own in zip(usual, (bandwidth, latency), strict=True))
    return Links(wide, far)
