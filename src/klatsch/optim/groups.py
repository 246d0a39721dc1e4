"""What an optimizer is given, looked at before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

import klatsch.columns as cols
from klatsch.arguments import named
from klatsch.ranks.links import OnFailure
from klatsch.rules import Rule
from klatsch.rules.base import rate
from klatsch.topology import Topology

LONGEST = 30 * 86400  # seconds
OnNonFinite = Literal["raise", "skip"]
# What torch, its schedulers and timm's write into parameter groups, beside the options of an optimizer.
NOTES = (
    *("params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    "lr_scale",
)


def settings(rule: Rule, weight_decay: Any, timeout: Any, on_failure: Any, quorum: Any, on_nonfinite: Any) -> None:
    """Check what belongs to the whole optimizer.

    Raises:
        ValueError: with the value and the remedy.
    """
    if cols.count(rule) > 1:
        raise ValueError("the rule has several columns; on ranks give one number for each hyper-parameter")
    number("weight_decay", weight_decay, lambda v: v >= 0, "a number from 0 up")
    number("timeout", timeout, lambda v: (v > 0) & (v <= LONGEST), f"a number of seconds above 0, at most {LONGEST:,}")
    for name, value, known in (("on_failure", on_failure, OnFailure), ("on_nonfinite", on_nonfinite, OnNonFinite)):
        if value not in get_args(known):
            raise ValueError(f"{name} = {value!r}; choose from {', '.join(get_args(known))}")
    number("quorum", quorum, lambda v: (v >= 0) & (v <= 1), "a share of all ranks from 0 to 1, such as 0.5")
    if quorum and on_failure == "raise":
        raise ValueError(f"quorum = {quorum} needs on_failure='continue': else the first failure ends the training")


def options(rule: Rule, lr: float, weight_decay: Any) -> dict[str, float]:
    """The options of a parameter group, and what they are where it has none of its own."""
    return {"lr": lr, "weight_decay": float(weight_decay)} | {name: float(v) for name, v in rule.settings.items()}


def group(entry: dict[str, Any], known: dict[str, float]) -> None:
    """Check a parameter group.

    Args:
        entry: the group.
        known: the options that it may have.

    Raises:
        ValueError: with the value and the remedy.
    """
    for name in entry:
        if name not in NOTES:
            named("option of a parameter group", name, known)
    values(entry, known)


def values(entry: dict[str, Any], known: dict[str, float]) -> None:
    """Check the numbers of a parameter group, which schedulers may have set.

    Raises:
        ValueError: with the value and the remedy.
    """
    number("lr of a parameter group", entry["lr"], lambda v: v >= 0, "a number from 0 up")
    number("weight_decay of a parameter group", entry["weight_decay"], lambda v: v >= 0, "a number from 0 up")
    if "momentum" in known and entry["momentum"] != known["momentum"]:  # which the rule has checked
        wanted = "a number from 0 up to but not including 1, such as 0.9"
        number("momentum of a parameter group", entry["momentum"], lambda v: (v >= 0) & (v < 1), wanted)


def number(name: str, value: Any, holds: Callable[[Any], Any], wanted: str) -> None:
    """Check a single number.

    Raises:
        ValueError: with the value and the remedy.
    """
    if isinstance(cols.hyper(name, value, holds, wanted), Tensor):
        raise ValueError(f"{name} = {value!r}; give {wanted}, a single one")


def first_rate(lr: Any) -> float:
    """The learning rate of the first round.

    Raises:
        ValueError: it is not a single number.
    """
    first = rate(lr, 1)
    number("lr(1)", first, lambda v: v >= 0, "a number from 0 up")
    return float(first)


def graph(rule: Rule, topology: Any, size: int, any_graph: bool) -> Rule:
    """The rule as it runs on a topology, after a check of that.

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
    if not any_graph:
        rule.check_graph(topology)
    return rule.on(topology)


def trainable(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that are trained: those that require gradients.

    Raises:
        ValueError: there are none, or they cannot share a buffer.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient; unfreeze some before the optimizer is made")
    if any(kind.__name__ == "DTensor" for p in trained for kind in type(p).__mro__):  # its module has moved
        raise ValueError(
            "parameters are DTensors, pieces into which fully_shard (FSDP2) or parallelize_module cuts a model, and "
            "cannot be gossiped yet; give every rank a whole model, without them"
        )
    devices = sorted({str(p.device) for p in trained})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {' and '.join(devices)}; move the model to one device, model.to(...)")
    if devices == ["meta"]:
        raise ValueError("parameters are on the device meta, without memory; give them some, model.to_empty(...)")
    for p in trained:
        if p.layout != torch.strided or not p.is_floating_point():
            raise ValueError(
                f"a parameter has dtype {p.dtype} and layout {p.layout}; only dense real ones can be mixed"
            )
    return trained


def names(groups: Sequence[dict[str, Any]]) -> dict[int, object]:
    """What to call parameters, by their id: the names that the optimizer was given, or their numbers."""
    given = [name for entry in groups for name in entry.get("param_names", ())]
    parameters = [p for entry in groups for p in entry["params"]]
    return {id(p): name for p, name in zip(parameters, given or range(len(parameters)), strict=True)}


def facts(rule: Rule, topology: Topology, groups: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What all ranks with the same kind of rule must agree on, as texts that are the same on every machine."""
    parameters = [p for entry in groups for p in entry["params"]]
    trained = [p for p in parameters if p.requires_grad]
    settings = {f"{name} of the rule": str(value) for name, value in settings_of(rule).items()}
    return settings | {
        "topology": f"{topology!r} {topology.fingerprint[:16]}",
        "number of parameters": f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} numbers",
        "shapes": str([list(p.shape) for p in trained]),
        "memory formats": str([list(p.stride()) for p in trained]),
        "dtypes": str([str(p.dtype) for p in trained]),
        "parameter groups": "; ".join(
            f"{len(entry['params'])} tensors with "
            + ", ".join(f"{name} {entry[name]:g}" for name in ("lr", "weight_decay", "momentum") if name in entry)
            for entry in groups
        ),
        "frozen parameters": str([[list(p.shape), str(p.dtype)] for p in parameters if not p.requires_grad]),
    }


def settings_of(rule: Rule) -> dict[str, Any]:
    """The options of a rule and its parts as plain data."""
    return {name: value for name, value in cols.flattened("rule", rule).items() if name != "rule"}


def name_of(rule: Rule) -> str:
    """A rule with its options."""
    return f"{rule.name}({', '.join(f'{name}={value}' for name, value in settings_of(rule).items())})"
