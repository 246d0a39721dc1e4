"""Random numbers as a function of (seed, purpose, round, node): the same in every engine and after every resume.

Each number is a hash of its address, by SplitMix64, which passes the usual statistical tests; there is no stream.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from klatsch import native

# What numbers are for: part of the address, so that no two purposes share numbers.
NOISE, MATRICES, CENTRE, SHIFTS, BATCHES, FEATURES, LABELS, WEIGHTS = range(8)

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, signed
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_LOW = 0xFFFFFFFF
_AT_ONCE = 30_000  # hashes at a time: they fit the cache, and torch starts no threads


def normals(
    seed: int | Tensor, purpose: int, t: Tensor, nodes: Tensor, size: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Standard normals of shape (len(t), len(nodes), size), on the device of `t` (Box–Muller).

    There is one seed for all nodes, or one for each. Numbers in float32 are those in float64, rounded.
    """
    if t.is_cuda:
        result = torch.empty(len(t), len(nodes), size, dtype=dtype, device=t.device)
        if _by_kernel(seed, purpose, t, nodes, result):
            return result
    pairs = (size + 1) // 2
    result = torch.empty(len(t), len(nodes), 2 * pairs, dtype=dtype, device=t.device)
    rounds = max(1, _AT_ONCE // max(1, len(nodes) * pairs)) if t.device.type == "cpu" else len(t)
    for k in range(0, len(t), rounds):
        bits = _bits(seed, purpose, t[k : k + rounds], nodes, pairs)
        radius = _unsigned(bits, 32).to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = bits.bitwise_and_(_LOW).to(dtype).mul_(2 * math.pi * 2.0**-32)
        result[k : k + rounds, :, :pairs] = angle.cos().mul_(radius)
        result[k : k + rounds, :, pairs:] = angle.sin_().mul_(radius)
    return result[..., :size]


def _by_kernel(seed: int | Tensor, purpose: int, t: Tensor, nodes: Tensor, result: Tensor) -> bool:
    """Let one kernel draw them instead of some thirty; whether there is a compiler for it."""
    source = f"#define T {'float' if result.dtype == torch.float32 else 'double'}\n{native.NORMALS.read_text()}"
    try:
        kernel = native.gpu_kernel(source, "klatsch_normals", t.device)
    except OSError:
        return False
    addresses = [torch.as_tensor(v, device=t.device).long().reshape(-1).contiguous() for v in (seed, t, nodes)]
    blocks = -(-result.numel() // result.shape[-1] * ((result.shape[-1] + 1) // 2) // 256)
    kernel(blocks, 256, 0, result, *addresses, int(len(addresses[0]) > 1), purpose, *result.shape)
    return True


def whole_numbers(seed: int, purpose: int, t: Tensor, nodes: Tensor, size: int, below: int) -> Tensor:
    """Whole numbers from 0 to `below` - 1 of shape (len(t), len(nodes), size), all equally likely within 2^-32."""
    return _unsigned(_bits(seed, purpose, t, nodes, size), 32).mul_(below).bitwise_right_shift_(32)


def _bits(seed: int | Tensor, purpose: int, t: Tensor, nodes: Tensor, size: int) -> Tensor:
    key = _hashed(torch.as_tensor(seed, device=t.device).reshape(-1) * _GOLDEN + purpose + 1)
    key = _hashed(key + t.long()[:, None] * _GOLDEN)
    key = _hashed(key + nodes.long() * _GOLDEN)
    return _hashed(key[:, :, None] + torch.arange(1, size + 1, device=t.device) * _GOLDEN)


def _hashed(z: Tensor) -> Tensor:
    # In place: fresh memory in every round would take longer than the arithmetic.
    shifted = torch.empty_like(z)
    z.bitwise_xor_(_unsigned(z, 30, shifted)).mul_(_FIRST)
    z.bitwise_xor_(_unsigned(z, 27, shifted)).mul_(_SECOND)
    return z.bitwise_xor_(_unsigned(z, 31, shifted))


def _unsigned(z: Tensor, places: int, out: Tensor | None = None) -> Tensor:
    """z >> places for unsigned z: torch fills with the sign, which the mask removes."""
    return torch.bitwise_right_shift(z, places, out=out).bitwise_and_((1 << (64 - places)) - 1)
