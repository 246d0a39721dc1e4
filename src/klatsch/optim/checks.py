"""What an optimizer is given, looked at before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.engine.links import OnFailure
from klatsch.topology import Topology


def settings(algorithm: Any, weight_decay: Any, timeout: Any, on_failure: Any) -> None:
    """Check what belongs to the whole optimizer.

    Raises:
        ValueError: with the value and the remedy.
    """
    if not hasattr(algorithm, "update"):
        kind = type(algorithm).__name__
        raise ValueError(f"algorithm is a {kind}; give a rule, such as algorithms.make('dat', lr=0.1)")
    if cols.count(algorithm) > 1:
        raise ValueError("the rule has several columns; on ranks give one number for each hyper-parameter")
    cols.hyper("weight_decay", weight_decay, lambda v: v >= 0, "a number from 0 up")
    cols.hyper("timeout", timeout, lambda v: v > 0, "a number of seconds above 0")
    if on_failure not in get_args(OnFailure):
        raise ValueError(f"on_failure = {on_failure!r}; choose from {', '.join(get_args(OnFailure))}")


def group(entry: dict[str, Any]) -> None:
    """Check a parameter group.

    Raises:
        ValueError: with the value and the remedy.
    """
    cols.hyper("lr of a parameter group", entry["lr"], lambda v: v >= 0, "a number from 0 up")
    cols.hyper("weight_decay of a parameter group", entry["weight_decay"], lambda v: v >= 0, "a number from 0 up")


def graph(algorithm: Any, topology: Any, size: int, any_graph: bool) -> None:
    """Check a topology.

    Raises:
        ValueError: it has another number of nodes than there are ranks, or the rule does not work on it.
    """
    if not isinstance(topology, Topology):
        raise ValueError(f"topology is a {type(topology).__name__}; give a Topology, or a name such as 'ring'")
    if topology.size != size:
        raise ValueError(
            f"{topology.name} has {topology.size} nodes but there are {size} ranks; give one of {size} nodes, its name "
            f"alone, or start {topology.size} processes (torchrun --nproc-per-node {topology.size})"
        )
    if not any_graph and hasattr(algorithm, "check_graph"):
        algorithm.check_graph(topology)


def trainable(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that are trained: those that require gradients.

    Raises:
        ValueError: there are none, or they cannot share a buffer.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient; unfreeze some before the optimizer is made")
    devices = sorted({str(p.device) for p in trained})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {' and '.join(devices)}; move the model to one device, model.to(...)")
    for p in trained:
        if p.layout != torch.strided or not p.is_floating_point():
            raise ValueError(
                f"a parameter has dtype {p.dtype} and layout {p.layout}; only dense real ones can be mixed"
            )
    return trained
