"""What a node minimises: the network minimises f(x) = 1/M sum_i f_i(x), and node i sees noisy gradients of f_i only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class Problem(Protocol):
    """A stochastic problem spread over nodes. This is all that the engines need.

    Randomness is a function of (seed, t, node): asked again it gives the same numbers, and for one node alone the same
    to rounding. Problems may offer more, which makes runs faster: see `Drawing` and `Quadratic`.
    """

    @property
    def nodes(self) -> int:
        """Number of nodes M."""
        ...

    @property
    def dim(self) -> int:
        """Number of parameters d."""
        ...

    def start(self) -> Tensor:
        """One common starting point, (d,)."""
        ...

    def grad(self, x: Tensor, t: int, nodes: Sequence[int] | None = None) -> Tensor:
        """Stochastic gradients of round t: x is (len(nodes), ..., d), all nodes where `nodes` is None."""
        ...

    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """How good the points x, (M, C, d), are: one number per column, by name."""
        ...


class Drawing(Protocol):
    """A problem that can draw the randomness of many rounds at once, and live in any dtype and on any device."""

    columns: int  # C, where the problem itself differs between columns; else 1

    def to(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The same problem with its tensors elsewhere."""
        ...

    def draw(self, t: Tensor) -> Tensor:
        """The randomness of rounds t, (len(t), M, ...)."""
        ...

    def gradient(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The gradients of one round at x, (M, C, d), from what was drawn for it, (M, ...)."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the gradients."""
        ...


class Headline(NamedTuple):
    """The metric of a problem by which learning rates are chosen, and which figures show."""

    metric: str
    text: str
    largest: bool = False  # whether large is good


DISTANCE = Headline("distance", "squared distance to the optimum, mean over nodes")


class Quadratic(NamedTuple):
    """Gradients g = x H_i + sum_r scale[c, r] rows[i, r] + noise[c] xi: what the fused engine understands."""

    H: Tensor  # (M, d, d), symmetric
    rows: Tensor  # (M, R, d)
    scale: Tensor  # (C, R)
    noise: Tensor  # (C,)


def chosen(nodes: Sequence[int] | None, count: int) -> Tensor:
    """The numbers of the nodes that are asked, as a tensor.

    Raises:
        ValueError: there is no such node.
    """
    if nodes is None:
        return torch.arange(count)
    numbers = torch.as_tensor(list(nodes))
    if numbers.ndim != 1 or numbers.numel() == 0 or numbers.min() < 0 or numbers.max() >= count:
        raise ValueError(f"nodes = {list(nodes)}; give numbers from 0 to {count - 1}")
    return numbers


def points(x: Tensor, nodes: int, dim: int, columns: int) -> Tensor:
    """Points as (nodes, C, d), where (nodes, d) and, for a single node, (d,) are allowed too.

    Raises:
        ValueError: x has another shape, or leaves open which column is meant.
    """
    wanted = f"({nodes}, {columns}, {dim})" if columns > 1 else f"({nodes}, columns, {dim}) or ({nodes}, {dim})"
    fits = x.ndim in (1, 2, 3) and x.shape[-1] == dim and (x.shape[0] == nodes if x.ndim > 1 else nodes == 1)
    if not fits or (columns > 1 and (x.ndim < 3 or x.shape[1] != columns)):
        raise ValueError(f"x has shape {tuple(x.shape)}; give {wanted}")
    return x.reshape(nodes, -1, dim)


def digest(*parts: Tensor | int) -> str:
    """SHA-256 of tensors and numbers, equal for equal content on every machine."""
    hashed = hashlib.sha256()
    for part in parts:
        tensor = torch.as_tensor(part)
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


def array(name: str, value: Any, ndim: int, wanted: str) -> Tensor:
    """Numbers from anything that holds them, as float64.

    Raises:
        ValueError: it has another number of dimensions, or a number that is not finite.
    """
    try:
        array = value.detach().cpu().double() if isinstance(value, Tensor) else torch.tensor(np.asarray(value, float))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no array of numbers ({error}); give shape {wanted}") from None
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; give {ndim} dimensions, {wanted}")
    if not torch.isfinite(array).all():
        place = tuple(int(v) for v in (~torch.isfinite(array)).nonzero()[0])
        raise ValueError(f"{name}{list(place)} = {array[place].item()}; give finite numbers only")
    return array
