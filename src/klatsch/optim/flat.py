"""Parameters as one vector: the tensors of a model become views of a flat buffer, their gradients views of another.

A rule then works on whole vectors, a message is one piece of memory, and nothing is gathered or scattered per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class Flat:
    """Parameters of one dtype on one device, side by side in one buffer.

    Args:
        parameters: leaf tensors that require gradients; their memory moves into the buffer.
        names: what to call parameters in errors, by their id.

    After `bind_gradients`, gradients live in a buffer of the same layout. Until then they are whatever autograd made
    of them, so that a sparse one shows itself.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Mapping[int, object]) -> None:
        self.parameters, self._names = list(parameters), names
        self.places: list[slice] = []
        end = 0
        for parameter in self.parameters:
            self.places.append(slice(end, end + parameter.numel()))
            end += parameter.numel()
        first = self.parameters[0]
        self.values = torch.empty(end, dtype=first.dtype, device=first.device)
        self.gradients: Tensor | None = None
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views(self.values), strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._formats = [(parameter.shape, parameter.stride()) for parameter in self.parameters]
        self._seen = self._versions()

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector of this layout as tensors shaped like the parameters."""
        return [
            _shaped(vector[place], parameter) for place, parameter in zip(self.places, self.parameters, strict=True)
        ]

    def described(self, k: int) -> str:
        """A parameter in words, by its number."""
        parameter = self.parameters[k]
        return f"parameter {self._names[id(parameter)]} of shape {tuple(parameter.shape)}"

    def bind_gradients(self) -> Tensor:
        """The gradients as one vector; those that autograd or a user put elsewhere are moved in, absent ones are zero.

        Raises:
            ValueError: a gradient is sparse.
        """
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.values)
            self._bound = self.views(self.gradients)
        self._bind_again(self.gradients)
        for parameter, bound in zip(self.parameters, self._bound, strict=True):
            grad = parameter.grad
            if grad is bound:
                continue
            if grad is None:
                bound.zero_()
            elif grad.is_sparse:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be gossiped as "
                    "one vector; use dense gradients (for embeddings: sparse=False)"
                )
            elif grad.data_ptr() != bound.data_ptr() or grad.stride() != bound.stride():
                bound.copy_(grad)
            parameter.grad = bound
        return self.gradients

    def zero_gradients(self) -> None:
        """All gradients to zero, in one go."""
        if self.gradients is None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        self._bind_again(self.gradients)
        self.gradients.zero_()
        for parameter, bound in zip(self.parameters, self._bound, strict=True):
            parameter.grad = bound

    def mark_written(self) -> None:
        """Tell autograd that the parameters have changed, as writing to them one by one would."""
        for parameter in self.parameters:
            torch.autograd.graph.increment_version(parameter)
        self._seen = self._versions()

    @property
    def touched(self) -> bool:
        """Whether somebody wrote to the parameters since `written` was asked: not through the buffer, but to them."""
        return self._versions() != self._seen

    def written(self) -> bool:
        """Whether somebody did, since the last call."""
        versions = self._versions()
        changed, self._seen = versions != self._seen, versions
        return changed

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the parameters."""
        start, place = self.values.data_ptr(), tensor.data_ptr()
        inside = start <= place < start + self.values.numel() * self.values.element_size()
        return inside or any(place == parameter.data_ptr() for parameter in self.parameters)

    def gather(self) -> None:
        """Bring parameters back into the buffer that were copied elsewhere on their device, as model.to("cpu:0") does.

        Raises:
            ValueError: one was moved to another device, dtype or memory format.
        """
        home = self.values
        for k in self._elsewhere(home, self.parameters):
            parameter, place = self.parameters[k], home.as_strided(*self._formats[k], self.places[k].start)
            if _kind(parameter) != _kind(place):
                raise ValueError(
                    f"{self.described(k)} was moved after the optimizer was made, from {home.dtype} on {home.device} "
                    f"to {parameter.dtype} on {parameter.device} with strides {parameter.stride()}; move the model "
                    "first (model.to(...)), then make the optimizer"
                )
            place.copy_(parameter.detach())
            parameter.data = place
            torch.autograd.graph.increment_version(parameter)  # its values may be others now

    def _bind_again(self, gradients: Tensor) -> None:
        """model.to(...) takes along the memory of gradients, too, in the tensors that were bound to the buffer."""
        if self._elsewhere(gradients, self._bound):
            self._bound = self.views(gradients)

    def _elsewhere(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[int]:
        size, start = buffer.element_size(), buffer.data_ptr()
        return [
            k
            for k, (tensor, place) in enumerate(zip(tensors, self.places, strict=True))
            if tensor.data_ptr() != start + place.start * size and tensor.numel()
        ]

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self.parameters)


def by_dtype(parameters: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Parameters in groups that can share a buffer, in the order in which they come."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return groups


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """What a copy of a tensor has in common with it, beside the values."""
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _shaped(piece: Tensor, parameter: Tensor) -> Tensor:
    """A piece of a vector in the shape of a parameter, and in its memory format where that is dense (channels last)."""
    if torch.empty_like(parameter).stride() == parameter.stride():
        return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)
