"""Encodings of messages, the same in simulation and on ranks; see `topology.channel`.

Only whole vectors are encoded. Single numbers, such as the weight of push-sum, travel as they are. An encoding that
remembers sends C(v - h), where h is what both ends hold; both then add to h what arrives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, no_type_check

import torch
from torch import Tensor
from torch.nn import functional

from klatsch import native, own
from klatsch.arguments import kind_of, named, number
from klatsch.units import size as told

BLOCK = 256  # numbers that are encoded together, whatever else the vector holds
LARGEST = 127  # of a code
# At most 8 numbers of a block that are 32 times as large as all others are outliers; then those of the others, if any.
OUTLIERS, OUTLYING, TIMES = 8, 32, 3
EVEN = 95  # in a block with outliers: the last code that stands for as many steps; 128, 192, 256, 384, ... follow
STEEP = torch.tensor([*range(EVEN + 1), *((2 + code % 2) << (6 + (code - EVEN - 1) // 2) for code in range(96, 129))])
FEW = 8  # numbers of a block that a GPU finds sooner one after the other
SHORT, FINEST = 64, 7  # numbers that share a scale, and the largest code, of four bits
MOST_AT_ONCE = 1 << 28  # numbers
KINDS = {torch.float32: "f32", torch.float64: "f64"}  # what the kernel is for
AT_ONCE = 8  # blocks that one program of a GPU encodes
WORKS: dict[tuple[Callable[..., None], torch.device], bool] = {}  # kernels that have run on a GPU, or could not
tl: object = None  # triton.language, once they are needed


class Encoding:
    """How vectors (..., d) travel: as one or more streams, tensors (..., length). Your own derives from this class.

    Every block of 256 numbers is encoded by itself, and streams have the same length for each, less for a shorter one
    at the end: ranks encode long vectors in slices. What is not finite has to arrive as something that is not finite.
    """

    remembers: ClassVar[bool] = True  # whether it encodes differences to what both ends hold; else whole vectors
    elementwise: ClassVar[bool] = False  # whether the only stream has a number for every number
    weight_bits: int | None = None  # bits of gossip weights, where float32 would else round the pulls

    def streams(self, numbers: int) -> Sequence[tuple[torch.dtype, int]]:
        """The types and lengths of the streams of so many numbers."""
        raise NotImplementedError(f"{type(self).__name__} has no streams(self, numbers)")

    def encode(self, v: Tensor) -> Sequence[Tensor]:
        """The streams of v; they travel as the types that `streams` says."""
        raise NotImplementedError(f"{type(self).__name__} has no encode(self, v)")

    def decode(self, streams: Sequence[Tensor], numbers: int, dtype: torch.dtype) -> Tensor:
        """What the streams say of so many numbers, the same bits on every machine."""
        raise NotImplementedError(f"{type(self).__name__} has no decode(self, streams, numbers, dtype)")

    def encode_difference(self, v: Tensor, held: Tensor) -> Sequence[Tensor]:
        """The streams of v - held."""
        return self.encode(v - held)

    def add(self, streams: Sequence[Tensor], held: Tensor) -> None:
        """Add what the streams say to what is held."""
        held.add_(self.decode(streams, held.shape[-1], held.dtype))

    @property
    def delay(self) -> float:
        """Messages until neighbours know what a number is, on average; 0 if the next one says it."""
        return 0.0

    def bytes(self, numbers: int) -> int:
        """The bytes of so many numbers."""
        return sum(length * dtype.itemsize for dtype, length in self.streams(numbers))

    def arrives(self, v: Tensor) -> Tensor:
        """What arrives of v."""
        if v.ndim > 1 and v.numel() > MOST_AT_ONCE and len(v) > 1:  # encoding takes several times its memory
            return torch.cat([self.arrives(part) for part in v.chunk(2)])
        numbers = v.shape[-1]
        streams = zip(self.encode(v), self.streams(numbers), strict=True)
        return self.decode([stream.to(dtype) for stream, (dtype, _) in streams], numbers, v.dtype)


@dataclass(frozen=True)
class Rounded(Encoding):
    """Every number as one of a type."""

    dtype: torch.dtype
    weight_bits: int | None = None
    remembers, elementwise = False, True

    def streams(self, numbers: int) -> Sequence[tuple[torch.dtype, int]]:
        return [(self.dtype, numbers)]

    def encode(self, v: Tensor) -> Sequence[Tensor]:
        return [v]

    def decode(self, streams: Sequence[Tensor], numbers: int, dtype: torch.dtype) -> Tensor:
        return streams[0].to(dtype)


@dataclass(frozen=True)
class Int8(Encoding):
    """A code for every number, and a scale for every block; see `quantized`."""

    def streams(self, numbers: int) -> Sequence[tuple[torch.dtype, int]]:
        return [(torch.bfloat16, -(-numbers // BLOCK)), (torch.int8, numbers)]

    def encode(self, v: Tensor) -> Sequence[Tensor]:
        return quantized(v)[::-1]

    def decode(self, streams: Sequence[Tensor], numbers: int, dtype: torch.dtype) -> Tensor:
        return restored(streams[1], streams[0], dtype)

    def encode_difference(self, v: Tensor, held: Tensor) -> Sequence[Tensor]:
        return (_on_gpu(v, held) or quantized(v - held))[::-1]

    def add(self, streams: Sequence[Tensor], held: Tensor) -> None:
        if not _runs(_restore_blocks, held, streams[1], streams[0], held):
            super().add(streams, held)


@dataclass(frozen=True)
class Int4(Encoding):
    """Two codes from -7 to 7 in a byte, and a bfloat16 scale for every 64 numbers: 4.25 bits each.

    What a code misses is part of the next difference. Beside a number that is far larger than the others they wait one
    message, until it has arrived.
    """

    def streams(self, numbers: int) -> Sequence[tuple[torch.dtype, int]]:
        return [(torch.bfloat16, -(-numbers // SHORT)), (torch.uint8, -(-numbers // 2))]

    def encode(self, v: Tensor) -> Sequence[Tensor]:
        if not _has_kernel(v):
            return _packed(v)
        scales, pairs = (v.new_empty((*v.shape[:-1], length), dtype=kind) for kind, length in self.streams(v.shape[-1]))
        native.call(f"klatsch_pack_{KINDS[v.dtype]}", v.contiguous(), *_rows(v), pairs, scales)
        return scales, pairs

    def decode(self, streams: Sequence[Tensor], numbers: int, dtype: torch.dtype) -> Tensor:
        scales, pairs = (stream.contiguous() for stream in streams)
        if not _has_kernel(v := torch.empty((*pairs.shape[:-1], numbers), dtype=dtype, device=pairs.device)):
            return _unpacked(scales, pairs, numbers, dtype)
        native.call(f"klatsch_unpack_{KINDS[dtype]}", pairs, scales, *_rows(v), v)
        return v


@dataclass(frozen=True)
class TopK(Encoding):
    """The largest numbers of every block in bfloat16, each with its place: 3 bytes for every number that is kept."""

    share: float

    def __post_init__(self) -> None:
        number("topk: share", self.share, lambda v: 0 < v <= 0.5, "a number above 0 up to 0.5, such as 0.01")

    @property
    def delay(self) -> float:
        return BLOCK / self._kept(BLOCK)

    def streams(self, numbers: int) -> Sequence[tuple[torch.dtype, int]]:
        whole, rest = divmod(numbers, BLOCK)
        kept = whole * self._kept(BLOCK) + self._kept(rest)
        return [(torch.bfloat16, kept), (torch.uint8, kept)]

    def encode(self, v: Tensor) -> Sequence[Tensor]:
        blocks = _blocks(v)
        sizes, kept = blocks.abs(), self._kept(BLOCK)
        places = _largest(sizes, kept, one_by_one=sizes.is_cuda and kept <= FEW)  # so that the last ones can be cut off
        length = self.streams(v.shape[-1])[0][1]
        return [each.flatten(-2)[..., :length] for each in (blocks.gather(-1, places), places)]

    def decode(self, streams: Sequence[Tensor], numbers: int, dtype: torch.dtype) -> Tensor:
        values, places = (_blocks(each, self._kept(BLOCK)) for each in streams)
        blocks = values.new_zeros(*values.shape[:-1], BLOCK, dtype=dtype)
        return blocks.scatter_add_(-1, places.long(), values.to(dtype)).flatten(-2)[..., :numbers]

    def _kept(self, numbers: int) -> int:
        """How many of so many numbers of a block are kept."""
        return min(numbers, max(1, round(self.share * numbers)))


BUILT_IN = {
    "float32": Rounded(torch.float32),
    "bfloat16": Rounded(torch.bfloat16, weight_bits=14),  # its 8 bits and these fit into 24, with 2 to spare
    "int8": Int8(),
    "int4": Int4(),
    "topk(0.01)": TopK(0.01),  # or any other share
}


def of(wire: object) -> Encoding:
    """The encoding "int8", "topk(0.01)" or "file.py:name", a class or function without arguments."""
    if own.is_own(name := str(wire)):
        with own.explained(name):
            made = own.load("encoding", name)()
        if not isinstance(made, Encoding):
            raise ValueError(f"{own.label(name)} makes {kind_of(made)}; let it make a klatsch.encodings.Encoding")
        with own.explained(name):
            _check(own.label(name), made)
        return made
    if share := re.fullmatch(r"topk\((\d*\.?\d+(e-?\d+)?)\)", name):
        return TopK(float(share[1]))
    return named("wire", wire, BUILT_IN)


def _check(name: str, encoding: Encoding) -> None:
    """Refuse an encoding of one's own that does not do to some numbers what it should."""
    v, cut = torch.linspace(-1.0, 1.0, 700).roll(300), 2 * BLOCK
    streams, declared = encoding.encode(v), encoding.streams(700)
    lengths, said = [len(stream) for stream in streams], [length for _, length in declared]
    arrived = encoding.arrives(v)
    for wrong, reason in (
        (lengths != said, f"encode makes streams of {lengths} numbers of 700, where streams(700) says {said}"),
        (arrived.shape != v.shape or arrived.dtype != v.dtype, f"decode makes {arrived.dtype} {tuple(arrived.shape)}"),
        (encoding.arrives(v * 0).any(), "decode(encode(0)) is not 0"),
        (encoding.arrives(v * torch.nan).isfinite().all(), "what is not finite arrives as finite numbers"),
    ):
        if wrong:
            raise ValueError(f"{name}: {reason}; see docs/own.md")
    if not torch.equal(torch.cat([encoding.arrives(part) for part in (v[:cut], v[cut:])]), arrived):
        raise ValueError(f"{name}: a slice arrives as other numbers; encode each block of {BLOCK} by itself")


