"""Messages: tensors side by side in one piece of memory, encoded, so that they travel together as bytes.

Only this file knows what the bytes mean; see wire/encodings.py for the encodings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.topology.channel import BLOCK
from klatsch.wire import encodings

ALIGNED = 8  # bytes: where a part may begin
PIECE = 1 << 30  # numbers per dot product; the limit on a GPU is twice that

Block = slice | None  # a slice of the vectors, or all of them


class Part(NamedTuple):
    """One tensor of a message, as it lies there."""

    numbers: Tensor  # of the state's dtype, bfloat16, or int8 codes
    scales: Tensor | None = None  # of int8 codes, (..., blocks)
    held: Tensor | None = None  # what both ends hold already, to which int8 codes are a difference

    def cut(self, block: Block) -> Part:
        """A slice of it; slices begin at multiples of 256."""
        if block is None:
            return self
        if self.scales is None or self.held is None:
            return Part(self.numbers[block])
        few = slice(block.start // BLOCK, encodings.scale_count(block.stop))
        return Part(self.numbers[block], self.scales[few], self.held[block])

    def write(self, v: Tensor) -> None:
        """Encode v."""
        if self.scales is None or self.held is None:
            self.numbers.copy_(v)
        else:
            codes, scales = encodings.quantized(v - self.held)
            self.numbers.copy_(codes)
            self.scales.copy_(scales)

    def read(self, dtype: torch.dtype) -> Tensor:
        """What it says."""
        if self.scales is None or self.held is None:
            return self.numbers.to(dtype)
        return self.held + encodings.restored(self.numbers, self.scales, dtype)

    def committed(self, blocks: Iterable[Block]) -> Part:
        """Hold what it says, slice by slice; from then on it says what is held."""
        if self.held is None:
            return self
        for block in blocks:
            (self.held if block is None else self.held[block]).copy_(self.cut(block).read(self.held.dtype))
        return Part(self.held)

    @property
    def is_sound(self) -> bool:
        """Whether its numbers are finite; int8 codes are if their scales are."""
        return is_sound((self.numbers if self.scales is None else self.scales).reshape(-1))


class Layout:
    """Where the tensors of a message lie in its bytes. Those as long as the vectors are encoded."""

    def __init__(self, shapes: Sequence[torch.Size], like: Tensor, wire: str) -> None:
        self._places: list[tuple[torch.Size, torch.dtype, int, int]] = []  # and where its scales and numbers begin
        self.size = 0
        for shape in shapes:
            is_encoded = wire != "float32" and shape[-1] == like.shape[-1]
            dtype = encodings.DTYPES[wire] if is_encoded else like.dtype
            numbers = self.size + (_aligned(_scale_bytes(shape)) if dtype is torch.int8 else 0)
            self._places.append((shape, dtype, self.size, numbers))
            self.size = numbers + _aligned(shape.numel() * dtype.itemsize)
        self.differences = {n: shape for n, (shape, dtype, *_) in enumerate(self._places) if dtype is torch.int8}
        self.exact = all(dtype is like.dtype for _, dtype, *_ in self._places)

    def parts(self, memory: Tensor, held: Mapping[int, Tensor]) -> list[Part]:
        """The tensors in the bytes of a message, and what is held of its sender, by part."""
        parts = []
        for n, (shape, dtype, begin, middle) in enumerate(self._places):
            part = Part(memory[middle : middle + shape.numel() * dtype.itemsize].view(dtype).view(shape))
            if dtype is torch.int8:
                scales = memory[begin : begin + _scale_bytes(shape)].view(torch.bfloat16)
                part = Part(part.numbers, scales.view(*shape[:-1], -1), held[n])
            parts.append(part)
        return parts


def is_sound(v: Tensor) -> bool:
    """Whether the squares of all numbers are finite; one dot product is 15 times as fast as testing each number."""
    v = v.float() if v.element_size() < 4 else v
    return bool(torch.isfinite(torch.stack([torch.dot(piece, piece) for piece in torch.split(v, PIECE)]).sum()))


def _scale_bytes(shape: torch.Size) -> int:
    return torch.bfloat16.itemsize * shape[:-1].numel() * encodings.scale_count(shape[-1])


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
