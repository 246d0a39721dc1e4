"""One node's rows of the gossip matrices, and what it does with what it hears."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.topology import Topology
from klatsch.topology.matrix import Matrix, exact_weights, mapped


class Heard(NamedTuple):
    """What came from the neighbours under one tag, and what to do with it."""

    vectors: list[Tensor]
    weights: list[float]  # P_ij of those who sent them
    away: float | None  # where columns sum to 1 instead of rows: what this node gives away of its own value

    def mixed(self, v: Tensor, others: list[Tensor]) -> Tensor:
        """v_i + sum_j P_ij (v_j - v_i): the difference form, which leaves equal values as they are.

        Where the columns sum to 1 instead of the rows (push-sum), what others take is what this node gives away:
        v_i - sum_k P_ki v_i + sum_j P_ij v_j.
        """
        if self.away is not None:
            result = v * (1.0 - self.away)
            for weight, other in zip(self.weights, others, strict=True):
                result.add_(other, alpha=weight)
            return result
        result = v
        for k, (weight, other) in enumerate(zip(self.weights, others, strict=True)):
            result = torch.lerp(v, other, weight) if k == 0 else result.add_(other - v, alpha=weight)
        return result

    def flow(self, v: Tensor, others: list[Tensor]) -> Tensor:
        """sum_j P_ij (v_j - v_i), summed as differences; for push-sum sum_j P_ij v_j - sum_k P_ki v_i."""
        if self.away is not None:
            result = v * -self.away
            for weight, other in zip(self.weights, others, strict=True):
                result.add_(other, alpha=weight)
            return result
        if not others:
            return torch.zeros_like(v)
        result = (others[0] - v).mul_(self.weights[0])
        for weight, other in zip(self.weights[1:], others[1:], strict=True):
            result.add_(other - v, alpha=weight)
        return result


class Row(NamedTuple):
    """One node's part of one gossip matrix, by node."""

    links: dict[int, float]  # P_ij: what it gives to the values that it hears
    away: dict[int, float]  # P_ki: what those who hear it give to its value


class Weights:
    """One node's parts of the gossip matrices.

    What this node would give to the value of a lost one it gives to its own, and rows still sum to 1; or, for push-sum,
    what it would have passed on to the lost one it keeps, and columns do.
    """

    def __init__(self, topology: Topology, rank: int, dtype: torch.dtype, push: bool = False) -> None:
        self._by_rows = topology.row_stochastic and not push

        def own(P: Matrix) -> Row:
            links, _ = exact_weights(P, dtype, by_rows=self._by_rows)
            row, column = links[[rank], :].tocoo(), links[:, [rank]].tocoo()
            return Row(
                dict(zip(row.coords[1].tolist(), row.data.tolist(), strict=True)),
                dict(zip(column.coords[0].tolist(), column.data.tolist(), strict=True)),
            )

        self._rows = mapped(topology.matrices, own)

    def heard(self, vectors: list[tuple[int, Tensor]], t: int, lost: Collection[int]) -> Heard:
        """What was heard in round t, by node, with its weights."""
        row = self._rows[(t - 1) % len(self._rows)]
        away = None if self._by_rows else sum(weight for node, weight in row.away.items() if node not in lost)
        return Heard([vector for _, vector in vectors], [row.links[node] for node, _ in vectors], away)
