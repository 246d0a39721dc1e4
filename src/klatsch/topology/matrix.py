"""The type of a gossip matrix, and lists of them in which one stands many times."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from scipy.sparse import csr_array

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
