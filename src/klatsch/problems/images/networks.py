"""Models: the LeNet of the image study, and what other models need so that their parameters can gossip."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def lenet(channels: int = 1, classes: int = 10) -> nn.Sequential:
    """LeNet for images of 28 by 28 pixels, with GroupNorm: running statistics would not gossip.

    References:
        LeCun et al., "Gradient-based learning applied to document recognition", 1998; Wu and He, "Group
        normalization", 2018.
    """
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def made(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """A copy of a module, or a fresh one whose start depends on the seed only."""
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model)
    elif callable(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = model()
    else:
        module = model
    if not isinstance(module, nn.Module):
        raise ValueError(f"model = {model!r}; give a torch.nn.Module, or a function that makes one")
    check(module)
    return module.float()


def check(module: nn.Module) -> None:
    """Refuse a model that the rules cannot move as one vector."""
    for name, part in module.named_modules():
        if isinstance(part, NORMS) and part.track_running_stats:
            raise ValueError(
                f"the model has a {type(part).__name__} ({name}): its running statistics are not parameters, so they "
                "do not gossip, and nodes would differ in what they evaluate; use nn.GroupNorm, or "
                "track_running_stats=False"
            )
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise ValueError(
                f"the model has a {type(part).__name__} ({name}): its draws would not be the same on every engine and "
                "after a resume; leave it out, or set p=0"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"the parameter {name!r} of the model has no shape yet; call the model once first")
        if not parameter.requires_grad:
            raise ValueError(f"the parameter {name!r} of the model is frozen, but rules move all of them; unfreeze it")
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        raise ValueError(
            f"the model has the buffer {buffers[0]!r}, which is not a parameter and does not gossip; make it a "
            "parameter, or keep it elsewhere"
        )
    if not list(module.parameters()):
        raise ValueError("the model has no parameters; give one that can learn")


def architecture(module: nn.Module) -> str:
    """A text that tells apart models that compute different things with the same parameters."""
    parts = []
    for name, part in module.named_modules():
        plain = {k: v for k, v in vars(part).items() if isinstance(v, bool | int | float | str | tuple) or v is None}
        kept = sorted((k, v) for k, v in plain.items() if not k.startswith("_") and k != "training")
        parts.append(f"{name}: {type(part).__module__}.{type(part).__qualname__} {kept}")
    return "\n".join(parts)
