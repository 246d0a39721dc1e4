"""The pieces that FSDP2 leaves to this rank as one vector. FSDP owns their memory, so they are copied in and out."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from klatsch.optim.flat import Flat
from klatsch.optim.hosts import piece
from klatsch.optim.wrappers import alive, fsdp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Pieces(Flat):
    """Pieces of parameters of one dtype on one device, side by side in one buffer; some may be empty."""

    def bind_gradients(self) -> Tensor:
        """The pieces of the gradients as one vector; absent ones are zero."""
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.values)
            self._bound = self.views(self.gradients)
        for parameter, bound in zip(self.parameters, self._bound, strict=True):
            if parameter.grad is None:
                bound.zero_()
            else:
                bound.copy_(piece(parameter.grad))
        return self.gradients

    def zero_gradients(self) -> None:
        """Drop all gradients: FSDP makes new ones."""
        for parameter in self.parameters:
            parameter.grad = None

    def mark_written(self) -> None:
        """Copy the buffer into the pieces, and have the next forward pass gather them again."""
        for parameter, view in zip(self.parameters, self.views(self.values), strict=True):
            piece(parameter).copy_(view)
        self.reshard()
        super().mark_written()

    def reshard(self) -> None:
        """Drop the whole parameters that FSDP keeps after a forward pass without a backward pass."""
        for module in self._modules:
            module.reshard()

    def gather(self) -> None:
        """Copy pieces that somebody has written into the buffer; refuse those that were moved."""
        for k, (parameter, place) in enumerate(zip(self.parameters, self.views(self.values), strict=True)):
            here = piece(parameter)
            if (here.device, here.dtype, here.shape) != (place.device, place.dtype, place.shape):
                raise ValueError(
                    f"{self.described(k)} was moved or cut anew after the optimizer was made; first fully_shard the "
                    "model where it trains, then make the optimizer"
                )
            if self.touched:
                place.copy_(here)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the pieces."""
        here = piece(tensor)
        if here is not tensor and not here.numel():  # nothing of it lies here
            return True
        return any(piece(p).data_ptr() == here.data_ptr() for p in self.parameters)

    def shaped(self, k: int, view: Tensor) -> Tensor:
        """A piece of parameter k as a DTensor like it."""
        from torch.distributed.tensor import DTensor

        like = cast("DTensor", self.parameters[k])
        return DTensor.from_local(
            view, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _settle(self) -> None:
        """Find the modules that own the parameters, which stay where they are."""
        ours = {id(p) for p in self.parameters}
        found = (m for m in alive(fsdp("FSDPModule")) if any(id(p) in ours for p in m.parameters()))
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet(found)

    def _versions(self) -> int:
        return super()._versions() + sum(piece(p)._version for p in self.parameters)
