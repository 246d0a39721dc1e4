"""Rules by name: each one a product of parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from klatsch.arguments import check_options, named
from klatsch.columns import Given
from klatsch.own import explained
from klatsch.rules.anytime import Anytime, Averaged
from klatsch.rules.base import Rule, checked
from klatsch.rules.directions import Adam
from klatsch.rules.directions import momentum as inertia
from klatsch.rules.patterns import Corrected, DecentLaM, DiLoCo, Plain, Push, QuasiGlobal, Tracked


def dsgd(lr: Given, momentum: Given = 0.0, average: Given = None, order: str = "atc") -> Rule:
    """D-SGD, the baseline of the field: step along your own gradient, then average with your neighbours."""
    return _averaged(Plain(lr, inertia(momentum), order), average)


def dat(lr: Given, averaging: Given = "constant", order: str = "atc", momentum: Given = 0.0, beta: Given = 1.0) -> Rule:
    """DAT-SGD, the paper's rule: D-SGD with gradients at, or near, an average x of the iterates."""
    return Anytime(Plain(lr, inertia(momentum), order), averaging, beta)


def d2(lr: Given, momentum: Given = 0.0, average: Given = None, lazy: bool = True) -> Rule:
    """D2, which differences between the nodes' data do not harm; on static symmetric graphs."""
    return _averaged(Corrected(lr, inertia(momentum), lazy), average)


def gt(lr: Given, momentum: Given = 0.0, average: Given = None) -> Rule:
    """Gradient tracking, which differences between the nodes' data do not harm; twice the messages of D-SGD."""
    return _averaged(Tracked(lr, inertia(momentum)), average)


def sgp(lr: Given, momentum: Given = 0.0, average: Given = None) -> Rule:
    """Stochastic gradient push, for directed graphs."""
    return _averaged(Push(lr, inertia(momentum)), average)


def decentlam(lr: Given, momentum: Given = 0.9, average: Given = None) -> Rule:
    """DecentLaM: momentum that does not amplify the differences between nodes."""
    return _averaged(DecentLaM(lr, momentum), average)


def dat_gt(lr: Given, averaging: Given = "constant", momentum: Given = 0.0, beta: Given = 1.0) -> Rule:
    """DAT over gradient tracking."""
    return Anytime(Tracked(lr, inertia(momentum)), averaging, beta)


def dat_d2(
    lr: Given, averaging: Given = "constant", momentum: Given = 0.0, beta: Given = 1.0, lazy: bool = True
) -> Rule:
    """DAT over D2, without the bias that data which differ between nodes cause."""
    return Anytime(Corrected(lr, inertia(momentum), lazy), averaging, beta)


def dat_sgp(lr: Given, averaging: Given = "constant", momentum: Given = 0.0, beta: Given = 1.0) -> Rule:
    """DAT over push-sum, for directed graphs."""
    return Anytime(Push(lr, inertia(momentum)), averaging, beta)


def qg(lr: Given, momentum: Given = 0.9, average: Given = None) -> Rule:
    """QG-DSGDm: momentum that follows the models after gossip, for data that differ between nodes."""
    return _averaged(QuasiGlobal(lr, momentum), average)


def diloco(
    lr: Given, momentum: Given = 0.0, outer_lr: Given = 0.7, outer_momentum: Given = 0.9, average: Given = None
) -> Rule:
    """DiLoCo: local steps, then outer steps with Nesterov momentum; on a graph such as complete/16."""
    return _averaged(DiLoCo(lr, inertia(momentum), outer_lr, outer_momentum), average)


def dadam(
    lr: Given,
    beta1: Given = 0.9,
    beta2: Given = 0.999,
    eps: Given = 1e-8,
    weight_decay: Given = 0.0,
    shared: bool = False,
    average: Given = None,
    order: str = "atc",
    reduced: bool = False,
) -> Rule:
    """AdamW on every node, then gossip: the rule to begin with for transformers."""
    return _averaged(Plain(lr, Adam(beta1, beta2, eps, weight_decay, shared, reduced), order), average)


def dat_adam(
    lr: Given,
    averaging: Given = "lr(2)",
    beta: Given = 0.9,
    beta1: Given = 0.0,
    beta2: Given = 0.999,
    eps: Given = 1e-8,
    weight_decay: Given = 0.0,
    shared: bool = False,
    order: str = "atc",
    reduced: bool = False,
) -> Rule:
    """Schedule-free AdamW on every node, with gossip of iterate and average."""
    return Anytime(Plain(lr, Adam(beta1, beta2, eps, weight_decay, shared, reduced), order), averaging, beta)


