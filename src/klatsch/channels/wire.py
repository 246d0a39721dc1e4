"""Encodings of messages, the same in simulation and on ranks; see `topology.channel`.

Only whole vectors are encoded. Single numbers, such as the weight of push-sum, travel as they are.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from klatsch import native
from klatsch.topology.channel import BLOCK

LARGEST = 127  # of a code
KINDS = (torch.float32, torch.float64)  # what the kernel is for


def rounded(v: Tensor) -> Tensor:
    """What arrives of v as bfloat16."""
    return v.bfloat16().to(v.dtype)


def scale_count(length: int) -> int:
    """The number of scales for so many numbers."""
    return -(-length // BLOCK)


def quantized(difference: Tensor) -> tuple[Tensor, Tensor]:
    """A difference (..., d) as int8 codes (..., d) and bfloat16 scales (..., ceil(d / 256)).

    A number is its code times the scale of its block, whose largest number has the code 127 or -127. A block that is
    not finite has such a scale. Scales have few digits, so that code times scale is exact in float32: both ends hold
    the same bits, whatever their machines fuse.
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
    scales = (blocks.abs().amax(-1) / LARGEST).bfloat16()
    steps = torch.where(scales > 0, scales, 1.0).to(blocks.dtype)
    codes = (blocks / steps[..., None]).round_().clamp_(-LARGEST, LARGEST).nan_to_num_(0.0).to(torch.int8)
    return codes.flatten(-2)[..., : difference.shape[-1]], scales


def _restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`restored` without the kernel."""
    blocks = _blocks(codes).to(dtype) * scales.to(dtype)[..., None]
    return blocks.flatten(-2)[..., : codes.shape[-1]]


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
