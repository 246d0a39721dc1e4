"""Image classification with a neural network over label-skewed data: all nodes' models in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from klatsch.arguments import whole
from klatsch.problems import base as core
from klatsch.problems import fashion_mnist
from klatsch.problems.fashion_mnist import Images
from klatsch.problems.sharded import Sharded, check_split, equal_parts, evenly
from klatsch.problems.stacks import Stacked, architecture, lenet, made, plain_convolutions

MODELS_AT_ONCE = 64  # that train on a CPU
COMPILED = (288, 144, 72, 32)  # on a GPU, which takes 15 seconds to compile each size; a larger one is hardly faster
ONE_MORE = 28  # models that train in the time that one more portion costs
EVALUATED_AT_ONCE = {"cpu": 4, "cuda": 9}  # models that are evaluated; always 9 on a GPU, as above
IMAGES_AT_ONCE = {"cpu": 250, "cuda": 2_000}  # for each of them; more do not fit into the caches of a CPU
LOSS_SAMPLES = 2_000  # training images for the training loss
BRIEF = 2_000  # test images for a brief look, at most

Score = Callable[[Tensor, Tensor], Tensor]  # of logits (S, B, classes) and labels (S, B)


class ImageClassification(Sharded):
    """f_i(x) = mean over the images of node i of the cross-entropy of a model with parameters x.

    A stochastic gradient is that of a mini-batch. Every node goes through its images in random order, epoch after
    epoch. Pixels are scaled to mean 0 and variance 1.

    Args:
        model: a torch.nn.Module without buffers, whose parameters are the start; or a function that makes one, called
            with the seed set. A LeNet by default.
        data: `Images`, the folder of Fashion-MNIST's four files, or None to look for them.
        nodes: number of nodes M.
        alpha: how label-skewed the nodes are: Dirichlet(alpha) over the classes; small is skewed.
        batch: images per node and round.
        seed: of start, partition and mini-batches.
        test: number of test images for the accuracy; all by default.
    """

    data: Images
    worst = dict.fromkeys(("accuracy", "accuracy_min", "accuracy_max", "accuracy_of_mean"), 0.0)
    score, alone = "accuracy", ("accuracy",)
    headline = core.Headline("accuracy", "test accuracy, mean over nodes", True, "accuracy_of_mean", "accuracy_min")

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] = lenet,
        data: Images | str | Path | None = None,
        nodes: int = 8,
        alpha: float = 0.1,
        batch: int = 32,
        seed: int = 0,
        test: int | None = None,
    ) -> None:
        data = Images(*data) if isinstance(data, tuple) and len(data) == 4 else fashion_mnist.load(data)
        data.check()
        count = check_choices(nodes, alpha, batch, seed, test, len(data.labels), len(data.test_labels))
        self._split(data.labels.numpy(), nodes, alpha, batch, seed)
        self.classes = int(torch.cat([data.labels, data.test_labels]).max()) + 1
        content, shift, factor = _known(data)
        self._stacked = Stacked(made(model, self.seed), shift, factor)
        self.fresh, self.dim = self._stacked.start(), self._stacked.dim
        self.matrices = self._stacked.matrices
        self.data = data._replace(test_images=data.test_images[:count], test_labels=data.test_labels[:count])
        self._check_model()
        self._seal(content, count, self.fresh.double())

    def scores(self, models: Tensor) -> Tensor:
        images, labels = self.data.test_images, self.data.test_labels
        some = evenly(len(labels), BRIEF) if self.brief else slice(None)
        return self._mean(models, images[some], labels[some], lambda logits, wanted: logits.argmax(-1) == wanted)

    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """Test accuracy: mean, smallest and largest over nodes, and of the averaged model; mean training loss."""
        measured = super().metrics(x)
        if not self.brief:
            images, labels = self.data.images[self._seen], self.data.labels[self._seen]
            measured["train_loss"] = (
                self._mean(x.reshape(-1, self.dim), images, labels, _losses).view(x.shape[:2]).mean(0)
            )
        return measured

    @torch.no_grad()
    def _mean(self, models: Tensor, images: Tensor, labels: Tensor, score: Score) -> Tensor:
        """The mean score of models, (S, d), over images, some at a time."""
        total = torch.zeros(len(models), dtype=torch.float64, device=models.device)
        kind = images.device.type
        some, size = EVALUATED_AT_ONCE[kind], equal_parts(len(labels), IMAGES_AT_ONCE[kind])
        for s in range(0, len(models), some):
            for k in range(0, len(labels), size):
                logits = self._logits(models[s : s + some], images[k : k + size])
                total[s : s + some] += score(logits, labels[k : k + size].expand(len(logits), -1)).sum(-1)
        return total / len(labels)

    @cached_property
    def _seen(self) -> Tensor:
        """The training images for the training loss, about the same number from every node."""
        own = self.shards.reshape(-1)  # node by node, each in random order
        return own[evenly(len(own), LOSS_SAMPLES)]

    def slope(self, models: Tensor, numbers: Tensor) -> Tensor:
        with plain_convolutions():
            return super().slope(models, numbers)

    def loss(self, models: Tensor, numbers: Tensor) -> Tensor:
        loss = self._stacked.fast("loss", models.device)
        return loss(models, self.data.images[numbers], self.data.labels[numbers])

    def portions(self, models: Tensor, batch: int) -> list[int]:
        return portions(len(models), models.device.type)

    def _logits(self, models: Tensor, images: Tensor) -> Tensor:
        count = len(models)
        if models.is_cuda:  # filled up to the size that is compiled
            models = torch.cat([models, models[:1].expand(EVALUATED_AT_ONCE["cuda"] - count, -1)])
        with plain_convolutions():
            return self._stacked.fast("logits", models.device)(models, images)[:count]

    def _check_model(self) -> None:
        sample = self.data.images[:2]
        try:
            shape = tuple(self._stacked.logits(self.fresh[None], sample).shape)
        except Exception as error:  # a user's model may raise anything
            pixels, reason = " by ".join(map(str, sample.shape[1:])), (str(error).splitlines() or [""])[0]
            why = f"does not take images of {pixels} numbers and return one tensor ({type(error).__name__}: {reason})"
            raise ValueError(f"the model {why}; give one that does") from None
        if len(shape) != 3 or shape[:2] != (1, 2) or shape[2] < self.classes:
            raise ValueError(
                f"the model gives {shape[2:] or shape} numbers per image, but there are {self.classes} classes; "
                "let its last layer have one output per class"
            )

    @property
    def model(self) -> str:
        return architecture(self._stacked.module)


class FashionMNIST(ImageClassification):
    """A LeNet on Fashion-MNIST, as in the paper's image study (Section 5.2).

    Its options are those of `ImageClassification`.
    """

    def __init__(self, nodes: int, alpha: float = 0.1, batch: int = 32, seed: int = 0, test: int = 10_000) -> None:
        super().__init__(lenet, None, nodes, alpha, batch, seed, test)

    @classmethod
    def check(cls, nodes: int, **options: Any) -> None:
        given = core.settings(cls, nodes, options)
        check_choices(**given, samples=fashion_mnist.SAMPLES, tests=fashion_mnist.TEST_SAMPLES)

    ready = staticmethod(fashion_mnist.load)

    @staticmethod
    def rounds_per_epoch(nodes: int, batch: int = 32, **_: object) -> int:
        return fashion_mnist.SAMPLES // nodes // batch

    @staticmethod
    def dim_of(nodes: int, **_: object) -> int:
        with torch.device("meta"):  # no memory, no random numbers
            return sum(parameter.numel() for parameter in lenet().parameters())


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


@lru_cache(maxsize=4)
def _known(data: Images) -> tuple[str, float, float]:
    """The digest of a data set and the scale of its pixels, once for all problems that share it."""
    return core.digest(*data), *data.scale()


def portions(count: int, device: str) -> list[int]:
    """The sizes in which so many models train; on a GPU only compiled ones, the last of which is filled up."""
    if device == "cuda":
        largest = COMPILED[0]
        full = max(0, count // largest - 1)
        return [largest] * full + [*_cheapest(count - full * largest)]
    size = equal_parts(count, MODELS_AT_ONCE)
    return [min(size, count - k) for k in range(0, count, size)]


@cache
def _cheapest(count: int) -> tuple[int, ...]:
    """The compiled sizes that take the least time."""
    if count <= 0:
        return ()
    choices = ((size, *_cheapest(count - size)) for size in COMPILED)
    return min(choices, key=lambda sizes: sum(sizes) + ONE_MORE * len(sizes))


def check_choices(nodes: int, alpha: float, batch: int, seed: int, test: int | None, samples: int, tests: int) -> int:
    """Refuse options that do not fit a data set; returns the number of test images to use."""
    check_split(nodes, alpha, batch, seed, samples, "images")
    count = tests if test is None else whole(test, "test", 1)
    if count > tests:
        raise ValueError(f"test = {count}, but there are {tests:,} test images; give at most that many")
    return count
