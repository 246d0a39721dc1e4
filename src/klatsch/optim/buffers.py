"""What gossip does not average: buffers, such as the running statistics of BatchNorm."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from klatsch.optim.gossip import Gossip
from klatsch.ranks.agreement import agree, members, summed
from klatsch.ranks.failures import reason


@torch.no_grad()
def average_(model: nn.Module, *, parameters: bool = False, group: Any = None) -> nn.Module:
    """Average the floating-point buffers of a model over all ranks, in place; all ranks must call it together.

    BatchNorm's running statistics follow each rank's own data, and an optimizer does not see them. Call this before
    evaluating or saving. It is an all-reduce, exact and seldom needed, unlike what happens in training. Where the model
    is trained by an optimizer with on_failure="continue", it is the average over the ranks that are still within reach,
    and a warning says who they are.

    Args:
        model: the model, with the same buffers on every rank.
        parameters: average the parameters as well: the model of the whole network. It is the mean of x, also where the
            model held another point to train. After the last step, or, to evaluate it in between, inside
            `with optimizer.averaged():`, which puts this rank's own point back.
        group: the process group; all ranks by default.

    Returns:
        The model.

    Raises:
        ValueError: the ranks do not have the same buffers.
        RuntimeError: a rank does not answer.
    """
    trainers = [each for each in Gossip.living if any(map(each.owns, model.parameters()))]
    with ExitStack() as stack:
        for each in trainers if parameters else []:
            stack.enter_context(each.merging())
        _average(model, trainers[0] if trainers else None, parameters, group)
    return model


def _average(model: nn.Module, trainer: Gossip | None, parameters: bool, group: Any) -> None:
    tensors = [b for b in model.buffers() if b.is_floating_point()]
    if parameters:
        tensors += [p for p in model.parameters() if p.is_floating_point()]
    kinds = str([[str(v.dtype), list(v.shape)] for v in tensors])
    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *(v.detach().double().cpu().reshape(-1) for v in tensors)])
    if trainer is not None and trainer.survives and group is trainer.process_group:
        with trainer.together("average_") as (total, ranks):
            _agree_among(total, len(ranks), kinds)
            mean = total(flat) / len(ranks)
    else:
        size = len(members(group))
        try:
            agree(group, {"buffers of the model": kinds})
            mean = summed(group, flat) / size
        except RuntimeError as error:
            raise RuntimeError(f"average_ needs an answer from all {size} ranks ({reason(error)})") from None
    _put(tensors, mean)


def _agree_among(total: Any, size: int, kinds: str) -> None:
    """Check that some ranks have the same buffers: their numbers are equal if all of them are the mean of all."""
    number = torch.tensor([int.from_bytes(hashlib.sha256(kinds.encode()).digest()[:3])], dtype=torch.float64)
    if total((number * size - total(number)).abs()) != 0:
        raise ValueError("the ranks do not agree on the buffers of the model; make them the same everywhere")


def _put(tensors: list[Tensor], vector: Tensor) -> None:
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.numel()
        tensor.copy_(vector[start:end].reshape(tensor.shape))