def d2_adam(
    lr: Given,
    beta1: Given = 0.9,
    beta2: Given = 0.999,
    eps: Given = 1e-8,
    weight_decay: Given = 0.0,
    shared: bool = True,
    average: Given = None,
) -> Rule:
    """AdamW with the correction of D2, on static symmetric graphs."""
    return _averaged(Corrected(lr, Adam(beta1, beta2, eps, weight_decay, shared)), average)


def dat_d2_adam(
    lr: Given,
    averaging: Given = "lr(2)",
    beta: Given = 0.9,
    beta1: Given = 0.0,
    beta2: Given = 0.999,
    eps: Given = 1e-8,
    weight_decay: Given = 0.0,
    shared: bool = True,
) -> Rule:
    """Schedule-free AdamW with the correction of D2, on static symmetric graphs."""
    return Anytime(Corrected(lr, Adam(beta1, beta2, eps, weight_decay, shared)), averaging, beta)


def gt_adam(
    lr: Given,
    beta1: Given = 0.9,
    beta2: Given = 0.999,
    eps: Given = 1e-8,
    weight_decay: Given = 0.0,
    shared: bool = False,
    average: Given = None,
) -> Rule:
    """AdamW of the tracked gradient, which differences between the nodes' data do not harm."""
    return _averaged(Tracked(lr, Adam(beta1, beta2, eps, weight_decay, shared)), average)


def dat_gt_adam(
    lr: Given,
    averaging: Given = "lr(2)",
    beta: Given = 0.9,
    beta1: Given = 0.0,
    beta2: Given = 0.999,
    eps: Given = 1e-8,
    weight_decay: Given = 0.0,
    shared: bool = False,
) -> Rule:
    """Schedule-free AdamW of the tracked gradient, which differences between the nodes' data do not harm."""
    return Anytime(Tracked(lr, Adam(beta1, beta2, eps, weight_decay, shared)), averaging, beta)


def diloco_adam(
    lr: Given,
    beta1: Given = 0.9,
    beta2: Given = 0.999,
    eps: Given = 1e-8,
    weight_decay: Given = 0.0,
    outer_lr: Given = 0.7,
    outer_momentum: Given = 0.9,
    average: Given = None,
) -> Rule:
    """DiLoCo as published: local steps of AdamW, then outer steps with Nesterov momentum; on complete/16, say."""
    return _averaged(DiLoCo(lr, Adam(beta1, beta2, eps, weight_decay), outer_lr, outer_momentum), average)


# A rule's place here is its colour and marker in figures: add new ones at the end.
RULES: dict[str, Callable[..., Rule]] = {
    build.__name__.replace("_", "-"): build
    for build in (
        *(dsgd, dat, d2, gt, sgp, decentlam, dat_gt, dat_d2, dat_sgp, qg, diloco),
        *(dadam, dat_adam, d2_adam, gt_adam, dat_d2_adam, dat_gt_adam, diloco_adam),
    )
}

WHY_NOT = {  # an option that only other rules have: the reason
    "average": "it returns x, which is an average already; choose its weights with averaging",
    "averaging": "it takes gradients at its iterate; use dat, dat-gt, dat-d2, dat-sgp or dat-adam, or average",
    "beta": "it keeps no average x, so there is no point between x and w; use dat, dat-gt, dat-d2, dat-sgp or dat-adam",
    "beta1": "it is not an Adam, and beta1 is that of its first moment; use momentum, or a rule such as dadam",
    "beta2": "it is not an Adam; use a rule such as dadam or dat-adam",
    "momentum": "it is an Adam, whose first moment has beta1",
    "weight_decay": "only dadam and its like decay weights themselves; optimizers on ranks add it to gradients",
    "order": "it has the order atc only, in which its correction, its tracked gradient or its weight is defined; use "
    "dsgd or dat",
    "lazy": "it is stable on every graph without it; d2 and dat-d2 have it, and any rule can mix with a lazy graph: "
    "topology.lazy(graph), or lazy = true of the topology in a study",
}


def make(name: str, **choices: Given) -> Rule:
    """A rule by name: `make("dat", lr=1e-3, averaging="linear", beta=0.9, momentum=0.9, order="cta")`.

    Your own rule is "file.py:Name"; the file is executed.
    """
    known = options(name)
    for choice in choices:
        if name in RULES and choice not in known and choice in WHY_NOT:
            raise ValueError(f"{name} has no {choice}: {WHY_NOT[choice]}")
    check_options(name, choices, known)
    if "lr" not in choices:
        raise ValueError(f"{name} needs a learning rate: make({name!r}, lr=0.01)")
    with explained(name):
        return checked(named("rule", name, RULES)(**choices))


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, ...)` takes."""
    return tuple(inspect.signature(named("rule", name, RULES)).parameters)


def _averaged(rule: Rule, average: Given) -> Rule:
    return rule if average is None else Averaged(rule, average)
