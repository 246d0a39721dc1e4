"""Parameter groups: which parameters are trained, with which options, and what all ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from klatsch.columns import count, flattened, hyper
from klatsch.optim.hosts import piece
from klatsch.rules import Rule
from klatsch.rules.base import rate
from klatsch.topology import Topology

Group = dict[str, Any]  # torch's
# What torch, its schedulers and timm's write into parameter groups, besides the options of an optimizer.
NOTES = ["params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "lr_scale", "swa_lr"]
NOTES += ["base_momentum", "max_momentum"]
BETAS = ("beta1", "beta2")
BELOW_1 = "from 0 up to but not including 1, such as 0.9"


def single(name: str, value: object, holds: Callable[[Any], Any], wanted: str) -> float:
    """Check a number that must not differ between columns."""
    number = hyper(name, value, holds, wanted)
    if isinstance(number, Tensor):
        raise ValueError(f"{name} = {value!r}; give {wanted}, a single one")
    return number


def defaults_of(rule: Rule, weight_decay: float) -> Group:
    """The options of a parameter group where it has none of its own."""
    if count(rule) > 1:
        raise ValueError("the rule has several columns; on ranks give one number for each hyper-parameter")
    numbers = {"lr(1)": rate(rule.lr, 1), "weight_decay": weight_decay}
    lr, decay = (single(name, v, lambda v: v >= 0, "a number from 0 up") for name, v in numbers.items())
    own = {name: float(v) for name, v in rule.settings.items()}
    if decay and "weight_decay" in own:
        own["weight_decay"] = decay
    return {"lr": lr, "weight_decay": decay} | options(own)


def options(settings: dict[str, float]) -> Group:
    """Settings of a rule as options of parameter groups, as torch calls them: beta1 and beta2 are betas."""
    found: Group = {name: v for name, v in settings.items() if name not in BETAS}
    return found | ({"betas": tuple(settings[name] for name in BETAS)} if "beta1" in settings else {})


def value(group: Group, setting: str) -> float:
    """A setting of a rule in a parameter group."""
    return float(group["betas"][BETAS.index(setting)] if setting in BETAS else group[setting])


def pair(betas: object) -> tuple[float, float]:
    """The two betas of Adam; the rule checks what they are."""
    if not isinstance(betas, list | tuple) or len(betas) != len(BETAS):
        raise ValueError(f"betas = {betas!r}; give two numbers, such as (0.9, 0.999)")
    return betas[0], betas[1]


def check_values(group: Group, defaults: Group) -> None:
    """Check the numbers of a parameter group, which schedulers may have set."""
    for name in ("lr", "weight_decay"):
        single(f"{name} of a parameter group", group[name], lambda v: v >= 0, "a number from 0 up")
    changed = {name for name in ("momentum", "betas", "eps") if name in defaults and group[name] != defaults[name]}
    if "momentum" in changed:  # those of the rule are checked
        single("momentum of a parameter group", group["momentum"], lambda v: (v >= 0) & (v < 1), f"a number {BELOW_1}")
    if "eps" in changed:
        single("eps of a parameter group", group["eps"], lambda v: v > 0, "a number above 0, such as 1e-8")
    if "betas" in changed:
        for beta in pair(group["betas"]):
            single("a beta of a parameter group", beta, lambda v: (v >= 0) & (v < 1), f"numbers {BELOW_1}")


def parameters_of(groups: Sequence[Group]) -> list[Tensor]:
    """All parameters, in order."""
    return [parameter for group in groups for parameter in group["params"]]


def trainable(groups: Sequence[Group]) -> list[Tensor]:
    """The parameters that require gradients, if gossip can train them."""
    trained = [p for p in parameters_of(groups) if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient; unfreeze some before the optimizer is made")
    devices = sorted({str(p.device) for p in trained})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {' and '.join(devices)}; move the model to one device, model.to(...)")
    if devices == ["meta"]:
        raise ValueError("parameters are on the device meta, without memory; give them some, model.to_empty(...)")
    for p in trained:
        if p.layout != torch.strided or not p.is_floating_point():
            raise ValueError(f"a parameter has dtype {p.dtype} and layout {p.layout}; only dense real ones can mix")
    return trained


def names(groups: Sequence[Group]) -> dict[int, object]:
    """The names of parameters by id: those passed to the optimizer, or their numbers."""
    given, parameters = [name for group in groups for name in group.get("param_names", ())], parameters_of(groups)
    return {id(p): name for p, name in zip(parameters, given or range(len(parameters)), strict=True)}


def facts(rule: Rule, topology: Topology, groups: Sequence[Group]) -> dict[str, str]:
    """What all ranks must agree on, as texts that are the same on every machine."""
    parameters = parameters_of(groups)
    trained = [p for p in parameters if p.requires_grad]
    numbers = dict.fromkeys(("lr", "weight_decay", *rule.settings))
    return {f"{name} of the rule": str(value) for name, value in settings_of(rule).items()} | {
        "topology": f"{topology!r} {topology.fingerprint[:16]}",
        "number of parameters": f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} numbers",
        "shapes": str([list(p.shape) for p in trained]),
        "pieces": str([list(piece(p).shape) for p in trained if piece(p) is not p]),
        "memory formats": str([list(p.stride()) for p in trained]),
        "dtypes": str([str(p.dtype) for p in trained]),
        "parameter groups": "; ".join(
            f"{len(group['params'])} tensors with " + ", ".join(f"{name} {value(group, name):g}" for name in numbers)
            for group in groups
        ),
        "frozen parameters": str([[list(p.shape), str(p.dtype)] for p in parameters if not p.requires_grad]),
    }


def settings_of(rule: Rule) -> dict[str, object]:
    """The options of a rule and its parts as plain data."""
    return {name: value for name, value in flattened("rule", rule).items() if name != "rule"}


def options_of(rule: Rule) -> dict[str, object]:
    """The options of a rule as users write them, without those of parameter groups: learning rate and momentum."""
    of_groups = {"rule", "lr", *rule.settings}
    return {name: v for name, v in flattened("rule", rule, spelled=True).items() if not of_groups & {*name.split()}}
