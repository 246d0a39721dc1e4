"""One rank's links to its neighbours: messages are posted early and waited for late, within a time limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Set
from functools import lru_cache, partial
from itertools import chain
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from klatsch.ranks.agreement import Group, absent, members
from klatsch.ranks.edges import LOOK as SOON
from klatsch.ranks.edges import Edges, Lane, Passage, gpu_of
from klatsch.ranks.failures import LinkError, QuorumError, reason, shown, warn
from klatsch.ranks.membership import Membership
from klatsch.ranks.waiting import Landed, Note, Notes, Pace, Stage, Stopwatch, Transfer, Waiter
from klatsch.topology import Topology

OnFailure = Literal["raise", "continue"]
PIECE = 1 << 23  # bytes of a message that move at a time; for a timeout, a neighbour is silent until one has moved
MOST_PATIENCE = 4  # timeouts for a neighbour that says it is waiting, too
PACE_TAG = (1 << 20) - 1  # above the tags of rounds, below those of assemblies
CALL = "call"  # what a thread is for that waits for messages outside of rounds
KNOWN_WITHIN = 10.0  # seconds in which all ranks say which GPU they have; else there are no lanes
LOOK = 0.25  # seconds after which a rank that waits looks who is still in a crew that changes
OUT = "it is out of the crew"
WITHOUT = "it goes on without this rank"


class GlooLinks:
    """The links of one rank over edges that nobody else uses; it opens them.

    A message is bytes (uint8), of which links understand only the tail. Messages with one tag between two ranks arrive
    in the order in which they were sent. Receives of a round are posted (`expect`) before anything of it is sent, and
    in a round only `received` and `sent` block, so no order of ranks can lock up; outside of rounds, `pass_on` and
    `settle` block, too. A neighbour may keep this rank waiting for `timeout` seconds. With on_failure="continue" this
    rank goes on without failed neighbours while `quorum`, a share of all ranks, is in reach. `is_out` says whether a
    crew that changes goes on without a neighbour; `first` is the round that these links begin with.

    Over a lane, messages of rounds go from GPU to GPU, and only their tails over the edge. Both ends of a lane begin
    the same messages in the same order, so that is the order in which they must be sent, and each rank begins with its
    first neighbour: none waits for one that waits for it.
    """

    def __init__(
        self,
        edges: Edges,
        topology: Topology,
        device: torch.device,
        timeout: float,
        on_failure: OnFailure = "raise",
        quorum: float = 0.0,
        catch_up: bool = False,
        is_out: Callable[[int], bool] = lambda peer: False,
        first: int = 1,
    ) -> None:
        self.edges, self.topology, self.device, self.timeout = edges, topology, device, timeout
        self.survives, self.quorum, self.is_out = on_failure == "continue", quorum, is_out
        self.rank, self.step = edges.rank, min(timeout / 8, LOOK if edges.optional else timeout)
        self.membership = Membership(topology, self.rank)
        self.tail = len(self.membership)  # bytes at the end of every message: what its sender knows of the network
        self.lost: dict[int, LinkError] = {}  # neighbours that this rank goes on without
        self.unsure: set[int] = set()  # neighbours that may not have got the last messages, once they are closed
        self.in_vain: dict[int, Exception] = {}  # by round: why not all ranks came together after it
        self.bytes_sent, self.seconds_waited = 0, 0.0
        self.messages = Counter[int]()  # of rounds, by neighbour
        self.long = timeout / 8  # seconds of waiting after which `is_late` is told of a neighbour and the round
        self.is_late: Callable[[int, int], object] = lambda peer, t: None
        self._told_late: dict[int, int] = {}  # by neighbour: the last round of which that was told
        self.waits: dict[int, float] = {}  # by neighbour: seconds until its messages came while this rank waited
        # With `late`, and where ranks catch up, an exchange waits for neither end, and NCCL's does for both.
        gpu = gpu_of(device) if self.survives and not topology.late and not catch_up else ""
        self.notes = Notes(PrefixStore("notes", edges.store), self.rank, gpu)
        self._sources, self._targets = (
            lru_cache(1024)(partial(peers, self.rank)) for peers in (topology.neighbors, topology.receivers)
        )
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._rooms: dict[int, list[tuple[int, Tensor]]] = {}  # by tag: where messages arrive, by neighbour
        self._arriving: dict[tuple[int, int], list[Transfer]] = {}  # by tag and round
        self._leaving: dict[tuple[int, int], list[Transfer]] = {}
        self._landed: dict[int, Landed] = {}  # by neighbour: its message on the GPU
        self.lanes: dict[int, Lane] = {}  # by neighbour
        self._passages: dict[int, dict[int, Passage]] = {}  # by tag and neighbour: those that are not posted yet
        self._tails: dict[tuple[int, int], Tensor] = {}  # of messages over lanes, by tag and neighbour
        self._heard: dict[int, int] = {}  # by neighbour: the last round from which a message came
        self._waiters: dict[tuple[object, ...], Waiter] = {}
        self._hung_up: list[Waiter] = []  # of calls that were in vain
        self.failure: LinkError | QuorumError | None = None
        self._has_warned = False  # of a network in several pieces
        self._stage = Stage(device) if device.type != "cpu" else None
        for peer, failure in edges.open(self.membership.beside(), is_out).items():
            if not edges.optional:
                raise absent(self.rank, topology.size, timeout, failure)
            self.lose(LinkError(self.rank, peer, first, reason(failure)))
        if gpu:
            self._pave(gpu, first)
        self._pace: Pace | None = None
        if catch_up:
            tell = partial(self._transfer, tag=PACE_TAG)
            self._pace = Pace(tell, self.membership.beside(), self.rank, topology.size)

    def _pave(self, gpu: str, first: int) -> None:
        """Make lanes to neighbours on the same machine, where both have a GPU that no other rank uses."""
        others = [rank for rank in range(self.topology.size) if rank != self.rank]
        alone, told, deadline = False, dict[int, Note](), time.monotonic() + min(self.timeout, KNOWN_WITHIN)
        while not alone and time.monotonic() < deadline:
            told = self.notes.of(*others) or told
            alone = all(rank in told or self.is_out(rank) for rank in others)
            time.sleep(0.0 if alone else SOON)
        alone = alone and gpu not in {note.gpu for note in told.values()}
        here = {rank for rank, note in told.items() if note.gpu and note.gpu.split("/")[0] == gpu.split("/")[0]}
        near = [peer for peer in self.membership.beside() if peer in here]
        for peer, lane in self.edges.pave(near, self.device, alone, self.is_out).items():
            if isinstance(lane, Lane):
                self.lanes[peer] = lane
            elif lane is not None:
                self.lose(LinkError(self.rank, peer, first, reason(lane)))

    # --- messages of rounds -------------------------------------------------------------------------------------

    def expect(self, tag: int, t: int, like: Tensor) -> None:
        """Get ready for what the neighbours send in round t under a tag: as many bytes as this rank sends."""
        room = self._rooms[tag] = self._room(tag, t, like)
        arriving = self._pieces(True, tag, [(peer, memory) for peer, memory in room if peer not in self.lanes])
        for peer, memory in [(peer, memory) for peer, memory in room if peer in self.lanes]:
            passage = self._passages.setdefault(tag, {})[peer] = self.lanes[peer].expect(memory[: -self.tail])
            tail = self._tails[tag, peer] = torch.empty(self.tail, dtype=torch.uint8)
            arriving.append(self._beside(True, tag, peer, tail, passage))
        self._arriving[tag, t] = arriving
        for transfer in arriving:
            transfer.start()
        if self._stage is not None or self.lanes:
            self._take(arriving)  # not when they are needed: they go on to the GPU by themselves

    def send(self, tag: int, t: int, message: Tensor) -> None:
        """Send a message to all that hear this rank in round t, with its tail; it must not change until `sent`."""
        hearers = self._present(self._targets, t)
        self.bytes_sent += len(hearers) * message.nbytes
        over_lanes = self._send_over_lanes(tag, message, self.lanes.keys() & hearers)
        targets, copied = [peer for peer in hearers if peer not in self.lanes], None
        if self._stage is not None and targets:
            message, copied = self._stage.copy_out(message, self.tail)
        if targets or not over_lanes:
            self.membership.tell(message[-self.tail :])
        leaving = self._pieces(False, tag, [(peer, message) for peer in targets])
        self._leaving[tag, t] = leaving + over_lanes
        for transfer in leaving:
            transfer.after = copied
            if copied is None:
                transfer.start()
        if copied is not None:
            self._take(leaving)  # their threads start them
        self.messages.update(targets)

    def _send_over_lanes(self, tag: int, message: Tensor, targets: Set[int]) -> list[Transfer]:
        """Exchange a message over lanes: with targets, and with those from which one is expected."""
        leaving, passages = [], self._passages.pop(tag, {})
        for peer in sorted(self.lanes.keys() & (targets | passages.keys())):
            lane, speaks = self.lanes[peer], peer in targets
            passage = passages.get(peer) or Passage(lane)
            lane.post(passage, message[: -self.tail] if speaks else None)
            if speaks:
                self.membership.tell(tail := torch.empty(self.tail, dtype=torch.uint8))
                leaving.append(transfer := self._beside(False, tag, peer, tail, passage))
                transfer.start()
        self._take(leaving)
        return leaving

    def _beside(self, incoming: bool, tag: int, peer: int, tail: Tensor, passage: Passage) -> Transfer:
        """The transfer of a tail over an edge, and of its message over the lane."""
        transfer = self._transfer(incoming, tail, peer, tag)
        transfer.beside = passage.wait
        self._waiter(peer, incoming)  # not later: some Pythons start no threads at the end
        return transfer

    def sent(self, tag: int, t: int) -> None:
        """Wait until the message of round t under a tag has left, so that its memory can be reused."""
        leaving = self._leaving.pop((tag, t), [])
        for transfer in leaving:
            # A neighbour that has sent a message of a later round needed this one before.
            if self._heard.get(transfer.peer, 0) > t and not transfer.waited_for:
                transfer.finish()
        self._wait([transfer for transfer in leaving if not transfer.ended(0.0) or transfer.error is not None], t)

    def received(self, tag: int, t: int) -> list[tuple[int, Tensor]]:
        """What the neighbours sent under a tag, without the tails; valid until the next `expect` of the tag."""
        self._arrive(tag, t)
        messages = [(source, memory) for source, memory in self._rooms[tag] if source not in self.lost]
        tails = [self._tails.get((tag, source), memory[-self.tail :]) for source, memory in messages]
        if self.membership.learn(tails):
            self.take_stock(t)
        messages = [(source, memory) for source, memory in messages if source not in self.lost]
        if self._stage is not None:
            landed = {source: self._stage.at_hand(one) for source, one in self._landed.items()}
            messages = [(source, landed.get(source, memory)) for source, memory in messages]
        return [(source, message[: -self.tail]) for source, message in messages]

    def _arrive(self, tag: int, t: int) -> None:
        """Wait for the messages of round t under a tag."""
        arriving = self._arriving.pop((tag, t), [])
        self._wait(arriving, t)
        self._heard |= {transfer.peer: t for transfer in arriving}
        for broken in [transfer.broken for transfer in arriving if transfer.broken is not None]:
            raise broken
        self._landed = {transfer.peer: transfer.landed for transfer in arriving if transfer.landed is not None}

    def _room(self, tag: int, t: int, like: Tensor) -> list[tuple[int, Tensor]]:
        """Memory for the messages of round t under a tag, by neighbour; on the CPU reused in every round."""
        sources = self._present(self._sources, t)
        if self._stage is not None:
            of = {source: torch.empty_like if source in self.lanes else self._stage.room for source in sources}
            return [(source, make(like)) for source, make in of.items()]
        for key in [(tag, k) for k in range(len(sources)) if (tag, k) not in self._memory]:
            self._memory[key] = torch.empty_like(like)
        return [(source, self._memory[tag, k]) for k, source in enumerate(sources)]

    def _present(self, peers: Callable[[int], NDArray[np.int64]], t: int) -> list[int]:
        absent = self.absent(t)
        phase = (t - 1) % self.topology.period + 1 if self.topology.shuffle is None else t
        return [peer for peer in peers(phase).tolist() if peer not in absent]

    def _pieces(self, incoming: bool, tag: int, messages: list[tuple[int, Tensor]]) -> list[Transfer]:
        """The transfers of messages, by neighbour: a long one moves in pieces, so that one can see that it does."""
        transfers = []
        for peer, message in messages:
            self._waiter(peer, incoming)  # not later: some Pythons start no threads at the end
            transfers += [self._transfer(incoming, piece, peer, tag) for piece in torch.split(message, PIECE)]
            if incoming and self._stage is not None:
                transfers[-1].land = partial(self._stage.copy_in, message)  # the whole lands with its last piece
        return transfers

    def _transfer(self, incoming: bool, memory: Tensor, peer: int, tag: int) -> Transfer:
        return Transfer(peer, incoming, memory, partial(self.edges.post, incoming, memory, peer, tag))

    # --- messages outside of rounds -----------------------------------------------------------------------------

    def call(self, tag: int, memory: Tensor, peer: int, incoming: bool) -> Transfer:
        """Begin to receive from a neighbour, or to send to it, outside of rounds."""
        transfer = self._transfer(incoming, memory, peer, tag)
        transfer.start()
        self._waiter(peer, incoming, CALL).take(transfer)  # those of rounds may wait for the next one already
        self.bytes_sent += 0 if incoming else memory.nbytes
        return transfer

    def pass_on(self, tag: int, t: int, memory: Tensor, peer: int, incoming: bool) -> None:
        """Receive from a neighbour, or send to it, outside of rounds, and wait for it."""
        self.settle(self.call(tag, memory, peer, incoming), t)

    def settle(self, call: Transfer, t: int) -> None:
        """Wait for a call."""
        began = time.monotonic()
        while not call.ended(LOOK) and time.monotonic() < began + self.timeout and not self.is_out(call.peer):
            pass
        if not call.ended(0.0) or call.error is not None:
            why = None if call.error is None else reason(call.error)
            why = OUT if self.is_out(call.peer) else why
            raise LinkError(self.rank, call.peer, t, why, time.monotonic() - began, call.incoming)

    def hang_up(self) -> None:
        """End the threads of calls; those of one that was in vain end when its edge closes."""
        for key in [key for key in self._waiters if CALL in key]:
            self._waiters[key].end()
            self._hung_up = [waiter for waiter in (*self._hung_up, self._waiters.pop(key)) if waiter.runs]

    def tell_pace(self, rounds: int, taken: float) -> None:
        """Tell the neighbours how many rounds this rank has done, and how much of its gradients it takes."""
        if self._pace is not None:
            self._pace.tell(rounds, taken)

    def paces(self, t: int) -> tuple[float, float]:
        """The most rounds that a neighbour has done, and how much of its gradients a rank takes, in the mean of all.

        Where nobody tells, they are 0 and 1.
        """
        if self._pace is None:
            return 0.0, 1.0
        absent, told = self.absent(t), self._pace.done.copy()
        foremost = max((rounds for peer, rounds in told.items() if peer not in absent), default=0)
        return float(foremost), float(self._pace.taken()[self.membership.within_reach(t)].mean())

    # --- waiting ------------------------------------------------------------------------------------------------

    def _waiter(self, *key: object) -> Waiter:
        """The thread for a neighbour, a direction and a purpose."""
        if key not in self._waiters:
            self._waiters[key] = Waiter(f"waiter {key}")
        return self._waiters[key]

    def _take(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._waiter(transfer.peer, transfer.incoming).take(transfer)

    def _wait(self, transfers: list[Transfer], t: int) -> None:
        """Wait for messages, and lose neighbours that fail or are late."""
        if self.failure is not None:
            raise self.failure  # again, for a caller that caught it: messages are missing now
        self.notes.go_on(t)
        began, clock = time.monotonic(), Stopwatch(self.step)
        moved: dict[int, float] = {}  # by neighbour: when its last piece has come or gone
        self._take(transfers)
        for transfer in transfers:
            in_time = self._in_time(transfer, t, clock, moved.get(transfer.peer, 0.0))
            moved[transfer.peer] = clock.read()
            if not in_time or transfer.error is not None:
                self.fail(transfer, t, clock.read())
        self.seconds_waited += time.monotonic() - began
        for peer, ended in {transfer.peer: transfer.ended_at for transfer in transfers}.items():  # its last piece
            self.waits[peer] = self.waits.get(peer, 0.0) + max(0.0, ended - began)

    def _in_time(self, transfer: Transfer, t: int, clock: Stopwatch, began: float) -> bool:
        """Whether a message ends in time; a neighbour that is itself waiting for another gets more time."""
        deadline, last_call, peer = began + self.timeout, began + MOST_PATIENCE * self.timeout, transfer.peer
        while not transfer.ended(min(clock.step, deadline - clock.read())):
            if self.is_out(peer):
                transfer.error = RuntimeError(OUT)
                return False
            if peer in self.lanes and (fault := self.lanes[peer].fault()):
                transfer.error = RuntimeError(fault)
                return False
            self.notes.waiting(peer)
            if self._told_late.get(peer) != t and clock.read() - began >= self.long:
                self._told_late[peer] = t
                self.is_late(peer, t)
            if any(self.rank in note.without for note in (self.notes.of(peer) or {}).values()):
                transfer.error = RuntimeError(WITHOUT)
                return False
            if (now := clock.read()) >= deadline:
                is_waiting = time.monotonic() - self.notes.since(peer) < self.timeout
                if not (is_waiting and (now < last_call or self.notes.leads_to_another(peer))):
                    return False
                deadline = now + self.timeout / 2
        return True

    # --- who is left --------------------------------------------------------------------------------------------

    def absent(self, t: int) -> set[int]:
        """Ranks that are lost or left before round t; all of them if this rank left."""
        gone = self.membership.gone_by(t)
        return set(range(self.topology.size)) if self.rank in gone else gone | self.lost.keys()

    def fail(self, transfer: Transfer, t: int, seconds: float) -> None:
        """Lose the neighbour of a transfer that has failed, or raise LinkError."""
        why = None if transfer.error is None else reason(transfer.error)
        self.lose(LinkError(self.rank, transfer.peer, t, why, seconds, transfer.incoming))

    def lose(self, failure: LinkError) -> None:
        """Go on without a neighbour, or raise why not."""
        peer = failure.neighbor
        if peer in self.lost:
            return
        if not self.survives:
            self.failure = failure
            raise failure
        self.lost[peer] = failure
        for transfers in (*self._arriving.values(), *self._leaving.values()):
            transfers[:] = [transfer for transfer in transfers if transfer.peer != peer]
        warn(f"{failure.args[0]}; going on without it: this rank takes over its weight")
        self.notes.goes_on_without(peer)
        if lane := self.lanes.pop(peer, None):
            lane.end(failure.why)
        self.edges.close(peer)
        self.membership.lose(peer)
        self.take_stock(failure.round)

    def take_stock(self, t: int) -> None:
        """Look at what is left of the network after a link is lost or a rank leaves."""
        for peer in set(self.membership.links_lost()) - self.lost.keys():
            self.lose(LinkError(self.rank, peer, t, WITHOUT))
        if self.membership.leaving:  # this rank is meant to go on without the others
            return
        near, size = self.membership.within_reach(), self.topology.size
        if len(near) / size < self.quorum and self.failure is None:
            self.failure = QuorumError(self.rank, t, near, size, self.quorum)
        if self.failure is not None:
            raise self.failure
        if (apart := self.membership.out_of_reach()) and not self._has_warned:
            self._has_warned = True
            left = f"{len(near)} of {size} ranks are left within reach ({shown(near)})"
            others = f"{' and '.join(map(shown, apart))} are gone or keep training on their own"
            remedy = "set quorum=... to stop when too few are left"
            if self.edges.optional:
                remedy = "the next epoch of the crew mends that"
            warn(f"rank {self.rank}, round {t}: the network is no longer connected: {left}, and {others}; {remedy}")

    # --- the end ------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait, at most for the timeout, until every message has left or its receiver is gone. Raises nothing."""
        self._end([*chain(*self._leaving.values())])

    def _end(self, transfers: list[Transfer]) -> None:
        deadline = time.monotonic() + self.timeout
        self._take(transfers)
        for transfer in transfers:  # one that does not end stays, and its memory is not reused
            while not self.is_out(transfer.peer) and (left := deadline - time.monotonic()) > 0:
                if transfer.ended(min(left, LOOK)):
                    break
            if transfer.error is not None or not transfer.ended(0.0):
                self.unsure.add(transfer.peer)

    def close(self) -> None:
        """Let the last messages leave, and those of the neighbours arrive, and end the threads."""
        # gloo does not tell the senders of early messages that a rank is gone, and they would wait for it up to the
        # timeout. What this rank has sent, its neighbours send, too. A thread that still waits for a late neighbour
        # would crash the process at its end; it stops when its edge closes.
        if self.failure is None:  # otherwise, the sooner it ends the better
            sent = [self._arriving.get(key, []) for key in self._leaving]
            self._end([*chain(*self._leaving.values(), *sent)])
            self.unsure |= self.edges.part(self.lanes)
        for lane in self.lanes.values():
            lane.end("it is over")
        if self._pace is not None:
            self._pace.end()
        self.edges.close_all()
        for waiter in (*self._waiters.values(), *self._hung_up):
            waiter.end()
            waiter.join()

    def succeed(self, before: GlooLinks) -> None:
        """Go on where other links have ended: without those they lost, and with their counts."""
        self.lost, self.bytes_sent, self.seconds_waited = before.lost, before.bytes_sent, before.seconds_waited
        for peer in self.lost:
            self.membership.lose(peer)