def check_memory(holder: str, copies: int, size: int, device: torch.device) -> None:
    """Refuse copies of what neighbours hold, of so many bytes each, that do not fit into what is free on a device."""
    if copies * size > (free := free_bytes(device)):
        raise ValueError(
            f"{holder}: {copies} copies of what neighbours hold take {told(copies * size)} on {device.type}, where "
            f"{told(free)} are free; use wire = 'bfloat16', which holds none, or a graph with a shorter period, or "
            "fewer neighbours"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device; more than any machine has where that is not known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    with suppress(OSError, IndexError):
        known = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(known[0]) << 10
    return 1 << 62


def quantized(difference: Tensor) -> tuple[Tensor, Tensor]:
    """A difference (..., d) as int8 codes (..., d) and bfloat16 scales (..., ceil(d / 256)).

    A number is its code times the scale of its block, whose largest number has the code 127 or -127. A few outliers
    would leave no codes for the other numbers. A block that has some says so by a negative scale: codes up to 95 are
    then for the others, and those above grow by a third or a half each, to 66,000 times as much. A block that is not
    finite has such a scale. Scales have few digits, so that code times scale is exact in float32: both ends hold the
    same bits, whatever their machines fuse.
    """
    if not _has_kernel(difference):
        return _on_gpu(difference) or _quantized(difference)
    v, (*outer, length) = difference.contiguous(), difference.shape
    codes = torch.empty(v.shape, dtype=torch.int8)
    scales = torch.empty((*outer, -(-length // BLOCK)), dtype=torch.bfloat16)
    native.call(f"klatsch_quantize_{KINDS[v.dtype]}", v, *_rows(v), codes, scales)
    return codes, scales


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The difference that `quantized` encoded, to the nearest code."""
    v = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    codes, scales = codes.contiguous(), scales.contiguous()
    if _runs(_restore_blocks, v, codes, scales, None):
        return v
    if not _has_kernel(v):
        return _restored(codes, scales, dtype)
    native.call(f"klatsch_restore_{KINDS[dtype]}", codes, scales, *_rows(v), v)
    return v


def _quantized(difference: Tensor) -> tuple[Tensor, Tensor]:
    """`quantized` without the kernel. On a GPU, sums and maxima are many times as fast as to sort."""
    blocks = _blocks(difference)
    sizes, values = blocks.abs(), _steep(blocks.device, blocks.dtype)
    most = rest = sizes.amax(-1, keepdim=True)
    for _ in range(TIMES):
        others = sizes < rest / OUTLYING
        below = torch.where(others, sizes, 0.0).amax(-1, keepdim=True)
        few = others.sum(-1, keepdim=True) >= BLOCK - OUTLIERS
        rest = torch.where(few & (below > 0), below, rest)
    steep = rest < most
    scales = torch.where(steep, torch.maximum(most / values[LARGEST], rest / EVEN), most / LARGEST).bfloat16()
    steps = sizes.div_(torch.where(scales > 0, scales, 1.0).to(sizes.dtype))
    between = (values[EVEN:LARGEST] + values[EVEN + 1 : LARGEST + 1]) / 2
    largest = torch.where(steep, EVEN + torch.bucketize(steps, between, out_int32=True), LARGEST)
    codes = torch.minimum(steps.round_(), largest).copysign_(blocks).nan_to_num_(0.0).to(torch.int8)
    return codes.flatten(-2)[..., : difference.shape[-1]], torch.where(steep, -scales, scales)[..., 0]


def _restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`restored` without the kernel."""
    scales = scales.to(dtype)[..., None]
    steep = scales < 0
    places = _blocks(codes) + (128 + 256 * steep.int())
    blocks = _meanings(codes.device, dtype)[places].mul_(torch.where(steep, -scales, scales))
    return blocks.flatten(-2)[..., : codes.shape[-1]]


def _packed(v: Tensor) -> tuple[Tensor, Tensor]:
    """`Int4.encode` without the kernel."""
    blocks = _blocks(v, SHORT)
    scales = (blocks.abs().amax(-1, keepdim=True) / FINEST).bfloat16()
    steps = blocks / torch.where(scales > 0, scales, 1.0).to(v.dtype)
    codes = steps.round_().clamp_(-FINEST, FINEST).nan_to_num_(0.0).add_(FINEST + 1).to(torch.uint8).flatten(-2)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return scales[..., 0], pairs[..., : -(-v.shape[-1] // 2)]


def _unpacked(scales: Tensor, pairs: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    """`Int4.decode` without the kernel."""
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)[..., :numbers].to(dtype) - (FINEST + 1)
    return (_blocks(codes, SHORT) * scales.to(dtype)[..., None]).flatten(-2)[..., :numbers]


def _on_gpu(v: Tensor, held: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """`quantized` of v, or v - held, by the kernel for a GPU; None where there is none."""
    if not _is_for_gpu(v):
        return None
    v, held = v.contiguous(), None if held is None else held.contiguous()
    codes = torch.empty(v.shape, dtype=torch.int8, device=v.device)
    scales = codes.new_empty(*v.shape[:-1], -(-v.shape[-1] // BLOCK), dtype=torch.bfloat16)
    return (codes, scales) if _runs(_quantize_blocks, v, held, codes, scales) else None


def _is_for_gpu(v: Tensor) -> bool:
    """Whether v can go through the kernels for GPUs."""
    return v.device.type == "cuda" and v.dtype == torch.float32 and v.numel() > 0


def _runs(kernel: Callable[..., None], v: Tensor, *others: Tensor | None) -> bool:
    """Run a kernel on blocks of vectors, if there is one for them, and Triton can compile it here."""
    whole = all(each is None or each.is_contiguous() for each in (v, *others))
    if not _is_for_gpu(v) or not whole or not WORKS.get((kernel, v.device), True):
        return False
    try:
        _launch(kernel, v, *others)
    except Exception:
        if (kernel, v.device) in WORKS:
            raise
        WORKS[kernel, v.device] = False
    return WORKS.setdefault((kernel, v.device), True)


def _launch(kernel: Callable[..., None], v: Tensor, *others: Tensor | None) -> None:
    length = v.shape[-1]
    chunks = -(-length // (BLOCK * AT_ONCE))
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        _compiled(kernel)[(v.numel() // length * chunks,)](v, *others, length, chunks, enable_fp_fusion=False)


@cache
def _compiled(kernel: Callable[..., None]) -> Any:
    global tl
    import triton
    import triton.language as tl

    return triton.jit(kernel)


@no_type_check
def _quantize_blocks(v, held, codes, scales, length, chunks):
    """`_quantized` by Triton: some blocks, in rows of so many numbers. NaN is the largest, by its bits."""
    row = tl.program_id(0).to(tl.int64) // chunks
    block = tl.program_id(0).to(tl.int64) % chunks * 8 + tl.arange(0, 8)
    at = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    inside, first = at < length, row * length
    x = tl.load(v + first + at, mask=inside, other=0.0)
    if held is not None:
        x = x - tl.load(held + first + at, mask=inside, other=0.0)
    sizes = tl.abs(x)
    most = tl.cast(tl.max(tl.cast(x, tl.int32, bitcast=True) & 0x7FFFFFFF, 1), tl.float32, bitcast=True)
    rest = most
    for _ in tl.static_range(3):
        others = sizes < (rest / 32.0)[:, None]
        below = tl.max(tl.where(others, sizes, 0.0), 1)
        few = tl.sum(others.to(tl.int32), 1) >= 256 - 8
        rest = tl.where(few & (below > 0.0), below, rest)
    steep = rest < most
    wide, even = tl.div_rn(most, 6291456.0), tl.div_rn(rest, 95.0)
    scale = tl.where(steep, tl.where(wide > even, wide, even), tl.div_rn(most, 127.0))
    bits = tl.cast(scale, tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & -65536  # to a bfloat16, ties to even
    step = tl.where(scale == scale, tl.cast(rounded, tl.float32, bitcast=True), scale)  # NaN may be all ones
    steps = tl.div_rn(sizes, tl.where(step > 0.0, step, 1.0)[:, None])
    bits = tl.cast(steps, tl.int32, bitcast=True)  # from 128 on there are two codes per power of two
    above = (bits >> 22) - 172 + ((bits & 0x3FFFFF) > 0x200000).to(tl.int32)
    largest = tl.where(steps > 111.5, tl.where(steps < 128.0, 96, tl.where(above < 127, above, 127)), 95)
    nearest = (steps + 12582912.0) - 12582912.0  # to whole numbers, ties to even
    code = tl.where(steep[:, None], largest, 127).to(tl.float32)
    code = tl.where(nearest < code, nearest, code)
    code = tl.where((step < float("inf"))[:, None], tl.where(x < 0.0, -code, code), 0.0)
    tl.store(codes + first + at, code.to(tl.int8), mask=inside)
    blocks = (length + 255) // 256
    tl.store(scales + row * blocks + block, tl.where(steep, -step, step).to(tl.bfloat16), mask=block < blocks)


@no_type_check
def _restore_blocks(v, codes, scales, held, length, chunks):
    """`_restored` by Triton, added to what is held."""
    row = tl.program_id(0).to(tl.int64) // chunks
    block = tl.program_id(0).to(tl.int64) % chunks * 8 + tl.arange(0, 8)
    at = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    inside, first, blocks = at < length, row * length, (length + 255) // 256
    scale = tl.load(scales + row * blocks + block, mask=block < blocks, other=0.0).to(tl.float32)[:, None]
    code = tl.load(codes + first + at, mask=inside, other=0).to(tl.int32)
    size = tl.abs(code)
    over = tl.where(size > 95, size, 96)
    size = tl.where((size > 95) & (scale < 0.0), (2 + over % 2) << (6 + (over - 96) // 2), size)
    said = tl.where(code < 0, -size, size).to(tl.float32) * tl.where(scale < 0.0, -scale, scale)
    if held is not None:
        said = tl.load(held + first + at, mask=inside, other=0.0) + said
    tl.store(v + first + at, said, mask=inside)


@cache
def _steep(device: torch.device, dtype: torch.dtype) -> Tensor:
    """`STEEP` on a device: a CUDA graph cannot copy it there while it records."""
    return STEEP.to(device, dtype)


@cache
def _meanings(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The steps that the codes -128 to 127 stand for, and those in a block with outliers."""
    codes = torch.arange(-128, 128)
    return torch.cat([codes, STEEP[codes.abs()] * codes.sign()]).to(device, dtype)


def _largest(sizes: Tensor, count: int, one_by_one: bool) -> Tensor:
    """The places of so many largest of sizes (..., n), which it may overwrite, the largest first."""
    if not one_by_one:
        return sizes.topk(count).indices
    places = []
    for _ in range(count):
        places.append(sizes.argmax(-1, keepdim=True))
        sizes.scatter_(-1, places[-1], -1.0)
    return torch.cat(places, -1)


def _blocks(v: Tensor, size: int = BLOCK) -> Tensor:
    """A tensor (..., d) as (..., blocks, size), filled up with zeros."""
    missing = -v.shape[-1] % size
    whole = functional.pad(v, (0, missing)) if missing else v
    return whole.reshape(*v.shape[:-1], -1, size)


def _has_kernel(v: Tensor) -> bool:
    """Whether there is a kernel, and v is for it."""
    return v.device.type == "cpu" and v.dtype in KINDS and v.numel() > 0 and native.why_not() is None


def _rows(v: Tensor) -> tuple[int, int]:
    """How many vectors there are, and their length."""
    return v.numel() // v.shape[-1], v.shape[-1]
