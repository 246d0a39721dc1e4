"""Problems of one data set that is split over the nodes, where every node and column has a model of its own."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from klatsch.arguments import number, whole
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
    score: ClassVar[str]  # what a model is measured by, the headline
    shards: Tensor  # (M, n): the numbers of each node's samples
    batch: int  # samples per node and round
    alpha: float  # how much the nodes' data differ
    data: tuple[Tensor, ...]  # of all nodes
    fresh: Tensor  # (d,): the parameters of the fresh model
    networks: Sequence[Self] = ()  # the problems of which this one is a stack
    shown = ("alpha", "batch", "seed")

    def _split(self, classes: ArrayLike, nodes: int, alpha: float, batch: int, seed: int) -> None:
        """Give every node its samples: of some classes more than of others."""
        self.nodes, self.alpha, self.batch, self.seed = int(nodes), float(alpha), int(batch), int(seed)
        self.shards = torch.as_tensor(dirichlet(classes, nodes, alpha, seed))
        self.numbers, self.drawn = torch.arange(nodes), batch

    def _seal(self, content: str, tests: int, *parts: Tensor) -> None:
        """Remember what determines the gradients: data, model, test samples and anything else."""
        facts = hashlib.sha256(f"{content} {self.model} {tests}".encode()).hexdigest()
        self.sha256 = core.digest(self.shards, self.batch, self.seed, *parts, int(facts[:15], 16))

    @property
    @abstractmethod
    def model(self) -> str:
        """A text that tells apart models that compute different things with the same parameters."""

    @abstractmethod
    def loss(self, models: Tensor, numbers: Tensor) -> Tensor:
        """The sum of the mean losses of models, (S, d), each on the samples of its numbers, (S, batch)."""

    @abstractmethod
    def portions(self, models: Tensor, batch: int) -> list[int]:
        """How many models to train at once, portion by portion."""

    @abstractmethod
    def scores(self, models: Tensor) -> Tensor:
        """The score of models, (S, d), on the test data; on some of them, if the problem is brief."""

    def start(self) -> Tensor:
        return self.fresh

    def slope(self, models: Tensor, numbers: Tensor) -> Tensor:
        """The gradients of models, (S, d), on the samples of these numbers, (S, batch)."""
        count, sizes, gradients = len(models), self.portions(models, numbers.shape[1]), []
        if missing := sum(sizes) - count:  # filled up to sizes that are compiled
            models, numbers = (torch.cat([v, v[:1].expand(missing, -1)]) for v in (models, numbers))
        for some, chosen in zip(torch.split(models, sizes), torch.split(numbers, sizes), strict=True):
            with torch.enable_grad():
                leaf = some.detach().requires_grad_()
                # Models share nothing, so the gradient of the sum is each model's own.
                gradients.append(torch.autograd.grad(self.loss(leaf, chosen), leaf)[0])
        return (gradients[0] if len(gradients) == 1 else torch.cat(gradients))[:count]

    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """The score: mean, smallest and largest over nodes, and of the averaged model; brief, the mean alone."""
        M, C, d = x.shape
        if self.brief:
            return {self.score: self.scores(x.reshape(-1, d)).view(M, C).mean(0)}
        scores = self.scores(torch.cat([x, x.mean(0, keepdim=True)]).view(-1, d)).view(M + 1, C)
        of_nodes, of_mean = scores[:M], scores[M]
        summary = {"": of_nodes.mean(0), "_min": of_nodes.amin(0), "_max": of_nodes.amax(0), "_of_mean": of_mean}
        return {f"{self.score}{name}": value for name, value in summary.items()}

    def by_node(self, x: Tensor) -> dict[str, Tensor]:
        in_full = replaced(self, brief=False)
        return {self.score: in_full.scores(x.reshape(-1, self.dim)).view(x.shape[:2])}

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


def dirichlet(labels: ArrayLike, nodes: int, alpha: float, seed: int = 0) -> NDArray[np.int64]:
    """Split samples over nodes, each with its own mixture of classes, drawn from Dirichlet(alpha).

    A small alpha gives each node few classes, a large one gives all the same mixture. Shards do not overlap and have
    the same size, len(labels) // nodes; the rest is not used. Mixtures are fitted to the sizes of the classes by
    alternating scaling, then rounded.

    Returns the numbers of the samples, (M, len(labels) // M), each node's in random order.
    """
    labels = np.asarray(labels)
    whole(nodes, "nodes", 1)
    whole(seed, "seed", 0)
    check_alpha(alpha)
    if labels.ndim != 1 or len(labels) < nodes:
        raise ValueError(f"labels of shape {labels.shape} for {nodes} nodes; give at least one sample per node")
    generator = np.random.default_rng([seed, nodes])
    _, classes = np.unique(labels, return_inverse=True)
    available = np.bincount(classes)
    size = len(labels) // nodes
    mixtures = generator.dirichlet(np.full(len(available), alpha), nodes)
    target = available * (size * nodes / available.sum())
    table = np.maximum(mixtures, 1e-12)
    for _ in range(1000):  # rows are scaled to the size of a shard, columns to the sizes of the classes, in turn
        table *= (target / table.sum(axis=0))[None, :]
        table *= (size / table.sum(axis=1))[:, None]
    counts = _rounded(table, available, size)
    pools = [generator.permutation(np.flatnonzero(classes == k)) for k in range(len(available))]
    parts = [np.split(pool, np.cumsum(counts[:, k]))[:-1] for k, pool in enumerate(pools)]
    return np.stack([generator.permutation(np.concatenate(shard)) for shard in zip(*parts, strict=True)])


def check_split(nodes: int, alpha: float, batch: int, seed: int, samples: int, what: str, more: str = "") -> None:
    """Refuse a split over nodes that does not fit the number of samples."""
    whole(nodes, "nodes", 1)
    whole(batch, "batch", 1)
    whole(seed, "seed", 0)
    check_alpha(alpha)
    if nodes * batch > samples:
        raise ValueError(
            f"nodes = {nodes} and batch = {batch}, but there are {samples:,} {what} to learn from; give fewer nodes or "
            f"a smaller batch{more}"
        )


def check_alpha(alpha: object) -> None:
    """Refuse a concentration that is not above 0."""
    number("alpha", alpha, lambda v: v > 0, "a number above 0, such as 0.1 (few classes per node) or 10 (all alike)")


def _rounded(table: NDArray[np.float64], available: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Whole numbers near the table, with exact row sums and no more of a class than there is."""
    counts = np.floor(np.minimum(table, available)).astype(np.int64)
    while (over := counts.sum(axis=0) - available).max() > 0:  # the last scaling was of the rows
        k = int(over.argmax())
        counts[counts[:, k].argmax(), k] -= 1
    for i in np.argsort(counts.sum(axis=1), kind="stable"):
        while counts[i].sum() < size:
            wish = np.where(counts.sum(axis=0) < available, table[i] - counts[i], -np.inf)
            counts[i, wish.argmax()] += 1
    return counts
