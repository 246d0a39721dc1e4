"""Options of an optimizer and of its parameter groups: what they may be, and what all ranks must agree on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from klatsch import topology as topologies
from klatsch.arguments import number, there_are
from klatsch.columns import count, flattened
from klatsch.optim.hosts import piece
from klatsch.ranks.links import OnFailure
from klatsch.rules import Rule
from klatsch.rules.base import rate
from klatsch.topology import Topology

Group = dict[str, Any]  # torch's
OnNonFinite = Literal["raise", "skip"]
# What torch, its schedulers and timm's write into parameter groups, besides the options of an optimizer.
NOTES = ["params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "lr_scale", "swa_lr"]
NOTES += ["base_momentum", "max_momentum"]
BETAS = ("beta1", "beta2")
LONGEST = 30 * 86400  # seconds
Check = tuple[Callable[[Any], Any], str]
POSITIVE_OR_0: Check = (lambda v: v >= 0, "a number from 0 up")
BELOW_1: Check = (lambda v: (v >= 0) & (v < 1), "a number from 0 up to but not including 1, such as 0.9")
CHECKS: dict[str, Check] = {  # of single numbers
    "lr": POSITIVE_OR_0,
    "weight_decay": POSITIVE_OR_0,
    "momentum": BELOW_1,
    "betas": BELOW_1,
    "eps": (lambda v: v > 0, "a number above 0, such as 1e-8"),
    "timeout": (lambda v: (v > 0) & (v <= LONGEST), f"a number of seconds above 0, at most {LONGEST:,}"),
    "quorum": (lambda v: (v >= 0) & (v <= 1), "a share of all ranks from 0 to 1, such as 0.5"),
    "weight": (lambda v: v > 0, "a number above 0, such as this rank's number of samples"),
}


def single(option: str, value: object, called: str = "") -> float:
    """Check a number that must not differ between columns."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    return number(called or option, value, *CHECKS[option])


def refuse(kind: type, own: Collection[str], base: Callable[..., None], given: Collection[str]) -> None:
    """Refuse options that an optimizer does not have; its own come beside those of the base class."""
    names = (*own, *inspect.signature(base).parameters)
    known = [name for name in dict.fromkeys(names) if name not in ("self", "params", "rule", "unknown")]
    for name in given:
        hint = "leave it out, momentum is plain" if name in ("nesterov", "dampening") else there_are(name, known)
        raise ValueError(f"{kind.__name__} has no option {name!r}; {hint}")


def check_options(
    rule: Rule, timeout: float, on_failure: str, quorum: float, on_nonfinite: str, weight: float | None
) -> None:
    """Check the options that say what to do when something goes wrong, and how much a rank counts."""
    single("timeout", timeout)
    for name, value, known in (("on_failure", on_failure, OnFailure), ("on_nonfinite", on_nonfinite, OnNonFinite)):
        if value not in get_args(known):
            raise ValueError(f"{name} = {value!r}; choose from {', '.join(get_args(known))}")
    if single("quorum", quorum) and on_failure == "raise":
        raise ValueError(f"quorum = {quorum} needs on_failure='continue': else the first failure ends the training")
    if weight is not None and single("weight", weight) and rule.ignores_scale:
        raise ValueError(
            f"weight = {weight} has no effect on {rule.name}, where every rank divides its gradients by their own "
            "size; gossip gradients first (shared=True), or leave it out"
        )


def on_channel(topology: object, size: int, every: int, late: int, wire: str, catch_up: object) -> Topology:
    """A topology with one node per rank, and how its messages travel."""
    graph = topologies.make(topology, size) if isinstance(topology, str) else topology
    if not isinstance(graph, Topology):
        hint = f"; a momentum goes by name: momentum={graph}" if isinstance(graph, float) else ""
        raise ValueError(f"topology is a {type(graph).__name__}; give a Topology, or a name such as 'ring'{hint}")
    if graph.size != size:
        remedy = f"give its name alone, or start {graph.size} processes (torchrun --nproc-per-node {graph.size})"
        raise ValueError(f"{graph.name} has {graph.size} nodes but there are {size} ranks; {remedy}")
    graph = topologies.channel(graph, every, late, graph.wire if wire == "float32" else wire)
    if not isinstance(catch_up, bool):
        raise ValueError(f"catch_up = {catch_up!r}; give True or False")
    if catch_up and not graph.late:
        raise ValueError(
            f"catch_up = True on {graph.name}: neighbours wait for every message at once; say for how many rounds "
            "they may go on, such as every=8, late=7"
        )
    return graph


