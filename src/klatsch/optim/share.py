"""`Share`: the parameters of one dtype and the node that trains them. An optimizer has one for each dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from klatsch.optim.flat import Flat
from klatsch.optim.groups import Group, value
from klatsch.optim.hosts import piece
from klatsch.ranks.links import GlooLinks
from klatsch.ranks.mailbox import Memory
from klatsch.ranks.message import Block, is_sound
from klatsch.ranks.node import Given, Node
from klatsch.rules import Rule, State

Point = Literal["query", "output", "merged"]  # merged: the mean of all ranks' outputs, which `average_` puts there
Setting = float | Tensor  # one number for all parameters, or a vector with one for each


class Share:
    """Parameters of one dtype, the same everywhere in the network, and this rank's part of the rule's state on them."""

    def __init__(self, flat: Flat, rule: Rule, links: GlooLinks, stream: int = 0) -> None:
        self.flat, self.rule = flat, rule
        # Averages with small weights would stand still in half precision, so states are kept in float32 there.
        own = flat.values[flat.own]
        start = own.float() if own.element_size() < 4 else own
        self.node = Node(rule, start, links, stream, guarded=True)
        self.dtype = start.dtype
        self._gradients, self._factor = start, 1.0
        # In this round: the rule with the settings that all parameters share, and those that differ; lr, weight_decay.
        self._now, self._by_parameter = rule, dict[str, Tensor]()
        self._lr: Setting = 0.0
        self._decay: Setting = 0.0
        self._inert = {name: 1.0 for name in ("momentum", "beta1") if name in rule.settings}
        self._with_momentum = rule.with_settings(**self._inert) if self._inert else rule
        probe = self._with_momentum.init(start.new_zeros(2))
        self.singles = {name for name, v in probe.items() if len(v) == 1}  # the same for all parameters
        self.optional = self._with_momentum.init(start[:1]).keys() - rule.init(start[:1]).keys()  # a group's momentum

    def take_in(self, groups: Sequence[Group], factor: float) -> None:
        """Take the gradients, times a factor; 0 makes it a round of gossip alone, whatever they are."""
        names = self.rule.settings
        if "momentum" not in names and any("momentum" in group for group in groups):
            raise ValueError(f"something gave a parameter group a momentum, but {self.rule.name} has none")
        if self.optional and any(value(group, name) for group in groups for name in self._inert):
            self._keep_momentum()
        self._gradients, self._factor = self.flat.bind_gradients(), factor
        settings = {name: self._setting(groups, name) for name in {"lr", "weight_decay", *names}}
        self._lr = settings.pop("lr")
        self._decay = 0.0 if "weight_decay" in names else settings.pop("weight_decay")  # or the rule decays
        self._by_parameter = {name: v for name, v in settings.items() if isinstance(v, Tensor)}
        self._now = self.rule.with_settings(**{n: v for n, v in settings.items() if not isinstance(v, Tensor)})

    def not_finite(self) -> str | None:
        """What is wrong with the gradients; None where they are finite."""
        if self._factor == 0.0 or is_sound(self._gradients):
            return None
        views = self.flat.views(self._gradients)
        wrong = [k for k, view in enumerate(views) if not is_sound(view.reshape(-1))] or [*range(len(views))]
        which = f"{self.flat.described(wrong[0])}{f' (of {len(wrong)})' * (len(wrong) > 1)}"
        return f"the gradient of {which} is not finite, or absurd: up to {float(self._gradients.abs().max()):.3g}"

    def exchange(self) -> None:
        """The first half of a round. Where it fails, nothing has changed yet."""
        self.node.exchange(self._given)

    def advance(self) -> None:
        """The second half: the model moves to the next point."""
        self.node.advance(self._given, self._move)
        self.flat.mark_written()

    def per_parameter(self) -> dict[Tensor, State]:
        """Copies of the fields of the state, cut into parameters; all ranks of a host ask together."""
        flat, state = self.flat, self.node.state
        fields = {name: flat.views(flat.whole(v)) for name, v in state.items() if name not in self.singles}
        return {
            p: {name: flat.shaped(k, views[k].clone()) for name, views in fields.items()}
            for k, p in enumerate(flat.parameters)
        }

    def single(self) -> State:
        """The fields that are one number for all parameters."""
        return {name: v for name, v in self.node.state.items() if name in self.singles}

    def joined(self, by_parameter: Mapping[int, State], single: State) -> State:
        """The fields as flat vectors, from those of the parameters by id, and from single numbers."""
        flat, entries = self.flat, [by_parameter[id(p)] for p in self.flat.parameters]
        known = {name for entry in entries for name in entry}
        kept = (self.node.state.keys() - single.keys() - self.optional) | (known & self.optional)
        for parameter, entry in zip(flat.parameters, entries, strict=True):
            if any((piece(value) is value) != (piece(parameter) is parameter) for value in entry.values()):
                raise ValueError(
                    "the state_dict is of a model that was cut into pieces (FSDP2), or this one is; load DTensors into "
                    "an optimizer of pieces, and whole tensors into one of whole parameters"
                )
            shapes = {name: tuple(value.shape) for name, value in sorted(entry.items())}
            expected = dict.fromkeys(sorted(kept), tuple(parameter.shape))
            if shapes != expected:
                remedy = "it is of another model, or of a rule with other options (momentum, average)"
                raise ValueError(
                    f"the state_dict has {shapes} of a parameter, this optimizer keeps {expected}; {remedy}"
                )
        vectors = {name: torch.zeros_like(flat.values, dtype=self.dtype) for name in kept}
        for name, vector in vectors.items():
            for view, entry in zip(flat.views(vector), entries, strict=True):
                view.copy_(piece(entry[name]))
        return single | {name: vector[flat.own] for name, vector in vectors.items()}

    def check(self, vectors: State) -> None:
        """Refuse vectors that are missing, unknown, or of another shape."""
        now = self._with_momentum.init(self.node.rule.query(self.node.state)) | self.node.state
        wrong = (now.keys() - self.optional - vectors.keys()) | (vectors.keys() - now.keys())
        if wrong:
            raise ValueError(f"the vectors {', '.join(sorted(wrong))} are missing or unknown")
        for name, v in vectors.items():
            if (v.shape, v.dtype) != (now[name].shape, now[name].dtype):
                raise ValueError(f"the vector {name} is of shape {tuple(v.shape)} and {v.dtype}")

    def load(self, vectors: State, rounds: int, memory: Memory) -> None:
        """Go on from a state saved after some rounds, and from the memory of its channel."""
        self.flat.gather()
        if self.optional & vectors.keys():
            self._keep_momentum()
        unsaved = {name: torch.zeros_like(v) for name, v in self.node.state.items() if name in self.optional}
        self.node.load(unsaved | vectors, rounds, memory)
        self.show("query")

    def show(self, point: Point) -> None:
        """Put a point of the state into the model."""
        self._write(point, self._own)
        self.flat.mark_written()

    def output(self) -> Tensor:
        """x, as the model holds it or would: the slice that is trained here."""
        if not self.rule.apart or self.node.rounds == 0:  # at the start all points are what the model holds
            return self._own
        return self._write("output", torch.empty_like(self._own))

    def check_untouched(self, holds: Point = "query") -> None:
        """Refuse parameters that somebody else has changed from the point they should hold, so that the state misfits.

        Before the first round they are where training starts.
        """
        self.flat.gather()
        values = self._own
        if not self.flat.touched:
            return
        if self.node.rounds == 0:
            self.node.load(self.rule.init(values.to(self.dtype)), 0)
        elif holds == "merged" or not torch.equal(values, self._write(holds, torch.empty_like(values))):
            raise ValueError(
                f"the parameters were changed after round {self.node.rounds}, but not by this optimizer, whose other "
                "vectors do not fit them any more; load its state too (load_state_dict), make a new one, or put its "
                "own point back: optimizer.train() after average_, else load_state_dict(optimizer.state_dict())"
            )
        self.flat.accept()

    @property
    def _own(self) -> Tensor:
        return self.flat.values[self.flat.own]

    def _write(self, point: Point, into: Tensor) -> Tensor:
        self.node.write(self.rule.query if point == "query" else self.rule.output, into)
        return into

    def _given(self, block: Block) -> Given:
        gradient = self._gradients[self.flat.own][block].to(self.dtype)
        lr, decay = _cut(self._lr, block), _cut(self._decay, block)
        if self._factor == 0.0:
            gradient = torch.zeros_like(gradient)
        elif self._factor != 1.0:
            gradient = gradient * self._factor
        if isinstance(decay, Tensor) or decay:
            gradient = gradient + decay * self._own[block]
        rule = self._now
        if self._by_parameter:
            rule = rule.with_settings(**{name: v[block] for name, v in self._by_parameter.items()})
        return Given(rule, gradient, lr)

    def _move(self, block: Block, state: State, rule: Rule) -> None:
        self._own[block].copy_(rule.query(state))

    def _keep_momentum(self) -> None:
        """Make the buffer of a momentum that a group has and the rule has not; it starts from 0, as in torch."""
        if not self.optional <= self.node.state.keys():
            self.node.keep_also(self._with_momentum)

    def _setting(self, groups: Sequence[Group], name: str) -> Setting:
        first, *others = [value(group, name) for group in groups]
        if all(value == first for value in others):
            return first
        vector = torch.full_like(self.flat.values, first, dtype=self.dtype)
        for group in groups:
            for parameter in group["params"]:
                if (place := self.flat.places.get(id(parameter))) is not None:
                    vector[place] = value(group, name)
        return vector[self.flat.own]


def _cut(setting: Setting, block: Block) -> Setting:
    return setting[block] if isinstance(setting, Tensor) else setting
