"""Messages between ranks over gloo: posted early, waited for late, and never waited for longer than agreed.

Receives of a round are posted before anything of it is sent, and nothing blocks but `received` and `sent`, so no order
of ranks can lock up. Every message of a round has a tag of its own; messages of one tag between two ranks arrive in
the order in which they were sent.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.agreement import shown
from klatsch.ranks.failures import LinkError, MessageError, QuorumError
from klatsch.ranks.membership import Membership
from klatsch.ranks.notes import Notes
from klatsch.ranks.waiting import Transfer, Waiters, reason
from klatsch.topology import Topology

MOST_PATIENCE = 4  # timeouts that a neighbour is given which says that it waits itself
OnFailure = Literal["raise", "continue"]


class GlooLinks:
    """The links of one rank to its neighbours.

    Args:
        group: a gloo process group of as many ranks as the topology has nodes, for these links alone.
        topology: who talks to whom.
        device: where the vectors live; those on a GPU go through pinned memory.
        timeout: seconds that a neighbour may keep this rank waiting.
        on_failure: "raise", or "continue" without the neighbour.
        quorum: the share of all ranks that must be left within reach to continue.
    """

    def __init__(
        self,
        group: Any,
        topology: Topology,
        device: torch.device,
        timeout: float,
        on_failure: OnFailure,
        quorum: float = 0.0,
    ) -> None:
        self.group, self.topology, self.device = group, topology, device
        self.timeout, self.on_failure, self.quorum = timeout, on_failure, quorum
        self.rank = dist.get_rank(group)
        self.membership = Membership(topology, self.rank)
        self.tail = len(self.membership)  # numbers at the end of every message: what its sender knows of the network
        self.lost: dict[int, LinkError] = {}
        self.bytes_sent, self.seconds_waited = 0, 0.0
        self._global = dist.get_process_group_ranks(group)
        rounds = range(1, topology.period + 1)
        self._sources = [topology.neighbors(self.rank, t).tolist() for t in rounds]
        self._targets = [topology.receivers(self.rank, t).tolist() for t in rounds]
        self._neighbors = {peer for peers in (*self._sources, *self._targets) for peer in peers}
        self._heard: dict[int, int] = {}  # by neighbour: the last round of which something came from it
        self._staged = device.type != "cpu"
        self._arriving: dict[int, list[tuple[int, Transfer]]] = {}
        self._leaving: dict[tuple[int, int], list[tuple[int, Transfer]]] = {}
        self._notes = Notes(group)
        self._abandoned: list[tuple[int, Transfer]] = []  # with neighbours that are lost; gloo may still work on them
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._waiters = Waiters()
        self._failure: LinkError | QuorumError | None = None
        self._apart = False  # whether it was said that the network is no longer connected

    def absent(self, t: int) -> set[int]:
        """Neighbours that are lost, or have left before round t; all of them if this rank has."""
        if not self.membership.anyone_leaves:
            return set(self.lost)
        if self.membership.gone_by(self.rank, t):
            return self._neighbors
        return {*self.lost, *(peer for peer in self._neighbors if self.membership.gone_by(peer, t))}

    def expect(self, tag: int, t: int, length: int, dtype: torch.dtype) -> None:
        """Make ready for what the neighbours will send in round t under a tag."""
        arriving = []
        for k, source in enumerate(self._present(self._sources, t)):
            if (tag, k) not in self._memory:
                self._memory[tag, k] = torch.empty(length + self.tail, dtype=dtype, pin_memory=self._staged)
            memory = self._memory[tag, k]
            arriving.append((source, Transfer(partial(self._receive, memory, source, tag), memory)))
        self._arriving[tag] = arriving

    def send(self, tag: int, t: int, message: Tensor) -> None:
        """Send a vector to all that hear this rank in round t; it must not change until `sent(tag, t)`.

        It ends in `tail` numbers that are filled in here.
        """
        targets = self._present(self._targets, t)
        if self._staged and targets:
            pinned = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
            message = pinned.copy_(message)  # waits for the GPU to have computed it
        self.membership.tell(message[len(message) - self.tail :])
        for target in targets:
            self._waiters.ready(target, "target")  # not at the end, when some Pythons start no more threads
        leaving = [(p, Transfer(partial(self._send, message, p, tag), message)) for p in targets]
        self._leaving[tag, t] = leaving
        self.bytes_sent += len(targets) * message.numel() * message.element_size()

    def received(self, tag: int, t: int) -> list[tuple[int, Tensor]]:
        """What has come under a tag, by neighbour, once all of it is there; valid until the next `expect` of the tag.

        Raises:
            LinkError: a neighbour is gone or late, and failures are to be raised.
        """
        arriving = self._arriving.pop(tag, [])
        self._wait(arriving, t, "source")
        self._heard |= {source: t for source, _ in arriving}
        there = [(source, transfer.memory) for source, transfer in arriving if source not in self.lost]
        if self.membership.learn(memory[len(memory) - self.tail :] for _, memory in there):
            self.take_stock(t)
        there = [(source, memory[: len(memory) - self.tail]) for source, memory in there if source not in self.lost]
        if self._staged:
            return [(source, memory.to(self.device)) for source, memory in there]
        return there

    def refuse(self, source: int, t: int) -> None:
        """Give a neighbour up that has sent numbers that are not finite.

        Raises:
            LinkError: failures are to be raised.
        """
        self._lose(source, MessageError(self.rank, source, t))

    def sent(self, tag: int, t: int) -> None:
        """Wait until what was sent under a tag for round t has left, so that its memory can be used again."""
        leaving = self._leaving.pop((tag, t), [])
        for target, transfer in leaving:
            # A neighbour that has sent something of a later round has ended this one, for which it needed the message.
            if self._heard.get(target, 0) > t and not transfer.waited_for:
                transfer.finish()
        self._wait([pair for pair in leaving if not pair[1].over()], t, "target")

    def swap(
        self, tag: int, t: int, message: Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> list[tuple[int, Tensor]]:
        """Send a vector on the CPU to some neighbours after round t, and give what came from others, of the same shape.

        Raises:
            RuntimeError: a neighbour does not answer. One that is gone is lost, as in a round.
        """
        began = time.monotonic()
        memory = {source: torch.empty_like(message) for source in sources}
        came = [(peer, Transfer(partial(self._receive, place, peer, tag), place)) for peer, place in memory.items()]
        went = [(target, Transfer(partial(self._send, message, target, tag), message)) for target in targets]
        for side, transfers in (("source", came), ("target", went)):
            for peer, transfer in transfers:
                self._waiters.take(peer, side, transfer)
        for peer, transfer in (*came, *went):
            if not self._ended(peer, transfer, t, began):
                self._abandoned.append((peer, transfer))
                raise RuntimeError(f"rank {peer} does not answer")
            if transfer.error is not None:
                edge = f"{peer} -> {self.rank}"
                self._lose(peer, LinkError(self.rank, peer, edge, t, time.monotonic() - began, reason(transfer.error)))
        return [(source, memory[source]) for source in sources if source not in self.lost]

    def drain(self) -> None:
        """Wait until all that was sent has left, or its receiver is gone; at most for the timeout. Raises nothing."""
        deadline = time.monotonic() + self.timeout
        transfers = [pair for leaving in self._leaving.values() for pair in leaving]
        for peer, transfer in transfers:
            self._waiters.take(peer, "target", transfer)
        for _, transfer in transfers:  # those that do not end stay, and their memory is not used again
            transfer.ended(deadline - time.monotonic())

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Tell the neighbours that this rank waits, while it does so elsewhere: in a collective of all ranks."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(self.timeout / 8):
                self._notes.waiting()

        thread = threading.Thread(target=tell, name="klatsch excuse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Let the last messages leave, and end the threads.

        A thread that waits for a late neighbour would be torn down with the process, and take it down in turn. It ends
        when its connection is closed, which gloo does, for all ranks at once, where a wait passes its limit.
        """
        if self._failure is None:  # else the sooner it ends the better
            self.drain()
        for _, transfer in (*self._abandoned, *(pair for leaving in self._leaving.values() for pair in leaving)):
            transfer.give_up()
        self._waiters.end()

    def reopened(self, group: Any) -> GlooLinks:
        """Links over a fresh group, where no message is on its way."""
        links = GlooLinks(group, self.topology, self.device, self.timeout, self.on_failure, self.quorum)
        links.lost, links.bytes_sent, links.seconds_waited = self.lost, self.bytes_sent, self.seconds_waited
        for peer in self.lost:
            links.membership.lose(peer)
        return links

    def _wait(self, transfers: list[tuple[int, Transfer]], t: int, side: str) -> None:
        if self._failure is not None:
            raise self._failure  # somebody caught it and goes on; but messages are missing now
        began = time.monotonic()
        for peer, transfer in transfers:
            self._waiters.take(peer, side, transfer)
        for peer, transfer in transfers:
            ended = self._ended(peer, transfer, t, began)
            if not ended:
                self._abandoned.append((peer, transfer))
            if not ended or transfer.error is not None:
                edge = f"{peer} -> {self.rank}" if side == "source" else f"{self.rank} -> {peer}"
                why = reason(transfer.error) if ended and transfer.error is not None else None
                self._lose(peer, LinkError(self.rank, peer, edge, t, time.monotonic() - began, why))
        self.seconds_waited += time.monotonic() - began

    def _ended(self, peer: int, transfer: Transfer, t: int, began: float) -> bool:
        """Whether a message came or went in time; a neighbour that waits itself is given more of it."""
        deadline, last_call = began + self.timeout, began + MOST_PATIENCE * self.timeout
        pause = self.timeout / 8
        while not transfer.ended(min(pause, deadline - time.monotonic())):
            now = time.monotonic()
            if now >= deadline:
                if now >= last_call or not self._notes.is_waiting(peer):
                    return False
                deadline = min(now + self.timeout / 2, last_call)
            self._notes.waiting()
        return True

    def _lose(self, peer: int, failure: LinkError) -> None:
        if peer in self.lost:
            return
        if self.on_failure == "raise":
            self._failure = failure
            raise failure
        self.lost[peer] = failure
        # Its messages may still come, into memory that is theirs from now on.
        self._memory.clear()
        for transfers in (*self._arriving.values(), *self._leaving.values()):
            self._abandoned += [pair for pair in transfers if pair[0] == peer]
            transfers[:] = [pair for pair in transfers if pair[0] != peer]
        warnings.warn(
            f"{failure.args[0]}; going on without it, its weight is this rank's own now", RuntimeWarning, stacklevel=2
        )
        self.membership.lose(peer)
        self.take_stock(failure.round)

    def take_stock(self, t: int) -> None:
        """Look at what is left of the network once a link is lost, or a rank leaves, somewhere.

        Raises:
            QuorumError: fewer ranks are within reach than were asked for.
        """
        for peer in set(self.membership.links_lost()) - self.lost.keys():  # which has given up this rank
            edge = f"{peer} -> {self.rank}"
            self._lose(peer, LinkError(self.rank, peer, edge, t, 0.0, "it goes on without this rank"))
        if self.membership.leaving:  # which goes on without the others, as it wanted
            return
        near, size = self.membership.within_reach(), self.topology.size
        if len(near) / size < self.quorum and self._failure is None:
            self._failure = QuorumError(self.rank, t, near, size, self.quorum)
        if self._failure is not None:
            raise self._failure
        if (apart := self.membership.out_of_reach()) and not self._apart:
            self._apart = True
            others = " and ".join(shown(group) for group in apart)
            warnings.warn(
                f"rank {self.rank}, round {t}: the network is no longer connected: {len(near)} of {size} ranks are "
                f"left within reach ({shown(near)}), and {others} are gone or train on by themselves; quorum=... "
                "would stop where too few are left",
                RuntimeWarning,
                stacklevel=2,
            )

    def _present(self, peers: list[list[int]], t: int) -> list[int]:
        absent = self.absent(t)
        return [peer for peer in peers[(t - 1) % len(peers)] if peer not in absent]

    def _receive(self, memory: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(memory, self._global[source], group=self.group, tag=tag)

    def _send(self, message: Tensor, target: int, tag: int) -> Any:
        return dist.isend(message, self._global[target], group=self.group, tag=tag)
