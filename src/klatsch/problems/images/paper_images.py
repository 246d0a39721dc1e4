"""The paper's image problem: a LeNet on Fashion-MNIST, by name in studies and on the command line."""

from __future__ import annotations

from typing import Any

from klatsch.arguments import whole
from klatsch.problems.images import fashion_mnist
from klatsch.problems.images.classification import ImageClassification, check_sizes, check_test
from klatsch.problems.images.networks import lenet
from klatsch.problems.partition import check_alpha


class FashionMNIST(ImageClassification):
    """A LeNet on Fashion-MNIST, as in the paper's image study (Section 5.2).

    Args:
        nodes: number of nodes M.
        alpha: how label-skewed the nodes are: Dirichlet(alpha) over the classes; small is skewed.
        batch: images per node and round.
        seed: of start, partition and mini-batches.
        test: on how many of the 10,000 test images accuracy is measured.
    """

    def __init__(self, nodes: int, alpha: float = 0.1, batch: int = 32, seed: int = 0, test: int = 10_000) -> None:
        super().__init__(lenet, None, nodes, alpha, batch, seed, test)

    @staticmethod
    def check(nodes: int, alpha: float = 0.1, batch: int = 32, seed: int = 0, test: int = 10_000) -> None:
        """Refuse options without looking at the data set: a study can be read where it is not.

        Raises:
            ValueError: one is not allowed; with the remedy.
        """
        whole(seed, "seed", 0)
        check_alpha(alpha)
        check_sizes(whole(nodes, "nodes", 1), whole(batch, "batch", 1), fashion_mnist.SAMPLES)
        check_test(test, fashion_mnist.TEST_SAMPLES)

    @staticmethod
    def ready() -> None:
        """Look for the data set, and download it where it is nowhere, before many processes want it.

        Raises:
            ValueError: it cannot be had; with the ways to get it.
        """
        fashion_mnist.load()

    @staticmethod
    def rounds_per_epoch(nodes: int, batch: int = 32, **_: Any) -> int:
        """Rounds in which the nodes go through their images once."""
        return fashion_mnist.SAMPLES // nodes // batch
