"""Labelled images: what a model learns from, and what it is tested on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Images(NamedTuple):
    """Labelled images: what to learn from, and what to test on."""

    images: Tensor  # (samples, channels, height, width), uint8 from 0 to 255, or floating point
    labels: Tensor  # (samples,), int64 from 0 up
    test_images: Tensor
    test_labels: Tensor

    def check(self) -> None:
        """Refuse tensors that do not fit each other.

        Raises:
            ValueError: with the shape or dtype, and what to give.
        """
        for tensor in self:
            if not isinstance(tensor, Tensor):
                kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
                raise ValueError(f"images or labels are a {kind}; give tensors, such as torch.from_numpy(array)")
        for images, labels in ((self.images, self.labels), (self.test_images, self.test_labels)):
            if images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
                raise ValueError(
                    f"images of shape {tuple(images.shape)} with labels of shape {tuple(labels.shape)}; give images as "
                    "(samples, channels, height, width) and one label for each"
                )
            if images.is_floating_point() and not torch.isfinite(images).all():
                raise ValueError("the images have pixels that are not finite; give finite numbers only")
            if labels.dtype != torch.int64 or labels.min() < 0:
                raise ValueError(f"labels are {labels.dtype} from {labels.min().item()}; give torch.int64 from 0 up")

        if self.images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"images to learn from are {tuple(self.images.shape[1:])}, those to test on "
                f"{tuple(self.test_images.shape[1:])}; give both the same shape"
            )

    def scale(self) -> tuple[float, float]:
        """What to subtract from pixels and to multiply them with, so that they have mean 0 and variance 1."""
        if self.images.dtype == torch.uint8:  # by counting, without a copy of all of them in another dtype
            counts = torch.bincount(self.images.flatten(), minlength=256).double()
            values = torch.arange(256, dtype=torch.float64)
            mean = (counts @ values) / counts.sum()
            deviation = ((counts @ (values - mean).square()) / counts.sum()).sqrt()
        else:
            mean, deviation = self.images.double().mean(), self.images.double().std(correction=0)
        return float(mean), 1.0 / max(float(deviation), 1e-12)