# --- parameter groups ------------------------------------------------------------------------------------------------


def defaults_of(rule: Rule, weight_decay: float) -> Group:
    """The options of a parameter group where it has none of its own; torch calls beta1 and beta2 betas."""
    if count(rule) > 1:
        raise ValueError("the rule has several columns; on ranks give one number for each hyper-parameter")
    lr, decay = single("lr", rate(rule.lr, 1), "lr(1)"), single("weight_decay", weight_decay)
    own: Group = {name: float(v) for name, v in rule.settings.items()}
    if decay and "weight_decay" in own:
        own["weight_decay"] = decay
    if "beta1" in own:
        own["betas"] = tuple(own.pop(name) for name in BETAS)
    return {"lr": lr, "weight_decay": decay} | own | ({"matrices": True} if rule.needs_shapes else {})


def value(group: Group, setting: str) -> float:
    """A setting of a rule in a parameter group."""
    return float(group["betas"][BETAS.index(setting)] if setting in BETAS else group[setting])


def pair(betas: object) -> tuple[float, float]:
    """The two betas of Adam; the rule checks what they are."""
    if not isinstance(betas, list | tuple) or len(betas) != len(BETAS):
        raise ValueError(f"betas = {betas!r}; give two numbers, such as (0.9, 0.999)")
    return betas[0], betas[1]


def check_values(group: Group, defaults: Group) -> None:
    """Check the numbers of a parameter group, which schedulers may have set; those of the rule are checked."""
    if not isinstance(group.get("matrices", True), bool):
        raise ValueError(f"matrices of a parameter group = {group['matrices']!r}; give False for AdamW, or True")
    for name in [name for name in defaults if name in CHECKS]:
        if name in ("lr", "weight_decay") or group[name] != defaults[name]:
            for given in pair(group[name]) if name == "betas" else (group[name],):
                single(name, given, f"{'a beta' if name == 'betas' else name} of a parameter group")


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


def matrices(groups: Sequence[Group]) -> set[int]:
    """The ids of the parameters that are matrices for a rule that needs shapes: those with two axes or more."""
    chosen = parameters_of([group for group in groups if group.get("matrices")])
    return {id(p) for p in chosen if p.ndim > 1 and p.numel()}


def names(groups: Sequence[Group]) -> dict[int, object]:
    """The names of parameters by id: those passed to the optimizer, or their numbers."""
    given, parameters = [name for group in groups for name in group.get("param_names", ())], parameters_of(groups)
    return {id(p): name for p, name in zip(parameters, given or range(len(parameters)), strict=True)}


def facts(rule: Rule, topology: str, groups: Sequence[Group]) -> dict[str, str]:
    """What all ranks must agree on, as texts that are the same on every machine."""
    parameters = parameters_of(groups)
    trained, whole = [p for p in parameters if p.requires_grad], matrices(groups)
    numbers = dict.fromkeys(("lr", "weight_decay", *rule.settings))
    return {f"{name} of the rule": str(value) for name, value in settings_of(rule).items()} | {
        "topology": topology,
        "number of parameters": f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} numbers",
        "shapes": str([list(p.shape) for p in trained]),
        "pieces": str([list(piece(p).shape) for p in trained if piece(p) is not p]),
        "memory formats": str([list(p.stride()) for p in trained]),
        "dtypes": str([str(p.dtype) for p in trained]),
        "matrices": str([id(p) in whole for p in trained]),
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


def difference(saved: dict[str, Any], current: dict[str, Any]) -> str:
    """The first fact that two sides do not share: "rule is dat there and dsgd here"; of a dictionary, its entries."""
    for name, new in current.items():
        old = saved.get(name)
        if old != new and isinstance(old, dict) and isinstance(new, dict):
            pairs = ((old, new), (new, old))
            old, new = (", ".join(f"{k}={v}" for k, v in a.items() if (k, v) not in b.items()) for a, b in pairs)
        if old != new:
            return f"{name} is {old or 'none'!s:.200} there and {new or 'none'!s:.200} here"
    return ""
