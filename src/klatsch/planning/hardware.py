"""What a round costs: a latency-bandwidth model of equal machines whose messages overlap with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from klatsch.arguments import named, number
from klatsch.clock import NETWORKS
from klatsch.clock.rounds import BUCKET, HIDDEN
from klatsch.theory import Number

TINY = 1e-50  # smaller numbers, and those above 1 / TINY, are mistakes


@dataclass(frozen=True)
class Network:
    """Equal machines, each with one link that sends and receives at the same time.

    Args:
        bandwidth: bytes per second of a machine's link, in each direction.
        latency: seconds until a message arrives, not counting its bytes.
        gradient: seconds of one gradient.
        handling: seconds to pack and add up each byte of a vector; nothing hides them.
        per_message: seconds of work for each message of any length.
        name: what to call it.
    """

    bandwidth: float
    latency: float
    gradient: float
    handling: float = 5e-10
    per_message: float = 1e-5
    name: str = "network"

    def __post_init__(self) -> None:
        for name, value, unit in (
            ("bandwidth", self.bandwidth, "bytes per second, such as 1.2e8, or the name of a network"),
            ("gradient", self.gradient, "seconds"),
        ):
            number(name, value, lambda v: TINY <= v <= 1 / TINY, f"a positive number of {unit}")
        for name, value, unit in (
            ("latency", self.latency, "seconds"),
            ("handling", self.handling, "seconds per byte"),
            ("per_message", self.per_message, "seconds"),
        ):
            number(name, value, lambda v: v == 0 or TINY <= v <= 1 / TINY, f"0 or a positive number of {unit}")

    def gossip_seconds(
        self,
        size: float,
        degree: Number,
        eager: int,
        late: int,
        every: Number = 1,
        delay: int = 0,
        encoded: float | None = None,
    ) -> Number:
        """Seconds of a round of gossip, on average.

        Of the time to talk, what exceeds the gradients behind which a message may travel makes nodes wait: once in H
        rounds, or once in `delay` rounds where several messages are on their way at a time. A link carries one after
        the other, so that a round is never shorter than its bytes take.

        Args:
            size: bytes of one vector, all of which are handled.
            degree: neighbours that each vector goes to; 0 for a machine by itself.
            eager: vectors that may travel while the gradient of their round is computed.
            late: vectors that wait for it.
            every: H, rounds between two with gossip.
            delay: rounds after which a message is needed, `late` of a topology.
            encoded: bytes of a vector as it travels, if not its size.
        """
        degree = np.asarray(degree, float)
        talks = degree > 0
        vector = degree * (size if encoded is None else encoded) / self.bandwidth
        start = self.latency + degree * self.per_message
        early = np.where(talks & (eager > 0), start + eager * vector, 0.0)
        after = np.where(talks & (late > 0), start + late * vector, 0.0)
        work = np.where(talks, (eager + late) * size * self.handling, 0.0)
        unhidden = np.maximum(0.0, early - self.gradient) + after - delay * self.gradient
        waits = np.maximum(0.0, unhidden) / np.maximum(every, delay)
        return np.maximum(self.gradient + waits + work / every, (eager + late) * vector / every)

    def all_reduce_seconds(self, size: float, M: Number) -> Number:
        """Seconds of a round of mini-batch SGD: an all-reduce of the gradient in buckets, by ring or tree."""
        M = np.asarray(M, float)
        travel = np.minimum(*self._ways(size, M))
        hidden = np.minimum(HIDDEN * self.gradient, travel * (1 - min(1.0, BUCKET / size)))
        return self.gradient + travel - hidden + np.where(M > 1, size * self.handling, 0.0)

    def all_reduce_bytes(self, size: float, M: Number) -> Number:
        """Bytes that the busiest machine sends for an all-reduce, by the faster way."""
        M = np.asarray(M, float)
        ring, tree = self._ways(size, M)
        return np.where(ring <= tree, 2 * (M - 1) / M, np.ceil(np.log2(M))) * size

    def _ways(self, size: float, M: Number) -> tuple[Number, Number]:
        """Seconds that an all-reduce takes along a ring, and along a tree and back."""
        message, vector = self.latency + self.per_message, size / self.bandwidth
        return 2 * (M - 1) * message + 2 * (M - 1) / M * vector, 2 * np.ceil(np.log2(M)) * (message + vector)


def network(
    name: str,
    gradient: float,
    *,
    bandwidth: float | None = None,
    latency: float | None = None,
    handling: float = Network.handling,
) -> Network:
    """A network by name ("1gbe", "10gbe", "100gbe", "wan"), with your own numbers where given."""
    usual = named("network", name.lower(), NETWORKS)
    wide, far = (there if own is None else own for there, own in zip(usual, (bandwidth, latency), strict=True))
    return Network(wide, far, gradient, handling, name=name if (wide, far) == usual else f"{name}, changed")
