"""Problems of several networks as one: their nodes side by side, each with its own data and draws."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klatsch.problems import draws
from klatsch.problems.images.networks import architecture


class JoinedLeastSquares:
    """What an engine needs to take the gradients of several `LeastSquares` in one product.

    It has no optimum of its own: measure each problem by itself.

    Args:
        problems: with the same number of parameters, and the same noise per column.

    Raises:
        ValueError: they differ.
    """

    def __init__(self, problems: Sequence[Any]) -> None:
        first = problems[0]
        for other in problems[1:]:
            if other.dim != first.dim or not torch.equal(other.sigma, first.sigma):
                raise ValueError(
                    f"{other!r} does not fit {first!r} in one stack: give all the same parameters and noise levels"
                )
        self.nodes, self.dim, self.columns = sum(p.nodes for p in problems), first.dim, first.columns
        parts = [problem.quadratic() for problem in problems]
        self._noise = parts[0].noise
        self._H = torch.cat([part.H for part in parts])
        self._offset = torch.cat([part.scale @ part.rows for part in parts])  # the gradients at 0
        # The address of every node's draws: they are those that it has in its own network.
        self._seeds = torch.cat([torch.full((p.nodes,), p.seed) for p in problems])
        self._numbers = torch.cat([torch.arange(p.nodes) for p in problems])

    def draw(self, t: Tensor) -> Tensor:
        """Standard normals for rounds t, (len(t), nodes, d)."""
        t = t.to(self._H.device)
        return draws.normals(self._seeds, draws.NOISE, t, self._numbers, self.dim, self._H.dtype)

    def gradient(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The gradients at x, (nodes, C, d)."""
        return torch.baddbmm(self._offset, x, self._H).addcmul_(self._noise[:, None], drawn[:, None, :])

    def to(self, dtype: torch.dtype, device: torch.device) -> JoinedLeastSquares:
        """The same with its tensors in another dtype or on another device."""
        other = copy.copy(self)
        other._H, other._offset, other._noise = (v.to(device, dtype) for v in (self._H, self._offset, self._noise))
        other._seeds, other._numbers = self._seeds.to(device), self._numbers.to(device)
        return other


class JoinedImages:
    """What an engine needs to take the gradients of several `ImageClassification` in one stack."""

    columns = 1

    def __init__(self, problems: Sequence[Any]) -> None:
        first = problems[0]
        for other in problems[1:]:
            same = other.batch == first.batch and other._data.images is first._data.images
            if not same or architecture(other._stacked.module) != architecture(first._stacked.module):
                raise ValueError(
                    f"{other!r} does not fit {first!r} in one stack: give all the same model, data and batch"
                )
        self._problems, self._first = list(problems), first
        self.nodes, self.dim, self.drawn = sum(p.nodes for p in problems), first.dim, first.batch

    def to(self, dtype: torch.dtype, device: torch.device) -> JoinedImages:
        """The same on another device."""
        other = copy.copy(self)
        other._first = self._first.to(dtype, device)
        other._problems = []
        for problem in self._problems:
            moved = copy.copy(problem)
            moved._data = other._first._data  # one copy of the images for all
            other._problems.append(moved)
        return other

    def draw(self, t: Tensor) -> Tensor:
        """The numbers of the images of rounds t, (len(t), nodes, batch)."""
        return torch.cat([problem.draw(t) for problem in self._problems], dim=1)

    def gradient(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The gradients at x, (nodes, C, d)."""
        gradients: Tensor = self._first.gradient(x, drawn)
        return gradients
