"""Gossip of all nodes at once: v <- P v over the first axis, dense or sparse, whichever is faster at this size.

It is computed as v + Q v, where Q is P minus the identity, with sums of exactly zero: in float32 weights like 1/3 do
not add up to 1, and over 100,000 rounds the plain sum drifts. A flow is Q times the differences between nodes: rules
add flows up, so those of large, nearly equal numbers must not carry the rounding of large numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from scipy.sparse import block_diag, csr_array, diags_array
from torch import Tensor

from klatsch.rules import Flow
from klatsch.rules.base import Silent, Tensors
from klatsch.topology import Topology
from klatsch.topology.matrix import exact_weights, mapped

DENSE_NODES = {"cpu": 24, "cuda": 256}  # below this a dense product is faster than a sparse one
WIDEST = 1 << 19  # columns of a sparse product: with some millions of them cuSPARSE computes nothing, without an error


class StackedMix:
    """The gossip of a topology, or of several side by side, on tensors (M, ...), for every round.

    Nodes that are shuffled take their places, mix with the matrix of their phase, and go back.
    """

    def __init__(self, *topologies: Topology, dtype: torch.dtype, device: torch.device) -> None:
        matrices = side_by_side(topologies)
        self._topologies, self._lossy = topologies, any(topology.loss for topology in topologies)
        self._shuffled = not self._lossy and any(topology.shuffle is not None for topology in topologies)
        self.period, size = len(matrices), matrices[0].shape[0]
        dense = size <= DENSE_NODES[device.type] or 4 * max(P.nnz for P in matrices) > size**2
        dense &= len(topologies) == 1  # 0 times the inf of a network that diverges would reach the others
        by_rows = all(topology.row_stochastic for topology in topologies)

        sizes = torch.tensor([topology.size for topology in topologies], device=device)
        first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)  # by node: the first one of its network
        alike = None if not by_rows else slice(0, 1) if len(topologies) == 1 else first

        def product(P: csr_array) -> Tensor | None:
            links, own = exact_weights(P, dtype, by_rows=by_rows)
            return _tensor(csr_array(links - diags_array(own)), dtype, device, dense) if links.nnz else None

        def flow(t: int, Q: Tensor | None) -> Flow:
            silent = _silent(topologies, t, sizes, dtype)
            # Of several networks, only those with equal audiences run side by side over a channel that remembers.
            return Flow(partial(_flow, Q, alike), partial(_mix, Q), silent, topologies[0].audience(t))

        self._made: Callable[[int, csr_array], Flow] = lambda t, P: flow(t, product(P))
        self._flows = [] if self._lossy else [flow(t, Q) for t, Q in enumerate(mapped(matrices, product), 1)]
        self._device = device

    def in_round(self, t: int, places: Tensor | None = None) -> Flow:
        """The flow of round t; `places` are those of this round, where nodes are shuffled."""
        if self._lossy:
            return self._made(t, csr_array(block_diag([topology.matrix(t) for topology in self._topologies])))
        flow = self._flows[(t - 1) % self.period]
        if not self._shuffled or flow.silent is True:
            return flow
        order, back = self._places(t - 1, t)[0] if places is None else places
        return flow.inside(partial(_moved, order, back))

    def places(self, done: int, until: int) -> Tensor | None:
        """Who stands where in rounds done + 1 to until, and the way back, (rounds, 2, M); None if all nodes stay."""
        return self._places(done, until) if self._shuffled else None

    def _places(self, done: int, until: int) -> Tensor:
        first = np.cumsum([0, *(topology.size for topology in self._topologies)])
        networks = [*zip(first[:-1], self._topologies, strict=True)]
        orders = [np.concatenate([k + own.places(t) for k, own in networks]) for t in range(done + 1, until + 1)]
        return torch.tensor(np.array([(order, np.argsort(order)) for order in orders]), device=self._device)


def _silent(topologies: Sequence[Topology], t: int, sizes: Tensor, dtype: torch.dtype) -> Silent:
    """Whether nobody talks in round t; by node, (M, 1, 1), where networks differ."""
    silent = [not topology.speaks(t) for topology in topologies]
    if len(set(silent)) == 1:
        return silent[0]
    return torch.tensor(silent, dtype=dtype, device=sizes.device).repeat_interleave(sizes)[:, None, None]


def _moved(order: Tensor, back: Tensor, function: Callable[..., Tensors], *tensors: Tensor) -> Tensors:
    return tuple(v[back] for v in function(*(v[order] for v in tensors)))


def _flow(Q: Tensor | None, alike: slice | Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    if Q is None:
        return tuple(torch.zeros_like(v) for v in tensors)
    flat = [v.reshape(v.shape[0], -1) for v in tensors]
    if alike is not None:  # the rows of Q sum to 0, so what all nodes share drops out
        flat = [v - v[alike] for v in flat]
    return tuple(_in_parts(Q, f, Q.matmul).reshape(v.shape) for f, v in zip(flat, tensors, strict=True))


def _mix(Q: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    if Q is None:
        return tensors  # a round in which nobody talks costs nothing
    flat = [v.reshape(v.shape[0], -1) for v in tensors]
    mixed = [_in_parts(Q, f, lambda part: torch.addmm(part, Q, part)) for f in flat]
    return tuple(m.reshape(v.shape) for m, v in zip(mixed, tensors, strict=True))


def _in_parts(Q: Tensor, f: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A product with Q that is columnwise, of at most so many columns at once if Q is sparse."""
    if Q.layout == torch.strided or f.shape[1] <= WIDEST:
        return product(f)
    return torch.cat([product(part) for part in torch.split(f, WIDEST, dim=1)], dim=1)


def common_period(topologies: Sequence[Topology]) -> int:
    """Rounds after which all of them repeat."""
    return math.lcm(*(topology.period for topology in topologies))


def side_by_side(topologies: Sequence[Topology]) -> list[csr_array]:
    """The joint gossip matrices of several separate networks, over their common period, by places."""
    if len(topologies) == 1:
        return list(topologies[0].matrices)
    rounds = [[own.matrices[t % own.period] for own in topologies] for t in range(common_period(topologies))]
    keys = [tuple(map(id, parts)) for parts in rounds]
    joined = {key: csr_array(block_diag(parts)) for key, parts in dict(zip(keys, rounds, strict=True)).items()}
    return [joined[key] for key in keys]  # equal rounds, such as silent ones, share a matrix


def _tensor(Q: csr_array, dtype: torch.dtype, device: torch.device, dense: bool) -> Tensor:
    if dense:
        return torch.tensor(Q.toarray(), dtype=dtype, device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks are)")
        first, others = (torch.tensor(v.astype(np.int32)) for v in (Q.indptr, Q.indices))
        values = torch.tensor(Q.data, dtype=dtype)
        return torch.sparse_csr_tensor(first, others, values, size=Q.shape, device=device, check_invariants=True)
