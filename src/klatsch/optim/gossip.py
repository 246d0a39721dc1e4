"""Every update rule as a torch optimizer: one process is one node, and talks to its neighbours only.

The model holds the query point, where gradients are taken (see points.py); a rule's vectors (DAT's iterate w, momentum,
tracked gradients) live in the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property, partial
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim.optimizer import ParamsT, StateDict

from klatsch.arguments import named
from klatsch.extras import VERSION
from klatsch.optim import groups, hosts
from klatsch.optim.groups import OnNonFinite
from klatsch.optim.points import Watch, model_of
from klatsch.optim.post import Own, Post, crew_of, graphs_of, held_by, rescaled
from klatsch.optim.share import Share, restore
from klatsch.optim.watched import MOST_SKIPPED, Watched
from klatsch.ranks.agreement import agree, everyone_of, group_of, ranks_of
from klatsch.ranks.assembly import assembled
from klatsch.ranks.edges import Edges
from klatsch.ranks.failures import LinkError, NonFiniteError, reason, warn
from klatsch.ranks.links import GlooLinks, OnFailure, backend, open_links
from klatsch.ranks.mailbox import Memory
from klatsch.rules import Rule, State
from klatsch.rules.base import checked, rate
from klatsch.topology import Topology
from klatsch.watch.events import Given, sinks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FORMAT = 6  # of a state_dict
WINDOW = 32  # rounds over which the gradients that a rank takes are counted
LONGEST_STRETCH = 2.0  # of gradients, where others are missing


class Gossip(Watched, Joinable, JoinHook):
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
        topology: a Topology with one node per rank, or the name of one; by default `rule.graph`: "base_graph" (for
            Muon "one_peer_exponential"), where a rank talks to one other per round and all agree after a few, or "ring"
            for rules that need a static graph or do better there.
        group: the process group; all ranks by default, whether or not the script has called init_process_group.
        mesh: instead of a group, a DeviceMesh of (hosts, GPUs of a host), or its first dimension mesh["host"]: a node
            of the network is then a host, with DDP or FSDP2 inside; in a crew, that of this host. See docs/hosts.md.
        crew: the registry of a crew that changes, HOST:PORT (several by commas), with the token in the file that
            KLATSCH_CREW_TOKEN_FILE names; by default that of `klatsch crew join`; see docs/crew.md.
        every: gossip in every so many rounds only; the others send nothing.
        late: rounds that a message may travel while gradients are computed, at best every - 1; see `topology.channel`.
        wire: how numbers travel: "float32" (as they are), "bfloat16", "int8" (a quarter of the bytes), "int4" (an
            eighth), "topk(0.01)" (a hundredth, but ranks agree more slowly), or your own "file.py:name". All but the
            first two need a graph that repeats, and a copy of the parameters per neighbour and message of a period.
        catch_up: a rank that falls behind, because its gradients take longer, catches up in rounds without a gradient
            before its neighbours have to wait for it: with `late`, over gloo; see docs/slow-networks.md.
        weight_decay: added to gradients as weight_decay times the point where they are taken; with Adam, to the step
            (decoupled, as in AdamW), instead of the rule's own.
        timeout: seconds that a neighbour may keep this rank waiting.
        on_failure: "raise" LinkError when a neighbour is gone or late, or "continue" without it: its weight in the
            gossip matrix becomes part of this rank's own.
        quorum: with on_failure="continue", the share of all ranks that must stay within reach, such as 0.5; with fewer,
            training stops with QuorumError. A crew that changes has that of its registry instead.
        on_nonfinite: "raise" NonFiniteError when a gradient is not finite, before anything is sent; or "skip", a round
            without gradient, which `skipped` counts.
        start_equal: start from rank 0's parameters; else every rank starts from its own.
        weight: how much this rank's gradients count beside the others', such as its number of samples; on all ranks, or
            on none, where all count alike. The network then minimises the weighted mean of the ranks' losses.
        any_graph: run even where the rule refuses the graph.
        log: where events go, to watch the training: a folder, "terminal", "tensorboard:FOLDER", "wandb:PROJECT",
            "trackio:PROJECT", "mlflow:EXPERIMENT", a function of an event, or a list of these; by default what the
            environment has as KLATSCH_LOG; see docs/watching.md.

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
        crew: str | None = None,
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
        log: Given = None,
        **unknown: Never,
    ) -> None:
        groups.refuse(type(self), self.own_options, Gossip.__init__, unknown)
        rule = checked(rule)
        defaults, sinks = groups.defaults_of(rule, weight_decay), sinks_of(log)
        member, inside = crew_of(crew, group, mesh)
        groups.check_options(rule, timeout, on_failure if member is None else "continue", quorum, on_nonfinite, weight)
        model = model_of(params)
        super().__init__(params, defaults)
        Joinable.__init__(self)
        self._made, self.on_nonfinite = True, on_nonfinite
        self.skipped, self.caught_up, self._finished = 0, 0, False
        self._lost_by_host: set[int] = set()
        self.idle_hooks: list[weakref.WeakMethod[Callable[[], None]]] = []  # called after rounds without gradient
        self._scheduled = defaults["lr"]
        self._follow = [g for g in self.param_groups if callable(rule.lr) and g["lr"] == self._scheduled]
        trained = groups.trainable(self.param_groups)
        self._frozen = [p for p in groups.parameters_of(self.param_groups) if not p.requires_grad]

        group, inside = (None, inside) if member else hosts.groups_of(mesh, group)
        ranks = ranks_of(group) if member is None else hosts.members_here(inside)
        self.host = hosts.host_of(trained, ranks, inside, timeout)
        if rule.needs_shapes and self.host.size > 1:
            raise ValueError(
                f"{rule.name} needs whole matrices, and the {self.host.size} ranks of a host share them out; give "
                "group=mesh.get_group(0) instead of mesh, with DDP inside hosts, or use a rule such as dadam"
            )
        self._apart, self.watch = rule.apart, Watch(self, trained, ranks, rule.apart)
        if model is not None:
            self.watch.take(model)
        graph = rule.graph if topology is None else topology

        def made(graph: Topology | str, size: int) -> Topology:
            travels = groups.on_channel(graph, size, every, late, wire, catch_up)
            if not any_graph:
                rule.check_graph(travels)
            return travels

        self.catches_up, self.device = catch_up, trained[0].device
        self.given = rule  # the rule before it is put on the graph, on which a state does not depend
        basic = {"version of klatsch": VERSION, "rule": rule.name, "ranks of a host": str(self.host)}
        settings = {"on_failure": on_failure, "quorum": f"{quorum:g}", "start_equal": f"{start_equal}"}
        settings |= {"weight": "left out" if weight is None else "given", "catch_up": f"{catch_up}"}
        self.process_group, self.post = group, None  # post: in a crew that changes
        if member is not None:
            facts = basic | groups.facts(rule, f"{graph}, every={every}, late={late}, wire={wire}", self.param_groups)
            self.post = Post(member, graphs_of(graph, rule, made), facts | settings, float(timeout), weight, self.host)
            weakref.finalize(self, self.post.close)
            self._stand(self.post)
        else:
            self.topology, self.everyone = made(graph, len(ranks)), everyone_of(group, timeout)
            self.rule, self.rank = rule.on(self.topology), self.everyone.rank
            told = f"{self.topology!r} {self.topology.fingerprint[:16]}"
            facts = basic | groups.facts(self.rule, told, self.param_groups)
            agree(self.everyone.told, facts | settings | {"backend": backend(group, self.device)})
        self._weight, self.stretch = 1.0, 1.0
        names, dtypes = groups.names(self.param_groups), dict.fromkeys(p.dtype for p in trained)
        by_dtype = [[p for p in trained if p.dtype == dtype] for dtype in dtypes]
        shares = [Share(parameters, names, self.host, self.watch.reshard) for parameters in by_dtype]
        self._starts = [*(share.values for share in shares), *(hosts.piece(p.data) for p in self._frozen)]
        for tensor in self._starts:
            self.host.start(tensor)
        choices = (self.topology, self.device, float(timeout), on_failure, quorum, catch_up)
        stores, rank = map(PrefixStore, map("edges{}".format, count()), repeat(self.everyone.store)), self.rank
        edges = (Edges(store, rank, timeout) for store in stores)
        self._new_links: Callable[[], GlooLinks] = lambda: open_links(group, next(edges), *choices)
        if (post := self.post) is not None:
            self._new_links = partial(post.links, self.device, catch_up)
        self._begin_alike = start_equal, weight
        links = self._first_links()
        self._taken = self._weight  # the mean weight of its gradients in the last rounds, 0 where it left one out
        for share in shares:
            share.mark_written()
        if links is not None:
            self._train_over(links, shares)
        if post and links is None:
            self._take_over(post, shares, None, [{} for _ in shares])
        self._begin_diary([*sinks, *((post.report,) if post else ())] if self.host.place == 0 else [])
        if post:
            self._begin_next(post)
        Gossip.living.add(self)

    def _first_links(self) -> GlooLinks | None:
        """Links of those who begin the training, all from the first one's parameters; None for a newcomer."""
        start_equal, weight = self._begin_alike
        while not (self.post and self.post.is_new):
            links, failure = self._new_links(), ""
            if not start_equal and weight is None:
                return links
            try:
                with assembled(links, 0, "start") as assembly:
                    self._weight = 1.0 if weight is None else assembly.share(float(weight))
                    if start_equal:
                        assembly.copy_first(self._starts)
                links.bytes_sent = 0
            except RuntimeError as error:
                if self.post is None:
                    raise
                failure = reason(error) or "it is gone"
            if self.post is None or self.host.all(not failure):
                return links
            warn(f"a member was lost while the crew began, and it begins again ({failure or 'seen by another rank'})")
            links.close()
            self.post.begin_again()
            self._stand(self.post)
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One round: take the gradients, exchange messages with the neighbours, move the model to the next point.

        Raises:
            LinkError: a neighbour is gone or late. Model and state are those of the round before, and can be saved.
            NonFiniteError: a gradient is not finite. Nothing was sent, and the state is that of the round before.
        """
        if self.post and self.post.left:
            raise ValueError("this member has left the crew and takes no more steps; make a new optimizer to join it")
        if self._finished:
            raise ValueError(f"rank {self.rank} has called finish() and takes no more steps; make a new optimizer")
        self._check_training()
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self._hear(loss)
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
        while not self.host.all((last := known.last_round()) is not None and self.rounds >= last):
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
        told = self.host.together(self.rounds + 1, partial(self._take_in, factor), 2)
        if self.host.slices and len({checksum for _, checksum in told}) > 1:
            raise ValueError(f"the ranks of this host have different gradients; {hosts.SAME}")
        if any(wrong for wrong, _ in told):
            self._skip(self._wrong or "the gradient of a piece on another rank of this host is not finite, or absurd")
        # All shares hear from the neighbours before any moves: a failure leaves them at the same round.
        try:
            lost = self.host.together(self.rounds + 1, self._exchange, self.topology.size)
        except RuntimeError:
            restore(self.shares)
            raise
        self._lost_by_host = {node for row in lost for node, gone in enumerate(row) if gone}
        for share in self.shares:
            share.advance()
        self._links.tell_pace(self.rounds, self._taken)
        self._tell_round()
        if self.post:
            self._begin_next(self.post)

    # --- a crew that changes ------------------------------------------------------------------------------------

    @torch.no_grad()
    def leave(self) -> int:
        """Leave a crew that changes, after a few rounds without gradient, in which the others learn of it.

        Returns:
            The rounds without gradient.
        """
        if (post := self.post) is None:
            raise ValueError("there is no crew to leave; end with finish(), or join one with klatsch crew join")
        began = self.rounds
        post.leave(self.main_hook)
        return self.rounds - began

    @torch.no_grad()
    def go_on(self, content: dict[str, Any] | None, rounds: int, place: int, size: int, anew: bool) -> bool:
        """In a crew that has not begun: go on from a content of some rounds, as others do; or without, as a newcomer.

        Args:
            content: see `content`; None without a checkpoint.
            rounds: of the checkpoint; 0 without one.
            place: the node that it is of.
            size: how many nodes there were, if all are here again and heard each other; else 0.
            anew: whether channels begin anew.

        Returns:
            Whether it goes on as if nothing had happened.
        """
        post = self.post
        assert post is not None
        before = post.epoch, post.topology, self._links
        self._close()
        epoch = post.resumed(rounds, place)
        if not post.moves_to(epoch):
            return False
        self._stand(post)
        unbroken = len(epoch.members) == size and not epoch.newcomers
        if unbroken and content is not None:
            self._train_over(self._new_links(), self.shares)
            self.load_content(content, rounds, anew)
        else:
            if content is not None:
                for group, saved in zip(self.param_groups, content["groups"], strict=True):
                    group.update(saved)
            states = rescaled(self.rule, content or self.content())
            held = held_by(states, self._frozen, self.param_groups, post.training)
            self._take_over(post, self.shares, None if post.is_new else (held, before), [{} for _ in states])
            self._tell_epoch()
        self._begin_next(post)
        return unbroken

    def _stand(self, post: Post) -> None:
        """Be the node of the network that the crew says."""
        self.topology, self.rank, self.everyone = post.topology, post.rank, post.everyone
        self.rule = self.given.on(self.topology)

    def _begin_next(self, post: Post) -> None:
        """Begin the next round of a crew, in which it may change."""
        while (epoch := post.next_epoch(self._links, self.rounds)) is not None:
            held, old = held_by(self.vectors(), self._frozen, self.param_groups, post.training), self._links
            before, memories = (post.epoch, post.topology, old), self.content()["memories"]
            self._close()
            if not post.moves_to(epoch):
                return
            self._stand(post)
            self._take_over(post, self.shares, None if post.is_new else (held, before), memories)
            if post.left:
                return
            self._links.bytes_sent += old.bytes_sent
            self._links.seconds_waited += old.seconds_waited
            self._tell_epoch()

    def _take_over(self, post: Post, shares: list[Share], own: Own | None, memories: list[Memory]) -> None:
        """Go on in an epoch of the crew, from what this member holds or a neighbour hands over."""
        while True:
            if own is None and (first := self._first_links()) is not None:  # nobody is left who has a state
                for share in shares:
                    share.mark_written()
                return self._train_over(first, shares)
            links = self._new_links()
            memories = post.kept_memories(own, links, memories)
            if (held := post.handed_over(links, own)) is not None:
                break
            links.close()
            post.begin_again()
            self._stand(post)
        (states, frozen, options, training), rounds = held, post.epoch.start - 1
        self._train_over(links, shares)
        settled, ledgers, self._weight = post.settled(links, [share.node for share in shares], states, self._weight)
        for share, state, memory, ledger in zip(shares, settled, memories, ledgers, strict=True):
            share.load(state, rounds, memory | ledger)
        if own is None:
            post.training = training
            for parameter, values in zip(self._frozen, frozen, strict=True):
                hosts.piece(parameter.data).copy_(values)
            for group, given in zip(self.param_groups, options, strict=True):
                group.update(given)
        self._has_gone_on(rounds)
        if self._finished:
            links.membership.finish(rounds, leave=False)

    def _has_gone_on(self, rounds: int) -> None:
        """Be at a round, with the state after it and the options that groups had then."""
        self._links.tell_pace(rounds, self._taken)
        self._met = rounds
        if self._follow:
            self._scheduled = self._follow[0]["lr"]

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
            share.exchange()
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
        if self.skipped <= MOST_SKIPPED:
            self.tell("skipped", round=self.rounds + 1, why=wrong)
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

    @cached_property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group in which Join counts ranks."""
        return group_of(self.process_group, self.everyone.timeout)

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
        vectors, memories = rescaled(self.rule, content), [{}] * len(self.shares) if anew else content["memories"]
        for group, other in zip(self.param_groups, content["groups"], strict=True):
            group.update(other)
        agree(self.everyone.told, {"round to go on from": str(rounds), "rounds done before": str(self.rounds)})
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
        if any(self.everyone.told(failure is not None)):  # nobody waits for one that fails
            raise failure or ValueError("another rank cannot load its state, and says why")
        differ = [share.node.meet(self.everyone) for share in self.shares]
        if any(differ) and self.rank == 0:
            warn(f"round {rounds}: ranks had lost each other when they were saved; their int8 copies begin anew")
        self._has_gone_on(rounds)
        self._show("output" if self._apart and self._holds != "query" else "query")
        self._finished = False
        if "counted" in content:  # as before a restart
            links = self._links
            links.bytes_sent, links.seconds_waited, self.skipped, self.caught_up = content["counted"]
        self._tell_epoch()

    def drain(self) -> None:
        """Wait until all that this rank has sent has left, at most for the timeout."""
        self._links.drain()

    def _train_over(self, links: GlooLinks, shares: list[Share]) -> None:
        """Begin at round 0 over some links."""
        matrices = groups.matrices(self.param_groups)
        for k, share in enumerate(shares):
            share.train_over(links, self.rule.shaped([*share.matrices(matrices)]), k)
        self._links, self.shares, self._met, self._lost_by_host = links, shares, 0, set()
        self._close = weakref.finalize(self, links.close)  # not before neighbours have the last messages


def _without_parameters(param_groups: list[groups.Group]) -> list[groups.Group]:
    return [{name: v for name, v in group.items() if name != "params"} for group in param_groups]
