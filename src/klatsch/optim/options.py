"""Checks of an optimizer's options, besides those of its rule and its parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Literal, get_args

from klatsch.arguments import there_are
from klatsch.optim.groups import single
from klatsch.ranks.links import OnFailure
from klatsch.rules import Rule
from klatsch.topology import Topology

LONGEST = 30 * 86400  # seconds
OnNonFinite = Literal["raise", "skip"]


def refuse(kind: type, own: Collection[str], base: Callable[..., None], given: Collection[str]) -> None:
    """Refuse options that an optimizer does not have; its own come beside those of the base class."""
    names = (*own, *inspect.signature(base).parameters)
    known = [name for name in dict.fromkeys(names) if name not in ("self", "params", "rule", "unknown")]
    for name in given:
        hint = "leave it out, momentum is plain" if name in ("nesterov", "dampening") else there_are(name, known)
        raise ValueError(f"{kind.__name__} has no option {name!r}; {hint}")


def check_failures(timeout: float, on_failure: OnFailure, quorum: float, on_nonfinite: OnNonFinite) -> None:
    """Check the options that say what to do when something goes wrong."""
    seconds = f"a number of seconds above 0, at most {LONGEST:,}"
    single("timeout", timeout, lambda v: (v > 0) & (v <= LONGEST), seconds)
    for name, value, known in (("on_failure", on_failure, OnFailure), ("on_nonfinite", on_nonfinite, OnNonFinite)):
        if value not in get_args(known):
            raise ValueError(f"{name} = {value!r}; choose from {', '.join(get_args(known))}")
    part = "a share of all ranks from 0 to 1, such as 0.5"
    if single("quorum", quorum, lambda v: (v >= 0) & (v <= 1), part) and on_failure == "raise":
        raise ValueError(f"quorum = {quorum} needs on_failure='continue': else the first failure ends the training")


def check_weight(weight: float | None, rule: Rule) -> None:
    """Check how much a rank counts, and that the rule takes notice of it."""
    if weight is None:
        return
    single("weight", weight, lambda v: v > 0, "a number above 0, such as this rank's number of samples")
    if rule.ignores_scale:
        raise ValueError(
            f"weight = {weight} has no effect on {rule.name}, where every rank divides its gradients by their own "
            "size; gossip gradients first (reduced=True), or leave it out"
        )


def catching_up(catch_up: object, topology: Topology) -> bool:
    """Whether ranks that fall behind catch up."""
    if not isinstance(catch_up, bool):
        raise ValueError(f"catch_up = {catch_up!r}; give True or False")
    if catch_up and not topology.late:
        raise ValueError(
            f"catch_up = True on {topology.name}: neighbours wait for every message at once; say for how many rounds "
            "they may go on, such as every=8, late=7"
        )
    return catch_up


def sized(topology: object, ranks: list[int]) -> Topology:
    """A topology with one node per rank."""
    if not isinstance(topology, Topology):
        hint = f"; a momentum goes by name: momentum={topology}" if isinstance(topology, float) else ""
        raise ValueError(f"topology is a {type(topology).__name__}; give a Topology, or a name such as 'ring'{hint}")
    if topology.size != len(ranks):
        remedy = f"give its name alone, or start {topology.size} processes (torchrun --nproc-per-node {topology.size})"
        raise ValueError(f"{topology.name} has {topology.size} nodes but there are {len(ranks)} ranks; {remedy}")
    return topology
