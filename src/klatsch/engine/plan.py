"""What a rule sends in a round: found by running it on a few numbers, before anything is sent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.algorithms import Algorithm

MOST_CALLS = 8  # mixes in one round, for the numbering of tags


class Call(NamedTuple):
    """One call of `mix` in a round."""

    shapes: tuple[torch.Size, ...]  # of the tensors that travel in its message
    needs: tuple[int, ...]  # earlier calls whose results are part of what it sends


def plan(rule: Algorithm, x: Tensor) -> tuple[Call, ...]:
    """The mix calls of a round, found by running the rule on a few numbers.

    Raises:
        ValueError: the rule does not keep its promise on what is eager, or mixes too often.
    """
    tiny = x.new_zeros(*x.shape[:-1], min(2, x.shape[-1]))
    state = rule.init(tiny)

    def calls(poisoned: int | None = None) -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []

        def mix(*tensors: Tensor) -> tuple[Tensor, ...]:
            found.append(tensors)
            return tuple(v * (torch.nan if len(found) - 1 == poisoned else 1.0) for v in tensors)

        rule.update(state, tiny, mix, 1)
        return found

    found = calls()
    eager = [getattr(state, name) for name in rule.eager]
    if eager and (
        not found or len(found[0]) != len(eager) or any(a is not b for a, b in zip(found[0], eager, strict=True))
    ):
        raise ValueError(
            f"{type(rule).__name__}: its first mix call is not on exactly the eager fields {', '.join(rule.eager)}, in "
            "this order and unchanged; put them so, or leave eager empty"
        )
    if len(found) > MOST_CALLS:
        raise ValueError(f"{type(rule).__name__} mixes {len(found)} times per round; {MOST_CALLS} times at most")
    needs: list[list[int]] = [[] for _ in found]
    for k in range(len(found)):
        for c, tensors in enumerate(calls(poisoned=k)):
            if c > k and any(bool(v.isnan().any()) for v in tensors):
                needs[c].append(k)
    wide = tiny.shape[-1]
    shapes = [
        tuple(torch.Size([*v.shape[:-1], x.shape[-1] if v.shape[-1] == wide else v.shape[-1]]) for v in tensors)
        for tensors in found
    ]
    return tuple(Call(*pair) for pair in zip(shapes, map(tuple, needs), strict=True))
