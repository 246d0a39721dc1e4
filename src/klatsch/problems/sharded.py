"""Problems of one data set that is split over the nodes, where every node and column has a model of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from klatsch.columns import replaced
from klatsch.problems import base as core
from klatsch.problems import draws


class Sharded(core.Drawing):
    """Every node goes through its own samples in random order, epoch after epoch, a batch in every round.

    Its batch is a function of (seed, round, node). Samples that do not fill a last batch wait for the next epoch.
    """

    of_nodes = ("shards",)
    per_network = ("alpha",)
    columns_share = False  # every column is a model of its own
    numbers_per_parameter = 0  # the data are shared by all
    shards: Tensor  # (M, n): the numbers of each node's samples
    batch: int  # samples per node and round
    data: tuple[Tensor, ...]  # of all nodes
    networks: Sequence[Self] = ()  # the problems of which this one is a stack

    @property
    @abstractmethod
    def model(self) -> str:
        """A text that tells apart models that compute different things with the same parameters."""

    @abstractmethod
    def slope(self, models: Tensor, numbers: Tensor) -> Tensor:
        """The gradients of models, (S, d), on the samples of these numbers, (S, batch)."""

    @property
    def epoch(self) -> int:
        """Rounds in which nodes go through their samples once."""
        return self.shards.shape[1] // self.batch

    def draw(self, t: Tensor) -> Tensor:
        """The numbers of the samples of rounds t, (len(t), M, batch)."""
        if self.networks:
            return torch.cat([network.draw(t) for network in self.networks], dim=1)
        device = self.shards.device
        t, n = t.to(device), self.shards.shape[1]
        epochs, which = torch.unique((t - 1) // self.epoch, return_inverse=True)
        keys = draws.whole_numbers(self.seed, draws.BATCHES, epochs, self.numbers, n, 1 << 32)
        orders = keys.argsort(dim=-1, stable=True)  # (epochs, M, n): a random order of every node's own samples
        first = (t - 1) % self.epoch * self.batch
        places = first[:, None] + torch.arange(self.batch, device=device)
        rows = torch.arange(self.nodes, device=device)[:, None]
        return self.shards[rows, orders[which[:, None, None], rows, places[:, None, :]]]

    def gradient(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The gradients at x, (M, C, d), on the samples of these numbers, (M, batch)."""
        M, C, d = x.shape
        numbers = drawn[:, None].expand(-1, C, -1).reshape(M * C, -1)
        return self.slope(x.reshape(M * C, d), numbers).view(M, C, d)

    def to(self, dtype: torch.dtype, device: torch.device) -> Self:
        """The same problem on another device, with its start in another dtype."""
        data = type(self.data)(*(tensor.to(device) for tensor in self.data))  # a named tuple
        networks = [replaced(core.Drawing.to(network, dtype, device), data=data) for network in self.networks]
        return replaced(super().to(dtype, device), data=data, networks=networks)

    @staticmethod
    def joined(problems: Sequence[Sharded]) -> Sharded:
        """The gradients of several networks at once, for `simulate_together`; each keeps its own metrics."""
        first = problems[0]
        for other in problems[1:]:
            same = other.batch == first.batch and other.data[0] is first.data[0]
            if not same or other.model != first.model:
                raise ValueError(
                    f"{other!r} does not fit {first!r} in one stack: give all the same model, data and batch"
                )
        return replaced(first, nodes=sum(problem.nodes for problem in problems), networks=[*problems])


def evenly(count: int, most: int) -> Tensor:
    """At most so many of the numbers from 0 to count - 1, from everywhere."""
    most = min(count, most)
    return torch.arange(most) * count // most


def equal_parts(count: int, most: int) -> int:
    """The size of portions of at most `most`: one that divides `count`, unless that is much smaller."""
    size = next(size for size in range(min(most, count), 0, -1) if count % size == 0)
    return size if 2 * size >= min(most, count) else min(most, count)
