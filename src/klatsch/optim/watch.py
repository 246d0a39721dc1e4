"""Makes one mistake loud: a model that is evaluated or saved while it holds the point of training, and not x.

An optimizer knows parameters only, so the modules that own them are looked for among all live objects, which takes up
to a tenth of a second. Hooks on a few of them then see whoever runs, saves or copies the model.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from klatsch.optim.wrappers import alive

if TYPE_CHECKING:
    from klatsch.optim.points import Points

WRONG = {
    "run": "the model was run for evaluation (in eval mode, or without gradients)",
    "saved": "the model's state_dict() was taken",
    "copied": "the model was copied or pickled",
}


class Watch:
    """Watches the modules that own some parameters, and warns once of each kind of mistake.

    Args:
        optimizer: what trains the parameters; held weakly, and hooks end with it.
        parameters: what is trained.
    """

    def __init__(self, optimizer: Points, parameters: Sequence[Tensor]) -> None:
        self.said: set[str] = set()
        self._optimizer, self._parameters = weakref.ref(optimizer), parameters
        self._modules: list[weakref.ref[nn.Module]] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._handles: list[RemovableHandle] = []
        self._paused = False
        self.look()
        weakref.finalize(optimizer, _remove, self._handles)

    def look(self) -> None:
        """Look for the modules: when the optimizer is made, and again at its first step, for those that came later."""
        owners, roots = _modules_of(self._parameters)
        # A few are enough: a model that is run passes by its first or last layer, even if only a part of it is run.
        ends = {id(self._parameters[0]), id(self._parameters[-1])}
        some = [m for m in owners if any(id(p) in ends for p in m._parameters.values())]
        self._roots = [weakref.ref(m) for m in roots]
        self._modules = [weakref.ref(m) for m in {id(m): m for m in (*some, *roots)}.values()]
        self.attached(True)

    def attached(self, on: bool) -> None:
        """Put the hooks in place while the model holds the point of training; else it is free to be pickled."""
        _remove(self._handles)
        for module in _living(self._modules) if on else []:
            self._handles.append(module.register_forward_pre_hook(_Hook(self, "run")))
            self._handles.append(module.register_state_dict_pre_hook(_Hook(self, "saved")))  # type: ignore[no-untyped-call]

    def noticed(self, module: nn.Module | None, how: str) -> None:
        """Be told by a hook that a module is run, saved or copied."""
        optimizer = self._optimizer()
        if self._paused or how in self.said or optimizer is None or optimizer.rounds == 0:  # where all points are one
            return
        if how == "run" and torch.is_grad_enabled() and any(m.training for m in _living(self._modules)):
            return
        ours = {id(p) for p in self._parameters}
        if module is not None and not any(id(p) in ours for p in module.parameters()):  # run with others' values
            return
        self.warn(
            how,
            f"{WRONG[how]} while it holds the point at which gradients are taken, and not x, the one to evaluate and "
            "save; do it inside `with optimizer.averaged():`, or between optimizer.eval() and optimizer.train()"
            + "; to resume a training, klatsch.Checkpointer or optimizer.state_dict() has all that is needed"
            * (how != "run"),
        )

    def warn_of_statistics(self) -> None:
        """Warn of running statistics that were gathered at the point of training, and do not belong to x."""
        optimizer = self._optimizer()
        if "statistics" in self.said or optimizer is None or optimizer.rounds == 0:
            return
        layers = (layer for root in _living(self._roots) for layer in normed(root).items())
        found = next((f"{type(layer).__name__} {name!r}" for name, layer in layers), None)
        if found is not None:
            self.warn(
                "statistics",
                f"the running statistics of {found} were gathered at the point at which gradients are taken, and the "
                "model now holds x; klatsch.recalibrate(model, batches) gathers them there",
            )

    def warn(self, what: str, text: str) -> None:
        """Say something once."""
        if what not in self.said:
            self.said.add(what)
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


class _Hook:
    """A hook on a module; copies of the module get one that does nothing, since they hold other parameters."""

    def __init__(self, watch: Watch | None, how: str) -> None:
        self._watch, self._how = watch, how

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._watch is not None:
            self._watch.noticed(module, self._how)

    def __reduce__(self) -> Any:
        if self._watch is not None:
            self._watch.noticed(None, "copied")
        return _Hook, (None, self._how)


def normed(model: nn.Module) -> dict[str, _BatchNorm]:
    """The modules of a model that keep running statistics of their inputs, such as BatchNorm, by name."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: m for name, m in found.items() if m.running_mean is not None}


def _modules_of(parameters: Sequence[Tensor]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules that own parameters themselves, and the outermost ones around them."""
    ours, everyone = {id(p) for p in parameters}, list(alive([nn.Module]))
    everyone = [m for m in everyone if "_parameters" in m.__dict__ and "_modules" in m.__dict__]  # else half made
    owners = [m for m in everyone if any(id(p) in ours for p in m._parameters.values())]
    parents: dict[int, list[nn.Module]] = {}
    for module in everyone:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    around = {id(m): m for m in owners}
    waiting = list(owners)
    while waiting:
        above = [m for m in parents.get(id(waiting.pop()), []) if id(m) not in around]
        around |= {id(m): m for m in above}
        waiting += above
    return owners, [m for m in around.values() if id(m) not in parents]


def _living(references: list[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for reference in references if (module := reference()) is not None]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