class NcclLinks(GlooLinks):
    """Rounds over NCCL, one process per GPU: each exchange is one batch, in the same order on all ranks.

    The process group's watchdog notices a neighbour that is gone or late, after the group's own timeout. Waiting times
    are unknown. All other messages go over gloo.
    """

    def __init__(self, group: Group, edges: Edges, topology: Topology, device: torch.device, timeout: float) -> None:
        if torch.cuda.current_device() != (device.index or 0):
            raise ValueError(
                f"the parameters are on {device} but the current device is cuda:{torch.cuda.current_device()}, which "
                f"NCCL would use; call torch.cuda.set_device({device.index or 0}) first"
            )
        super().__init__(edges, topology, torch.device("cpu"), timeout)
        self._nccl, self._global, self.device = group, members(group), device
        self._running: dict[int, list[dist.Work]] = {}  # by tag
        # The first operation makes the communicator with all ranks; not all of them speak in every round.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def expect(self, tag: int, t: int, like: Tensor) -> None:
        self._rooms[tag] = self._room(tag, t, like)  # posted in one batch with the sends

    def send(self, tag: int, t: int, message: Tensor) -> None:
        targets = self._present(self._targets, t)
        self.membership.tell(message[-self.tail :])
        operations = [dist.P2POp(dist.irecv, v, self._global[peer], self._nccl) for peer, v in self._rooms[tag]]
        operations += [dist.P2POp(dist.isend, message, self._global[peer], self._nccl) for peer in targets]
        self._running[tag] = dist.batch_isend_irecv(operations) if operations else []
        self.bytes_sent += len(targets) * message.nbytes

    def _arrive(self, tag: int, t: int) -> None:
        for work in self._running.pop(tag, []):  # later work on the current stream waits for the whole batch
            work.wait()

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.drain()
        super().close()


