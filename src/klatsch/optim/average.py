"""What gossip does not average: buffers, such as the running statistics of BatchNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from klatsch.engine.agreement import agree, members, summed


@torch.no_grad()
def average_(model: nn.Module, *, parameters: bool = False, group: Any = None) -> nn.Module:
    """Average the floating-point buffers of a model over all ranks, in place; all ranks must call it together.

    BatchNorm's running statistics follow each rank's own data, and an optimizer does not see them. Call this before
    evaluating or saving. It is an all-reduce, exact and seldom needed, unlike what happens in training.

    Args:
        model: the model, with the same buffers on every rank.
        parameters: average the parameters as well: the model of the whole network, after the last step.
        group: the process group; all ranks by default.

    Returns:
        The model.
    """
    tensors = [b for b in model.buffers() if b.is_floating_point()]
    if parameters:
        tensors += [p for p in model.parameters() if p.is_floating_point()]
    size = len(members(group))
    agree(group, {"buffers of the model": str([[str(v.dtype), list(v.shape)] for v in tensors])})
    if tensors:
        flat = torch.cat([v.detach().double().cpu().reshape(-1) for v in tensors])
        mean = summed(group, flat) / size
        _put(tensors, mean)
    return model


def _put(tensors: list[Tensor], vector: Tensor) -> None:
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.numel()
        tensor.copy_(vector[start:end].reshape(tensor.shape))
