"""Parameters as one vector: the tensors of a model lie side by side in a flat buffer, their gradients in another.

A rule then works on whole vectors, a message is one piece of memory, and nothing is gathered or scattered per step.
Each parameter has a storage of its own, which is its part of the buffer: whoever saves a model tells tensors apart by
their storages, and writes these whole. Between two parameters there may be some numbers that are always zero:
compiled kernels take for granted that a storage begins at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from klatsch.optim.hosts import Host, piece

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ALIGNED = 16  # bytes


class Flat:
    """Parameters of one dtype on one device, side by side in one buffer.

    After `bind_gradients`, gradients live in a buffer of the same layout; until then autograd makes them, so that a
    sparse one shows. `names` are those of the parameters in errors, by id. If a host has several ranks, each of them
    trains the slice `own` of the vector.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Mapping[int, object], host: Host | None = None) -> None:
        self.parameters, self._names, self.host = list(parameters), names, host or Host()
        pieces = [piece(p).detach() for p in self.parameters]
        step = ALIGNED // pieces[0].element_size()
        *starts, _ = accumulate((-(-v.numel() // step) * step for v in pieces), initial=0)
        self.layout = [(v.shape, _strides(v), start) for v, start in zip(pieces, starts, strict=True)]
        self.places = {
            id(p): slice(start, start + shape.numel())
            for p, (shape, _, start) in zip(self.parameters, self.layout, strict=True)
        }
        length = self.places[id(self.parameters[-1])].stop
        self.own = self.host.slice_of(length)
        self._padded = pieces[0].new_zeros(self.host.room(length))
        self.values = self._padded[:length]
        self.gradients: Tensor | None = None
        self._bound: list[Tensor] = []  # views of them
        self._watched: list[tuple[Tensor | None, int | None]] = []
        for view, value in zip(self.views(self.values), pieces, strict=True):
            view.copy_(value)
        self._settle()
        self.accept()

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector of this layout as tensors shaped like the parameters, in their memory formats."""
        return [self._view(vector, k) for k in range(len(self.parameters))]

    def described(self, k: int) -> str:
        """Parameter number k in words."""
        parameter = self.parameters[k]
        return f"parameter {self._names[id(parameter)]} of shape {tuple(parameter.shape)}"

    def bind_gradients(self) -> Tensor:
        """The gradients as one vector: those that lie elsewhere are copied in, absent ones are zero."""
        gradients = self._gradient_buffer()
        for parameter, bound in zip(self.parameters, self._bound, strict=True):
            grad = parameter.grad
            if grad is bound:
                continue
            if grad is None:
                bound.zero_()
            elif grad.is_sparse:
                what = f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be gossiped"
                raise ValueError(f"{what} as one vector; use dense gradients (for embeddings: sparse=False)")
            elif grad.data_ptr() != bound.data_ptr() or grad.stride() != bound.stride():
                bound.copy_(grad)
            parameter.grad = bound
        return gradients

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in one go."""
        if self.gradients is not None:
            self._gradient_buffer().zero_()
        for k, parameter in enumerate(self.parameters):
            parameter.grad = self._bound[k] if self._bound else None

    def watch_gradients(self) -> None:
        """Remember the gradients, so that `drop_gradients` knows those that are taken from now on."""
        self._watched = [(v, None if v is None else v._version) for v in self._gradients]

    def drop_gradients(self) -> bool:
        """Set the gradients to zero if some were taken since `watch_gradients`, and say so."""
        before, self._watched = self._watched, []
        pairs = zip(self._gradients, before, strict=False)  # nothing is watched at the start
        taken = any(v is not None and (v is not old or v._version != seen) and v.any() for v, (old, seen) in pairs)
        if taken:
            self.zero_gradients()
        return taken

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient is other than zero."""
        return any(v is not None and bool(v.any()) for v in self._gradients)

    def mark_written(self) -> None:
        """Put the own slice together with the host's others, and tell autograd that all parameters have changed."""
        self.host.join(self._padded)
        for parameter in self.parameters:
            torch.autograd.graph.increment_version(parameter)
        self.accept()

    def whole(self, own: Tensor) -> Tensor:
        """The vector of which this is the own slice; all ranks of a host ask together."""
        if not self.host.slices:
            return own
        padded = own.new_zeros(len(self._padded))
        padded[self.own] = own
        self.host.join(padded)
        return padded[: len(self.values)]

    def shaped(self, k: int, view: Tensor) -> Tensor:
        """A view for parameter k as users know it."""
        return view

    def accept(self) -> None:
        """Accept everything written to the parameters so far."""
        self._seen = self._versions()

    @property
    def touched(self) -> bool:
        """Whether somebody else has written to the parameters, not through the buffer."""
        return self._versions() != self._seen

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the parameters."""
        start, place = self.values.data_ptr(), tensor.data_ptr()
        inside = start <= place < start + self.values.numel() * self.values.element_size()
        return inside or any(place == parameter.data_ptr() for parameter in self.parameters)

    def gather(self) -> None:
        """Bring back parameters that were copied on their device, as by model.to("cpu:0"); refuse real moves."""
        home = self.values
        for k in self._elsewhere(home, self.parameters):
            parameter, place = self.parameters[k], self._view(home, k)
            moved, kind = ((v.device, v.dtype, v.shape, v.stride()) for v in (parameter, place))
            if moved != kind:
                raise ValueError(
                    f"{self.described(k)} was moved after the optimizer was made, from {home.dtype} on {home.device} "
                    f"to {parameter.dtype} on {parameter.device} with strides {parameter.stride()}; move the model "
                    "first (model.to(...)), then make the optimizer"
                )
            place.copy_(parameter.detach())
            parameter.data = self._place(k)
            torch.autograd.graph.increment_version(parameter)  # its values may have changed with it

    @property
    def _gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else piece(p.grad) for p in self.parameters]

    def _settle(self) -> None:
        """Move the parameters into the buffer."""
        for k, parameter in enumerate(self.parameters):
            parameter.data = self._place(k)

    def _place(self, k: int) -> Tensor:
        """Parameter k in the buffer, with a storage that is this part of it."""
        shape, strides, start = self.layout[k]
        size = self.values.element_size()
        part = self.values.untyped_storage()[start * size : (start + shape.numel()) * size]
        return self.values.new_empty(0).set_(part, 0, shape, strides)

    def _view(self, vector: Tensor, k: int) -> Tensor:
        shape, strides, start = self.layout[k]
        return vector.as_strided(shape, strides, vector.storage_offset() + start)

    def _gradient_buffer(self) -> Tensor:
        """The buffer of the gradients, with views of it, also if model.to(...) has moved the old ones."""
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.values)
        if not self._bound or self._elsewhere(self.gradients, self._bound):
            self._bound = self.views(self.gradients)
        return self.gradients

    def _elsewhere(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[int]:
        size, begin = buffer.element_size(), buffer.data_ptr()
        pairs = enumerate(zip(tensors, self.layout, strict=True))
        return [k for k, (v, (*_, start)) in pairs if v.data_ptr() != begin + start * size and v.numel()]

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self.parameters)


class Pieces(Flat):
    """The pieces that FSDP2 leaves to this rank, some of them empty; copied in and out, since it owns their memory."""

    def __init__(self, reshard: Callable[[], None], *args: Any) -> None:
        self._reshard = reshard  # drops whole parameters, so that the next forward pass gathers them again
        super().__init__(*args)

    def bind_gradients(self) -> Tensor:
        """The pieces of the gradients as one vector; absent ones are zero."""
        gradients = self._gradient_buffer()
        for parameter, bound in zip(self.parameters, self._bound, strict=True):
            if parameter.grad is None:
                bound.zero_()
            else:
                bound.copy_(piece(parameter.grad))
        return gradients

    def zero_gradients(self) -> None:
        """Drop all gradients: FSDP makes new ones."""
        for parameter in self.parameters:
            parameter.grad = None

    def mark_written(self) -> None:
        """Copy the buffer into the pieces, and have the next forward pass gather them again."""
        for parameter, view in zip(self.parameters, self.views(self.values), strict=True):
            piece(parameter).copy_(view)
        self._reshard()
        super().mark_written()

    def gather(self) -> None:
        """Copy pieces that somebody has written into the buffer; refuse those that were moved."""
        for k, (parameter, place) in enumerate(zip(self.parameters, self.views(self.values), strict=True)):
            own = piece(parameter)
            if (own.device, own.dtype, own.shape) != (place.device, place.dtype, place.shape):
                raise ValueError(
                    f"{self.described(k)} was moved or cut anew after the optimizer was made; first fully_shard the "
                    "model where it trains, then make the optimizer"
                )
            if self.touched:
                place.copy_(own)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the pieces."""
        own = piece(tensor)
        nothing = own is not tensor and not own.numel()  # of it lies on this rank
        return nothing or any(piece(p).data_ptr() == own.data_ptr() for p in self.parameters)

    def shaped(self, k: int, view: Tensor) -> Tensor:
        """A piece of parameter k as a DTensor like it."""
        from torch.distributed.tensor import DTensor

        like = cast("DTensor", self.parameters[k])
        return DTensor.from_local(
            view, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _settle(self) -> None:
        """The pieces stay where they are."""

    def _versions(self) -> int:
        return super()._versions() + sum(piece(p)._version for p in self.parameters)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of a parameter if they leave no gaps, as channels last; else the usual ones."""
    dense = torch.empty_like(parameter).stride() == parameter.stride()
    return parameter.stride() if dense else parameter.new_empty(parameter.shape).stride()
