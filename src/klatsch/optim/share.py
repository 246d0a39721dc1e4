"""Parameters of one dtype and the node that trains them: between torch's view of a model and a rule's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from klatsch.optim.flat import Flat
from klatsch.ranks.links import Links
from klatsch.ranks.node import Block, Given, Node, is_sound
from klatsch.rules import Rule, State

Point = Literal["query", "output", "merged"]  # merged: the mean of all ranks' outputs, which `average_` puts there
Setting = float | Tensor  # one number for all parameters, or a vector with one for each


class Share:
    """Parameters of one dtype, the same everywhere in the network, and this rank's part of the rule's state on them."""

    def __init__(self, flat: Flat, rule: Rule, links: Links, channel: int = 0) -> None:
        self.flat, self.rule = flat, rule
        # Averages with small weights would stand still in half precision, so states are kept in float32 there.
        start = flat.values.float() if flat.values.element_size() < 4 else flat.values
        self.node = Node(rule, start, links, channel, guarded=True)
        self.dtype = start.dtype
        self._inputs: tuple[Tensor, Setting, float] = (start, 0.0, 1.0)
        self._lr: Setting = 0.0
        self._settings: dict[str, Setting] = {}  # what the rule is given anew in every round
        self.added = _kept(self._with_momentum, start) - _kept(rule, start)  # what only a group's momentum needs

    def take_in(self, groups: Sequence[dict[str, Any]], factor: float) -> None:
        """Take the gradients, times a factor; 0 makes it a round of gossip alone, whatever they are.

        Raises:
            ValueError: a gradient is sparse, or a group has a momentum that the rule does not know.
        """
        names = self.rule.settings
        if "momentum" not in names and any("momentum" in group for group in groups):
            raise ValueError(f"something gave a parameter group a momentum, but {self.rule.name} has none")
        if self.added and any(group["momentum"] for group in groups):
            self._keep_momentum()
        self._inputs = self.flat.bind_gradients(), self._setting(groups, "weight_decay"), factor
        self._lr = self._setting(groups, "lr")
        self._settings = {name: self._setting(groups, name) for name in names}

    def not_finite(self) -> str | None:
        """What is wrong with the gradients that were taken in; None where they are finite."""
        gradients, _, factor = self._inputs
        if factor == 0.0 or is_sound(gradients):
            return None
        views = self.flat.views(gradients)
        wrong = [k for k, view in enumerate(views) if not is_sound(view.reshape(-1))] or [*range(len(views))]
        which = f"{self.flat.described(wrong[0])}{f' (of {len(wrong)})' * (len(wrong) > 1)}"
        largest = float(gradients.abs().max())
        return f"the gradient of {which} is not finite, or absurd: up to {largest:.3g}"

    def exchange(self) -> None:
        """The first half of a round.

        Raises:
            LinkError: a neighbour failed; nothing has changed yet.
        """
        self.node.exchange(self._given)

    def advance(self) -> None:
        """The second half: the model moves to the next x."""
        self.node.advance(self._given, self._take_over)
        self.flat.mark_written()

    def vectors(self) -> State:
        """The fields of the state."""
        return self.node.state

    def load(self, vectors: dict[str, Tensor], rounds: int) -> None:
        """Go on from a state that was saved after so many rounds.

        Raises:
            ValueError: the parameters were moved.
        """
        self.flat.gather()
        if self.added & vectors.keys():
            self._keep_momentum()
        unsaved = {name: v.new_zeros(v.shape) for name, v in self.vectors().items() if name in self.added}
        self.node.load(unsaved | vectors, rounds)
        self.show("query")

    def show(self, point: Point) -> None:
        """Put a point of the state into the model."""
        self._write(point, self.flat.values)
        self.flat.mark_written()

    def output(self) -> Tensor:
        """x, as the model holds it or would."""
        if not self.rule.apart or self.node.rounds == 0:  # at the start all points are what the model holds
            return self.flat.values
        found = torch.empty_like(self.flat.values)
        self._write("output", found)
        return found

    def check_untouched(self, holds: Point = "query") -> None:
        """See whether somebody has written to the parameters, which belong to the optimizer since it was made.

        Args:
            holds: what they should be.

        Raises:
            ValueError: somebody has, and they do not fit the rest of the state; or they were moved.
        """
        self.flat.gather()
        if not self.flat.touched:
            return
        if self.node.rounds == 0:  # the model was loaded before training: start from there
            self.node.load(self.rule.init(self.flat.values.to(self.dtype)), 0)
        elif not self._shows(holds):
            raise ValueError(
                f"the parameters were changed after round {self.node.rounds}, but not by this optimizer, whose other "
                "vectors do not fit them any more; load its state too (load_state_dict), make a new one, or put its "
                "own point back: optimizer.train() after average_, else load_state_dict(optimizer.state_dict())"
            )
        self.flat.written()

    def _write(self, point: Point, into: Tensor) -> None:
        self.node.write(self.rule.query if point == "query" else self.rule.output, into)

    def _shows(self, point: Point) -> bool:
        expected = torch.empty_like(self.flat.values)
        self._write(point, expected)
        return point != "merged" and torch.equal(self.flat.values, expected)

    def _gradient(self, block: Block) -> Tensor:
        gradients, decay, factor = self._inputs
        gradient = gradients[block].to(self.dtype)
        if factor == 0.0:
            gradient = torch.zeros_like(gradient)
        elif factor != 1.0:
            gradient = gradient * factor
        if isinstance(decay, Tensor):
            return gradient + decay[block] * self.flat.values[block]
        return gradient + decay * self.flat.values[block] if decay else gradient

    def _given(self, block: Block) -> Given:
        lr, *values = [v[block] if isinstance(v, Tensor) else v for v in (self._lr, *self._settings.values())]
        rule = self.rule.with_settings(**dict(zip(self._settings, values, strict=True)))
        return Given(rule, self._gradient(block), lr)

    def _take_over(self, block: Block, state: State, rule: Rule) -> None:
        self.flat.values[block].copy_(rule.query(state))

    def _keep_momentum(self) -> None:
        """Make the buffer of a momentum that a group has and the rule has not; it starts from 0, as in torch."""
        if not self.added <= self.vectors().keys():
            self.node.keep_also(self._with_momentum)

    @property
    def _with_momentum(self) -> Rule:
        return self.rule.with_settings(momentum=1.0) if "momentum" in self.rule.settings else self.rule

    def _setting(self, groups: Sequence[dict[str, Any]], name: str) -> Setting:
        if len({float(group[name]) for group in groups}) == 1:
            return float(groups[0][name])
        places = {id(p): place for p, place in zip(self.flat.parameters, self.flat.places, strict=True)}
        vector = torch.empty(len(self.flat.values), dtype=self.dtype, device=self.flat.values.device)
        for group in groups:
            for parameter in group["params"]:
                if id(parameter) in places:
                    vector[places[id(parameter)]] = float(group[name])
        return vector


def _kept(rule: Rule, x: Tensor) -> set[str]:
    """The fields of a rule's state, seen at a few numbers."""
    return set(rule.init(x[:1]))
