"""Wrappers that gossip cannot work with: DDP and FSDP average gradients over all of their ranks.

A parameter does not know that it is wrapped, and the wrapper may be older or younger than the optimizer. So all live
objects are searched, which takes up to a tenth of a second, when the optimizer is made and in steps 1, 10, 100...
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn

Kind = TypeVar("Kind")
RECIPES = {  # of docs/frameworks.md, by the package that wraps models
    "lightning.pytorch": "Lightning: Trainer(strategy=klatsch.frameworks.lightning.GossipStrategy())",
    "transformers.trainer": "Hugging Face: klatsch.frameworks.huggingface.GossipTrainer instead of Trainer",
    "accelerate.accelerator": "Accelerate: accelerator.prepare_model(model, evaluation_mode=True)",
}


class Wrappers:
    """Refuses wrappers around parameters that some ranks train by gossip."""

    def __init__(self, parameters: Sequence[Tensor], ranks: Sequence[int]) -> None:
        self._parameters, self._ranks = parameters, set(ranks)
        self._looks, self._next = 0, 1
        self._refuse_averaging()

    def look(self, *, now: bool = False) -> None:
        """Look again in a step, if it is time, or `now`: DDP writes to the parameters when it wraps them."""
        self._looks += 1
        if self._looks == self._next:
            now, self._next = True, self._next * 10
        if now:
            self._refuse_averaging()
        kinds = [*fsdp("FullyShardedDataParallel"), *fsdp("FSDPModule")] if self._looks == 1 else []
        if kinds and all(p.grad is None for p in self._parameters) and any(True for _ in alive(kinds)):
            what = "no parameter of the optimizer has a gradient: FSDP has put others in their place"
            raise ValueError(f"{what}; train the model without it; {recipe()}")

    def _refuse_averaging(self) -> None:
        if len(self._ranks) == 1:
            return  # nobody to average with
        kinds: list[type[nn.Module]] = [nn.parallel.DistributedDataParallel, *fsdp("FullyShardedDataParallel")]
        found = weakref.WeakSet(wrapper for wrapper in alive(kinds) if self._averages(wrapper))
        if found:
            gc.collect()  # one that nobody uses does no harm
        for wrapper in found:
            raise ValueError(
                f"{type(wrapper).__name__} is around this model on ranks that gossip, and averages their gradients "
                "before gossip can; train the model without it, or put it around the ranks of one host, and gossip "
                f"between hosts (mesh=..., docs/hosts.md); {recipe()}"
            )

    def _averages(self, wrapper: nn.Module) -> bool:
        known, ours = vars(wrapper), {id(p) for p in self._parameters}
        ignored, inside = known.get("parameters_to_ignore", ()), wrapper.get_submodule("module")
        groups = (known.get("process_group"), known.get("_inter_node_pg"))
        return any(len(self._ranks.intersection(_ranks(group))) > 1 for group in groups) and any(
            id(p) in ours for name, p in inside.named_parameters() if name not in ignored
        )


def recipe() -> str:
    """What to do instead in the frameworks that are in use, and where to read it."""
    found = [text for package, text in RECIPES.items() if package in sys.modules]
    return "; ".join((*found, "see docs/frameworks.md"))


def fsdp(name: str) -> list[type[nn.Module]]:
    """A class of FSDP if it is imported, which takes a while; else it has no objects."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [vars(module)[name]] if module is not None and name in vars(module) else []


def alive(kinds: Sequence[type[Kind]]) -> Iterator[Kind]:
    """All objects of some classes, and of those derived from them."""
    known = list(kinds)
    for kind in known:  # which grows
        known += kind.__subclasses__()
    every = set(known)
    return (thing for thing in gc.get_objects() if type(thing) in every)


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    with suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # a destroyed group
        return dist.get_process_group_ranks(group) if group is not None else []
    return []