def backend(group: Group, device: torch.device) -> str:
    """What carries messages of states on a device; over gloo, some ranks may have a GPU and others not."""
    if not dist.is_initialized():
        return "gloo"
    has_nccl = "cuda:nccl" in dist.get_backend_config(group) or dist.get_backend(group) == "nccl"
    return "nccl" if device.type == "cuda" and has_nccl else "gloo"


def open_links(
    group: Group,
    edges: Edges,
    topology: Topology,
    device: torch.device,
    timeout: float,
    on_failure: OnFailure,
    quorum: float,
    catch_up: bool,
) -> GlooLinks:
    """Links over NCCL between GPUs where the user's group has it, else over edges of gloo."""
    if backend(group, device) == "gloo":
        return GlooLinks(edges, topology, device, timeout, on_failure, quorum, catch_up)
    refused = {
        "on_failure = 'continue'": "whose communicator ends with its first failure; use 'raise' with a Checkpointer",
        "catch_up = True": "where each exchange waits for both ends; leave it out",
    }
    for (option, why), given in zip(refused.items(), (on_failure == "continue", catch_up), strict=True):
        if given:
            raise ValueError(f"{option} is not possible over NCCL, {why}, or use init_process_group('gloo')")
    return NcclLinks(group, edges, topology, device, timeout)
