"""Regularised logistic regression over label-skewed data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klatsch.arguments import whole
from klatsch.problems import base as core
from klatsch.problems import draws
from klatsch.problems.partition import dirichlet


class LogisticRegression:
    """f_i(x) = mean over the samples (a, y) of node i of log(1 + exp(-y a'x)) + l2/2 ||x||², with y = 1 or -1.

    A stochastic gradient is that of a mini-batch, drawn with replacement from the node's own samples. The
    synthetic data are a ~ N(0, I) and y = 1 with probability 1 / (1 + exp(-a'u)) for one hidden u ~ N(0, 4 I/d).

    Args:
        nodes: number of nodes M.
        dim: number of parameters d.
        samples: samples per node.
        batch: size of a mini-batch.
        l2: strength of the regularisation, above 0 (so that there is one optimum).
        alpha: how label-skewed the nodes are: Dirichlet(alpha) over the two classes; small is skewed.
        seed: of data, partition and mini-batches.
    """

    columns = 1
    per_column = ()

    def __init__(
        self,
        nodes: int,
        dim: int = 20,
        samples: int = 200,
        batch: int = 1,
        l2: float = 1e-2,
        alpha: float = 0.1,
        seed: int = 0,
    ) -> None:
        M, d, n = whole(nodes, "nodes", 1), whole(dim, "dim", 1), whole(samples, "samples", 1)
        seed = whole(seed, "seed", 0)
        once, every = torch.zeros(1, dtype=torch.long), torch.arange(M * n)
        features = draws.normals(seed, draws.FEATURES, once, every, d)[0]
        hidden = 2 * draws.normals(seed, draws.CENTRE, once, once, d)[0, 0] / d**0.5
        chance = draws.whole_numbers(seed, draws.LABELS, once, every, 1, 1 << 30)[0, :, 0] / (1 << 30)
        labels = (chance < torch.sigmoid(features @ hidden)).long()
        self._fill(features, labels, dirichlet(labels.numpy(), M, alpha, seed), batch, l2, seed)

    @classmethod
    def from_arrays(
        cls,
        features: Any,
        labels: Any,
        nodes: int | None = None,
        batch: int = 1,
        l2: float = 1e-2,
        alpha: float = 0.1,
        seed: int = 0,
    ) -> LogisticRegression:
        """The same problem from your own data: one heap that is split over the nodes, or data of each node.

        Args:
            features: (samples, d), which are split over `nodes`; or (nodes, samples, d), which stay where they are.
            labels: (samples,) or (nodes, samples), two different values; the larger one is y = 1.
            nodes: number of nodes M to split over; not needed where the data are split already.
            batch: size of a mini-batch.
            l2: strength of the regularisation, above 0.
            alpha: how label-skewed the nodes are: Dirichlet(alpha) over the two classes; small is skewed.
            seed: of partition and mini-batches.

        Raises:
            ValueError: the shapes do not fit each other, a number is not finite, or there are not two classes.
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

    def _fill(self, features: Tensor, labels: Tensor, shards: Any, batch: int, l2: float, seed: int) -> None:
        if isinstance(l2, bool) or not isinstance(l2, int | float | np.number) or not 0 < l2 < np.inf:
            raise ValueError(f"l2 = {l2!r}; give a number above 0, such as 0.01, so that there is one optimum")
        self.seed, self.batch, self.l2 = seed, whole(batch, "batch", 1), float(l2)
        shards = torch.as_tensor(shards)
        # y a instead of a and y: the loss of a sample depends on their product only.
        self._signed = features[shards] * (2.0 * labels[shards] - 1.0)[:, :, None]  # (M, n, d)
        self.labels = labels[shards]
        self.optimum: Tensor = self._newton()
        self._fingerprint = core.digest(self._signed, self.batch, torch.tensor(self.l2, dtype=torch.float64), seed)

    # --- what the theory asks of a problem ---------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        """Number of nodes M."""
        return self._signed.shape[0]

    @property
    def dim(self) -> int:
        """Number of parameters d."""
        return self._signed.shape[-1]

    @property
    def L(self) -> float:
        """Smoothness: ¼ of the largest eigenvalue of any node's mean of a a', plus l2 (Assumption 2.1)."""
        A = self._signed.double()
        return float(torch.linalg.eigvalsh(A.mT @ A / A.shape[1]).max() / 4) + self.l2

    @property
    def D1(self) -> Tensor:
        """The distance ||w_1 - x*|| of the start from the optimum."""
        return self.optimum.square().sum(-1).sqrt()

    @property
    def zeta(self) -> Tensor:
        """Heterogeneity at the optimum, sqrt(1/M sum_i ||grad f_i(x*)||²)."""
        exact: Tensor = self._slope(self.optimum.expand(self.nodes, 1, -1), self._signed)
        return exact.square().sum(-1).mean(0).sqrt()

    # --- gradients ---------------------------------------------------------------------------------------------

    def start(self) -> Tensor:
        """The origin."""
        return torch.zeros(self.dim, dtype=self._signed.dtype, device=self._signed.device)

    def draw(self, t: Tensor) -> Tensor:
        """The samples of the mini-batches of rounds t, (len(t), M, batch)."""
        device = self._signed.device
        return self._batches(t.to(device), torch.arange(self.nodes, device=device))

    def gradient(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """The gradients at x, (M, C, d), on all samples where nothing is drawn."""
        return self._slope(x, self._signed if drawn is None else _picked(self._signed, drawn))

    def exact(self, x: Tensor) -> Tensor:
        """The gradients at x, (M, C, d), of all samples."""
        return self.gradient(x, None)

    def grad(self, x: Tensor, t: int, nodes: Sequence[int] | None = None) -> Tensor:
        """Stochastic gradients of round t at x, (m, C, d), (m, d) or, for a single node, (d,)."""
        asked = core.chosen(nodes, self.nodes)
        points = core.points(x, len(asked), self.dim, self.columns)
        drawn = self._batches(torch.tensor([t]), asked)[0].to(x.device)
        samples = self._signed[asked.to(self._signed.device)].to(x)
        return self._slope(points, _picked(samples, drawn)).reshape(x.shape)

    def _batches(self, t: Tensor, nodes: Tensor) -> Tensor:
        return draws.whole_numbers(self.seed, draws.BATCHES, t, nodes, self.batch, self._signed.shape[1])

    def _slope(self, x: Tensor, samples: Tensor) -> Tensor:
        wrong = torch.sigmoid(-(x @ samples.mT))  # (M, C, n): how far each sample is from being explained
        return self.l2 * x - wrong @ samples / samples.shape[1]

    # --- how good a point is -----------------------------------------------------------------------------------

    def loss(self, x: Tensor) -> Tensor:
        """f(x) for points (..., d)."""
        flat = x.reshape(-1, self.dim)
        samples = self._signed.reshape(-1, self.dim)
        rows = max(1, 20_000_000 // len(samples))  # so that ten thousand points do not need all the memory at once
        losses = [torch.nn.functional.softplus(-(part @ samples.mT)).mean(-1) for part in torch.split(flat, rows)]
        return (torch.cat(losses) + 0.5 * self.l2 * flat.square().sum(-1)).reshape(x.shape[:-1])

    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """Squared distance to the optimum, mean over nodes; loss gap at the network mean and at the worst node."""
        best = self.loss(self.optimum)[0]
        return {
            "distance": (x - self.optimum).square().sum(-1).mean(0),
            "loss_gap": (self.loss(x.mean(0)) - best).clamp(min=0),
            "worst_loss_gap": (self.loss(x).amax(0) - best).clamp(min=0),
        }

    def _newton(self) -> Tensor:
        """The optimum (1, d), by Newton's method with halved steps, until a step is below 1e-12."""
        samples = self._signed.reshape(-1, self.dim)
        x = torch.zeros(1, self.dim, dtype=samples.dtype)
        for _ in range(100):
            chance = torch.sigmoid(-(x @ samples.mT))[0]
            slope = self.l2 * x - chance[None] @ samples / len(samples)
            curvature = (samples.mT * (chance * (1 - chance))) @ samples / len(samples)
            curvature += self.l2 * torch.eye(self.dim, dtype=samples.dtype)
            step = torch.linalg.solve(curvature, slope[0])
            here, size = self.loss(x) * (1 + 1e-14), 1.0
            while self.loss(x - size * step) > here and size > 1e-4:
                size /= 2
            x = x - size * step
            if torch.linalg.vector_norm(step) < 1e-12 * (1 + torch.linalg.vector_norm(x)):
                break
        return x

    def to(self, dtype: torch.dtype, device: torch.device) -> LogisticRegression:
        """The same problem with its tensors in another dtype or on another device."""
        other = copy.copy(self)
        other._signed, other.optimum = (v.to(device, dtype) for v in (self._signed, self.optimum))
        return other

    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the gradients."""
        return self._fingerprint

    def __repr__(self) -> str:
        return f"<LogisticRegression: {self.nodes} nodes, {self.dim} parameters, batch {self.batch}, seed {self.seed}>"


def _picked(samples: Tensor, drawn: Tensor) -> Tensor:
    """The samples (m, batch, d) that were drawn, (m, batch), out of (m, n, d)."""
    return samples.gather(1, drawn[:, :, None].expand(-1, -1, samples.shape[-1]))
