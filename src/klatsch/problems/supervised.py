"""A user's own task as a problem: any PyTorch model, loss and data, split over the nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from klatsch.problems import base as core
from klatsch.problems.sharded import Sharded, check_split, equal_parts, evenly
from klatsch.problems.stacks import Stacked, architecture, made

NUMBERS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 30}  # parameters of models that train together
TESTED_AT_ONCE = 500  # samples
HELD_OUT = 10  # one in so many samples, where no test data are given
BRIEF = 1_000  # test samples for a brief look, at most

Model = nn.Module | Callable[[], nn.Module]
Loss = Callable[[Tensor, Tensor], Tensor]  # the mean over a batch, of the model's outputs and the targets
Given = Dataset[Any] | tuple[Tensor, Tensor]


class Pairs(NamedTuple):
    """Samples, all in memory."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


class Supervised(Sharded):
    """f_i(x) = mean over the samples of node i of loss(model(input), target) with parameters x.

    Args:
        model: a torch.nn.Module without buffers and dropout, whose parameters are the start; or a function that makes
            one, called with the seed set.
        loss: of a batch of outputs and targets, the mean over the batch: `nn.functional.cross_entropy`, or your own.
        data: a torch Dataset of (input, target), or a tensor of each; all are held in memory.
        test: the same, for the test loss; every tenth sample of `data` by default.
        nodes: number of nodes M.
        alpha: how much the nodes' data differ, where targets are classes: Dirichlet(alpha) over them; small is
            different. By default all have the same mixture.
        batch: samples per node and round.
        seed: of start, partition and mini-batches.
    """

    data: Pairs
    score, alone = "loss", ("loss",)
    headline = core.Headline("loss", "test loss, mean over nodes", of_mean="loss_of_mean", of_worst="loss_max")

    def __init__(
        self,
        model: Model,
        loss: Loss,
        data: Given,
        test: Given | None = None,
        nodes: int = 8,
        alpha: float | None = None,
        batch: int = 32,
        seed: int = 0,
    ) -> None:
        self.data = pairs = _in_memory(data, test)
        targets, self.samples = pairs.targets, len(pairs.targets)
        check_split(nodes, 1.0 if alpha is None else alpha, batch, seed, self.samples, "samples")
        kind = f"{str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}"
        if alpha is not None and (targets.ndim != 1 or targets.is_floating_point()):
            raise ValueError(f"alpha = {alpha} mixes classes, but targets are {kind}; leave it out")
        classes = np.zeros(self.samples) if alpha is None else targets.numpy()
        self._split(classes, nodes, 1.0 if alpha is None else alpha, batch, seed)
        self._stacked, self._mean_loss = Stacked(made(model, seed)), loss
        self.fresh, self.dim = self._stacked.start(), self._stacked.dim
        self.matrices = self._stacked.matrices
        self._check_model()
        self._seal(core.digest(*pairs), len(pairs.test_targets), self.fresh.double())

    @property
    def model(self) -> str:
        return f"{architecture(self._stacked.module)} {getattr(self._mean_loss, '__qualname__', self._mean_loss)}"

    def loss(self, models: Tensor, numbers: Tensor) -> Tensor:
        return self._losses(models, self.data.inputs[numbers], self.data.targets[numbers]).sum()

    def portions(self, models: Tensor, batch: int) -> list[int]:
        size = equal_parts(len(models), max(1, NUMBERS_AT_ONCE[models.device.type] // self.dim))
        return [len(part) for part in torch.split(models, size)]

    @torch.no_grad()
    def scores(self, models: Tensor) -> Tensor:
        inputs, targets = self.data.test_inputs, self.data.test_targets
        some = evenly(len(targets), BRIEF) if self.brief else torch.arange(len(targets))
        total = torch.zeros(len(models), dtype=torch.float64, device=models.device)
        places = torch.split(torch.arange(len(models)), self.portions(models, 0))
        for place in places:
            for part in torch.split(some.to(targets.device), TESTED_AT_ONCE):
                shown = (v[part].expand(len(place), *v[part].shape) for v in (inputs, targets))
                total[place] += len(part) * self._losses(models[place], *shown).double()
        return total / len(some)

    def _losses(self, models: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean losses of models, (S, d), each on its own samples."""
        outputs = self._stacked(models, inputs) if inputs.is_floating_point() else self._stacked.apart(models, inputs)
        return torch.stack([self._mean_loss(*pair) for pair in zip(outputs, targets, strict=True)])

    def _check_model(self) -> None:
        few = slice(0, 2)
        value = self._losses(self.fresh[None], self.data.inputs[None, few], self.data.targets[None, few])
        if value.shape != (1,):
            raise ValueError(f"the loss of a batch has shape {tuple(value.shape[1:])}; let it be one number, the mean")


def of_any(maker: Callable[..., core.Problem]) -> Callable[..., core.Problem]:
    """What makes problems; a function that takes nothing may give a task, (model, loss, (train, test)), instead."""
    if not isinstance(maker, FunctionType) or inspect.signature(maker).parameters:
        return maker

    def problem(nodes: int, alpha: float | None = None, batch: int = 32, seed: int = 0) -> Supervised:
        given = _given(maker)
        if not isinstance(given, tuple):
            return given  # type: ignore[no-any-return]
        model, loss, data, test = given
        return Supervised(model, loss, data, test, nodes, alpha, batch, seed)

    return problem


@cache
def _given(task: Callable[[], Any]) -> Any:
    """What a task gives, once: a problem, or model, loss, training data and test data."""
    given = task()
    if not isinstance(given, tuple | list):
        return given
    if len(given) != 3:
        raise ValueError(f"{task.__name__} gives {len(given)} things; let it return (model, loss, (train, test))")
    model, loss, data = given
    two = isinstance(data, tuple | list) and len(data) == 2 and not all(isinstance(v, Tensor) for v in data)
    return (model, loss, *data) if two else (model, loss, data, None)


def _in_memory(data: Given, test: Given | None) -> Pairs:
    inputs, targets = _tensors(data)
    if test is not None:
        return Pairs(inputs, targets, *_tensors(test))
    held_out = torch.arange(len(targets)) % HELD_OUT == HELD_OUT - 1
    if not held_out.any():
        raise ValueError(f"{len(targets)} samples are too few to hold one in {HELD_OUT} out; give test data, too")
    return Pairs(inputs[~held_out], targets[~held_out], inputs[held_out], targets[held_out])


def _tensors(data: Any) -> tuple[Tensor, Tensor]:
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not isinstance(data, tuple | list):
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(f"the data are a {type(data).__name__}; give a Dataset with a length, or two tensors")
        data = default_collate([data[k] for k in range(len(data))])
    if len(data) != 2 or not all(isinstance(v, Tensor) for v in data) or len(data[0]) != len(data[1]):
        raise ValueError("samples of the data are not (input, target), a tensor each; give a Dataset of such pairs")
    return data[0].detach().cpu(), data[1].detach().cpu()
