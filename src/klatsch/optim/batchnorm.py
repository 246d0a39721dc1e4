"""Running statistics, such as BatchNorm's, at the point to evaluate and save."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from klatsch.optim.gossip import Gossip
from klatsch.optim.watch import normed


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """Gather the running statistics of a model anew, as means over some batches, at x.

    BatchNorm's statistics belong to the point at which they were gathered. Where an optimizer trains at another point
    than x (`beta` below 1), call this before evaluating or saving. If the model is in training, it holds x meanwhile.
    As torch.optim.swa_utils.update_bn, but only what keeps statistics is in training mode: dropout stays out of them.
    Every rank gathers its own; `klatsch.average_(model)` averages them.

    Args:
        model: the model.
        batches: inputs of the model, or tuples and lists whose first element they are, as a DataLoader yields.

    Returns:
        The model, with modes and momenta as before.

    Raises:
        ValueError: there are no batches. The statistics stay as they are, as with any other error.
    """
    layers = list(normed(model).values())
    if not layers:
        return model
    first = next(model.parameters(), None)
    flags = [(m, m.training) for m in model.modules()]
    before = [(m, m.momentum, [b.clone() for b in m.buffers(recurse=False)]) for m in layers]
    with ExitStack() as stack:
        for optimizer in Gossip.living:
            if any(map(optimizer.owns, model.parameters())):
                optimizer.recalibrated()
                stack.enter_context(optimizer.averaged())
        try:
            _begin(model, layers)
            empty = True
            for batch in batches:
                empty = False
                inputs = batch[0] if isinstance(batch, list | tuple) else batch
                model(inputs.to(first.device) if first is not None and isinstance(inputs, Tensor) else inputs)
            if empty:
                raise ValueError("batches is empty, or was used up before; give some, such as a DataLoader")
        except BaseException:
            for module, _, buffers in before:
                for buffer, old in zip(module.buffers(recurse=False), buffers, strict=True):
                    buffer.copy_(old)
            raise
        finally:
            for module, momentum, _ in before:
                module.momentum = momentum
            for each, training in flags:
                each.training = training
    return model


def _begin(model: nn.Module, layers: list[_BatchNorm]) -> None:
    model.eval()
    for module in layers:
        module.reset_running_stats()
        module.momentum = None  # a mean over all batches
        module.training = True
