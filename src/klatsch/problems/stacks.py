"""Models: the LeNet of the image study, what others need so that their parameters can gossip, and many as one.

Many models of one architecture, each with its own parameters, are evaluated as one: parameters are rows (S, d).

Models of known layers run as grouped convolutions and batched products, one operation per layer for all S. Others
run through torch.func, which is slower.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from klatsch.columns import WeightMatrix

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)
POOLS = (nn.MaxPool2d, nn.AvgPool2d)
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
        fault = ""
        if isinstance(part, NORMS) and part.track_running_stats:
            fault = "running statistics do not gossip; use nn.GroupNorm, or track_running_stats=False"
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            fault = "draws would differ between engines and after a resume; leave it out, or set p=0"
        if fault:
            raise ValueError(f"the model has a {type(part).__name__} ({name}): its {fault}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"the parameter {name!r} of the model has no shape yet; call the model once first")
        if not parameter.requires_grad:
            raise ValueError(f"the parameter {name!r} of the model is frozen, but rules move all of them; unfreeze it")
    for name, _ in module.named_buffers():
        raise ValueError(f"the model has the buffer {name!r}, which does not gossip; make it a parameter, or remove it")
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


class Stacked:
    """S models with the architecture and the start of a module; pixels become (pixel - shift) * factor."""

    def __init__(self, module: nn.Module, shift: float = 0.0, factor: float = 1.0) -> None:
        self.module, self.shift, self.factor = module, shift, factor
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.layers = _layers(module)

    @property
    def dim(self) -> int:
        """Number of parameters d of one model."""
        return sum(self.sizes)

    @property
    def matrices(self) -> list[WeightMatrix]:
        """Parameters with two axes or more, kernels as rows, without the last one, which is the classifier."""
        places = zip(accumulate(self.sizes, initial=0), self.shapes.values(), strict=False)
        return [WeightMatrix(start, shape[0], shape[1:].numel()) for start, shape in places if len(shape) > 1][:-1]

    def start(self) -> Tensor:
        """The parameters of the module, (d,)."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.module.parameters()])

    def __call__(self, x: Tensor, images: Tensor) -> Tensor:
        """The logits (S, B, classes) of models x, (S, d), on images (S, B, channels, height, width)."""
        pixels = (images.to(x.dtype) - self.shift) * self.factor
        if self.layers is None:
            return self.apart(x, pixels)
        parts = torch.split(x, self.sizes, dim=1)  # one operation: its gradient is one concatenation
        run = rows if x.is_cuda else grouped
        return run(self.layers, dict(zip(self.shapes, parts, strict=True)), pixels)

    def logits(self, x: Tensor, images: Tensor) -> Tensor:
        """The logits (S, B, classes) of models x, (S, d), on the same images (B, ...) for all."""
        return self(x, images.expand(len(x), *images.shape))

    def loss(self, x: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """The sum of the models' mean losses; models share nothing, so its gradient is each model's own."""
        logits = self(x, images)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.shape[1]

    def fast(self, name: str, device: torch.device) -> Callable[..., Tensor]:
        """`logits` or `loss`, compiled on a GPU, where launching an operation takes longer than running it."""
        functions: dict[str, Callable[..., Tensor]] = {"logits": self.logits, "loss": self.loss}
        if device.type != "cuda" or self.layers is None:
            return functions[name]
        # By architecture: networks that differ in data and start share what is compiled.
        key = (name, architecture(self.module), self.shift, self.factor)
        if key not in _compiled:
            # It advises TensorFloat32, which is less exact, and reports what it could not speed up.
            warnings.filterwarnings("ignore", module=r"torch\._inductor")
            _compiled[key] = torch.compile(functions[name], dynamic=False)
        return _compiled[key]

    def apart(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The outputs of models x, (S, d), of any kind on inputs of any kind, (S, B, ...)."""

        def logits(vector: Tensor, batch: Tensor) -> Any:
            pieces = torch.split(vector, self.sizes)
            values = {n: piece.view(s) for (n, s), piece in zip(self.shapes.items(), pieces, strict=True)}
            return torch.func.functional_call(self.module, values, (batch,))

        return torch.func.vmap(logits)(x, inputs)  # type: ignore[no-any-return]


_lock = threading.Lock()
_users = 0
_before = (True, True)
_switches: Any = torch.backends  # oneDNN's and NNPACK's, which torch has not annotated


@contextmanager
def plain_convolutions() -> Iterator[None]:
    """Without oneDNN and NNPACK: torch's own convolutions are faster for many small kernels on a CPU.

    These switches belong to the whole process; the last thread to leave restores them.
    """
    global _users, _before
    with _lock:
        if _users == 0:
            _before = _switches.mkldnn.enabled, _switches.nnpack.set_flags(False)[0]
            _switches.mkldnn.enabled = False
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _switches.mkldnn.enabled = _before[0]
                _switches.nnpack.set_flags(_before[1])


_compiled: dict[tuple[object, ...], Callable[..., Tensor]] = {}
Layers = list[tuple[str, nn.Module]]
Values = dict[str, Tensor]


def _layers(module: nn.Module) -> Layers | None:
    """The layers of a plain chain of known ones, first on images, then on vectors; None for other models."""
    layers = _listed(module, "")
    named = {name for name, _ in module.named_parameters()}  # tied ones have one name only
    if not all(
        _known(layer) and {f"{name}.{p}" for p, _ in layer.named_parameters()} <= named for name, layer in layers
    ):
        return None
    flat = [k for k, (_, layer) in enumerate(layers) if isinstance(layer, nn.Flatten)]
    spatial = [k for k, (_, layer) in enumerate(layers) if isinstance(layer, (nn.Conv2d, nn.GroupNorm, *POOLS))]
    linear = [k for k, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
    if not flat or any(k > flat[0] for k in spatial) or any(k < flat[0] for k in linear):
        return None
    return [pair for k, pair in enumerate(layers) if k not in flat[1:]]  # vectors are flat already


def _listed(module: nn.Module, prefix: str) -> Layers:
    """The parts of a chain in order, also those that occur twice, which named_children leaves out."""
    if type(module) is not nn.Sequential or _hooked(module):  # a class of its own may do something else
        return [(prefix.removesuffix("."), module)]
    parts = ((name, part) for name, part in module._modules.items() if part is not None)
    return [pair for name, part in parts for pair in _listed(part, f"{prefix}{name}.")]


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _known(part: nn.Module) -> bool:
    """Whether `grouped` and `rows` cover everything about a layer."""
    if _hooked(part) or any(name not in ("weight", "bias") for name, _ in part.named_parameters()):
        return False
    if type(part) is nn.Conv2d:
        simple = part.groups == 1 and part.dilation == (1, 1) and part.padding_mode == "zeros"
        return simple and not isinstance(part.padding, str)
    if type(part) is nn.Flatten:
        return part.start_dim == 1 and part.end_dim == -1
    return type(part) in (nn.Linear, nn.GroupNorm, *POOLS, *ELEMENTWISE)


def grouped(layers: Layers, values: Values, images: Tensor) -> Tensor:
    """All models at once, with a group of channels for each: activations are (B, S channels, height, width)."""
    S, B = images.shape[:2]
    v = images.transpose(0, 1).flatten(1, 2)
    for name, layer in layers:
        weight, bias = values.get(f"{name}.weight"), values.get(f"{name}.bias")
        flat = bias if bias is None else bias.reshape(-1)
        if isinstance(layer, nn.Conv2d):
            assert weight is not None
            kernels = weight.reshape(-1, *layer.weight.shape[1:])
            v = functional.conv2d(v, kernels, flat, layer.stride, layer.padding, groups=S)
        elif isinstance(layer, nn.GroupNorm):
            factors = weight if weight is None else weight.reshape(-1)
            v = functional.group_norm(v, S * layer.num_groups, factors, flat, layer.eps)
        elif isinstance(layer, nn.Flatten):
            v = v.reshape(B, S, -1).transpose(0, 1)
        elif isinstance(layer, nn.Linear):
            v = _linear(v, layer, weight, bias)
        else:
            v = layer(v)
    return v


def rows(layers: Layers, values: Values, images: Tensor) -> Tensor:
    """All models at once on a GPU: activations are (S, B, height, channels, width).

    Grouped convolutions are slow there. A few columns of the result depend on a small window of the image, so a
    convolution is one product of all windows with a banded matrix: more arithmetic, but large and regular. What is
    between two products compiles into few launches.
    """
    S, B = images.shape[:2]
    v = images.transpose(2, 3)
    for name, layer in layers:
        weight, bias = values.get(f"{name}.weight"), values.get(f"{name}.bias")
        if isinstance(layer, nn.Conv2d):
            v = _convolution(v, layer, weight, bias)
        elif isinstance(layer, nn.GroupNorm):
            v = _group_norm(v, layer, weight, bias)
        elif isinstance(layer, nn.Flatten):
            v = v.transpose(2, 3).reshape(S, B, -1)
        elif isinstance(layer, nn.Linear):
            v = _linear(v, layer, weight, None)
            v = v if bias is None else v + bias[:, None]
        elif isinstance(layer, POOLS):
            v = _pool(v, layer)
        else:
            v = layer(v)
    return v


def _convolution(v: Tensor, layer: nn.Conv2d, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    assert not isinstance(layer.padding, str)
    if any(layer.padding):
        v = functional.pad(v, (layer.padding[1], layer.padding[1], 0, 0, layer.padding[0], layer.padding[0]))
    S, B, _, channels, wide = v.shape
    (high, across), (down, right), outputs = layer.kernel_size, layer.stride, layer.out_channels
    columns = (wide - across) // right + 1
    # How many to compute from one window: narrow strips have fewer zeros in the band, wide ones copy less.
    strip = next((size for size in (8, 7, 6, 5, 4, 3) if columns % size == 0 and size < columns), columns)
    window = (strip - 1) * right + across
    seen = v.unfold(2, high, down).unfold(4, window, strip * right)  # (S, B, rows, channels, strips, high, window)
    strips = seen.shape[4]
    flat = seen.permute(0, 1, 2, 4, 5, 3, 6).reshape(S, -1, high * channels * window)
    band = (weight.reshape(-1, across) @ _shifts(strip, window, across, right, v)).view(
        S, outputs, channels, high, strip, window
    )
    band = band.permute(0, 3, 2, 5, 1, 4).reshape(S, high * channels * window, outputs * strip)
    out = (flat @ band).view(S, B, -1, strips, outputs, strip).transpose(3, 4).flatten(4)
    return out if bias is None else out + bias.view(S, 1, 1, outputs, 1)  # which is compiled into what follows


def _shifts(strip: int, window: int, across: int, right: int, like: Tensor) -> Tensor:
    """Where the kernel lies for each column of a strip: (across, strip window), ones and zeros.

    Times the kernel, it is the band; padding and cutting instead would take the compiler a minute.
    """
    columns = torch.arange(strip, device=like.device)[:, None] * right
    places = columns + torch.arange(across, device=like.device)[:, None, None]
    return (places == torch.arange(window, device=like.device)).to(like.dtype).view(across, -1)


def _group_norm(v: Tensor, layer: nn.GroupNorm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    # Axes are split, never joined, which would take the compiler long.
    parts = v.reshape(*v.shape[:3], layer.num_groups, -1, v.shape[4])
    apart = parts - parts.mean((2, 4, 5), keepdim=True)
    v = (apart * torch.rsqrt(apart.square().mean((2, 4, 5), keepdim=True) + layer.eps)).flatten(3, 4)
    v = v if weight is None else v * weight[:, None, None, :, None]
    return v if bias is None else v + bias[:, None, None, :, None]


def _pool(v: Tensor, layer: nn.MaxPool2d | nn.AvgPool2d) -> Tensor:
    size = layer.kernel_size
    usual = layer.dilation == 1 if isinstance(layer, nn.MaxPool2d) else layer.divisor_override is None
    if isinstance(size, int) and layer.stride == size and usual and not layer.padding and not layer.ceil_mode:
        high, wide = v.shape[2] // size, v.shape[4] // size
        tiles = v[:, :, : high * size, :, : wide * size]
        tiles = tiles.reshape(*v.shape[:2], high, size, v.shape[3], wide, size)
        return tiles.amax((3, 6)) if isinstance(layer, nn.MaxPool2d) else tiles.mean((3, 6))
    pooled: Tensor = layer(v.transpose(2, 3).flatten(0, 1))
    return pooled.view(*v.shape[:2], *pooled.shape[1:]).transpose(2, 3)


def _linear(v: Tensor, layer: nn.Linear, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    matrix = weight.view(-1, layer.out_features, layer.in_features).mT
    return v @ matrix if bias is None else torch.baddbmm(bias[:, None], v, matrix)
