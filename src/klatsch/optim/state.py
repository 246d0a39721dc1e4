"""The state of an optimizer as plain dictionaries and tensors, the way torch's own optimizers give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klatsch.optim.share import Share

FORMAT = 2  # 1 was that of the hand-written rules of 0.1.0


def per_parameter(share: Share) -> dict[Tensor, dict[str, Tensor]]:
    """Copies of the fields of the state, cut into parameters."""
    flat = share.flat
    found: dict[Tensor, dict[str, Tensor]] = {p: {} for p in flat.parameters}
    for name, vector in share.vectors().items():
        if len(vector) == len(flat.values):
            for parameter, view in zip(flat.parameters, flat.views(vector), strict=True):
                found[parameter][name] = view.clone()
    return found


def header(shares: Sequence[Share]) -> dict[str, Any]:
    """What else there is to know: the rule, the round, and fields that are single numbers, such as push-sum weights."""
    singles = [
        {name: v.clone() for name, v in share.vectors().items() if len(v) != len(share.flat.values)} for share in shares
    ]
    return {"format": FORMAT, "rule": shares[0].rule.name, "rounds": shares[0].node.rounds, "single": singles}


def checked(state: Any, groups: Sequence[dict[str, Any]], shares: Sequence[Share]) -> list[dict[str, Tensor]]:
    """The vectors of a state, by share, after a check that it fits.

    Raises:
        ValueError: it is a state of something else; with what differs.
    """
    facts = state.get("gossip") if isinstance(state, dict) else None
    if isinstance(facts, dict) and facts.get("format") == 1:
        raise ValueError(
            "this is a state_dict of klatsch 0.1.0, whose rules kept other vectors; load it with klatsch 0.1.0"
        )
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError("this is no state_dict of a Gossip optimizer of this version; give what its state_dict() gave")
    rule = shares[0].rule.name
    if facts["rule"] != rule:
        raise ValueError(
            f"the state_dict is one of {facts['rule']}, but this optimizer runs {rule}; load it into one with that rule"
        )
    counts = [len(group["params"]) for group in state["param_groups"]]
    if counts != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"the state_dict has parameter groups of {counts} parameters, this optimizer of "
            f"{[len(group['params']) for group in groups]}; make it with the same parameters"
        )
    numbers = {
        id(parameter): number
        for group, other in zip(groups, state["param_groups"], strict=True)
        for parameter, number in zip(group["params"], other["params"], strict=True)
    }
    if len(facts["single"]) != len(shares):
        raise ValueError("the state_dict is of parameters of other dtypes; make the optimizer with the same parameters")
    return [
        _vectors(share, state["state"], numbers, single) for share, single in zip(shares, facts["single"], strict=True)
    ]


def _vectors(share: Share, entries: Any, numbers: dict[int, int], single: dict[str, Tensor]) -> dict[str, Tensor]:
    flat, result = share.flat, dict(single)
    known = {name for parameter in flat.parameters for name in entries.get(numbers[id(parameter)], {})}
    if strange := known - set(share.vectors()) - share.added:
        raise ValueError(
            f"the state_dict has {', '.join(sorted(strange))}, which this optimizer does not keep; it is of a rule "
            "with other options (momentum, average)"
        )
    for name in dict.fromkeys((*share.vectors(), *share.added)):
        if name in single or name in share.added - known:
            continue
        whole = torch.empty(len(flat.values), dtype=share.dtype, device=flat.values.device)
        for parameter, view in zip(flat.parameters, flat.views(whole), strict=True):
            value = entries.get(numbers[id(parameter)], {}).get(name)
            if value is None or value.shape != parameter.shape:
                found = "nothing" if value is None else f"shape {tuple(value.shape)}"
                raise ValueError(
                    f"the state_dict has {found} as {name} of a parameter of shape {tuple(parameter.shape)}; it is of "
                    "another model, or of a rule with other options (momentum, average)"
                )
            view.copy_(value)
        result[name] = whole
    return result
