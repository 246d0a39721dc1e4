"""What one can see of an optimizer that gossips: what it has sent and waited for, who is left, and the events of it."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import ClassVar, SupportsFloat

import torch
from torch import Tensor

from klatsch.extras import VERSION
from klatsch.optim.groups import parameters_of
from klatsch.optim.hosts import Host
from klatsch.optim.points import Points
from klatsch.optim.post import Post
from klatsch.ranks.assembly import assembled
from klatsch.ranks.failures import LinkError, QuorumError, reason, shown, warn
from klatsch.ranks.links import GlooLinks
from klatsch.rules import Rule
from klatsch.topology import Topology
from klatsch.watch.events import ABOUT, ROW, Log, Sink

MOST_SKIPPED = 100  # events of rounds without gradient; rounds tell how many there were
# Reserved names, which numbers of users do not have.
OWN = {*ABOUT, *ROW, "bytes", "waited", "waits", "lag", "seconds", "lr", "skipped", "members", "neighbours", "metrics"}


class Diary:
    """The events of one optimizer; it outlives the optimizer, to tell of its end."""

    _open: ClassVar[weakref.WeakSet[Diary]] = weakref.WeakSet()  # of this process

    def __init__(self, sinks: Sequence[Sink], rank: int = 0) -> None:
        self.log = Log(sinks, warn)
        self._places = {(rank, str(sink)) for sink in sinks}
        taken = {other.number for other in Diary._open if other._places & self._places}
        self.number: int = next(k for k in count(1) if k not in taken)  # among the optimizers with one log
        Diary._open.add(self)
        self.member, self.members, self.rounds = "", list[str](), 0
        self.given: dict[str, SupportsFloat] = {}  # numbers of the user for the next event of a round
        self._lost = set[str]()
        self._told, self._last = 0, time.monotonic()  # the last round that was told, and when
        self._waits = dict[str, float]()  # of links before, to members that are still there
        self._links: GlooLinks | None = None

    def tell(self, kind: str, **facts: object) -> None:
        self.log.emit(kind, self.member, **{"round": self.rounds} | facts)

    def stand(self, member: str, members: Sequence[str], epoch: int, links: GlooLinks) -> None:
        """Be a member of an epoch, with some links."""
        if links is not self._links:  # of those who are gone for good nobody asks: they would become ever more
            self._waits = {name: seconds for name, seconds in self.waits().items() if name in members}
        self.member, self.members, self._links = member, [*members], links
        links.is_late = lambda peer, t: self.tell("late", round=t, neighbour=members[peer])
        near = [self.members[peer] for peer in links.membership.beside()]
        facts = {"epoch": epoch, "round": self.rounds + 1, "members": self.members, "neighbours": near}
        self.tell("epoch", **facts)
        for neighbour in self._lost & {*near}:
            self.tell("back", round=self.rounds + 1, neighbour=neighbour)
        self._lost.clear()
        self.look(self.rounds)

    def waits(self) -> dict[str, float]:
        """Seconds that messages of neighbours were waited for."""
        waits = self._waits.copy()
        for peer, seconds in self._links.waits.items() if self._links else ():
            waits[self.members[peer]] = waits.get(self.members[peer], 0.0) + seconds
        return waits

    def look(self, rounds: int) -> None:
        """See how many rounds are done, and tell of neighbours that are newly lost."""
        self.rounds, links = rounds, self._links
        if links is None or (len(links.lost) == len(self._lost) and links.failure is None):
            return
        failures = [*links.lost.values(), *([links.failure] if isinstance(links.failure, LinkError) else [])]
        for failure in [each for each in failures if self.members[each.neighbor] not in self._lost]:
            name = self.members[failure.neighbor]
            self._lost.add(name)
            self.tell("lost", round=failure.round, neighbour=name, why=failure.why)

    def tell_round(self, **numbers: object) -> None:
        links, now = self._links, time.monotonic()
        assert links is not None
        counts = {"bytes": links.bytes_sent, "waited": round(links.seconds_waited, 6)}
        waits = {name: round(seconds, 6) for name, seconds in self.waits().items()}
        given, self.given = {name: float(v) for name, v in self.given.items()}, {}
        took = {"seconds": round(now - self._last, 6)}
        self._told, self._last = self.rounds, now
        self.tell("round", **given, **numbers, **counts, waits=waits, **took)

    def close(self) -> None:
        """Tell of the last round, and of the end."""
        Diary._open.discard(self)
        self.look(self.rounds)
        if self.given or self.rounds != self._told:
            self.tell_round()
        self.log.close(self.member, round=self.rounds)
        self._links = None  # which know this diary: both are freed at once


class Watched(Points):
    """The part of an optimizer that one can see."""

    topology: Topology
    rule: Rule
    rank: int
    host: Host
    post: Post | None
    skipped: int
    _links: GlooLinks
    _diary: Diary | None = None  # without a log

    def log(self, **numbers: SupportsFloat) -> None:
        """Have numbers, such as the loss, in the event of the next round that is logged; see docs/watching.md.

        Call it before `step`. The value of a closure is the loss by itself. Of numbers with one name, the last one
        counts. It costs next to nothing, also where nothing is logged.

            optimizer.log(loss=loss)
        """
        for name in OWN & numbers.keys():
            raise ValueError(f"{name} is a fact of every round; give your number another name")
        held = {name: _held(name, value) for name, value in numbers.items()}
        if self._diary is not None:
            self._diary.given |= held

    def counts(self) -> dict[str, float]:
        """What the event of a round tells of this rank besides the loss, for a logger of your own.

        accelerator.log({"loss": loss.item()} | optimizer.counts())
        """
        return self._own_numbers() | {"bytes": self.bytes_sent, "waited": self.seconds_waited, "lost": len(self.lost)}

    def tell(self, kind: str, **facts: object) -> None:
        """Emit an event of this rank, if there is a log."""
        if self._diary is not None:
            self._diary.tell(kind, **facts)

    def _hear(self, loss: object) -> None:
        """Take the value of a closure for the loss, if it is a number."""
        if loss is not None and self._diary is not None:
            with suppress(ValueError):
                self._diary.given["loss"] = _held("loss", loss)

    def _own_numbers(self) -> dict[str, float]:
        numbers = {"lr": float(self.param_groups[0]["lr"])}
        if self.host.size == 1 and (apart := self.consensus(estimate=True)) == apart:  # not nan, as for push-sum
            numbers["consensus"] = apart
        if (foremost := self._links.paces(self.rounds + 1)[0]) > 0:
            numbers["lag"] = max(0, int(foremost) - self.rounds)
        return numbers | ({"skipped": self.skipped} if self.skipped else {})

    def _begin_diary(self, sinks: Sequence[Sink]) -> None:
        if sinks:
            self._diary = Diary(sinks, self.rank)
            weakref.finalize(self, self._diary.close)
            if self.post is not None:
                self.post.tell = self._diary.tell
            self._tell_epoch()

    def _tell_epoch(self) -> None:
        """Tell where this rank stands now, in a crew that changes or for good."""
        if (diary := self._diary) is None:
            return
        suffix = f"-{diary.number}" if diary.number > 1 else ""
        members: Sequence[str] = [f"{rank}{suffix}" for rank in range(self.topology.size)]
        member, epoch = members[self.rank], 1
        if self.post is not None:
            members, member, epoch = self.post.epoch.members, self.post.crew.member, self.post.epoch.number
        if member != diary.member:
            graph, trained = self.topology, [p for p in parameters_of(self.param_groups) if p.requires_grad]
            channel = {"wire": graph.wire, "every": graph.every, "late": graph.late}
            facts = {"host": socket.gethostname(), "pid": os.getpid(), "rule": self.rule.name, "topology": graph.name}
            facts |= {"size": graph.size, "parameters": sum(p.numel() for p in trained), "version": VERSION}
            diary.log.emit("start", member, **facts, **channel)
        diary.rounds = self.rounds
        diary.stand(member, members, epoch, self._links)

    def _tell_round(self) -> None:
        if (diary := self._diary) is not None:
            diary.look(self.rounds)
            if diary.log.is_due():
                diary.tell_round(**self._own_numbers())

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


def _held(name: str, value: object) -> SupportsFloat:
    """A number that is read later, so that no step waits for a GPU; of a tensor without its graph."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} = {value!r:.100}; give a number, or a tensor with one") from None
