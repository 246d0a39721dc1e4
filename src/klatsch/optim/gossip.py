"""Every update rule as a torch optimizer: one process is one node, and talks to its neighbours only.

The model holds the query point, where gradients are taken (see points.py); a rule's vectors (DAT's iterate w, momentum,
tracked gradients) live in the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim.optimizer import ParamsT, StateDict

from klatsch.arguments import named
from klatsch.optim import groups, hosts
from klatsch.optim.groups import OnNonFinite
from klatsch.optim.points import Points, Watch, model_of
from klatsch.optim.share import Share
from klatsch.ranks.agreement import agree, group_of, leave, members, summed
from klatsch.ranks.assembly import assembled
from klatsch.ranks.failures import LinkError, NonFiniteError, QuorumError, reason, shown, warn
from klatsch.ranks.links import GlooLinks, OnFailure, backend, open_links
from klatsch.rules import Rule, State
from klatsch.rules.base import checked, rate
from klatsch.topology import Topology
from klatsch.version import VERSION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FORMAT = 6  # of a state_dict
WINDOW = 32  # rounds over which the gradients that a rank takes are counted
LONGEST_STRETCH = 2.0  # of gradients, where others are missing


class Gossip(Points, Joinable, JoinHook):
    """An update rule on this rank's parameters, gossiped with its neighbours on a topology.

    Make it on every rank, with the same rule, topology and shapes. Ranks start from rank 0's parameters. A parameter
    without gradient has gradient zero, and is still averaged with the neighbours'. Parameters that are frozen when the
    optimizer is made stay out of it. Ranks with fewer batches than others end with `finish()`, or train inside torch's
    `Join([optimizer])`.

    The model holds the point where gradients are taken. If the rule's output x is another one (`beta` below 1, or
    `average`), evaluate and save inside `with optimizer.averaged():`, or between `eval()` and `train()`.

    Args:
        params: parameters, or groups of them with their own "lr", "weight_decay" and, if the rule has them, "momentum",
            "betas" and "eps"; for Muon, "matrices": False gives a group, such as embeddings, to AdamW.
        rule: the update rule, such as rules.make("dat", lr=0.1); its lr is the default of the groups.
        topology: a Topology with one node per rank, or the name of one; by default `rule.graph`: "base_graph", where a
            rank talks to one other per round and all agree after a few, or "ring" for rules that need a static graph or
            do better there.
        group: the process group; all ranks by default.
        mesh: instead of a group, a DeviceMesh of (hosts, GPUs of a host), or its first dimension mesh["host"]: a node
            of the network is then a host, with DDP or FSDP2 inside; see docs/hosts.md.
        every: gossip in every so many rounds only; the others send nothing.
        late: rounds that a message may travel while gradients are computed, at best every - 1; see `topology.channel`.
        wire: how numbers travel: "float32" (as they are), "bfloat16", "int8" (a quarter of the bytes), "topk(0.01)"
            (a hundredth, but ranks agree more slowly), or your own "file.py:name". The last three need a
            graph that repeats, and a copy of the parameters for every neighbour and message of a period.
        catch_up: a rank that falls behind, because its gradients take longer, catches up in rounds without a gradient
            before its neighbours have to wait for it: with `late`, over gloo; see docs/slow-networks.md.
        weight_decay: added to gradients as weight_decay times the point where they are taken; with Adam, to the step
            (decoupled, as in AdamW), instead of the rule's own.
        timeout: seconds that a neighbour may keep this rank waiting.
        on_failure: "raise" LinkError when a neighbour is gone or late, or "continue" without it: its weight in the
            gossip matrix becomes part of this rank's own.
        quorum: with on_failure="continue", the share of all ranks that must stay within reach, such as 0.5; with fewer,
            training stops with QuorumError.
        on_nonfinite: "raise" NonFiniteError when a gradient is not finite, before anything is sent; or "skip", a round
            without gradient, which `skipped` counts.
        start_equal: start from rank 0's parameters; else every rank starts from its own.
        weight: how much this rank's gradients count beside the others', such as its number of samples; on all ranks, or
            on none, where all count alike. The network then minimises the weighted mean of the ranks' losses.
        any_graph: run even where the rule refuses the graph.

    Attributes:
        rank: which node of the topology this is.
        skipped: rounds without gradient, because it was not finite.
        caught_up: rounds without gradient, to catch up.
        stretch: what gradients are multiplied by, since those are missing that others leave out to catch up.
    """

    own_options: ClassVar[tuple[str, ...]] = ()  # of a rule by name
    _step_supports_amp_scaling = True  # a GradScaler must not skip a round, or neighbours would wait for it
    grad_scale: Tensor | float | None = 1.0  # it sets this and the next during a step
    found_inf: Tensor | float = 0.0
    join_device = torch.device("cpu")  # where Join counts ranks, since the group is gloo's
    _made = False
    _met = 0  # the rounds that the foremost neighbour had done after the last step

    def __init__(
        self,
        params: ParamsT,
        rule: Rule,
        topology: Topology | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: DeviceMesh | None = None,
        every: int = 1,
        late: int = 0,
        wire: str = "float32",
        catch_up: bool = False,
        weight_decay: float = 0.0,
        timeout: float = 300.0,
        on_failure: OnFailure = "raise",
        quorum: float = 0.0,
        on_nonfinite: OnNonFinite = "raise",
        start_equal: bool = True,
        weight: float | None = None,
        any_graph: bool = False,
        **unknown: Never,
    ) -> None:
        groups.refuse(type(self), self.own_options, Gossip.__init__, unknown)
        rule = checked(rule)
        defaults = groups.defaults_of(rule, weight_decay)
        groups.check_options(rule, timeout, on_failure, quorum, on_nonfinite, weight)
        model = model_of(params)
        super().__init__(params, defaults)
        Joinable.__init__(self)
        self._made = True
        self.on_nonfinite = on_nonfinite
        self.skipped, self.caught_up, self._finished = 0, 0, False
        self._lost_by_host: set[int] = set()
        self.idle_hooks: list[weakref.WeakMethod[Callable[[], None]]] = []  # called after rounds without gradient
        self._scheduled = defaults["lr"]
        self._follow = [g for g in self.param_groups if callable(rule.lr) and g["lr"] == self._scheduled]
        trained = groups.trainable(self.param_groups)
        self._frozen = [p for p in groups.parameters_of(self.param_groups) if not p.requires_grad]

        group, inside = hosts.groups_of(mesh, group)
        ranks = members(group)
        self.host = hosts.host_of(trained, ranks, inside, timeout)
        if rule.needs_shapes and self.host.size > 1:
            raise ValueError(
                f"{rule.name} needs whole matrices, and the {self.host.size} ranks of a host share them out; give "
                "group=mesh.get_group(0) instead of mesh, with DDP inside hosts, or use a rule such as dadam"
            )
        self._apart = rule.apart
        self.watch = Watch(self, trained, ranks, self._apart)
        if model is not None:
            self.watch.take(model)
        graph = rule.graph if topology is None else topology
        self.topology = groups.on_channel(graph, len(ranks), every, late, wire, catch_up)
        self.catches_up = catch_up
        if not any_graph:
            rule.check_graph(self.topology)
        self.given = rule  # the rule before it is put on the graph, on which a state does not depend
        self.rule, self.device = rule.on(self.topology), trained[0].device
        self.process_group, self.group = group, group_of(group, timeout)
        self.rank = dist.get_rank(self.group)
        agree(self.group, {"version of klatsch": VERSION, "rule": rule.name})
        settings = {"on_failure": on_failure, "quorum": f"{quorum:g}", "start_equal": str(start_equal)}
        settings |= {"weight": "left out" if weight is None else "given", "catch_up": str(catch_up)}
        settings |= {"backend": backend(group, self.device)}
        agree(self.group, groups.facts(self.rule, self.topology, self.param_groups) | settings)
        self._weight, self.stretch = 1.0, 1.0
        if weight is not None:
            total = summed(self.group, torch.tensor([float(weight)], dtype=torch.float64))
            self._weight = float(weight) * len(ranks) / float(total)
        self._taken = self._weight  # the mean weight of its gradients in the last rounds, 0 where it left one out
        names, dtypes = groups.names(self.param_groups), dict.fromkeys(p.dtype for p in trained)
        by_dtype = [[p for p in trained if p.dtype == dtype] for dtype in dtypes]
        shares = [Share(parameters, names, self.host, self.watch.reshard) for parameters in by_dtype]
        starts = [*(share.values for share in shares), *(hosts.piece(p.data) for p in self._frozen)]
        for tensor in starts:
            self.host.start(tensor)
        # A group of their own: a collective that fails closes all connections of its group.
        choices = (self.topology, self.device, float(timeout), on_failure, quorum, catch_up)
        self._new_links: Callable[[], GlooLinks] = lambda: open_links(group, group_of(group, timeout), *choices)
        links = self._new_links()
        if start_equal:
            with assembled(links, 0, "start") as everyone:
                for tensor in starts:
                    flat_copy = tensor.detach().cpu().contiguous().reshape(-1)
                    first = everyone.copy(flat_copy.view(torch.uint8))  # as bytes: gloo does not know every dtype
                    tensor.copy_(first.view(flat_copy.dtype).reshape(tensor.shape))
            links.bytes_sent = 0
        for share in shares:
            share.mark_written()
        self._train_over(links, shares)
        weakref.finalize(self, leave, self.group, group)
        Gossip.living.add(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One round: take the gradients, exchange messages with the neighbours, move the model to the next point.

        Raises:
            LinkError: a neighbour is gone or late. Model and state are those of the round before, and can be saved.
            NonFiniteError: a gradient is not finite. Nothing was sent, and the state is that of the round before.
        """
        if self._finished:
            raise ValueError(f"rank {self.rank} has called finish() and takes no more steps; make a new optimizer")
        self._check_training()
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self._check_gradients()
        if any(p.requires_grad for p in self._frozen):
            raise ValueError("a parameter was frozen when the optimizer was made and is not now; make a new optimizer")
        self.watch.check()
        Join.notify_join_context(self)  # inside torch's Join: this rank is not done
        scale = 1.0 if self.grad_scale is None else float(self.grad_scale)
        self._count(self._weight)
        self._round(0.0 if float(self.found_inf) > 0 else self._weight / scale * self.stretch)
        if self.catches_up:
            self._catch_up()
        return loss

    @torch.no_grad()
    def finish(self, leave: bool = False) -> int:
        """Take no more steps; for ranks that have fewer batches than others. Every rank must end with it.

        Goes on with rounds without gradient until all ranks have finished, so that no rank waits for one that is done.
        All return after the same round.

        Args:
            leave: tell the others, and go on without them: their weights for this rank become their own.

        Returns:
            The rounds without gradient.
        """
        self._check_training()
        if not self._finished:
            self._finished = True
            self._links.membership.finish(self.rounds, leave)
        idle = self._idle()
        for share in self.shares:
            share.node.land()
        self.drain()
        return idle

    @torch.no_grad()
    def end_epoch(self) -> int:
        """Wait for ranks with more batches, in rounds without gradient; then all take steps again.

        Every rank calls it at the end of the same epoch, before anything that all do together, such as `merged`. All
        return after the same round. News of the last one takes some rounds; leave it out if epochs are equally long.

        Returns:
            The rounds without gradient.
        """
        self._check_training()
        known = self._links.membership
        known.finish(self.rounds, leave=False)
        idle = self._idle()
        known.since = self.rounds  # all return from this end together
        return idle

    def _idle(self) -> int:
        """Rounds without gradient until all know that all have finished; how many they were."""
        began, known = self.rounds, self._links.membership
        while (last := known.last_round()) is None or self.rounds < last:
            self.main_hook()
        return self.rounds - began

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero. They stay where they are, in one buffer, whatever `set_to_none` says."""
        for share in self.shares:
            share.zero_gradients()
        self._gradients_at_x = False
        for parameter in self._frozen:
            parameter.grad = None

    def add_param_group(self, param_group: groups.Group) -> None:
        """Take a group in; only while the optimizer is made, since all parameters live in one buffer."""
        if self._made:
            raise ValueError("parameters cannot be added to a Gossip optimizer; make a new one with all of them")
        super().add_param_group(param_group)
        for name in [name for name in param_group if name not in groups.NOTES]:
            named("option of a parameter group", name, self.defaults)
        groups.check_values(param_group, self.defaults)

    def _round(self, factor: float) -> None:
        """One round with gradients times a factor."""
        told = self.host.together(self.rounds + 1, partial(self._take_in, factor), 2)
        if self.host.slices and len({checksum for _, checksum in told}) > 1:
            raise ValueError(f"the ranks of this host have different gradients; {hosts.SAME}")
        if any(wrong for wrong, _ in told):
            self._skip(self._wrong or "the gradient of a piece on another rank of this host is not finite, or absurd")
        # All shares hear from the neighbours before any moves: a failure leaves them at the same round.
        lost = self.host.together(self.rounds + 1, self._exchange, self.topology.size)
        self._lost_by_host = {node for row in lost for node, gone in enumerate(row) if gone}
        for share in self.shares:
            share.advance()
        self._links.tell_pace(self.rounds, self._taken)

    def _catch_up(self) -> None:
        """Catch up with the foremost neighbour, if it would have to wait for this rank during the next gradient.

        If that takes as long as the last one, the neighbour does as many rounds meanwhile; `late` rounds after this
        rank's next message it waits.
        """
        (foremost, _), behind = self._paces(), self.rounds
        next_message = behind + 1 + (-behind - 1) % self.topology.every
        if 2 * foremost - self._met + 1 >= next_message + self.topology.late:
            while self.rounds < foremost:
                self._save_idle()  # of the round before
                self._count(0.0)
                self._round(0.0)
        self.caught_up += self.rounds - behind
        foremost, taken = self._paces()
        self._met = max(self.rounds, foremost)
        self.stretch = 1.0 / min(max(taken, 1.0 / LONGEST_STRETCH), 1.0)

    def _count(self, weight: float) -> None:
        """Count the weight of a gradient; 0 for a round without one, to catch up."""
        self._taken += (weight - self._taken) / min(self.rounds + 1, WINDOW)

    def _paces(self) -> tuple[int, float]:
        """See `GlooLinks.paces`; the same on all ranks of a host."""
        told = self.host.together(self.rounds + 1, lambda: self._links.paces(self.rounds + 1), 2)
        return int(max(rounds for rounds, _ in told)), max(taken for _, taken in told)

    def _take_in(self, factor: float) -> tuple[float, float]:
        """Take the gradients: whether they are wrong, and in some rounds their sum, if a host's must be the same."""
        for node in self._lost_by_host - self._links.lost.keys():  # to another rank of this host
            self._links.lose(LinkError(self.rank, node, self.rounds + 1, "another rank of this host has lost it"))
        self._check_training()
        self._check_untouched()
        self._holds = "query"
        self._follow_schedule()
        for group in self.param_groups:
            groups.check_values(group, self.defaults)
        wrong = [share.take_in(self.param_groups, factor) for share in self.shares]
        self._wrong = next(filter(None, wrong), None)
        looks = self.host.slices and str(self.rounds + 1).strip("0") == "1" and factor and not self._wrong
        sums = [float(share.bind_gradients().sum(dtype=torch.float64)) for share in self.shares if looks]
        return float(self._wrong is not None), sum(sums)

    def _exchange(self) -> list[float]:
        for share in self.shares:
            share.node.balance()
        for share in self.shares:
            share.node.exchange(share.given)
        return [float(node in self._links.lost) for node in range(self.topology.size)]

    def _follow_schedule(self) -> None:
        rates = [group["lr"] for group in self._follow]
        if any(lr != self._scheduled for lr in rates):
            remedy = "use a number with a scheduler, or the function alone"
            raise ValueError(f"lr is a function of the round, and something set it to {rates}; {remedy}")
        self._scheduled = rate(self.rule.lr, self.rounds + 1)
        for group in self._follow:
            group["lr"] = self._scheduled

    def _skip(self, wrong: str) -> None:
        """Make it a round without gradient, or raise."""
        if self.on_nonfinite == "raise":
            remedy = "see the loss and the learning rate, clip, or go on without it (on_nonfinite='skip')"
            raise NonFiniteError(self.rank, self.rounds + 1, wrong, f"nothing was sent; {remedy}")
        for share in self.shares:
            share.take_in(self.param_groups, 0.0)
        self.skipped += 1
        if self.skipped == 1:
            instead = "a round without gradient instead, and so from now on (optimizer.skipped counts them)"
            warn(f"rank {self.rank}, round {self.rounds + 1}: {wrong}; {instead}")

    def join_hook(self, **_: object) -> JoinHook:
        """Torch's Join asks this what to do when this rank has no more batches and others go on."""
        return self

    @torch.no_grad()
    def main_hook(self) -> None:
        """A round without gradient, while others train."""
        self._round(0.0)
        self._save_idle()

    def _save_idle(self) -> None:
        for reference in self.idle_hooks:
            if (hook := reference()) is not None:
                hook()

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group in which Join counts ranks."""
        return self.group

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent: to its neighbours, and for `consensus()`, `average_` and `merged`.

        The copy of rank 0's parameters at the start is not counted.
        """
        return self._links.bytes_sent

    @property
    def seconds_waited(self) -> float:
        """Seconds that this rank has waited for messages."""
        return self._links.seconds_waited

    @property
    def lost(self) -> tuple[int, ...]:
        """Neighbours that this rank goes on without."""
        return tuple(self._links.lost)

    @property
    def crew(self) -> list[int]:
        """The nodes that this one still hears and is heard by, directly or through others, including itself."""
        return self._links.membership.within_reach()

    @property
    def lag(self) -> int:
        """Rounds that this rank may be ahead of the slowest of them."""
        return self._links.membership.lag + (self.host.size > 1)  # ranks of a host wait for each other

    def consensus(self, estimate: bool = False) -> float:
        """Gamma, the mean over ranks of the squared distance of x from its network mean; all ranks must ask together.

        x is the rule's output, whatever the model holds. Only ranks within reach count, and if others have left or are
        lost, a warning names them. It costs about as much as a message of x to each neighbour: the mean of x goes up
        and down a tree of the graph's links, in float32 unless the model is in float64.

        Args:
            estimate: estimate it on this rank alone, without a message, from what the neighbours sent in the last mix:
                (M - 1)/(2 M) times their mean squared distance from this rank, of x if the rule sends it, else of what
                it sends. Any rank may ask. If ranks differ at random, it is Gamma in expectation, on the complete graph
                in the mean over ranks; if they differ along the graph, neighbours are alike and it is too small: Gamma
                is at most about estimate / rho. It is nan before the first mix, and for push-sum.
        """
        if estimate:
            size, heard = self.topology.size, [share.node.apart for share in self.shares]
            apart = sum(torch.tensor(torch.nan) if one is None else one.double().cpu() for one in heard)
            total = float(self.host.total(torch.as_tensor(apart, dtype=torch.float64).reshape(1)))
            return (size - 1) / (2 * size) * total if size > 1 else 0.0
        with self.together("consensus()") as mean:
            distance = torch.zeros(1, dtype=torch.float64)
            for share in self.shares:
                x = share.output().detach().cpu().to(share.dtype)
                distance += (x.double() - mean(x)).square().sum()
            return float(self.host.total(mean(distance)))

    @contextmanager
    def together(self, what: str, of: str = "") -> Iterator[Callable[[Tensor], Tensor]]:
        """A mean over all ranks, or those within reach, of something that they all describe alike."""
        try:
            with assembled(self._links, self.rounds, what + of) as everyone:
                if len(everyone.ranks) < self.topology.size:
                    some = f"{len(everyone.ranks)} of {self.topology.size} ranks ({shown(everyone.ranks)})"
                    warn(f"{what} is that of {some}; the others are gone or out of reach")
                yield everyone.mean
        except QuorumError:
            raise
        except RuntimeError as error:
            needed = f"{what} needs an answer from all ranks within reach, after the same round"
            raise RuntimeError(f"{needed} ({reason(error)}); was it called on every rank?") from None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in groups.options_of(self.rule).items())
        nodes = f"{self.topology.size} node{'s' * (self.topology.size > 1)}"
        place = f"rank {self.rank} of {self.topology.name}, {nodes}, round {self.rounds}"
        return f"{super().__repr__()}\n{self.rule.name}({options}) on {place}"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        remedy = "save optimizer.state_dict() on each rank, or use klatsch.Checkpointer, and load it into a new one"
        raise ValueError(f"{type(self).__name__} cannot be copied or pickled with its connections; {remedy}")

    def state_dict(self) -> StateDict:
        """The state of this rank, as torch optimizers give it: copies of tensors, shaped like the parameters.

        If nodes are hosts, all ranks of a host must ask together.
        """
        for share in self.shares:
            self.state.update(share.by_parameter())
        try:
            by_parameter = super().state_dict()
        finally:
            self.state.clear()
        content = self.content()
        single = [{n: share.node.state[n].clone() for n in sorted(share.singles)} for share in self.shares]
        # A host's may be loaded by another number of ranks, which have other parts of the channel's memory.
        memories = content["memories"] if self.host.group is None else None
        place = {"rank": self.rank, "size": self.topology.size, "topology": self.topology.fingerprint}
        held = {"rounds": self.rounds, "single": single, "scales": content["scales"], "memories": memories}
        return by_parameter | {"gossip": {"format": FORMAT, "run": self._run} | place | held}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Go on from a state; on all ranks, each with its own of the same round.

        The model holds x or the query point, as before: that is not part of the state. A state that does not fit
        changes nothing.
        """
        saved = state_dict.get("gossip") if isinstance(state_dict, dict) else None
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError("this is not a state_dict of a Gossip optimizer of this version; give its state_dict()")
        if difference := groups.difference(saved["run"], self._run):
            remedy = "make it with the same rule, options and parameters"
            raise ValueError(f"the state_dict is of another optimizer: {difference}; {remedy}")
        # Corrections and tracked gradients sum to zero over the ranks, and so they must come back; those of one rank
        # alone are zero.
        rank, size = saved["rank"], saved["size"]
        if size != 1 and (rank, size) != (self.rank, self.topology.size):
            own = f"rank {self.rank} of {self.topology.size}"
            remedy = "save and load on each rank its own, or use klatsch.Checkpointer, which does that"
            raise ValueError(f"the state_dict is of rank {rank} of {size}, but this is {own}; {remedy}")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = groups.parameters_of(self.param_groups)
        entries = {id(p): state_dict["state"].get(k, {}) for p, k in zip(parameters, numbers, strict=True)}
        vectors = [share.joined(entries, one) for share, one in zip(self.shares, saved["single"], strict=True)]
        content = saved | {"vectors": vectors, "groups": _without_parameters(state_dict["param_groups"])}
        same = saved["topology"] == self.topology.fingerprint and self.host.group is None
        self.load_content(content, saved["rounds"], anew=not same)

    @property
    def _run(self) -> dict[str, object]:
        """What an optimizer and a state that it loads must share."""
        return {
            "rule": self.given.name,
            "options": groups.options_of(self.given),
            "sizes of parameter groups": [len(group["params"]) for group in self.param_groups],
            "number of dtypes": len(self.shares),
        }

    def vectors(self) -> list[State]:
        """The fields of the state as flat vectors, by dtype of the parameters: this optimizer's own memory."""
        return [share.node.state for share in self.shares]

    def content(self) -> dict[str, Any]:
        """All that this rank goes on from: plain data, and tensors that may be its own memory."""
        return {
            "vectors": self.vectors(),
            "groups": _without_parameters(self.param_groups),
            "scales": dict(self.rule.scales),
            "memories": [share.node.memory for share in self.shares],
            "counted": [self.bytes_sent, self.seconds_waited, self.skipped, self.caught_up],
        }

    def check_content(self, content: dict[str, Any]) -> None:
        """Refuse a content that cannot be loaded; whatever the error, it is not what `content` gave."""
        for share, fields in zip(self.shares, content["vectors"], strict=True):
            share.check(fields)
        for _, group in zip(self.param_groups, content["groups"], strict=True):
            if "params" in group or not self.defaults.keys() <= group.keys():
                raise ValueError(f"a group of parameters has {', '.join(group)}")
        if not all(content["scales"][field] > 0 for field in self.rule.scales):
            raise ValueError(f"scales are {content['scales']}")
        if len(content["memories"]) != len(self.shares):
            raise ValueError("the memory of the channel is missing")
        if not (len(content["counted"]) == 4 and all(number >= 0 for number in content["counted"])):
            raise ValueError(f"counted is {content['counted']}")

    @torch.no_grad()
    def load_content(self, content: dict[str, Any], rounds: int, anew: bool = False) -> None:
        """Go on from a content of some rounds, on all ranks.

        Channels may begin anew: what was on its way is lost, the same at both ends.
        """
        vectors, memories = content["vectors"], [{}] * len(self.shares) if anew else content["memories"]
        for group, other in zip(self.param_groups, content["groups"], strict=True):
            group.update(other)
        for field, scale in self.rule.scales.items():
            for fields in vectors:
                fields[field] = fields[field] * (scale / content["scales"][field])
        agree(self.group, {"round to go on from": str(rounds), "rounds done before": str(self.rounds)})
        if self.rounds > 0:  # messages of the rounds before are on their way
            before, links = self._links, self._new_links()
            self._close()
            links.succeed(before)
            self._train_over(links, self.shares)
        failure: ValueError | None = None
        try:
            for share, fields, memory in zip(self.shares, vectors, memories, strict=True):
                share.load(fields, rounds, memory)
        except ValueError as error:
            failure = error
        if float(summed(self.group, torch.tensor([float(failure is not None)]))):  # nobody waits for one that fails
            raise failure or ValueError("another rank cannot load its state, and says why")
        differ = [share.node.meet(self.group) for share in self.shares]
        if any(differ) and self.rank == 0:
            warn(f"round {rounds}: ranks had lost each other when they were saved; their int8 copies begin anew")
        self._links.tell_pace(rounds, self._taken)
        self._show("output" if self._apart and self._holds != "query" else "query")
        self._finished, self._met = False, rounds
        if self._follow:
            self._scheduled = self._follow[0]["lr"]
        if "counted" in content:  # as before a restart
            links = self._links
            links.bytes_sent, links.seconds_waited, self.skipped, self.caught_up = content["counted"]

    def drain(self) -> None:
        """Wait until all that this rank has sent has left, at most for the timeout."""
        self._links.drain()

    def _train_over(self, links: GlooLinks, shares: list[Share]) -> None:
        """Begin at round 0 over some links."""
        matrices = groups.matrices(self.param_groups)
        for k, share in enumerate(shares):
            share.train_over(links, self.rule.shaped([*share.matrices(matrices)]), k)
        self._links, self.shares = links, shares
        self._met = 0
        # Neighbours need the last messages: they leave before the optimizer or the process ends.
        self._close = weakref.finalize(self, _end, links, self.process_group)


def _end(links: GlooLinks, group: dist.ProcessGroup | None) -> None:
    links.close()
    leave(links.group, group)


def _without_parameters(param_groups: list[groups.Group]) -> list[groups.Group]:
    return [{name: v for name, v in group.items() if name != "params"} for group in param_groups]
