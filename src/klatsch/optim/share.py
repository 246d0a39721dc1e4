"""`Share`: parameters of one dtype as one vector, and the node that trains them. An optimizer has one for each dtype.

The tensors of a model lie side by side in a flat buffer, their gradients in another. A rule then works on whole
vectors, a message is one piece of memory, and nothing is gathered or scattered per step. Each parameter has a storage
of its own, which is its part of the buffer: whoever saves a model tells tensors apart by their storages, and writes
these whole. Between two parameters there may be some numbers that are always zero: compiled kernels take for granted
that a storage begins at a multiple of 16 bytes. What FSDP2 leaves to this rank is copied in and out, since it owns that
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from klatsch.columns import WeightMatrix
from klatsch.optim.groups import Group, value
from klatsch.optim.hosts import Host, like, piece
from klatsch.ranks.links import GlooLinks
from klatsch.ranks.mailbox import Memory
from klatsch.ranks.message import Block, is_sound
from klatsch.ranks.node import Given, Inputs, Node
from klatsch.rules import Rule, State

ALIGNED = 16  # bytes
Point = Literal["query", "output", "merged"]  # merged: the mean of all ranks' outputs, which `average_` puts there
Setting = float | Tensor  # one number for all parameters, or a vector with one for each


class Share:
    """Parameters of one dtype on one device, and this rank's part of the rule's state on them.

    After `bind_gradients`, gradients live in a buffer like that of the values; until then autograd makes them, so that
    a sparse one shows. If a host has several ranks, each of them trains the slice `own` of the vector.

    Args:
        parameters: those of one dtype, the same everywhere in the network.
        names: their names in errors, by id.
        host: the ranks that train them together.
        reshard: makes FSDP2 gather whole parameters again in the next forward pass.
    """

    rule: Rule
    node: Node
    given: Inputs  # what a round starts from

    def __init__(
        self, parameters: Sequence[Tensor], names: Mapping[int, object], host: Host, reshard: Callable[[], None]
    ) -> None:
        self.parameters, self._names, self.host, self._reshard = list(parameters), names, host, reshard
        pieces = [piece(p).detach() for p in self.parameters]
        step = ALIGNED // pieces[0].element_size()
        starts = accumulate((-(-v.numel() // step) * step for v in pieces), initial=0)
        self.layout = [(v.shape, _strides(v), start) for v, start in zip(pieces, starts, strict=False)]
        length = self.layout[-1][2] + pieces[-1].numel()
        padded, self.own = host.cut(length)
        self._padded = pieces[0].new_zeros(padded)
        self.values = self._padded[:length]
        # Averages with small weights would stand still in half precision, so states are kept in float32 there.
        self.dtype = torch.float32 if self.values.element_size() < 4 else self.values.dtype
        self._gradients: Tensor | None = None
        self._bound: list[Tensor] = []  # views of them
        self._watched: list[tuple[Tensor | None, int | None]] = []
        for k, view in enumerate(self.views(self.values)):
            view.copy_(pieces[k])
            if not host.sharded:
                self.parameters[k].data = self._place(k)
        self.accept()

    def train_over(self, links: GlooLinks, rule: Rule, stream: int) -> None:
        """Begin at round 0 over some links, where every share has a stream of its own."""
        start = self._own.to(self.dtype)
        self.rule, self.node = rule, Node(rule, start, links, stream, guarded=True)
        self._inert = [name for name in ("momentum", "beta1") if name in rule.settings]
        self._with_momentum = rule.with_settings(**dict.fromkeys(self._inert, 1.0))
        few = start.new_zeros(2)
        fields = self._with_momentum.init(few)
        self.singles = {name for name, v in fields.items() if len(v) == 1}  # the same for all parameters
        self.optional = fields.keys() - rule.init(few).keys()  # a group's momentum

    # --- parameters and gradients as vectors -------------------------------------------------------------------

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector of this layout as tensors shaped like the parameters, in their memory formats."""
        first = vector.storage_offset()
        return [vector.as_strided(shape, strides, first + start) for shape, strides, start in self.layout]

    def matrices(self, chosen: Collection[int]) -> Iterator[WeightMatrix]:
        """The parameters with these ids as matrices: a row for every output, however the other axes are ordered."""
        for k, (shape, strides, start) in enumerate(self.layout):
            if id(self.parameters[k]) in chosen:
                outputs, inputs = shape[0], shape[1:].numel()
                if outputs > 1 and strides[0] not in (1, inputs):
                    what = f"{self._described(k)} has strides {strides}: its outputs are neither rows nor columns"
                    raise ValueError(f"{what}; make it contiguous before the optimizer is made")
                yield WeightMatrix(start, outputs, inputs, turned=outputs > 1 and strides[0] != inputs)

    def copies(self, own: Tensor) -> list[Tensor]:
        """The own slice and the host's others as tensors like the parameters; all ranks of a host ask together."""
        whole = own
        if self.host.slices:
            padded = own.new_zeros(len(self._padded))
            padded[self.own] = own
            self.host.join(padded)
            whole = padded[: len(self.values)]
        return [like(p, view.clone()) for p, view in zip(self.parameters, self.views(whole), strict=True)]

    def bind_gradients(self) -> Tensor:
        """The gradients as one vector: those that lie elsewhere are copied in, absent ones are zero."""
        gradients = self._gradient_buffer()
        for parameter, bound in zip(self.parameters, self._bound, strict=True):
            if parameter.grad is bound:
                continue
            if parameter.grad is None:
                bound.zero_()
            elif parameter.grad.is_sparse:
                what = f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be gossiped"
                raise ValueError(f"{what} as one vector; use dense gradients (for embeddings: sparse=False)")
            else:
                grad = piece(parameter.grad)
                if grad.data_ptr() != bound.data_ptr() or grad.stride() != bound.stride():
                    bound.copy_(grad)
            if not self.host.sharded:
                parameter.grad = bound
        return gradients

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in one go; FSDP2 makes new ones."""
        binds = self._gradients is not None and not self.host.sharded
        if binds:
            self._gradient_buffer().zero_()
        for k, parameter in enumerate(self.parameters):
            parameter.grad = self._bound[k] if binds else None

    def watch_gradients(self) -> None:
        """Remember the gradients, so that `drop_gradients` knows those that are taken from now on."""
        self._watched = [(v, None if v is None else v._version) for v in self._own_gradients]

    def drop_gradients(self) -> bool:
        """Set the gradients to zero if some were taken since `watch_gradients`, and say so."""
        before, self._watched = self._watched, []
        pairs = zip(self._own_gradients, before, strict=False)  # nothing is watched at the start
        taken = any(v is not None and (v is not old or v._version != seen) and v.any() for v, (old, seen) in pairs)
        if taken:
            self.zero_gradients()
        return taken

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient is other than zero."""
        return any(v is not None and bool(v.any()) for v in self._own_gradients)

    def mark_written(self) -> None:
        """Put the own slice together with the host's others, and tell autograd that all parameters have changed."""
        if self.host.sharded:
            for parameter, view in zip(self.parameters, self.views(self.values), strict=True):
                piece(parameter).copy_(view)
            self._reshard()
        self.host.join(self._padded)
        for parameter in self.parameters:
            torch.autograd.graph.increment_version(parameter)
        self.accept()

    def accept(self) -> None:
        """Accept everything written to the parameters so far."""
        self._seen = self._versions

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the parameters, or is one of which nothing lies on this rank."""
        local = piece(tensor)
        start, place = self.values.data_ptr(), local.data_ptr()
        inside = start <= place < start + self.values.nbytes or (local is not tensor and not local.numel())
        return inside or any(place == piece(parameter).data_ptr() for parameter in self.parameters)

    # --- rounds ------------------------------------------------------------------------------------------------

    def take_in(self, groups: Sequence[Group], factor: float) -> str | None:
        """Take the gradients, times a factor; 0 makes it a round of gossip alone, whatever they are.

        Returns:
            What is wrong with them; None where they are finite.
        """
        names = self.rule.settings
        if "momentum" not in names and any("momentum" in group for group in groups):
            raise ValueError(f"something gave a parameter group a momentum, but {self.rule.name} has none")
        if self.optional and any(value(group, name) for group in groups for name in self._inert):
            self._keep_momentum()
        gradients = self.bind_gradients()
        settings = {name: self._setting(groups, name) for name in {"lr", "weight_decay", *names}}
        lr = settings.pop("lr")
        decay = 0.0 if "weight_decay" in names else settings.pop("weight_decay")  # or the rule decays
        by_parameter = {name: v for name, v in settings.items() if isinstance(v, Tensor)}
        rule = self.rule.with_settings(**{name: v for name, v in settings.items() if name not in by_parameter})

        def given(block: Block, symbol: Callable[[Tensor], Tensor]) -> Given:
            taken = gradients[self.own][block]
            gradient = symbol(taken if factor else torch.zeros_like(taken))
            if factor not in (0.0, 1.0):
                gradient = gradient * factor
            if isinstance(decay, Tensor) or decay:
                gradient = gradient + _cut(decay, block) * symbol(self._own[block])
            own = {name: v[block] for name, v in by_parameter.items()}
            return Given(rule.with_settings(**own) if own else rule, gradient, _cut(lr, block))

        self.given = given
        if factor == 0.0 or is_sound(gradients):
            return None
        views = self.views(gradients)
        wrong = [k for k, view in enumerate(views) if not is_sound(view.reshape(-1))] or [*range(len(views))]
        which = f"{self._described(wrong[0])}{f' (of {len(wrong)})' * (len(wrong) > 1)}"
        return f"the gradient of {which} is not finite, or absurd: up to {float(gradients.abs().max()):.3g}"

    def exchange(self) -> None:
        """The first half of a round, after which the model may hold the next point."""
        self.node.exchange(self.given, self._move)

    def advance(self) -> None:
        """The second half of a round: the model moves to the next point."""
        self.node.advance(self.given, self._move)
        self.mark_written()

    def _move(self, block: Block, state: State, rule: Rule) -> None:
        self._own[block].copy_(rule.query(state))

    # --- points and states -------------------------------------------------------------------------------------

    def show(self, point: Point) -> None:
        """Put a point of the state into the model."""
        self._write(point, self._own)
        self.mark_written()

    def output(self) -> Tensor:
        """x, as the model holds it or would: the slice that is trained here."""
        if not self.rule.apart or self.node.rounds == 0:  # at the start all points are what the model holds
            return self._own
        return self._write("output", torch.empty_like(self._own))

    def check_untouched(self, holds: Point = "query") -> None:
        """Refuse parameters that somebody else has changed from the point they should hold, so that the state misfits.

        Before the first round they are where training starts.
        """
        self._gather()
        if self._versions == self._seen:
            return
        values = self._own
        if self.node.rounds == 0:
            self.node.load(self.rule.init(values.to(self.dtype)), 0)
        elif holds == "merged" or not torch.equal(values, self._write(holds, torch.empty_like(values))):
            raise ValueError(
                f"the parameters were changed after round {self.node.rounds}, but not by this optimizer, whose other "
                "vectors do not fit them any more; load its state too (load_state_dict), make a new one, or put its "
                "own point back: optimizer.train() after average_, else load_state_dict(optimizer.state_dict())"
            )
        self.accept()

    def by_parameter(self) -> dict[Tensor, State]:
        """Copies of the fields of the state, cut into parameters; all ranks of a host ask together."""
        fields = {name: self.copies(v) for name, v in self.node.state.items() if name not in self.singles}
        return {p: {name: tensors[k] for name, tensors in fields.items()} for k, p in enumerate(self.parameters)}

    def joined(self, by_parameter: Mapping[int, State], single: State) -> State:
        """The fields as flat vectors, from those of the parameters by id, and from single numbers."""
        entries = [by_parameter[id(p)] for p in self.parameters]
        known = {name for entry in entries for name in entry}
        kept = (self.node.state.keys() - single.keys() - self.optional) | (known & self.optional)
        for parameter, entry in zip(self.parameters, entries, strict=True):
            if any((piece(v) is v) != (piece(parameter) is parameter) for v in entry.values()):
                raise ValueError(
                    "the state_dict is of a model that was cut into pieces (FSDP2), or this one is; load DTensors into "
                    "an optimizer of pieces, and whole tensors into one of whole parameters"
                )
            shapes = {name: tuple(v.shape) for name, v in sorted(entry.items())}
            expected = dict.fromkeys(sorted(kept), tuple(parameter.shape))
            if shapes != expected:
                remedy = "it is of another model, or of a rule with other options (momentum, average)"
                raise ValueError(
                    f"the state_dict has {shapes} of a parameter, this optimizer keeps {expected}; {remedy}"
                )
        vectors = {name: torch.zeros_like(self.values, dtype=self.dtype) for name in kept}
        for name, vector in vectors.items():
            for view, entry in zip(self.views(vector), entries, strict=True):
                view.copy_(piece(entry[name]))
        return single | {name: vector[self.own] for name, vector in vectors.items()}

    def check(self, vectors: State) -> None:
        """Refuse vectors that are missing, unknown, or of another shape."""
        now = self._with_momentum.init(self.rule.query(self.node.state)) | self.node.state
        wrong = (now.keys() - self.optional - vectors.keys()) | (vectors.keys() - now.keys())
        if wrong:
            raise ValueError(f"the vectors {', '.join(sorted(wrong))} are missing or unknown")
        for name, v in vectors.items():
            if (v.shape, v.dtype) != (now[name].shape, now[name].dtype):
                raise ValueError(f"the vector {name} is of shape {tuple(v.shape)} and {v.dtype}")

    def load(self, vectors: State, rounds: int, memory: Memory) -> None:
        """Go on from a state saved after some rounds, and from the memory of its channel."""
        self._gather()
        if self.optional & vectors.keys():
            self._keep_momentum()
        unsaved = {name: torch.zeros_like(v) for name, v in self.node.state.items() if name in self.optional}
        self.node.load(unsaved | vectors, rounds, memory)
        self.show("query")

    # --- inside ------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> Tensor:
        return self.values[self.own]

    @property
    def _own_gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else piece(p.grad) for p in self.parameters]

    @property
    def _versions(self) -> int:
        own = sum(p._version for p in self.parameters)
        return own + sum(piece(p)._version for p in self.parameters) if self.host.sharded else own

    def _gradient_buffer(self) -> Tensor:
        """The buffer of the gradients, with views of it, also if model.to(...) has moved the old ones."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.values)
        if not self._bound or self._elsewhere(self._gradients, self._bound):
            self._bound = self.views(self._gradients)
        return self._gradients

    def _place(self, k: int) -> Tensor:
        """Parameter k in the buffer, with a storage that is this part of it."""
        (shape, strides, start), size = self.layout[k], self.values.element_size()
        part = self.values.untyped_storage()[start * size : (start + shape.numel()) * size]
        return self.values.new_empty(0).set_(part, 0, shape, strides)

    def _elsewhere(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[int]:
        size, begin = buffer.element_size(), buffer.data_ptr()
        pairs = enumerate(zip(tensors, self.layout, strict=True))
        return [k for k, (v, (*_, start)) in pairs if v.data_ptr() != begin + start * size and v.numel()]

    def _gather(self) -> None:
        """Bring back parameters that were copied on their device, as by model.to("cpu:0"); refuse real moves."""
        home = self.values
        if self.host.sharded:
            touched = self._versions != self._seen
            for k, (parameter, place) in enumerate(zip(self.parameters, self.views(home), strict=True)):
                local = piece(parameter)
                if (local.device, local.dtype, local.shape) != (place.device, place.dtype, place.shape):
                    raise ValueError(
                        f"{self._described(k)} was moved or cut anew after the optimizer was made; first fully_shard "
                        "the model where it trains, then make the optimizer"
                    )
                if touched:
                    place.copy_(local)
            return
        for k in self._elsewhere(home, self.parameters):
            parameter, place = self.parameters[k], self._place(k)
            moved, kind = ((v.device, v.dtype, v.shape, v.stride()) for v in (parameter, place))
            if moved != kind:
                raise ValueError(
                    f"{self._described(k)} was moved after the optimizer was made, from {home.dtype} on {home.device} "
                    f"to {parameter.dtype} on {parameter.device} with strides {parameter.stride()}; move the model "
                    "first (model.to(...)), then make the optimizer"
                )
            place.copy_(parameter.detach())
            parameter.data = place
            torch.autograd.graph.increment_version(parameter)  # its values may have changed with it

    def _described(self, k: int) -> str:
        parameter = self.parameters[k]
        return f"parameter {self._names[id(parameter)]} of shape {tuple(parameter.shape)}"

    def _write(self, point: Point, into: Tensor) -> Tensor:
        self.node.write(self.rule.query if point == "query" else self.rule.output, into)
        return into

    def _keep_momentum(self) -> None:
        """Make the buffer of a momentum that a group has and the rule has not; it starts from 0, as in torch."""
        if not self.optional <= self.node.state.keys():
            self.node.keep_also(self._with_momentum)

    def _setting(self, groups: Sequence[Group], name: str) -> Setting:
        first, *others = [value(group, name) for group in groups]
        if all(other == first for other in others):
            return first
        numbers = {id(p): value(group, name) for group in groups for p in group["params"]}
        vector = torch.full_like(self.values, first, dtype=self.dtype)
        for parameter, (shape, _, start) in zip(self.parameters, self.layout, strict=True):
            vector[start : start + shape.numel()] = numbers[id(parameter)]
        return vector[self.own]


def restore(shares: Iterable[Share]) -> None:
    """Put the model back to where a round began, which has failed."""
    for share in shares:
        if share.node.moved:
            share.node.write(share.rule.query, share.values[share.own])


def _cut(setting: Setting, block: Block) -> Setting:
    return setting[block] if isinstance(setting, Tensor) else setting


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of a parameter if they leave no gaps, as channels last; else the usual ones."""
    dense = torch.empty_like(parameter).stride() == parameter.stride()
    return parameter.stride() if dense else parameter.new_empty(parameter.shape).stride()
