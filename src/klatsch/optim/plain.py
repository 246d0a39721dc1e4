"""States of schedulers, scalers and generators as plain data and tensors, so that they can be saved without pickle."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor


def packed(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """A nested value as data that JSON can hold; tensors are put aside under their path.

    Raises:
        ValueError: it holds something else; with the path.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, list | tuple):
        inner = [packed(each, tensors, f"{path}.{k}") for k, each in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": inner}
    if isinstance(value, dict) and all(isinstance(key, str | int | float) for key in value):
        pairs = [[key, packed(each, tensors, f"{path}.{key}")] for key, each in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ValueError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; keep numbers, texts, lists, dictionaries "
        "and tensors in its state_dict()"
    )


def unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `packed` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind in ("dict", "counter"):
        pairs = {key: unpacked(each, tensors) for key, each in inner}
        return Counter(pairs) if kind == "counter" else pairs
    items = [unpacked(each, tensors) for each in inner]
    return items if kind == "list" else tuple(items)


def generators(device: torch.device) -> dict[str, Any]:
    """The states of the random generators that scripts draw from."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], position, has_gauss, gauss),
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generators(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators back into states of `generators`."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
