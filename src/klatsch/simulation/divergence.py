"""Where a run begins to diverge: the first round in which a column is not finite, and the node that began.

A run is looked at where a piece of its rounds ends. A piece in which a column was lost is run again, in halves, until
the round is found. Within that round, what is not finite spreads to neighbours, so the node is the one whose numbers
failed first: the gradient, then what it mixes, then the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from klatsch.rules import Flow, Rule, State
from klatsch.simulation.stack import Rounds, TorchRounds


class Moment(NamedTuple):
    """A state, and after how many rounds it was reached."""

    state: State
    rounds: int


class Watched:
    """A rule that remembers what its last round computed, in this order: the gradient, all that was mixed, the output.

    Args:
        rule: the rule itself.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._seen: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def update(self, state: State, grad: Tensor, flow: Flow, t: int, lr: Any) -> State:
        """The rule's own update."""
        seen = [grad]

        def watched(function: Any, *tensors: Tensor) -> Any:
            seen.extend(tensors)
            return function(*tensors)

        new = self.rule.update(state, grad, Flow(partial(watched, flow), partial(watched, flow.mix)), t, lr)
        self._seen = [*seen, self.rule.output(new)]
        return new

    def finite_steps(self, *outputs: Tensor) -> Tensor:
        """How many steps of the round were finite before the first that was not, per node and column.

        Args:
            outputs: further outputs of the same round, which count as later steps.
        """
        steps = [*self._seen, *outputs]
        finite = [torch.isfinite(v).all(-1).expand(steps[-1].shape[:-1]) for v in steps]
        return torch.stack(finite).int().cumprod(0).sum(0).cpu()


def diverged(output: Tensor, networks: Sequence[slice]) -> Tensor:
    """Which columns are not finite on some node: those of every network, one network after the other."""
    finite = torch.isfinite(output).all(-1)
    return torch.cat([~finite[nodes].all(0) for nodes in networks]).cpu()


def beginnings(
    plain: TorchRounds, rounds: Rounds, networks: Sequence[slice], early: Moment, late: Moment, lost: Tensor
) -> Tensor:
    """The first node and round of columns that were lost, (columns, 2); -1 for the others.

    Args:
        plain: the rounds as plain operations, which show what happens within one.
        rounds: the way in which the run takes them.
        networks: the rows of the state that are the nodes of each network.
        early: where the columns are finite.
        late: where they are not.
        lost: the columns, as `diverged` gives them.
    """
    found = torch.full((len(lost), 2), -1)
    while lost.any():
        low, high = early, late
        while high.rounds - low.rounds > 1:
            half = (low.rounds + high.rounds) // 2
            middle = Moment(rounds.advance(low.state, low.rounds, half), half)
            if (lost & diverged(plain.rule.output(middle.state), networks)).any():
                high = middle
            else:
                low = middle
        output = plain.rule.output(high.state)
        first = lost & diverged(output, networks)
        watched = Watched(plain.rule)
        TorchRounds(plain.gradients, cast(Rule, watched), plain.rates, plain.mix).one(low.state, high.rounds)
        finite = watched.finite_steps(output)  # other engines round otherwise, and may be the only ones to overflow
        nodes = torch.cat([finite[own].argmin(0) for own in networks])
        found[first] = torch.stack([nodes, torch.full_like(nodes, high.rounds)], -1)[first]
        lost, early = lost & ~first, low
    return found
