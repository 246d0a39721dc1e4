"""What gossip does not average: buffers, such as the running statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from klatsch.optim.gossip import Gossip
from klatsch.optim.groups import parameters_of
from klatsch.optim.hosts import piece
from klatsch.optim.points import normed
from klatsch.ranks.agreement import agree, members, summed
from klatsch.ranks.failures import reason


@torch.no_grad()
def average_(model: nn.Module, *, parameters: bool = False, group: ProcessGroup | None = None) -> nn.Module:
    """Average the floating-point buffers of a model over all ranks, in place; all ranks must call it together.

    BatchNorm's running statistics follow each rank's own data, and the optimizer does not see them: call this before
    evaluating or saving. The mean goes up and down a tree of the graph's links, in float32 unless a tensor is in
    float64, and counts in `optimizer.bytes_sent`; ranks must be at the same round, and one that does not answer within
    the optimizer's timeout is named. If ranks have left or are lost, it averages over those within reach, and a warning
    names them. Without an optimizer of klatsch, or over another `group`, it is an all-reduce.

    Args:
        model: the model, with the same buffers on every rank; it is returned.
        parameters: average the parameters as well, to get the model of the whole network: the mean of x, even if the
            model holds another point while it trains. Do it after the last step, or in between inside
            `with optimizer.averaged():`, which puts this rank's point back.
        group: the process group; by default that of the optimizer, or all ranks. If nodes are hosts, their buffers are
            averaged place by place.
    """
    for optimizer in Gossip.living:
        optimizer.watch.reshard()
    whole = [*model.buffers(), *(model.parameters() if parameters else ())]
    tensors, trainers = [piece(v) for v in whole if v.is_floating_point()], _trainers(model)
    group = trainers[0].process_group if group is None and trainers else group
    with ExitStack() as stack:
        for trainer in trainers if parameters else ():
            stack.enter_context(trainer.merging())
        for tensor, values in zip(tensors, _mean(tensors, trainers, group), strict=True):
            tensor.copy_(values.view_as(tensor))
    return model


@contextmanager
def merged(model: nn.Module, *, group: ProcessGroup | None = None) -> Iterator[nn.Module]:
    """Evaluate or save inside: there the model is that of the whole network, and afterwards this rank's own again.

    That is the mean over all ranks of x and of floating-point buffers; see `average_`. All ranks must enter together.

    Args:
        model: the model, while it trains or afterwards.
        group: see `average_`.
    """
    trainers = _trainers(model)
    with ExitStack() as stack:
        for trainer in trainers:
            stack.enter_context(trainer.averaged())
        moved = [trainer for trainer in trainers if trainer.rounds > 0]  # the others train from what the model holds
        others = [v.data for v in (*model.buffers(), *model.parameters()) if not any(t.owns(v) for t in moved)]
        before = [v.clone() for v in others]
        try:
            yield average_(model, parameters=True, group=group)
        finally:
            for tensor, values in zip(others, before, strict=True):
                tensor.copy_(values)


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[object]) -> nn.Module:
    """Gather the running statistics of a model again, at x, as means over some batches.

    BatchNorm's statistics belong to the point where they were gathered. If an optimizer trains at another point than x
    (`beta` below 1), call this before evaluating or saving. It is torch.optim.swa_utils.update_bn, at x and without
    dropout. Every rank gathers its own; `klatsch.average_(model)` averages them.

    Args:
        model: the model; returned with modes and momenta as before, after an error also with its old statistics.
        batches: inputs of the model, or tuples or lists that begin with them, as a DataLoader yields.
    """
    layers = list(normed(model).values())
    if not layers:
        return model
    first = next(model.parameters(), None)
    statistics = [(buffer, buffer.clone()) for m in layers for buffer in m.buffers(recurse=False)]
    with ExitStack() as stack:
        for optimizer in _trainers(model):
            optimizer.watch.said.add("statistics")  # somebody takes care of them
            stack.enter_context(optimizer.averaged())
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        try:
            for layer in layers:
                stack.callback(setattr, layer, "momentum", layer.momentum)
                layer.reset_running_stats()
                layer.momentum = None  # a mean over all batches
                layer.training = True
            count = 0
            for count, batch in enumerate(batches, 1):  # noqa: B007
                inputs = batch[0] if isinstance(batch, list | tuple) else batch
                model(inputs.to(first.device) if first is not None and isinstance(inputs, Tensor) else inputs)
            if count == 0:
                raise ValueError("batches is empty, or was used up before; give some, such as a DataLoader")
        except BaseException:
            for buffer, old in statistics:
                buffer.copy_(old)
            raise
    return model


def _trainers(model: nn.Module) -> list[Gossip]:
    trained = {id(p) for p in model.parameters()}
    return [o for o in Gossip.living if any(id(p) in trained for p in parameters_of(o.param_groups))]


def _mean(tensors: Sequence[Tensor], trainers: Sequence[Gossip], group: ProcessGroup | None) -> list[Tensor]:
    """The means over ranks of some tensors, as vectors."""
    kinds = str([[str(v.dtype), list(v.shape)] for v in tensors])
    sent_as = [torch.float64 if v.dtype is torch.float64 else torch.float32 for v in tensors]
    along_links = bool(trainers) and group is trainers[0].process_group
    with trainers[0].together("average_", kinds) if along_links else _collective(group, kinds) as mean:
        means: dict[torch.dtype, Iterator[Tensor]] = {}
        for dtype in dict.fromkeys(sent_as):
            same = [v for v, other in zip(tensors, sent_as, strict=True) if other is dtype]
            vector = mean(torch.cat([v.detach().cpu().to(dtype).reshape(-1) for v in same]))
            means[dtype] = iter(torch.split(vector, [v.numel() for v in same]))
        return [next(means[dtype]) for dtype in sent_as]


@contextmanager
def _collective(group: ProcessGroup | None, kinds: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """A mean over all ranks of a group; says what is missing where it fails."""
    size = len(members(group))
    try:
        agree(group, {"buffers of the model": kinds})
        yield lambda vector: summed(group, vector) / size
    except RuntimeError as error:
        needed = f"average_ needs an answer from all {size} ranks"
        raise RuntimeError(f"{needed} ({reason(error)}); was it called on every rank?") from None
