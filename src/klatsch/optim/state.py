"""The state of a training as plain data and tensors, without pickle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from klatsch import sealed
from klatsch.optim.groups import Group, options_of, parameters_of
from klatsch.optim.hosts import piece
from klatsch.optim.share import Share
from klatsch.ranks import saved
from klatsch.ranks.mailbox import Memory
from klatsch.ranks.saved import Round, SavedFile
from klatsch.rules import Rule, State
from klatsch.sealed import REMEDY, CheckpointError
from klatsch.topology import Topology

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
FORMAT = 4  # 1: the hand-written rules of 0.1.0; 2: without the options of the rule; 3: without rank and size


def per_parameter(share: Share) -> dict[Tensor, State]:
    """Copies of the fields of the state, cut into parameters; all ranks of a host ask together."""
    flat = share.flat
    own = {name: v for name, v in share.node.state.items() if name not in share.singles}
    fields = {name: flat.views(flat.whole(v)) for name, v in own.items()}
    return {
        p: {name: flat.shaped(k, views[k].clone()) for name, views in fields.items()}
        for k, p in enumerate(flat.parameters)
    }


def header(rule: Rule, shares: Sequence[Share], rank: int, topology: Topology) -> dict[str, object]:
    """The rest: the rule as it was given, the round, fields that are single numbers, and what the channel holds."""
    singles = [{name: share.node.state[name].clone() for name in sorted(share.singles)} for share in shares]
    told = {"rule": rule.name, "options": options_of(rule), "rounds": shares[0].node.rounds, "single": singles}
    # The state of a host may be loaded by another number of ranks, which have other parts of the channel's memory.
    alone = shares[0].flat.host.group is None
    channel = {"topology": topology.fingerprint, "memories": [share.node.memory for share in shares]} if alone else {}
    return {"format": FORMAT, "rank": rank, "size": topology.size, "channel": channel} | told


def memories_of(state: StateDict, topology: Topology, shares: Sequence[Share]) -> list[Memory] | None:
    """What the channels of a state hold; None if it is of another graph or channel, or if nodes are hosts."""
    channel = state["gossip"].get("channel", {})
    fits = channel.get("topology") == topology.fingerprint and shares[0].flat.host.group is None
    return channel["memories"] if fits else None


def vectors_of(
    state: StateDict, groups: Sequence[Group], rule: Rule, shares: Sequence[Share], rank: int, size: int
) -> list[State]:
    """The vectors of a state, by share, after a check that it fits."""
    facts = state.get("gossip") if isinstance(state, dict) else None
    form = facts.get("format") if isinstance(facts, dict) else None
    if form == 1:
        raise ValueError(
            "this state_dict is of klatsch 0.1.0, whose rules kept other vectors; load it with that version"
        )
    if facts is None or form != FORMAT:
        raise ValueError("this is not a state_dict of a Gossip optimizer of this version; give its state_dict()")
    sizes = [[len(group["params"]) for group in some] for some in (state["param_groups"], groups)]
    for what, there, here in (
        ("the rule", facts["rule"], rule.name),
        ("the options", *different(facts["options"], options_of(rule))),
        ("parameter groups of size", *sizes),
        ("a number of dtypes of", len(facts["single"]), len(shares)),
    ):
        if there != here:
            remedy = "make it with the same rule, options and parameters"
            raise ValueError(f"the state_dict has {what} {there}, but this optimizer {here}; {remedy}")
    # Corrections and tracked gradients sum to zero over the ranks, and so they must come back; those of one rank alone
    # are zero.
    if facts["size"] != 1 and (facts["rank"], facts["size"]) != (rank, size):
        remedy = "save and load on each rank its own, or use klatsch.Checkpointer, which does that"
        whose = f"rank {facts['rank']} of {facts['size']}"
        raise ValueError(f"the state_dict is of {whose}, but this is rank {rank} of {size}; {remedy}")
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    entries = {id(p): state["state"].get(k, {}) for p, k in zip(parameters_of(groups), numbers, strict=True)}
    return [
        _joined(share, [entries[id(p)] for p in share.flat.parameters], single)
        for share, single in zip(shares, facts["single"], strict=True)
    ]


def different(there: dict[str, object], here: dict[str, object]) -> tuple[str, str]:
    """What two dictionaries do not share, as "beta=0.9, order=atc"; "none" where one has nothing."""
    first, second = (
        ", ".join(f"{k}={v}" for k, v in one.items() if (k, v) not in other.items()) or "none"
        for one, other in ((there, here), (here, there))
    )
    return first, second


def _joined(share: Share, entries: Sequence[State], single: State) -> State:
    """The fields of a share as flat vectors, from those of its parameters."""
    flat, known = share.flat, {name for entry in entries for name in entry}
    kept = (share.node.state.keys() - single.keys() - share.optional) | (known & share.optional)
    for parameter, entry in zip(flat.parameters, entries, strict=True):
        if any((piece(value) is value) != (piece(parameter) is parameter) for value in entry.values()):
            remedy = "load DTensors into an optimizer of pieces, and whole tensors into one of whole parameters"
            raise ValueError(f"the state_dict is of a model that was cut into pieces (FSDP2), or this one is; {remedy}")
        there = {name: tuple(value.shape) for name, value in sorted(entry.items())}
        here = dict.fromkeys(sorted(kept), tuple(parameter.shape))
        if there != here:
            remedy = "it is of another model, or of a rule with other options (momentum, average)"
            raise ValueError(f"the state_dict has {there} of a parameter, this optimizer keeps {here}; {remedy}")
    found = {name: torch.zeros_like(flat.values, dtype=share.dtype) for name in kept}
    for name, vector in found.items():
        for view, entry in zip(flat.views(vector), entries, strict=True):
            view.copy_(piece(entry[name]))
    return single | {name: vector[flat.own] for name, vector in found.items()}


def packed(value: object, tensors: dict[str, Tensor], path: str) -> object:
    """A nested value as data that JSON can hold; tensors go into `tensors`, by their path."""
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


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `packed` packed."""
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


