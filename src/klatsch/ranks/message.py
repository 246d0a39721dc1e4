"""Messages: tensors side by side in one piece of memory, encoded, so that they travel together as bytes.

Only this file knows what the bytes mean; see encodings.py for the encodings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.encodings import Encoding, Rounded

ALIGNED = 8  # bytes: where a part may begin
PIECE = 1 << 30  # numbers per dot product; the limit on a GPU is twice that

Block = slice | None  # a slice of the vectors, or all of them


class Part(NamedTuple):
    """One tensor of a message, as it lies there."""

    streams: Sequence[Tensor]
    numbers: int  # of the tensor, in its last axis
    encoding: Encoding
    held: Tensor | None = None  # what both ends hold already, if the streams are a difference to that

    def cut(self, block: Block) -> Part:
        """A slice of it; slices begin at multiples of 256."""
        if block is None:
            return self
        before, until = self.encoding.streams(block.start), self.encoding.streams(block.stop)
        ends = zip(self.streams, before, until, strict=True)
        streams = [stream[begin:end] for stream, (_, begin), (_, end) in ends]
        held = None if self.held is None else self.held[block]
        return Part(streams, block.stop - block.start, self.encoding, held)

    def write(self, v: Tensor) -> None:
        """Encode v."""
        encoded = self.encoding.encode(v) if self.held is None else self.encoding.encode_difference(v, self.held)
        for stream, given in zip(self.streams, encoded, strict=True):
            stream.copy_(given)

    def read(self, dtype: torch.dtype) -> Tensor:
        """What it says."""
        said = self.encoding.decode(self.streams, self.numbers, dtype)
        return said if self.held is None else self.held + said

    def some(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """What it says at some places."""
        if self.encoding.elementwise:
            return self.streams[0][..., places].to(dtype)
        return self.read(dtype)[..., places]

    def committed(self, blocks: Iterable[Block]) -> Part:
        """Hold what it says, slice by slice; from then on it says what is held."""
        if self.held is None:
            return self
        for block in blocks:
            self.encoding.add(self.cut(block).streams, self.held if block is None else self.held[block])
        return as_it_is(self.held)

    @property
    def is_plain(self) -> bool:
        """Whether a kernel can read it as it lies there."""
        return self.encoding.elementwise and self.held is None

    @property
    def is_sound(self) -> bool:
        """Whether its numbers are finite, which streams of whole numbers are."""
        return all(is_sound(stream.reshape(-1)) for stream in self.streams if stream.is_floating_point())


class Layout:
    """Where the streams of a message's tensors lie in its bytes. Those as long as the vectors are encoded."""

    def __init__(self, shapes: Sequence[torch.Size], like: Tensor, encoding: Encoding | None) -> None:
        plain = Rounded(like.dtype)
        self._shapes = [(s, encoding if encoding and s[-1] == like.shape[-1] else plain) for s in shapes]
        self.differences = {n: shape for n, (shape, encoding) in enumerate(self._shapes) if encoding.remembers}
        self.exact = all(encoding == plain for _, encoding in self._shapes)
        self.elementwise = all(encoding.elementwise for _, encoding in self._shapes)
        self._places: list[list[tuple[torch.dtype, int, slice]]] = []  # by tensor and stream: type, length and bytes
        self.size = 0
        for shape, encoding in self._shapes:
            self._places.append([])
            for dtype, length in encoding.streams(shape[-1]):
                end = self.size + shape[:-1].numel() * length * dtype.itemsize
                self._places[-1].append((dtype, length, slice(self.size, end)))
                self.size = -(-end // ALIGNED) * ALIGNED

    def parts(self, memory: Tensor, held: Mapping[int, Tensor]) -> list[Part]:
        """The tensors in the bytes of a message, and what is held of its sender, by part."""
        parts = []
        for n, ((shape, encoding), places) in enumerate(zip(self._shapes, self._places, strict=True)):
            streams = [memory[place].view(dtype).view(*shape[:-1], length) for dtype, length, place in places]
            parts.append(Part(streams, shape[-1], encoding, held.get(n)))
        return parts


def as_it_is(v: Tensor) -> Part:
    """A tensor that is not encoded."""
    return Part([v], v.shape[-1], Rounded(v.dtype))


def is_sound(v: Tensor) -> bool:
    """Whether the squares of all numbers are finite; one dot product is 15 times as fast as testing each number."""
    v = v.float() if v.element_size() < 4 else v
    if len(v) <= PIECE:
        return math.isfinite(torch.dot(v, v).item())
    return math.isfinite(torch.stack([torch.dot(piece, piece) for piece in torch.split(v, PIECE)]).sum().item())
