"""Links over gloo: messages are posted early and waited for late, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.assembly import Assembly
from klatsch.ranks.failures import LinkError, MessageError, QuorumError, reason, shown, warn
from klatsch.ranks.links import Links, OnFailure
from klatsch.ranks.pace import Pace
from klatsch.ranks.staging import Stage
from klatsch.ranks.waiting import Landed, Notes, Stopwatch, Transfer, Waiter
from klatsch.topology import Topology

Move = Callable[..., dist.Work | None]
Land = Callable[[Tensor], Landed]
PIECE = 1 << 23  # bytes of a message that move at a time; for a timeout, a neighbour is silent until one has moved
MOST_PATIENCE = 4  # timeouts for a neighbour that says it is waiting, too
PACE_TAG = (1 << 20) - 1  # above the tags of rounds, below those of assemblies
WITHOUT = "it goes on without this rank"


class GlooLinks(Links):
    """The links of one rank over a gloo group that nobody else uses; vectors on a GPU travel through pinned memory.

    With on_failure="continue" it goes on without failed neighbours while `quorum`, a share of all ranks, is in reach.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        topology: Topology,
        device: torch.device,
        timeout: float,
        on_failure: OnFailure,
        quorum: float = 0.0,
        catch_up: bool = False,
    ) -> None:
        super().__init__(group, topology, device, timeout)
        self.on_failure, self.quorum, self.catch_up = on_failure, quorum, catch_up
        self.survives = on_failure == "continue"
        self._stage = Stage(device) if device.type != "cpu" else None
        self._landed: dict[int, Landed] = {}  # by neighbour: its message on the GPU
        self._heard: dict[int, int] = {}  # by neighbour: the last round from which a message came
        self._arriving: dict[int, list[Transfer]] = {}
        self._rooms: dict[int, list[tuple[int, Tensor]]] = {}  # by tag: where messages arrive, by neighbour
        self._awaited: dict[int, int] = {}  # by tag: the round whose messages arrive
        self._leaving: dict[tuple[int, int], list[Transfer]] = {}
        self._abandoned: list[Transfer] = []  # with lost neighbours; gloo may still work on them
        self.notes = Notes(group)
        self._waiters: dict[tuple[int, bool], Waiter] = {}
        self._callers: dict[tuple[int, bool, int], Waiter] = {}
        self._called: list[Transfer] = []  # that have not ended
        self._in_vain: dict[int, Exception] = {}  # by round: why not all came together after it
        self._failure: LinkError | QuorumError | None = None
        self._pace = Pace(self._small, self.membership.beside()) if catch_up else None
        self._apart = False  # whether a warning has reported a network in several pieces

    def expect(self, tag: int, t: int, like: Tensor) -> None:
        room = self._rooms[tag] = self._room(tag, t, like)
        self._awaited[tag] = t
        land = None if self._stage is None else self._stage.copy_in
        self._arriving[tag] = [*chain(*(self._posted(dist.irecv, memory, peer, tag, land) for peer, memory in room))]
        if land is not None:
            self._take(self._arriving[tag])  # not when they are needed: they go on to the GPU by themselves

    def send(self, tag: int, t: int, message: Tensor) -> None:
        targets = self._present(self._targets, t)
        if self._stage is not None and targets:
            message, copied = self._stage.copy_out(message, self.tail)
            self.membership.tell(message[-self.tail :])
            self._leaving[tag, t] = [*chain(*(self._pieces(dist.isend, message, peer, tag) for peer in targets))]
            self._stage.post(copied, self._leaving[tag, t])
        else:
            self.membership.tell(message[-self.tail :])
            self._leaving[tag, t] = [*chain(*(self._posted(dist.isend, message, peer, tag) for peer in targets))]
        self.bytes_sent += len(targets) * message.nbytes

    def sent(self, tag: int, t: int) -> None:
        leaving = self._leaving.pop((tag, t), [])
        for transfer in leaving:
            # A neighbour that has sent a message of a later round needed this one before.
            if self._heard.get(transfer.peer, 0) > t and not transfer.waited_for:
                transfer.finish()
        self._wait([transfer for transfer in leaving if not transfer.ended(0.0) or transfer.error is not None], t)

    def refuse(self, source: int, t: int) -> None:
        self._lose(source, MessageError(self.rank, source, t))

    def give_up(self, source: int, t: int) -> None:
        edge = f"{source} -> {self.rank}"
        self._lose(source, LinkError(self.rank, source, edge, t, 0.0, "another rank of this host has lost it"))

    def take_stock(self, t: int) -> None:
        for peer in set(self.membership.links_lost()) - self.lost.keys():  # it has given up on this rank
            edge = f"{peer} -> {self.rank}"
            self._lose(peer, LinkError(self.rank, peer, edge, t, 0.0, WITHOUT))
        if self.membership.leaving:  # this rank is meant to go on without the others
            return
        near, size = self.membership.within_reach(), self.topology.size
        if len(near) / size < self.quorum and self._failure is None:
            self._failure = QuorumError(self.rank, t, near, size, self.quorum)
        if self._failure is not None:
            raise self._failure
        if (apart := self.membership.out_of_reach()) and not self._apart:
            self._apart = True
            others = " and ".join(shown(group) for group in apart)
            warn(
                f"rank {self.rank}, round {t}: the network is no longer connected: {len(near)} of {size} ranks are "
                f"left within reach ({shown(near)}), and {others} are gone or keep training on their own; set "
                "quorum=... to stop when too few are left"
            )

    @contextmanager
    def together(self, t: int, what: str, leavers: bool = False) -> Iterator[Assembly]:
        if t in self._in_vain:  # what was sent then is still on its way
            raise self._in_vain[t]
        with self.notes.excuse(t, every=min(self.timeout / 8, 1.0)):
            yield Assembly(self, t, what, leavers)

    def call(self, tag: int, memory: Tensor, peer: int, incoming: bool) -> Transfer:
        """Begin to receive from a neighbour, or to send to it, outside of rounds."""
        move: Move = dist.irecv if incoming else dist.isend
        post = partial(move, memory, self._global[peer], group=self.group, tag=tag)
        transfer = Transfer(peer, incoming, memory, post)
        transfer.start()
        # Threads of their own: those of rounds may wait for messages of the next one already.
        key = peer, incoming, len(self._in_vain)  # those of a call that was in vain wait for ever
        if key not in self._callers:
            self._callers[key] = Waiter(f"klatsch caller {peer}")
        self._callers[key].take(transfer)
        self._called = [other for other in self._called if not other.ended(0.0)] + [transfer]
        self.bytes_sent += 0 if incoming else memory.nbytes
        return transfer

    def in_vain(self, t: int, error: Exception) -> None:
        """Not all ranks came together after round t; whoever asks again then hears why."""
        self._in_vain[t] = error

    def fail(self, transfer: Transfer, t: int, seconds: float) -> None:
        """Lose the neighbour of a transfer that has failed, or raise LinkError."""
        peer, why = transfer.peer, None if transfer.error is None else reason(transfer.error)
        edge = f"{peer} -> {self.rank}" if transfer.incoming else f"{self.rank} -> {peer}"
        self._lose(peer, LinkError(self.rank, peer, edge, t, seconds, why))

    def tell_pace(self, rounds: int) -> None:
        if self._pace is not None:
            self._pace.tell(rounds)

    def foremost(self, t: int) -> int:
        told = {} if self._pace is None else self._pace.done.copy()
        return max((rounds for peer, rounds in told.items() if peer not in self.absent(t)), default=0)

    def drain(self) -> None:
        self._end([*chain(*self._leaving.values())])

    def _end(self, transfers: list[Transfer]) -> None:
        deadline = time.monotonic() + self.timeout
        self._take(transfers)
        for transfer in transfers:  # one that does not end stays, and its memory is not reused
            transfer.ended(deadline - time.monotonic())

    def close(self) -> None:
        """Let the last messages leave, and those of the neighbours arrive, and end the threads.

        When training ends, messages that need no gradient are on their way; gloo does not tell their senders that a
        rank is gone, and they would wait for it up to the timeout. What this rank has sent, its neighbours send, too.

        A thread that still waits for a late neighbour would crash the process at its end. It stops when its connection
        closes, and gloo closes all connections when a wait passes its limit.
        """
        if self._failure is None:  # otherwise, the sooner it ends the better
            sent = [tag for tag, t in self._leaving if self._awaited.get(tag) == t]
            self._end([*chain(*self._leaving.values()), *chain(*(self._arriving.get(tag, []) for tag in sent))])
        if self._stage is not None:
            self._stage.end()
        if self._pace is not None:
            self._pace.end()
        for transfer in (*self._abandoned, *self._called, *chain(*self._leaving.values(), *self._arriving.values())):
            transfer.give_up()
        for waiter in (*self._waiters.values(), *self._callers.values()):
            waiter.end()

    def reopened(self, group: dist.ProcessGroup) -> GlooLinks:
        choices = (self.timeout, self.on_failure, self.quorum, self.catch_up)
        links = GlooLinks(group, self.topology, self.device, *choices)
        links.lost, links.bytes_sent, links.seconds_waited = self.lost, self.bytes_sent, self.seconds_waited
        for peer in self.lost:
            links.membership.lose(peer)
        return links

    def _arrived(self, tag: int, t: int) -> list[tuple[int, Tensor]]:
        arriving = self._arriving.pop(tag, [])
        self._wait(arriving, t)
        self._heard |= {transfer.peer: t for transfer in arriving}
        for broken in [transfer.broken for transfer in arriving if transfer.broken is not None]:
            raise broken
        self._landed = {transfer.peer: transfer.landed for transfer in arriving if transfer.landed is not None}
        return [(source, memory) for source, memory in self._rooms[tag] if source not in self.lost]

    def _at_hand(self, source: int, message: Tensor) -> Tensor:
        return message if self._stage is None else self._stage.at_hand(self._landed[source])[: len(message)]

    def _room(self, tag: int, t: int, like: Tensor) -> list[tuple[int, Tensor]]:
        if (stage := self._stage) is None:
            return super()._room(tag, t, like)
        return [(source, stage.room(like)) for source in self._present(self._sources, t)]

    def _posted(self, move: Move, message: Tensor, peer: int, tag: int, land: Land | None = None) -> list[Transfer]:
        transfers = self._pieces(move, message, peer, tag, land)
        for transfer in transfers:
            transfer.start()
        return transfers

    def _pieces(self, move: Move, message: Tensor, peer: int, tag: int, land: Land | None = None) -> list[Transfer]:
        """The transfers of a message: a long one moves in pieces, so that one can see that it does."""
        incoming = move is dist.irecv
        if (peer, incoming) not in self._waiters:  # not later: some Pythons start no threads at the end
            self._waiters[peer, incoming] = Waiter(f"klatsch {'source' if incoming else 'target'} {peer}")
        *first, last = torch.split(message, PIECE)
        post = partial(move, group=self.group, tag=tag)
        whole = None if land is None else lambda _: land(message)  # lands with its last piece
        pieces = [(piece, None) for piece in first] + [(last, whole)]
        return [Transfer(peer, incoming, p, partial(post, p, self._global[peer]), lands) for p, lands in pieces]

    def _small(self, move: Move, memory: Tensor, peer: int) -> Transfer:
        post = partial(move, memory, self._global[peer], group=self.group, tag=PACE_TAG)
        return Transfer(peer, move is dist.irecv, memory, post)

    def _take(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._waiters[transfer.peer, transfer.incoming].take(transfer)

    def _wait(self, transfers: list[Transfer], t: int) -> None:
        if self._failure is not None:
            raise self._failure  # again, for a caller that caught it: messages are missing now
        self.notes.go_on(t)
        began = time.monotonic()
        self._settle(transfers, t)
        self.seconds_waited += time.monotonic() - began

    def _settle(self, transfers: list[Transfer], t: int) -> None:
        """Wait for messages, and lose neighbours that fail or are late."""
        clock = Stopwatch(self.timeout / 8)
        moved: dict[int, float] = {}  # by neighbour: when its last piece has come or gone
        self._take(transfers)
        for transfer in transfers:
            in_time = self._in_time(transfer, clock, moved.get(transfer.peer, 0.0))
            moved[transfer.peer] = clock.read()
            if not in_time:
                self._abandoned.append(transfer)
            if not in_time or transfer.error is not None:
                self.fail(transfer, t, clock.read())

    def _in_time(self, transfer: Transfer, clock: Stopwatch, began: float) -> bool:
        """Whether a message ends in time; a neighbour that is itself waiting for another gets more time."""
        deadline, last_call, peer = began + self.timeout, began + MOST_PATIENCE * self.timeout, transfer.peer
        while not transfer.ended(min(clock.step, deadline - clock.read())):
            self.notes.waiting(peer)
            if (note := self.notes.of(peer)) is not None and self.rank in note.without:
                transfer.error = RuntimeError(WITHOUT)
                return False
            if (now := clock.read()) >= deadline:
                is_patient = now < last_call or self.notes.leads_to_another(peer)
                if not (is_patient and self.notes.is_waiting(peer)):
                    return False
                deadline = now + self.timeout / 2
        return True

    def _lose(self, peer: int, failure: LinkError) -> None:
        if peer in self.lost:
            return
        if not self.survives:
            self._failure = failure
            raise failure
        self.lost[peer] = failure
        # Messages may still arrive in posted memory, so it is not reused.
        self._memory.clear()
        for transfers in (*self._arriving.values(), *self._leaving.values()):
            self._abandoned += [transfer for transfer in transfers if transfer.peer == peer]
            transfers[:] = [transfer for transfer in transfers if transfer.peer != peer]
        warn(f"{failure.args[0]}; going on without it: this rank takes over its weight")
        self.notes.goes_on_without(peer)
        self.membership.lose(peer)
        self.take_stock(failure.round)