def generators(device: torch.device) -> dict[str, object]:
    """The states of the random generators that scripts draw from."""
    name, keys, *rest = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generators(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators back into states of `generators`."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# --- a model from checkpoints, without the script that trained it ----------------------------------------------------


def merged_of(files: Sequence[SavedFile], best: Round) -> dict[str, Tensor]:
    """The model of the whole network after a round: the mean over its ranks of x and of floating-point buffers.

    What is no floating-point number, such as a count of batches, is the first rank's. One rank is read at a time.
    """
    ranks = sorted(best.crew & best.held)
    total: dict[str, Tensor] = {}
    for rank in ranks:
        mine = [file for file in files if file.seen[:3] == (rank, best.rounds, best.training)]
        if len(mine) != mine[0].header["places"]:
            raise CheckpointError(f"{mine[0].path.parent} lacks files of rank {rank}: one for each GPU of its host")
        try:
            model = _model_of([sealed.read(file.path, saved.FORMAT) for file in mine])
            if total and total.keys() != model.keys():
                raise KeyError("its parameters have other names than those of the rank before")
            for name, v in model.items():
                share = v.double() / len(ranks) if v.is_floating_point() else v
                total[name] = total[name] + share if name in total and v.is_floating_point() else share
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{mine[0].path} does not hold what a checkpoint holds ({error}); {REMEDY}") from None
    return {name: v.to(model[name].dtype) for name, v in total.items()}


def _model_of(parts: list[tuple[dict[str, Any], dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The parameters and buffers of one node, whose ranks have one part each."""
    exports = [header["export"] for header, _ in parts]
    vectors = [[tensors[name] for name in header["export"]["outputs"]] for header, tensors in parts]
    names, cut, models = (exports[0][key] for key in ("names", "cut", "models"))
    if not cut:  # with DDP every rank trains a slice of the whole
        exports, vectors = exports[:1], [[torch.cat(slices) for slices in zip(*vectors, strict=True)]]
    pieces: dict[str, list[Tensor]] = {}
    for export, here in zip(exports, vectors, strict=True):
        for place in export["layout"]:
            vector = here[place["vector"]]
            view = vector.as_strided(place["shape"], place["stride"], place["start"])
            if view.numel() > vector.numel():
                raise IndexError("a parameter is larger than the vector that holds it")
            for name in names[place["parameter"]]:
                pieces.setdefault(name, []).append(view.to(DTYPES[place["dtype"]]))
    model = {name: torch.cat(some, cut[name]) if name in cut else some[0] for name, some in pieces.items()}
    others = [unpacked(header["others"], tensors) for header, tensors in parts]
    for key, before in models.items():  # buffers and frozen parameters
        for own, v in others[0][key].items():
            if isinstance(v, Tensor) and (name := before + own) not in model:
                model[name] = torch.cat([each[key][own] for each in others], cut[name]) if name in cut else v
    return {name: v.contiguous() for name, v in model.items()}
