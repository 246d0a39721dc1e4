"""Where the weight matrices of a model lie in its flat vector of parameters, for directions that need whole ones."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class WeightMatrix(NamedTuple):
    """A weight matrix among the parameters: row by row from `start` on."""

    start: int
    outputs: int  # its rows, as in nn.Linear; those of a convolution are its kernels
    inputs: int
    turned: bool = False  # whether it lies there column by column

    @property
    def end(self) -> int:
        return self.start + self.outputs * self.inputs

    def wide(self, vector: Tensor) -> Tensor:
        """A view of its numbers in vectors, (..., d), as a matrix that is at least as wide as high."""
        rows, columns = (self.inputs, self.outputs) if self.turned else (self.outputs, self.inputs)
        matrix = vector[..., self.start : self.end].view(*vector.shape[:-1], rows, columns)
        return matrix.mT if rows > columns else matrix
