"""The clock: when every node has done a round, given when its neighbours have.

A node sends what needs no gradient as soon as the round before is over, and the rest when its gradient is there. It is
done with a round when it has its own gradient and all messages that it waits for. A message leaves when those before
have left, travels for a latency, and takes its bytes over the bandwidth; what a node sends to several neighbours at
the same time shares its link. Synchronous rules wait for the same messages however long they take, so the numbers of a
run do not depend on its clock. Asynchronous nodes meet as a schedule says, which the clock makes (`Pairwise`,
`Staleness`).
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch import columns
from klatsch.arguments import number, whole
from klatsch.clock.network import Array, Links, Nodes, NoLinkError, Times
from klatsch.clock.network import links as links_of
from klatsch.clock.network import times as times_of
from klatsch.rules import Rule
from klatsch.topology import Topology
from klatsch.topology.channel import encoded_bytes
from klatsch.topology.matrix import Matrix, mapped, places
from klatsch.wire.rehearsal import FEW, Rehearsal

FEW_ROUNDS, CHUNK = 64, 1 << 22  # rounds whose times are drawn at first, and times that are drawn at once later
MOST_IN_PAIRS = 4096  # nodes: a schedule of pairs looks at all of them at once
BUCKET = 25e6  # bytes that an all-reduce of gradients collects, as in DDP; nothing hides the last bucket
HIDDEN = 1 / 3  # of a gradient's time, in which finished buckets may travel
SOME = 64  # gradients of every node that are drawn at once for a schedule of pairs
MEETINGS = {  # how nodes may meet, with an example of each
    "pairwise": "pairwise lognormal(0.05, 0.5) over 10gbe",
    "stale": "stale exponential(0.05) over wan",
}


Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Round = TypeVar("Round")


class Sending(NamedTuple):
    """One message of a round."""

    early: bool  # whether it needs no gradient
    vectors: int
    needs: tuple[int, ...]  # messages that have to arrive before


class Talk(NamedTuple):
    """Who sends what to whom: all that a clock has to know of a rule on a graph."""

    name: str  # in errors
    nodes: int
    every: int
    late: int
    wire: str
    all_reduce: bool
    messages: Sequence[Sending]  # of a round
    links: Sequence[tuple[Nodes, Nodes]]  # senders and receivers, for each round with gossip of a period
    shuffle: int | None = None  # the seed by which nodes change places before every round
    encoded: float | None = None  # bytes of a vector, if not those of `wire`, or of a gradient as a hook sends it


class Hearing(NamedTuple):
    """Who waits for whom in a round with one message of a size."""

    sources: Numbers  # (degree, M): whom each node hears; itself where it hears fewer
    delays: Array  # (degree, M): from the sending to the arrival; -inf where it is itself
    sending: Array  # (M,): how long a node's link is busy with it


@dataclass(frozen=True)
class Deaths:
    """Machines that die, at any moment, and are replaced; expected times, in seconds.

    With an all-reduce all machines then start again from the last checkpoint, and there are as many of them as pays
    off. With gossip the others wait until they notice, and go on; the replacement takes over at once, so accuracy stays
    as it was.

    Args:
        life: of one machine, in the mean.
        restart: from the death until all machines work again.
        write: of a checkpoint, while all machines wait.
        notice: from the death until neighbours go on.
    """

    life: float
    restart: float
    write: float
    notice: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number(name, value, lambda v: v > 0, "a positive number of seconds, such as 36_000")

    def stretch(self, nodes: int, all_reduce: bool) -> float:
        """How many times as long work takes, in expectation.

        Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006. Waits that overlap
        are one, which makes theirs exponential as well.
        """
        each = self.life / nodes  # between two deaths
        if not all_reduce:
            return float(np.exp(self.notice / each))
        work = self.interval(nodes)
        return float(np.exp(self.restart / each) * np.expm1((work + self.write) / each) / (work / each))

    def interval(self, nodes: int) -> float:
        """Seconds of work between two checkpoints: Young's first approximation to the optimum, 1974."""
        return float(np.sqrt(2 * self.write * self.life / nodes))


