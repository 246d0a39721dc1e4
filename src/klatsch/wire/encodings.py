"""Encodings of messages, the same in simulation and on ranks; see `topology.channel`.

Only whole vectors are encoded. Single numbers, such as the weight of push-sum, travel as they are.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from klatsch import native
from klatsch.topology.channel import BLOCK

DTYPES = {
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}  # of numbers in a message, if not as they are
LARGEST = 127  # of a code
# At most 8 numbers of a block that are 32 times as large as all others are outliers; then those of the others, if any.
OUTLIERS, OUTLYING, TIMES = 8, 32, 3
EVEN = 95  # in a block with outliers: the last code that stands for as many steps; 128, 192, 256, 384, ... follow
STEEP = torch.tensor([*range(EVEN + 1), *((2 + code % 2) << (6 + (code - EVEN - 1) // 2) for code in range(96, 129))])
KINDS = (torch.float32, torch.float64)  # what the kernel is for


def rounded(v: Tensor, wire: str) -> Tensor:
    """What arrives of v in an encoding that remembers nothing."""
    return v.to(DTYPES[wire]).to(v.dtype)


def scale_count(length: int) -> int:
    """The number of scales for so many numbers."""
    return -(-length // BLOCK)


def quantized(difference: Tensor) -> tuple[Tensor, Tensor]:
    """A difference (..., d) as int8 codes (..., d) and bfloat16 scales (..., ceil(d / 256)).

    A number is its code times the scale of its block, whose largest number has the code 127 or -127. A few outliers
    would leave no codes for the other numbers. A block that has some says so by a negative scale: codes up to 95 are
    then for the others, and those above grow by a third or a half each, to 66,000 times as much. A block that is not
    finite has such a scale. Scales have few digits, so that code times scale is exact in float32: both ends hold the
    same bits, whatever their machines fuse.
    """
    if (kernel := _kernel(difference)) is None:
        return _quantized(difference)
    v, (*outer, length) = difference.contiguous(), difference.shape
    codes = torch.empty(v.shape, dtype=torch.int8)
    scales = torch.empty((*outer, scale_count(length)), dtype=torch.bfloat16)
    quantize = kernel.klatsch_quantize_f32 if v.dtype == torch.float32 else kernel.klatsch_quantize_f64
    quantize(v.data_ptr(), v.numel() // length, length, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The difference that `quantized` encoded, to the nearest code."""
    v = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if (kernel := _kernel(v)) is None:
        return _restored(codes, scales, dtype)
    restore = kernel.klatsch_restore_f32 if dtype == torch.float32 else kernel.klatsch_restore_f64
    codes, scales, length = codes.contiguous(), scales.contiguous(), v.shape[-1]
    restore(codes.data_ptr(), scales.data_ptr(), v.numel() // length, length, v.data_ptr())
    return v


def _quantized(difference: Tensor) -> tuple[Tensor, Tensor]:
    """`quantized` without the kernel."""
    blocks = _blocks(difference)
    top = blocks.abs().topk(OUTLIERS + 1).values
    most = rest = top[..., :1]
    for _ in range(TIMES):
        below = torch.where(top < rest / OUTLYING, top, 0.0).amax(-1, keepdim=True)
        rest = torch.where(below > 0, below, rest)
    steep, values = rest < most, _steep(blocks.device, blocks.dtype)
    scales = torch.where(steep, torch.maximum(most / values[LARGEST], rest / EVEN), most / LARGEST).bfloat16()
    steps = blocks / torch.where(scales > 0, scales, 1.0).to(blocks.dtype)
    between = (values[EVEN:LARGEST] + values[EVEN + 1 : LARGEST + 1]) / 2
    above = (EVEN + torch.bucketize(steps.abs(), between)).to(blocks.dtype).copysign_(steps)
    codes = torch.where(steep & (steps.abs() >= EVEN + 0.5), above, steps.round().clamp_(-LARGEST, LARGEST))
    codes = codes.nan_to_num_(0.0).to(torch.int8).flatten(-2)[..., : difference.shape[-1]]
    return codes, torch.where(steep, -scales, scales)[..., 0]


def _restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`restored` without the kernel."""
    blocks, scales = _blocks(codes).to(dtype), scales.to(dtype)[..., None]
    steep = _steep(blocks.device, dtype)[blocks.abs().int()].copysign_(blocks)
    return (torch.where(scales < 0, -steep, blocks) * scales).flatten(-2)[..., : codes.shape[-1]]


@cache
def _steep(device: torch.device, dtype: torch.dtype) -> Tensor:
    """`STEEP` on a device: a CUDA graph cannot copy it there while it records."""
    return STEEP.to(device, dtype)


def _blocks(v: Tensor) -> Tensor:
    """A tensor (..., d) as (..., blocks, 256), filled up with zeros."""
    missing = -v.shape[-1] % BLOCK
    whole = functional.pad(v, (0, missing)) if missing else v
    return whole.reshape(*v.shape[:-1], -1, BLOCK)


def _kernel(v: Tensor) -> ctypes.CDLL | None:
    """The kernel, where there is one and v is for it."""
    if v.device.type != "cpu" or v.dtype not in KINDS or not v.numel() or native.why_not() is not None:
        return None
    return native.library()
