"""Many small GPTs on bytes, each with its own parameters, computed as one: parameters are rows (S, d)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from klatsch.columns import WeightMatrix
from klatsch.problems import draws

BYTES = 256  # values of a byte: what is read and predicted
SPREAD = 0.02  # of the weights at the start, as in GPT-2


@dataclass(frozen=True)
class StackedGPT:
    """S transformers: pre-norm, learned positions, GELU, one matrix for bytes that go in and come out, no biases.

    Norms have no parameters either: the matrix that follows can learn them. Products run over the stack, a matrix for
    each model; attention runs over all windows of all models at once.
    """

    context: int  # T, the most bytes that a prediction sees
    width: int
    depth: int
    heads: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The matrices of a model: bytes, positions, and four of every block."""
        width = self.width
        block = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        return [(BYTES, width), (self.context, width), *self.depth * block]

    @property
    def sizes(self) -> list[int]:
        return [rows * columns for rows, columns in self.shapes]

    @property
    def dim(self) -> int:
        """Number of parameters d of one model."""
        return sum(self.sizes)

    @property
    def matrices(self) -> list[WeightMatrix]:
        """Those of the blocks, whose rows are inputs."""
        places = zip(accumulate(self.sizes, initial=0), self.shapes, strict=False)
        return [WeightMatrix(start, columns, rows, turned=True) for start, (rows, columns) in places][2:]

    def start(self, seed: int) -> Tensor:
        """The parameters of a fresh model, (d,)."""
        once = torch.zeros(1, dtype=torch.long)
        parts = [draws.normals(seed, draws.WEIGHTS, once, once + k, size)[0, 0] for k, size in enumerate(self.sizes)]
        for out, down in zip(parts[3::4], parts[5::4], strict=True):  # those that add to the stream
            out.div_((2 * self.depth) ** 0.5)
            down.div_((2 * self.depth) ** 0.5)
        return SPREAD * torch.cat(parts)

    def logits(self, x: Tensor, given: Tensor) -> Tensor:
        """What models x, (S, d), say about the byte after each of the given ones, (S, B, T): (S, B T, 256)."""
        S, B, T = given.shape
        pieces = torch.split(x, self.sizes, dim=1)  # one operation: its gradient is one concatenation
        embedding, positions, *matrices = (p.view(S, *shape) for p, shape in zip(pieces, self.shapes, strict=True))
        rows = given + BYTES * torch.arange(S, device=x.device)[:, None, None]
        stream = functional.embedding(rows, embedding.flatten(0, 1)) + positions[:, None, :T]
        stream = stream.flatten(1, 2)
        for k in range(0, len(matrices), 4):
            inner, out, up, down = matrices[k : k + 4]
            stream = stream + self._attention(self._normed(stream) @ inner, B) @ out
            stream = stream + functional.gelu(self._normed(stream) @ up) @ down
        return self._normed(stream) @ embedding.mT

    def losses(self, x: Tensor, windows: Tensor) -> Tensor:
        """The mean cross-entropy of each model, (S,), over windows of T + 1 bytes, (S, B, T + 1), in nats."""
        windows = windows.long()
        said, wanted = self.logits(x, windows[:, :, :-1]), windows[:, :, 1:]
        found = functional.cross_entropy(said.flatten(0, 1), wanted.flatten(), reduction="none")
        return found.view(len(x), -1).mean(1)

    def _attention(self, inner: Tensor, batch: int) -> Tensor:
        """Causal attention; `inner` has queries, keys and values, (S, B T, 3 width)."""
        S, rows, _ = inner.shape
        shape = S * batch, rows // batch, self.heads, self.width // self.heads
        queries, keys, values = (part.view(shape).transpose(1, 2) for part in torch.split(inner, self.width, dim=2))
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).reshape(S, rows, self.width)

    def _normed(self, stream: Tensor) -> Tensor:
        return functional.layer_norm(stream, (self.width,))
