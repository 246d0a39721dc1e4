"""Regularised logistic regression over label-skewed data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from klatsch.arguments import number, whole
from klatsch.problems import base as core
from klatsch.problems import draws
from klatsch.problems.sharded import dirichlet


class LogisticRegression(core.Convex):
    """f_i(x) = mean over the samples (a, y) of node i of log(1 + exp(-y a'x)) + l2/2 ||x||², with y = 1 or -1.

    A stochastic gradient is that of a mini-batch, drawn with replacement from the node's samples. The synthetic data
    are a ~ N(0, I) and y = 1 with probability 1 / (1 + exp(-a'u)) for one hidden u ~ N(0, 4 I/d).

    Args:
        nodes: number of nodes M.
        dim: number of parameters d.
        samples: samples per node, or per node of the pool.
        batch: size of a mini-batch.
        l2: strength of the regularisation, above 0 (so that there is one optimum).
        alpha: how label-skewed the nodes are: Dirichlet(alpha) over the two classes; small is skewed.
        seed: of data, partition and mini-batches.
        pool: the data of so many nodes, a multiple of `nodes`: each holds those of several, so that networks of
            different sizes minimise the same function; by default those of `nodes`.
    """

    of_nodes = ("_signed", "labels")
    shown = ("batch", "seed")

    def __init__(
        self,
        nodes: int,
        dim: int = 20,
        samples: int = 200,
        batch: int = 1,
        l2: float = 1e-2,
        alpha: float = 0.1,
        seed: int = 0,
        pool: int | None = None,
    ) -> None:
        M, d, n = whole(nodes, "nodes", 1), whole(dim, "dim", 1), whole(samples, "samples", 1)
        seed, of = whole(seed, "seed", 0), core.pooled(M, pool)
        once, every = torch.zeros(1, dtype=torch.long), torch.arange(of * n)
        features = draws.normals(seed, draws.FEATURES, once, every, d)[0]
        hidden = 2 * draws.normals(seed, draws.CENTRE, once, once, d)[0, 0] / d**0.5
        chance = draws.whole_numbers(seed, draws.LABELS, once, every, 1, 1 << 30)[0, :, 0] / (1 << 30)
        labels = (chance < torch.sigmoid(features @ hidden)).long()
        shards = dirichlet(labels.numpy(), of, alpha, seed)
        self._fill(features, labels, shards.reshape(M, -1), batch, l2, seed)

    @classmethod
    def from_arrays(
        cls,
        features: ArrayLike | Tensor,
        labels: ArrayLike | Tensor,
        nodes: int | None = None,
        batch: int = 1,
        l2: float = 1e-2,
        alpha: float = 0.1,
        seed: int = 0,
    ) -> LogisticRegression:
        """The same problem from your own data, of one heap or of each node.

        Features are (samples, d), to be split over `nodes`, or (nodes, samples, d), which stay where they are. Labels
        are (samples,) or (nodes, samples), of two different values; the larger one is y = 1. The rest is as above.
        """
        split = np.ndim(features) == 3
        A = core.array("features", features, 3 if split else 2, "(samples, parameters) or (nodes, samples, parameters)")
        y = core.array("labels", labels, 2 if split else 1, "(nodes, samples)" if split else "(samples,)")
        if A.shape[:-1] != y.shape or 0 in A.shape:
            raise ValueError(
                f"features have shape {tuple(A.shape)} but labels {tuple(y.shape)}; give one label for every row"
            )
        classes = torch.unique(y)
        if len(classes) != 2:
            raise ValueError(f"labels have {len(classes)} different values; give two classes, such as 0 and 1")
        seed = whole(seed, "seed", 0)
        self = cls.__new__(cls)
        positive = (y == classes[1]).long().flatten()
        if split:
            if nodes not in (None, len(A)):
                raise ValueError(f"nodes = {nodes}, but the features are those of {len(A)} nodes; leave nodes out")
            shards = torch.arange(y.numel()).reshape(y.shape)
        elif nodes is None:
            raise ValueError("nodes = None; give the number of nodes to split the samples over")
        else:
            shards = torch.as_tensor(dirichlet(positive.numpy(), nodes, alpha, seed))
        self._fill(A.reshape(-1, A.shape[-1]), positive, shards, batch, l2, seed)
        return self

    def _fill(self, features: Tensor, labels: Tensor, shards: ArrayLike, batch: int, l2: float, seed: int) -> None:
        wanted = "a number above 0, such as 0.01, so that there is one optimum"
        self.seed, self.batch, self.l2 = seed, whole(batch, "batch", 1), number("l2", l2, lambda v: v > 0, wanted)
        shards = torch.as_tensor(shards)
        # y a instead of a and y: the loss of a sample depends on their product only.
        self._signed = features[shards] * (2.0 * labels[shards] - 1.0)[:, :, None]  # (M, n, d)
        self.nodes, _, self.dim = self._signed.shape
        self.samples = shards.numel()
        self.labels, self.numbers = labels[shards], torch.arange(self.nodes)
        self.optimum = self._newton()
        self.sha256 = core.digest(self._signed, self.batch, torch.tensor(self.l2, dtype=torch.float64), seed)

    def among(self, nodes: Sequence[int]) -> LogisticRegression:
        some = self.part(nodes)
        some.samples, some.optimum = some.labels.numel(), some._newton()
        return some

    def on_fewer(self, nodes: int, seed: int) -> LogisticRegression:
        """The same data on so many nodes, each with those of several, and mini-batches of another seed."""
        labels = self.labels.flatten()
        features = self._signed.flatten(0, 1) * (2.0 * labels - 1.0)[:, None]
        fewer, shards = type(self).__new__(type(self)), torch.arange(len(labels)).reshape(nodes, -1)
        fewer._fill(features, labels, shards, self.batch, self.l2, seed)
        return fewer

    @property
    def L(self) -> float:
        """Smoothness: ¼ of the largest eigenvalue of any node's mean of a a', plus l2 (Assumption 2.1)."""
        A = self._signed.double()
        return float(torch.linalg.eigvalsh(A.mT @ A / A.shape[1]).max() / 4) + self.l2

    def draw(self, t: Tensor) -> Tensor:
        """The samples of the mini-batches of rounds t, (len(t), M, batch)."""
        t, samples = t.to(self.numbers.device), self._signed.shape[1]
        return draws.whole_numbers(self.seed, draws.BATCHES, t, self.numbers, self.batch, samples)

    def gradient(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        samples = self._signed
        if drawn is not None:
            samples = samples.gather(1, drawn[:, :, None].expand(-1, -1, self.dim))
        return self._slope(x, samples)

    def logistic(self) -> core.Logistic | None:
        """The parts of the gradient, for the fused engine; None in a subclass that changes the gradient."""
        same = type(self).gradient is LogisticRegression.gradient and type(self).draw is LogisticRegression.draw
        return core.Logistic(self._signed, self.l2, self.batch) if same else None

    def _slope(self, x: Tensor, samples: Tensor) -> Tensor:
        wrong = torch.sigmoid(-(x @ samples.mT))  # (..., C, n): how wrong the model is on each sample
        return self.l2 * x - wrong @ samples / samples.shape[-2]

    def loss(self, x: Tensor) -> Tensor:
        """f(x) for points (..., d)."""
        flat = x.reshape(-1, self.dim)
        samples = self._signed.reshape(-1, self.dim)
        rows = max(1, 20_000_000 // len(samples))  # at a time: ten thousand points would need too much memory
        losses = [torch.nn.functional.softplus(-(part @ samples.mT)).mean(-1) for part in torch.split(flat, rows)]
        return (torch.cat(losses) + 0.5 * self.l2 * flat.square().sum(-1)).reshape(x.shape[:-1])

    def loss_gap(self, x: Tensor) -> Tensor:
        return (self.loss(x) - self.loss(self.optimum)[0]).clamp(min=0)

    def _newton(self) -> Tensor:
        """The optimum (1, d), by Newton's method with halved steps, until a step is below 1e-12."""
        samples = self._signed.reshape(-1, self.dim)
        x = torch.zeros(1, self.dim, dtype=samples.dtype)
        for _ in range(100):
            chance = torch.sigmoid(-(x @ samples.mT))[0]
            slope = self._slope(x, samples)
            curvature = (samples.mT * (chance * (1 - chance))) @ samples / len(samples)
            curvature += self.l2 * torch.eye(self.dim, dtype=samples.dtype)
            step = torch.linalg.solve(curvature, slope[0])
            loss, size = self.loss(x) * (1 + 1e-14), 1.0
            while self.loss(x - size * step) > loss and size > 1e-4:
                size /= 2
            x = x - size * step
            if torch.linalg.vector_norm(step) < 1e-12 * (1 + torch.linalg.vector_norm(x)):
                break
        return x