@dataclass(frozen=True)
class Clock:
    """How long gradients and messages take.

    Args:
        gradient: seconds of a gradient: a number, one for each node, or a distribution; see `times`.
        network: its links: "1gbe", "10gbe", "100gbe", "wan", a CSV file, or `Links`, `Sites`, `Table`.
        handling: seconds to pack and add up each byte of a vector; nothing hides them.
        per_message: seconds of work for each message of any length.
        gpus: GPUs of a node, if nodes are hosts: they average their gradients, and put their slices together, inside.
        bus: bytes per second between them.
        seed: of what is drawn.
        deaths: machines that die and are replaced, which `seconds` counts.
        params: of the model that is timed beside runs, if not of the problem's own.
    """

    gradient: Times | float | str | Sequence[float] = field(compare=False)
    network: Links | str = field(default="10gbe", compare=False)
    handling: float = 5e-10
    per_message: float = 1e-5
    gpus: int = 1
    bus: float = 2e10
    seed: int = 0
    deaths: Deaths | None = None
    params: int | None = None
    times: Times = field(init=False, repr=False)  # of gradients
    links: Links = field(init=False, repr=False)  # of the network

    def __post_init__(self) -> None:
        number("handling", self.handling, lambda v: v >= 0, "0 or a positive number of seconds per byte")
        number("per_message", self.per_message, lambda v: v >= 0, "0 or a positive number of seconds")
        number("bus", self.bus, lambda v: v > 0, "a positive number of bytes per second, such as 2e10")
        whole(self.gpus, "gpus", 1)
        whole(self.seed, "seed", 0)
        if self.params is not None:
            whole(self.params, "params", 1)
        object.__setattr__(self, "times", times_of(self.gradient))
        object.__setattr__(self, "links", links_of(self.network))

    @property
    def nodes(self) -> int | None:
        """Of how many nodes it is; None for any number."""
        return min((part.nodes for part in (self.times, self.links) if part.nodes is not None), default=None)

    def of_first(self, nodes: int) -> Clock:
        """The clock of the first nodes alone."""
        return replace(self, gradient=self.times.of_first(nodes), network=self.links.of(nodes))

    def seconds(self, rule: Rule, topology: Topology, params: int, steps: Sequence[int]) -> list[float]:
        """When all nodes have done so many rounds, in seconds.

        A graph that says so, as the complete one, is an all-reduce.

            >>> from klatsch import clock, rules, topology
            >>> wan, rule = clock.Clock(0.05, "wan"), rules.make("dsgd", lr=0.1)
            >>> for graph in (topology.ring(8), topology.complete(8)):
            ...     (seconds,) = wan.seconds(rule, graph, params=1_000_000, steps=[100])
            ...     print(f"{graph.name}: {seconds:.0f} s")
            ring: 78 s
            complete: 95 s
        """
        return self.seconds_of(talk_of(rule, topology, params), params, steps)

    def seconds_of(self, talk: Talk, params: int, steps: Sequence[int]) -> list[float]:
        """The same of nodes that meet in rounds, by what they send."""
        if talk.all_reduce:
            vectors = 1 if talk.every == 1 else sum(sent.vectors for sent in talk.messages)
            turns = 1 if talk.encoded is None else len(talk.messages) - 1  # the last message is the iterate
            done = self.all_reduce(talk.nodes, params, steps, talk.every, vectors, talk.encoded, turns)
        else:
            done = self._at(talk.nodes, steps, (one.done for one in self._gossip(talk, params)))
        stretch = 1.0 if self.deaths is None else self.deaths.stretch(talk.nodes, talk.all_reduce)
        return [float(seconds) * stretch for seconds in done.max(1)]

    def gossip(self, rule: Rule, topology: Topology, params: int, steps: Sequence[int]) -> Array:
        """When each node has done so many rounds of gossip, in seconds, (len(steps), M)."""
        rounds = self._gossip(talk_of(rule, topology, params), params)
        return self._at(topology.size, steps, (one.done for one in rounds))

    def _gossip(self, talk: Talk, params: int) -> Iterator[Late]:
        """Rounds of gossip without end; `arrivals` are those of all messages of a node."""
        size = float(encoded_bytes("float32", params))
        encoded = float(encoded_bytes(talk.wire, params)) if talk.encoded is None else talk.encoded
        sendings = talk.messages
        sizes = [sent.vectors * encoded for sent in sendings]
        hearings = [mapped(talk.links, partial(self._hearing, talk=talk, size=each)) for each in sizes]
        work = sum(sent.vectors for sent in sendings) * size * self.handling
        free = np.zeros(talk.nodes)  # when a node's link has sent all that it was given
        on_the_way: deque[tuple[int, Array]] = deque()  # the round that waits for it, and when it has arrived

        def heard_in(t: int) -> list[Hearing]:
            """Who waits for whom in round t, by message."""
            phase = (t // talk.every - 1) % len(talk.links)
            if talk.shuffle is None:
                return [hearing[phase] for hearing in hearings]
            sender, receiver = (places(talk.nodes, talk.shuffle, t)[ends] for ends in talk.links[phase])
            return [self._hearing((sender, receiver), talk, each) for each in sizes]

        def sent_from(begin: Array, ready: Array, t: int) -> Array:
            """When each node has the messages of each neighbour; the early ones leave at the beginning."""
            nonlocal free
            arrivals: list[Array] = []
            in_round = heard_in(t)
            last = np.full(in_round[0].delays.shape, -np.inf)
            for sent, (sources, delays, sending) in zip(sendings, in_round, strict=True):
                start = np.maximum(begin if sent.early else ready, free)
                for k in sent.needs:
                    start = np.maximum(start, arrivals[k])
                free = start + sending
                each = start[sources] + delays
                arrivals.append(each.max(0))
                last = np.maximum(last, each)
            return last

        done, nothing = np.zeros(talk.nodes), np.full((1, talk.nodes), -np.inf)
        for t, gradient in enumerate(self.gradients(talk.nodes, params), 1):
            ready, arrivals = done + gradient, nothing
            speaks = t % talk.every == 0 and talk.nodes > 1
            if speaks and not talk.late:
                arrivals = sent_from(done, ready, t)
                done = np.maximum(ready, arrivals.max(0)) + work
            else:
                done = ready
                if on_the_way and on_the_way[0][0] == t:
                    done = np.maximum(done, on_the_way.popleft()[1])
                if speaks:
                    done = done + work
                    arrivals = sent_from(done, done, t)
                    on_the_way.append((t + talk.late, arrivals.max(0)))
            yield Late(ready, arrivals, done)

    def all_reduce(
        self,
        nodes: int,
        params: int,
        steps: Sequence[int],
        every: int = 1,
        vectors: int = 1,
        encoded: float | None = None,
        turns: int = 1,
    ) -> Array:
        """When each node has done so many rounds with an all-reduce of some vectors in every H-th, (len(steps), M).

        They go along a ring in pieces, in the order of the nodes, or by halving and doubling, whichever is faster. In
        every round it is an all-reduce of gradients, in buckets, which travel as soon as they are finished. A hook
        sends `encoded` bytes of them instead, in equal parts of which each waits for the one before.
        """

        def rounds() -> Iterator[Array]:
            size, done = vectors * float(encoded_bytes("float32", params)), np.zeros(nodes)
            part = (size if encoded is None else encoded) / turns
            extra = self._all_reduce(nodes, part, hides=every == 1) + size * self.handling * (nodes > 1)
            extra += (turns - 1) * self._all_reduce(nodes, part, hides=False)
            for t, gradient in enumerate(self.gradients(nodes, params), 1):
                done = done + gradient
                if t % every == 0:
                    done = np.full(nodes, done.max() + extra)
                yield done

        return self._at(nodes, steps, rounds())

    def pairwise(self, rule: Rule, topology: Topology, params: int) -> Pairwise:
        """Who meets whom, if nodes average in pairs and do not wait for each other."""
        self._check(topology.size)
        whole(topology.size, f"{topology.name}: nodes that meet in pairs", 1, MOST_IN_PAIRS)
        weights = topology.union.toarray()
        np.fill_diagonal(weights, 0.0)
        size = sum(sent.vectors for sent in messages_of(rule, params)) * float(encoded_bytes("float32", params))
        asks, answers = np.nonzero(weights)
        takes = np.zeros(weights.shape)
        for way in ((asks, answers), (answers, asks)):  # there and back
            rate, latency = self._between(*way, topology.name, topology.size)
            takes[asks, answers] += latency + size / rate + self.per_message
        return Pairwise(self.gradients(topology.size, params), weights, takes, size * self.handling, self.seed)

    def staleness(self, rule: Rule, topology: Topology, params: int) -> Staleness:
        """How many rounds late messages are used, if nodes wait only for those that are `topology.late` rounds old."""
        self._check(topology.size)
        everyone, talk = np.arange(topology.size), talk_of(rule, topology, params)
        sources = self._hearing(talk.links[0], talk, 0.0).sources
        weights = np.where(sources == everyone, 0.0, topology.speaking[0].toarray()[everyone, sources])
        return Staleness(self._gossip(talk, params), sources, weights, topology.late)

    def _check(self, nodes: int) -> None:
        for part in (self.times, self.links):
            if part.nodes not in (None, nodes):
                raise ValueError(f"{part.name} is for {part.nodes} nodes, but there are {nodes}; make them equal")

    def _at(self, nodes: int, steps: Sequence[int], rounds: Iterator[Array]) -> Array:
        """What there is at some rounds, (len(steps), M)."""
        self._check(nodes)
        if not len(steps):
            raise ValueError("steps is empty; give the rounds at which to look at the clock, such as [1000]")
        wanted = {whole(step, "steps", 1) for step in steps}
        at = {t: done for t, done in enumerate(islice(rounds, max(wanted)), 1) if t in wanted}
        return np.array([at[step] for step in steps])

    def gradients(self, nodes: int, params: int) -> Iterator[Array]:
        """The seconds of every node's gradient, round by round, with what its GPUs do among themselves."""
        size = float(encoded_bytes("float32", params))
        inside = 3 * (self.gpus - 1) / self.gpus * size / self.bus  # an all-reduce and an all-gather
        draw, first, some = self.times.drawing(nodes, self.seed), 0, FEW_ROUNDS
        while True:
            yield from draw(first, some) + inside
            first, some = first + some, min(2 * some, max(1, CHUNK // nodes))

    def _hearing(self, links: tuple[Nodes, Nodes], talk: Talk, size: float) -> Hearing:
        """Who hears whom in a round, and how long a message of a size takes."""
        (sender, receiver), nodes = links, talk.nodes
        rate, latency = self._between(sender, receiver, talk.name, nodes)
        takes = size / rate + self.per_message
        sending, hearing = (np.bincount(who, takes, nodes).astype(float) for who in (sender, receiver))
        delay = latency + np.maximum(sending[sender], hearing[receiver])
        degree = np.bincount(receiver, minlength=nodes)
        sources = np.tile(np.arange(nodes), (max(1, int(degree.max(initial=0))), 1))
        delays = np.full(sources.shape, -np.inf)
        order = np.argsort(receiver, kind="stable")
        place = np.arange(len(order)) - np.repeat(np.cumsum(degree) - degree, degree)
        sources[place, receiver[order]] = sender[order]
        delays[place, receiver[order]] = delay[order]
        return Hearing(sources, delays, sending)

    def _between(self, sender: Nodes, receiver: Nodes, name: str, nodes: int) -> tuple[Array, Array]:
        """Bytes per second and latency of the links of a graph."""
        rate, latency = self.links.of(nodes).between(sender, receiver)
        if (rate <= 0).any():
            k = int(np.argmax(rate <= 0))
            raise NoLinkError(
                f"{name} needs a link from node {sender[k]} to node {receiver[k]}, and the network has none; give it "
                "a bandwidth, or take another graph"
            )
        return rate, latency

    def _all_reduce(self, nodes: int, size: float, hides: bool) -> float:
        """Seconds that an all-reduce adds to a round; buckets may hide behind the gradient."""
        if nodes == 1:
            return 0.0
        travel = self._along_a_ring(nodes, size)
        with suppress(NoLinkError):  # a ring is enough
            travel = min(travel, self._by_halves(nodes, size))
        hidden = min(HIDDEN * self.times.mean, travel * (1 - min(1.0, BUCKET / size)))
        return travel - hidden * hides

    def _along_a_ring(self, nodes: int, size: float) -> float:
        """Seconds of an all-reduce in pieces: each piece goes around twice, and a slow link delays those behind it."""
        everyone = np.arange(nodes)
        rate, latency = self._between(everyone, np.roll(everyone, -1), "an all-reduce along a ring", nodes)
        busy = self.per_message + size / nodes / rate
        ready, idle = np.zeros(nodes), np.zeros(nodes)  # when a node has its next piece, and its link is free
        for _ in range(2 * (nodes - 1)):
            idle = np.maximum(ready, idle) + busy
            ready = np.roll(idle + latency, 1)
        return float(ready.max())

    def _by_halves(self, nodes: int, size: float) -> float:
        """Seconds of an all-reduce by halving and doubling: partners twice as far in every step, for half the bytes.

        Of more nodes than a power of two, those beyond give their vector to another one, and get the result.
        """
        power = 1 << (nodes.bit_length() - 1)
        first, extra = np.arange(power), np.arange(power, nodes)
        steps = [(first, first ^ (1 << k), size / (2 << k)) for k in range(power.bit_length() - 1)]
        steps += [(extra, extra - power, size)] if len(extra) else []
        seconds = 0.0
        for one, other, each in steps:
            for sender, receiver in ((one, other), (other, one)):  # halving and doubling, or there and back
                rate, latency = self._between(sender, receiver, "an all-reduce by halves", nodes)
                seconds += float((latency + self.per_message + each / rate).max())
        return seconds


# --- asynchrony: who meets whom, and how old a message is when it is used --------------------------------------------


class Meeting(NamedTuple):
    """Nodes that take a step, and then pairs that average; no node does the same twice."""

    number: int  # from 1, over all rounds
    steps: Numbers  # (m,)
    pairs: Numbers  # (k, 2)


class Late(NamedTuple):
    """One round of nodes that send what arrives later, each (M,) or (degree, M)."""

    ready: Array  # when each node has its gradient, and looks at what has arrived
    arrivals: Array  # when it will have what its neighbours send in this round; -inf where it has fewer neighbours
    done: Array


class Schedule(Generic[Round]):
    """Rounds that a clock finds one after the other; all are kept, so that a run can go back."""

    def __init__(self, coming: Iterator[tuple[Round, float]]) -> None:
        self._coming, self._rounds = coming, list[tuple[Round, float]]()

    def round(self, t: int) -> Round:
        """What happens in round t."""
        return self._at(t)[0]

    def seconds(self, t: int) -> float:
        """When round t is over."""
        return self._at(t)[1]

    def _at(self, t: int) -> tuple[Round, float]:
        self._rounds += islice(self._coming, max(0, t - len(self._rounds)))
        return self._rounds[t - 1]


class Pairwise(Schedule[list[Meeting]]):
    """Asynchronous gossip in pairs (AD-PSGD): nobody waits for anybody's gradient.

    A node asks a neighbour while it computes its gradient. When the answer is there, both have the mean of their
    vectors; when the gradient is there as well, it takes its step and begins again. So a gradient is of the point at
    which it began. A round counts M steps of the network, whoever takes them. `weights` say how likely a node (row)
    asks another one (column), `answers` how many seconds pass until the answer; `work` is to handle a message.
    """

    def __init__(self, gradients: Iterator[Array], weights: Array, answers: Array, work: float, seed: int) -> None:
        self.nodes = len(weights)
        self._gradients, self._answers, self._work = gradients, answers, work
        self._shares = np.cumsum(weights, axis=1) / np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
        self._chance = np.random.default_rng([seed, 1])
        super().__init__(self._grouped())

    def _grouped(self) -> Iterator[tuple[list[Meeting], float]]:
        """Rounds of M steps; each event is in the first meeting that keeps the order of every node's events."""
        M, number, events = self.nodes, 1, self._events()
        while True:
            steps, pairs = defaultdict[int, list[int]](list), defaultdict[int, list[tuple[int, int]]](list)
            may_step, may_meet = [0] * M, [0] * M  # from which meeting of the round on
            for taken, when, node, other in events:
                if other >= 0:
                    k = max(may_meet[node], may_meet[other])
                    pairs[k].append((node, other))
                    for one in (node, other):
                        may_step[one] = may_meet[one] = k + 1
                    continue
                k = may_step[node]
                steps[k].append(node)
                may_step[node], may_meet[node] = k + 1, k
                if taken % M == 0:
                    meetings = [
                        Meeting(number + k, np.array(steps[k], np.int64), np.array(pairs[k], np.int64).reshape(-1, 2))
                        for k in range(1 + max((*steps, *pairs)))
                    ]
                    number += len(meetings)
                    yield meetings, when
                    break

    def _events(self) -> Iterator[tuple[int, float, int, int]]:
        """Steps so far, when, which node, and whom it meets, in the order of time; -1 where it takes its step."""
        taken = 0
        M, everyone = self.nodes, np.arange(self.nodes)
        begun, left = np.zeros(M), np.empty((0, 3))
        while True:
            times = np.array(list(islice(self._gradients, SOME)))  # (SOME, M)
            asked = (self._chance.random((SOME, M, 1)) > self._shares).sum(-1).clip(0, M - 1)
            answered = self._answers[everyone, asked]
            ends = begun + np.cumsum(np.maximum(times, answered) + self._work, axis=0)
            starts = np.concatenate([begun[None], ends[:-1]])
            nodes = np.broadcast_to(everyone, ends.shape)
            met = np.stack([starts + answered, nodes, asked], -1).reshape(-1, 3)
            stepped = np.stack([ends, nodes, np.full(ends.shape, -1)], -1).reshape(-1, 3)
            events = np.concatenate([left, met[met[:, 1] != met[:, 2]], stepped])  # one machine meets nobody
            events = events[np.lexsort((events[:, 1], -events[:, 2], events[:, 0]))]
            begun = ends[-1]
            known = events[:, 0] <= begun.min()  # of what is later, some is not drawn yet
            for when, node, other in events[known].tolist():
                taken += other < 0
                yield taken, when, int(node), int(other)
            left = events[~known]


class Staleness(Schedule[dict[int, Flags]]):
    """Which messages, (degree, M), nodes use in a round, by how many rounds old they are.

    Each is used as soon as it is there; after `late` rounds nodes wait for it. `sources` are those whom each node
    hears, with the weights of their messages.
    """

    def __init__(self, rounds: Iterator[Late], sources: Numbers, weights: Array, late: int) -> None:
        self.sources, self.weights = sources, weights

        def used() -> Iterator[tuple[dict[int, Flags], float]]:
            on_the_way: dict[int, tuple[Array, Flags]] = {}  # by round of sending: arrivals, and which are not used yet
            for t, (ready, arrivals, done) in enumerate(rounds, 1):
                on_the_way[t] = arrivals, np.isfinite(arrivals)
                ages = {}
                for sent, (arrival, waiting) in on_the_way.items():
                    due = waiting & ((arrival <= ready) | (sent + late <= t))
                    waiting &= ~due
                    if due.any():
                        ages[t - sent] = due
                on_the_way.pop(t - late, None)
                yield ages, float(done.max())

        super().__init__(used())


def check_meets(
    name: str, meets: object, every: int = 1, late: int = 0, wire: str = "float32", loss: float = 0.0, **others: object
) -> None:
    """Check that nodes of a graph with such a channel may meet otherwise than in rounds."""
    how = meets.split()[:1] if isinstance(meets, str) else [""]
    if how and how[0] not in MEETINGS:
        raise ValueError(f"meets = {meets!r}; give {' or '.join(map(repr, MEETINGS.values()))}, or nothing for rounds")
    if not how:
        return
    asked = f"{name} with meets = {str(meets).strip()!r}"
    special = {"every": every if every > 1 else None, "wire": wire if wire != "float32" else None, "loss": loss or None}
    for option, value in special.items():
        if value is not None:
            raise ValueError(f"{asked} and {option} = {value!r}; leave one of them out")
    if how == ["pairwise"] and late:
        raise ValueError(f"{asked} and late = {late}: nodes wait for nothing but an answer; leave late out")
    if how == ["stale"] and not late:
        raise ValueError(f"{asked}: how old may a message be? give late, such as late = 4")


def scheduled(rule: Rule, topology: Topology, params: int, meets: str) -> Pairwise | Staleness:
    """The schedule of nodes that do not meet in rounds, by "pairwise lognormal(0.05, 0.5) over wan"."""
    check_meets(topology.name, meets, topology.every, topology.late, topology.wire, topology.loss)
    meets = meets.strip()
    said = re.fullmatch(r"(\w+)\s+(.+?)(?:\s+over\s+(\S+))?", meets)
    if said is None:
        raise ValueError(f"meets = {meets!r} does not say how long a gradient takes; write '{meets} exponential(0.05)'")
    clock = Clock(said[2], said[3] or "10gbe")
    if said[1] == "pairwise":
        if not rule.met:
            name = f"{rule.name} on {topology.name} {meets}"
            raise ValueError(f"{name}: it needs rounds; in pairs run dsgd and dat, also with momentum or adam")
        return clock.pairwise(rule, topology, params)
    if topology.changes:
        asked = f"{topology.name} with meets = {meets!r}"
        raise ValueError(f"{asked}: the graph changes from round to round; use a static one, such as ring")
    return clock.staleness(rule, topology, params)


def talk_of(rule: Rule, topology: Topology, params: int = FEW) -> Talk:
    """What nodes say to each other."""
    channel = topology.every, topology.late, topology.wire, topology.all_reduce

    def ends(P: Matrix) -> tuple[Nodes, Nodes]:
        """Senders and receivers."""
        hearer, heard = (each.astype(np.int64) for each in P.tocoo().coords)
        return heard[heard != hearer], hearer[heard != hearer]

    links = mapped(topology.speaking, ends)
    hooked = float(rule.hook.bytes(params)) if rule.hook else None
    return Talk(topology.name, topology.size, *channel, messages_of(rule, params), links, topology.shuffle, hooked)


def messages_of(rule: Rule, params: int = FEW) -> list[Sending]:
    """The messages of a round of a rule for so many parameters."""
    wide = params if params > 1 else FEW  # one number could be a vector or a weight
    traffic = Rehearsal(rule, torch.zeros(1, 1).expand(columns.count(rule), wide)).traffic
    early = 0 if traffic.early else None
    return [
        Sending(k == early, sum(shape[-1] == wide for shape in sent.shapes), sent.needs)
        for k, sent in enumerate(traffic.messages)
    ]
