"""The type of a gossip matrix, and lists of them in which one stands many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from scipy.sparse import csr_array, diags_array

if TYPE_CHECKING:
    import torch  # graphs alone need none of it

# In quotes, since older versions of SciPy do not take the element type at run time.
Matrix: TypeAlias = "csr_array[np.float64]"

Thing = TypeVar("Thing")
Made = TypeVar("Made")


def identity(size: int) -> Matrix:
    """The matrix of a round in which nobody talks."""
    return csr_array((np.ones(size), np.arange(size), np.arange(size + 1)), shape=(size, size))


def mapped(things: Sequence[Thing], make: Callable[[Thing], Made]) -> list[Made]:
    """make(P) of every P, computed once where the same object stands many times, as in silent rounds."""
    made = {number: make(P) for number, P in {id(P): P for P in things}.items()}
    return [made[id(P)] for P in things]


def exact_weights(P: Matrix, dtype: torch.dtype, by_rows: bool = True) -> tuple[Matrix, np.ndarray]:
    """The weights of the links, and what each node gives away, so that the two cancel without rounding.

    Weights are rounded to multiples of 2^-24 (float32) or 2^-53 (float64): sums of such numbers below 1 are exact. The
    rounding is the same for P_ij and P_ji, so a symmetric P stays symmetric and doubly stochastic.

    Args:
        P: the gossip matrix.
        dtype: of the run.
        by_rows: whether rows sum to 1; else columns do (push-sum).
    """
    unit = 2.0**24 if str(dtype) == "torch.float32" else 2.0**53
    links = csr_array(P - diags_array(P.diagonal()))
    links.eliminate_zeros()
    links.data = np.rint(links.data * unit) / unit
    return links, np.asarray(links.sum(axis=1 if by_rows else 0)).ravel()
