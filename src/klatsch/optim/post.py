"""A member's post in a crew that changes while it trains: which node of which graph it is, and how it takes it up.

A change comes between two rounds. Members open new edges, newcomers get the state of a neighbour, and all settle what
must be kept over the crew (`wire.carried`). Messages that were on their way are dropped at both ends.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from klatsch.files import token_of
from klatsch.optim.groups import Group
from klatsch.optim.hosts import Host, inside_of, piece
from klatsch.ranks.agreement import Everyone
from klatsch.ranks.agreement import Group as Ranks
from klatsch.ranks.assembly import abandon, assembled
from klatsch.ranks.crew import Crew, Dropped
from klatsch.ranks.edges import Edges, rates
from klatsch.ranks.failures import LinkError, reason, warn
from klatsch.ranks.links import GlooLinks
from klatsch.ranks.mailbox import Memory
from klatsch.ranks.node import Node
from klatsch.ranks.registry import Epoch
from klatsch.ranks.saved import Training
from klatsch.rules import Rule, State
from klatsch.rules.base import each
from klatsch.topology import Topology
from klatsch.topology.families import family, make, split
from klatsch.watch.events import Event
from klatsch.wire.carried import Handover, kept_copies, sponsors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ADDRESSES, TOKEN_FILE = "KLATSCH_CREW", "KLATSCH_CREW_TOKEN_FILE"  # in the environment, by klatsch crew join
TAG = (1 << 20) - 4  # of states that are handed over; above the tags of rounds
PIECE = 1 << 22  # bytes that travel at a time
LEAVING = 60.0  # seconds for the registry to let a member go
NOBODY = Epoch(0, (), (), 0)
PROBED = range(4, 10)  # sizes of which a graph has one
ANSWER = timedelta(seconds=20)  # within which the registry answers
PATIENCE = 15.0  # seconds for the registry to change a crew of which few are within reach; it drops some after ten
REST = 64.0  # seconds at most between two times that a member joins of which no neighbour is within reach
UNREPORTED = ("event", "time", "member", "round", "lag")  # which the registry knows itself
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# States by dtype, frozen parameters, groups' options, and the training that checkpoints are of.
Held = tuple[list[State], list[Tensor], list[dict[str, float]], Training]
Before = tuple[Epoch, Topology, GlooLinks]  # the epoch before, its graph, and its links, which are closed
Own = tuple[Held, Before]
Handler = signal.Handlers | Callable[[int, FrameType | None], object]


def crew_of(given: str | None, group: Ranks, mesh: DeviceMesh | None) -> tuple[Crew | None, Ranks]:
    """The crew at an address, or that of the environment, if there is one, and the ranks of this host in it."""
    address = os.environ.get(ADDRESSES) if given is None else given
    if not address:
        return None, None
    if group is not None:
        if given is not None:
            raise ValueError(f"crew = {given!r} and a group are given; give one of them")
        remedy = f"leave it out, or unset {ADDRESSES}, which klatsch crew join sets"
        raise ValueError(f"{ADDRESSES} = {address!r} says to join a crew, but a group is given; {remedy}")
    inside = inside_of(mesh)
    leads = inside is None or dist.get_rank(inside) == 0
    return Crew(address, token_of(os.environ.get(TOKEN_FILE)), leads), inside


def graphs_of(given: str | Topology, rule: Rule, made: Callable[[str, int], Topology]) -> Callable[[int], Topology]:
    """A graph for every number of members: by its name, or that of the rule where a size has no such graph."""
    if not isinstance(given, str):
        raise ValueError(f"topology is a graph of {given.size} nodes, and the crew changes; give its name, say 'ring'")
    family(given)
    other, told = f"{rule.graph}/{split(given)[1]}", set[int]()

    def graph(size: int) -> Topology:
        try:
            make(given, size)
        except ValueError as error:
            if not told:
                warn(f"{given} has no graph of {size} nodes ({error}); such crews train on {split(other)[0]} instead")
            told.add(size)
        return made(other if size in told else given, size)

    for size in PROBED:  # before it joins: a rule that refuses the graph, or an option that does not fit
        with suppress(ValueError):
            make(given, size)
            made(given, size)
            break
    else:
        made(given, size)
    return graph


class Post:
    """Membership of an optimizer in a crew; see `ranks.crew`."""

    def __init__(
        self,
        crew: Crew,
        graphs: Callable[[int], Topology],
        facts: Mapping[str, str],
        timeout: float,
        weight: float | None,
        host: Host,
    ) -> None:
        self.crew, self._graphs, self._facts, self._timeout, self._host = crew, graphs, facts, timeout, host
        self.left, self.signal, self.weight, self._lost = False, 0, weight, list[str]()
        self._in_vain = 0  # how many times in a row it has asked its neighbours for their state
        self._speeds = dict[str, tuple[float, float]]()  # of links, as `status` tells them
        self.training: Training = ()  # the identity in checkpoints
        self.tell: Callable[..., object] = lambda kind, **facts: None  # of events
        crew.store.set_timeout(ANSWER)
        try:
            host.agree(facts)
            self.take(self._agreed(lambda: crew.join(facts)) or NOBODY)
        except BaseException:
            crew.close()  # a notebook goes on, and must not seem to be a member
            raise
        self._usual: dict[int, Handler] = {}
        self._process = os.getpid()
        self._listen_to_signals()

    def take(self, epoch: Epoch) -> None:
        """Be a node of an epoch."""
        self.epoch, self.topology = epoch, self._graphs(len(epoch.members))
        self.rank, self._times = epoch.members.index(self.crew.member), count()
        store = PrefixStore(f"epoch{epoch.number}/{self._host.place}", self.crew.store)
        self.everyone = Everyone(store, self.rank, len(epoch.members), self._timeout, epoch.members)

    def moves_to(self, epoch: Epoch) -> bool:
        """Be a node of an epoch, or out of the crew if this member is not in it."""
        if self.crew.member in epoch.members:
            self.take(epoch)
        else:
            self.go()
        return not self.left

    @property
    def is_new(self) -> bool:
        """Whether it has no state of its own yet."""
        return self.crew.member in self.epoch.newcomers

    def links(self, device: torch.device, catch_up: bool) -> GlooLinks:
        """New links to the neighbours of this epoch."""
        crew, members = self.crew, self.epoch.members
        store = PrefixStore(f"epoch{self.epoch.number}/{self._host.place}/links{next(self._times)}", crew.store)
        edges = Edges(store, self.rank, self._timeout, crew.address, members, optional=True, guarded=True)
        choices = {"on_failure": "continue", "catch_up": catch_up, "first": self.epoch.start}

        def is_out(peer: int) -> bool:
            return crew.is_out(members[peer])

        links = GlooLinks(edges, self.topology, device, self._timeout, is_out=is_out, **choices)  # type: ignore[arg-type]
        self._near = links, members
        return links

    def next_epoch(self, links: GlooLinks, rounds: int) -> Epoch | None:
        """The epoch that starts with the next round, if one does; this member may be out of it."""
        epoch = self._agreed(lambda: self._next_epoch(links, rounds))
        if self._host.place and epoch and (not epoch.members or self.crew.member not in self.epoch.members):
            links.edges.close_all()  # as the first rank has done
        return epoch

    def _agreed(self, find: Callable[[], Epoch | None]) -> Epoch | None:
        """An epoch that the first rank of the host finds, on all of its ranks, and who they are in it."""
        crew = self.crew
        (epoch, crew.member), signals = self._host.led(
            lambda: (find(), crew.member), lambda: [self.signal, crew.leaving]
        )
        if number := max(number for number, _ in signals):  # a handler may set it at any moment
            self.signal = number
        if any(leaving for _, leaving in signals) and not crew.leaving:
            crew.leave()
        return Epoch.read(epoch) if isinstance(epoch, list) else epoch  # as JSON, or as it was found

    def _next_epoch(self, links: GlooLinks, rounds: int) -> Epoch | None:
        crew, near = self.crew, links.membership.within_reach()
        asked = crew.quorum * self.topology.size  # with exactly so many, those go on who have the first member
        few_left = len(near) < asked or (len(near) == asked and 0 not in near)
        if few_left and not crew.expects_change(PATIENCE):
            few = f"{len(near)} of {self.topology.size} members are within reach"
            self.tell("dropped", why=few)
            warn(f"round {rounds}: {few}; it waits for the others")
        else:
            try:
                return crew.before(rounds + 1)
            except Dropped as error:
                self.tell("dropped", why=str(error))
                self._accept(error)
        links.edges.close_all()  # nobody waits for it
        return self.join_again(rounds)

    def _accept(self, dropped: Dropped) -> None:
        """Be out for now, or for good if this member may not join again and has not asked to leave."""
        if not (dropped.again or self.crew.leaving):
            raise dropped
        warn(str(dropped))

    def report(self, event: Event) -> None:
        """A sink of events: tell the registry how this member is doing."""
        match event:
            case {"event": "epoch", "epoch": number, "neighbours": near}:
                self._lost = []
                links, members = self._near
                over_nccl = [members[peer] for peer in links.lanes]
                self.crew.report({"epoch": number, "neighbours": near, "lost": [], "nccl": over_nccl})
            case {"event": "lost", "neighbour": neighbour}:
                self._lost = [*self._lost, neighbour]
                self.crew.report({"lost": self._lost})
            case {"event": "round"}:
                told = {name: v for name, v in event.items() if name not in UNREPORTED}
                self.crew.report(told | {"links": self._look_at_links()})

    def _look_at_links(self) -> dict[str, tuple[float, float]]:
        """Seconds there and back and bytes per second, 0 if unknown, by member that is or was a neighbour."""
        links, members = self._near
        flown, known = links.edges.flown(), self._speeds.copy()
        for peer in flown.keys() & links.lanes.keys():  # what goes from GPU to GPU is not seen
            flown[peer] = flown[peer]._replace(taken=0)
        for peer, rate in rates(flown, links.messages, together=links.topology.degree > 1).items():
            _, before = known.get(members[peer], (0.0, 0.0))
            # All ranks of a host send their slices at the same time.
            known[members[peer]] = round(flown[peer].trip, 6), float(f"{self._host.size * rate or before:.3g}")
        self._speeds = {name: speed for name, speed in known.items() if name in members}
        return self._speeds

    def leave(self, idle: Callable[[], None]) -> None:
        """Ask to leave, and go on with rounds without gradient until the crew does without this member."""
        deadline = time.monotonic() + LEAVING
        self.crew.leave()
        while not self.left:
            if self._host.led(lambda: time.monotonic() > deadline)[0]:  # the registry does not answer
                self.go()
            else:
                idle()

    # --- going --------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Be out of the crew, and end the process if a signal has asked for it."""
        self.left = True
        self.tell("left", why="signal" if self.signal else "leave")
        self.close()
        if self.signal:
            raise KeyboardInterrupt if self.signal == signal.SIGINT else SystemExit(0)

    def close(self) -> None:
        """Close the connection to the registry, and leave signals alone."""
        self.crew.close()
        if threading.current_thread() is threading.main_thread():
            for number, usual in self._usual.items():
                if signal.getsignal(number) == self._heard:  # and not a handler of the script's own, which came later
                    signal.signal(number, usual)
            self._usual.clear()

    def _listen_to_signals(self) -> None:
        """SIGTERM and Ctrl-C ask to leave, unless the script has handlers of its own; the second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) == usual:
                self._usual[number] = usual
                signal.signal(number, self._heard)

    def _heard(self, number: int, _frame: object) -> None:
        if os.getpid() != self._process:  # a child that was forked, such as a worker that loads data
            if number == signal.SIGTERM:  # Ctrl-C is for all processes of a terminal, and the member decides
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        signal.signal(number, self._usual.pop(number))
        self.signal = number
        self.crew.leave()

    # --- states -------------------------------------------------------------------------------------------------

    def handed_over(self, links: GlooLinks, own: Own | None) -> Held | None:
        """What this member goes on from: a newcomer asks its neighbours for it, which give theirs, if one is left."""
        held, t = own and own[0], self.epoch.start
        for newcomer, asked in sponsors(self.topology, len(self.epoch.newcomers)).items():
            if newcomer == self.rank:
                held = _asked_for(links, t, asked)
            elif self.rank in asked and newcomer not in links.lost and held is not None:
                _give(links, t, newcomer, held)
        links.hang_up()
        held = held if self._host.all(held is not None) else None
        self._in_vain = 0 if held is not None else self._in_vain + 1
        return held

    def join_again(self, rounds: int) -> Epoch:
        """Become a newcomer; one that wants to leave is out instead."""
        try:
            return NOBODY if self.crew.leaving else self.crew.join(self._facts, rounds)
        except Dropped:
            if self.crew.leaving:  # since it waits
                return NOBODY
            raise

    def begin_again(self) -> None:
        """Be a newcomer that holds nothing, unless a signal has asked it to leave."""
        self.moves_to(self._agreed(self._anew) or NOBODY)

    def _anew(self) -> Epoch:
        if self._in_vain > 1:  # others must not begin an epoch for it all the time
            seconds = min(2.0**self._in_vain, REST)
            remedy = "members must reach each other's ports, and not the registry alone"
            warn(f"no neighbour could be asked for its state; joining again in {seconds:g} s; {remedy}")
            self.crew.expects_change(seconds)
        return self.join_again(0)

    def resumed(self, rounds: int, place: int) -> Epoch:
        """The epoch that goes on from checkpoints."""

        def find() -> Epoch:
            try:
                return self.crew.resume(rounds, place)
            except Dropped as error:
                self._accept(error)
                return self.join_again(0)

        return self._agreed(find) or NOBODY

    def kept_memories(self, own: Own | None, links: GlooLinks, memories: Sequence[Memory]) -> list[Memory]:
        """What channels still hold, by dtype: copies of speakers that keep their hearers, and have lost none of them.

        A newcomer, which has nothing before, only tells others so.
        """
        topology, members, t = self.topology, self.epoch.members, self.epoch.start
        nothing: list[Memory] = [{} for _ in memories]
        if not topology.encoding.remembers or topology.late:  # what is on its way is dropped
            return nothing
        apart = set[str]()
        if own is not None:
            epoch, graph, old = own[1]
            apart = {epoch.members[peer] for peer in (*old.lost, *old.unsure)} & {*members}
        # One end of a link may not know that the other has lost it, nor do others that hear it.
        lost_by = _told(links, t, {peer: members[peer] in apart for peer in links.membership.beside()})
        has_lost = bool(apart) or any(lost_by.values())
        spoilt = _told(links, t, dict.fromkeys(lost_by, has_lost)) | {self.rank: has_lost}
        if own is None:
            return nothing
        kept = kept_copies(graph, epoch.members, topology, members, self.epoch.newcomers)
        return [_moved(memory, epoch.members, members, kept, spoilt) for memory in memories]

    def settled(
        self, links: GlooLinks, nodes: Sequence[Node], states: list[State], share: float
    ) -> tuple[list[State], list[Memory], float]:
        """States of which the crew's sums are what they must be, ledgers of them, and this member's weight.

        Weights are over the crew's mean.
        """
        handovers, t = [Handover(node.rule, node.rehearsal) for node in nodes], self.epoch.start - 1
        if self.is_new:
            states = [one.begun(state) for one, state in zip(handovers, states, strict=True)]
        ledgers = [Memory() for _ in nodes]
        if self.weight is None and not any(one.means for one in handovers):
            return states, ledgers, share
        try:
            with assembled(links, t, f"epoch {self.epoch.number}") as everyone:
                sums = [
                    {name: everyone.mean_and_debts(state[name].cpu()) for name in one.means}
                    for one, state in zip(handovers, states, strict=True)
                ]
                settled: float | None = share if self.weight is None else everyone.share(self.weight)
        except (RuntimeError, ValueError) as error:  # a member died
            warn(f"epoch {self.epoch.number}: sums over the crew begin anew ({reason(error)})")
            abandon(links, t, reason(error))  # those who have not noticed need not wait
            states = [one.zeroed(state) for one, state in zip(handovers, states, strict=True)]
            settled, sums = None, []
        for k, told in enumerate(sums):
            means = {name: mean.to(states[k][name]) for name, (mean, _) in told.items()}
            owed = {(peer, name): v for name in told if name in nodes[k].owes for peer, v in told[name][1].items()}
            states[k] = handovers[k].settled(states[k], means)
            ledgers[k]["ledger"] = {f"{peer} {name}": v for (peer, name), v in owed.items()}
            ledgers[k]["last"] = {str(peer): t for peer, _ in owed}
        agreed = self._host.all(settled is not None)
        return states, ledgers, settled if agreed and settled is not None else share


def held_by(states: Iterable[State], frozen: Iterable[Tensor], groups: Iterable[Group], training: Training) -> Held:
    """What a member holds, as copies."""
    options = [{name: v for name, v in group.items() if isinstance(v, bool | int | float)} for group in groups]
    return [each(torch.clone, state) for state in states], [piece(v.data) for v in frozen], options, training


def rescaled(rule: Rule, content: dict[str, Any]) -> list[State]:
    """The vectors of a content, which a rule may scale by what its graph says."""
    return [
        fields | {name: fields[name] * (scale / content["scales"][name]) for name, scale in rule.scales.items()}
        for fields in content["vectors"]
    ]


def _told(links: GlooLinks, t: int, tell: Mapping[int, bool]) -> dict[int, bool]:
    """What some neighbours tell this node, which tells each of them something."""
    boxes = {peer: torch.zeros(1, dtype=torch.bool) for peer in tell}
    calls = [links.call(TAG, box, peer, True) for peer, box in boxes.items()]
    calls += [links.call(TAG, torch.tensor([told]), peer, False) for peer, told in tell.items()]
    for call in calls:
        try:
            links.settle(call, t)
        except LinkError as error:
            links.lose(error)
    links.hang_up()
    return {peer: bool(box) for peer, box in boxes.items()}


def _moved(
    memory: Memory, before: Sequence[str], now: Sequence[str], kept: Set[tuple[int, Hashable]], spoilt: dict[int, bool]
) -> Memory:
    """The memory of a channel with nodes that have other numbers, and fewer copies."""
    held: dict[str, Tensor] = {}
    for key, copy in memory.get("held", {}).items():  # type: ignore[attr-defined]
        message, node, audience, part = map(int, key.split())
        if node >= 0 and (audience, before[node]) in kept and not spoilt.get(place := now.index(before[node]), True):
            held[f"{message} {place} {audience} {part}"] = copy
    return {"held": held}


def _asked_for(links: GlooLinks, t: int, neighbours: Sequence[int]) -> Held | None:
    """The state of the first of some neighbours that gives it; the others are told that they need not."""
    held: Held | None = None
    for peer in neighbours:
        if peer not in links.lost:
            try:
                links.pass_on(TAG, t, torch.tensor([held is None]), peer, False)
                held = held or _received(links, t, peer)
            except LinkError as error:
                links.lose(error)
    return held


def _received(links: GlooLinks, t: int, peer: int) -> Held:
    take = partial(_pass, links, t, peer, True)
    (length,) = take([torch.empty(1, dtype=torch.int64)])
    (text,) = take([torch.empty(int(length), dtype=torch.uint8)])
    held, kinds = json.loads(text.numpy().tobytes())
    tensors = take(torch.empty(shape, dtype=DTYPES[dtype]) for shape, dtype in kinds.values())
    states, frozen, options, training = unpacked(held, dict(zip(kinds, tensors, strict=True)))
    return states, frozen, options, training


def _give(links: GlooLinks, t: int, peer: int, held: Held) -> None:
    """Give a newcomer what it goes on from, if it wants it."""
    tensors: dict[str, Tensor] = {}
    header = packed(held, tensors, "held"), {name: [list(v.shape), str(v.dtype)] for name, v in tensors.items()}
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    try:
        (wants,) = _pass(links, t, peer, True, [torch.tensor([False])])
        if wants:
            _pass(links, t, peer, False, [torch.tensor([len(text)]), text, *tensors.values()])
    except LinkError as error:
        with suppress(LinkError):
            links.lose(error)


def _pass(links: GlooLinks, t: int, peer: int, incoming: bool, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Receive tensors, or send them."""
    whole = [v.detach().cpu().contiguous() for v in tensors]
    for v in whole:
        for some in torch.split(v.reshape(-1).view(torch.uint8), PIECE) if v.numel() else ():
            links.pass_on(TAG, t, some, peer, incoming)
    return whole


# --- plain data and tensors, without pickle -------------------------------------------------------------------------


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
