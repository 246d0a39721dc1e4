"""Connections between neighbours: each is a gloo group of two ranks, made over a store, so that nobody opens a mesh.

An edge takes one descriptor and no thread: those of gloo's groups are for collectives, and one thread per process moves
the bytes of all edges. An edge that breaks, or that one end closes, takes no other with it.

Beside an edge whose ends have a GPU each there may be a lane, on which NCCL carries messages from one to the other.

On Linux the system knows how long bytes travel and how fast they were taken; `Edges.flown` asks it.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from klatsch.clock.network import Table
from klatsch.ranks.failures import reason, warn
from klatsch.ranks.waiting import FOREVER, LAST_WORDS, in_background
from klatsch.units import size

CLOSING_TAG = (1 << 20) - 2  # of a message that never comes
PASSWORD_TAG, PASSWORD = (1 << 20) - 5, 32  # bytes
NAMES_TAG, NAME, NAMES = (1 << 20) - 6, 8, 256  # bytes of a connection's name, and how many a neighbour is told
# Bytes acknowledged, and microseconds: of the fastest trip, those busy, and those of them that the reader was slow.
TCP_INFO, FIELDS = 11, struct.Struct("=120xQ20xI16xQQ")
TELLING = 1 << 18  # bytes that say how fast a link is
DESCRIPTORS = Path("/proc/self/fd")
MACHINE = Path("/proc/sys/kernel/random/boot_id")  # the same in all of its containers
CONNECT = timedelta(seconds=10)  # once both ends are there
AT_ONCE = timedelta(milliseconds=1)
LOOK = 0.05  # seconds between two looks at whether the other end is still expected

INVITATION_TAG, READY_TAG, BYE_TAG = ((1 << 20) - tag for tag in (7, 8, 9))  # of lanes
INVITATION, UNDEFINED = 128, -(1 << 31)  # NCCL's: bytes, and what stands for a default
# How NCCL makes a communicator: the size of this, a magic number, its version 2.17, whether the call waits, thread
# blocks per cluster, the fewest and the most of them, and the network. While it waits for the other end, NCCL keeps as
# many multiprocessors busy as it has thread blocks, from all that computes meanwhile. How much four of them carry over
# NVLink has not been measured.
SETTINGS = struct.Struct("=QIIiiiiQ")
MOST_BLOCKS, BYTES = 4, 1  # and what NCCL calls whole numbers of a byte

Pair = tuple[int, int]
Made = TypeVar("Made")


class Flown(NamedTuple):
    """What has gone over a connection so far, in this direction."""

    trip: float  # seconds there and back, of the fastest packet of the last minutes
    taken: int  # bytes that the other end has acknowledged
    busy: float  # seconds in which some were on the way, and the other end had room for more


def rates(flown: Mapping[int, Flown], messages: Mapping[int, int], together: bool) -> dict[int, float]:
    """Bytes per second of each link as if it was used alone; 0 for one that has carried too little to say.

    Args:
        flown: by neighbour.
        messages: how many they were. After the last byte of each, a connection is busy until it hears that it is there.
        together: whether neighbours get theirs at the same time. They then share this machine's way out, each until its
            message is there.
    """
    busy = {peer: one.busy - min(messages.get(peer, 0) * one.trip, one.busy / 2) for peer, one in flown.items()}
    found, shared, before = dict[int, float](), 0.0, 0.0
    for k, peer in enumerate(sorted(flown, key=lambda peer: busy[peer])):
        shared += (busy[peer] - before) / (len(flown) - k)
        before, taken = busy[peer], flown[peer].taken
        alone = shared if together else busy[peer]
        found[peer] = taken / alone if taken >= TELLING and alone > 0 else 0.0
    return found


def links_of(members: Sequence[Mapping[str, Any]], name: str) -> Table:
    """The links between the members of a crew that train, as fast as they see them to be.

    Args:
        members: the rows of the registry's status, with links.
        name: of the crew, in errors.
    """
    places = {row["member"]: k for k, row in enumerate(row for row in members if row["state"] == "trains")}
    if len(places) < 2:
        raise ValueError(f"{name} has {len(places)} that train; links are between two or more")
    speeds, delays = np.zeros((2, len(places), len(places)))
    for row in (row for row in members if row["member"] in places):
        for other, (trip, speed) in row.get("links", {}).items():
            if other in places:
                pair = places[row["member"]], places[other]
                speeds[pair], delays[pair] = speed, trip / 2
    # Who only hears another one does not know how fast that link is.
    speeds, delays = (np.where(one > 0, one, one.T) for one in (speeds, delays))
    if not speeds.any():
        raise ValueError(
            f"{name} knows no links: members on Linux see one when {size(TELLING)} have gone over it; wait for some "
            f"rounds, or give a CSV file of links"
        )
    return Table.completed(speeds, delays, name)


class Edges:
    """The connections of node `rank` to its neighbours, over a store that knows all of them by the same names.

    Args:
        store: where the two ends of an edge find each other.
        rank: the number of this node.
        timeout: seconds to wait for the other end of an edge.
        address: of this machine, on which it listens; by default what gloo finds, or GLOO_SOCKET_IFNAME.
        names: of the nodes, in the store; by default their numbers.
        optional: whether nodes go on without edges that cannot be made. These are made all at once, the others one
            after another, since torch's stores let those who wait for different keys wait for each other.
        guarded: whether both ends first prove over the edge that they read the store, which strangers cannot: gloo's
            ports are open to everybody who reaches the machine.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        timeout: float,
        address: str = "",
        names: Sequence[str] = (),
        optional: bool = False,
        guarded: bool = False,
    ) -> None:
        self.store, self.rank, self.optional, self._guarded = store, rank, optional, guarded
        self._timeout, self._address, self._names = timedelta(seconds=timeout), address, names
        self._groups: dict[int, dist.ProcessGroup] = {}  # by neighbour
        self._connections: dict[int, dict[bytes, int]] = {}  # by neighbour: descriptors by name

    def open(self, peers: Iterable[int], is_out: Callable[[int], bool] = lambda peer: False) -> dict[int, Exception]:
        """Connect to some neighbours, which do the same; returns why those failed that did.

        Nobody waits for an optional one that is out.
        """
        made = self._with_each(peers, self._made, is_out)
        self._groups |= {peer: edge for peer, edge in made.items() if not isinstance(edge, Exception)}
        return {peer: edge for peer, edge in made.items() if isinstance(edge, Exception)}

    def pave(
        self, peers: Iterable[int], device: torch.device, may: bool, is_out: Callable[[int], bool]
    ) -> dict[int, Lane | Exception | None]:
        """Lanes to some neighbours, which do the same; None where an end may not or cannot, or why the edge failed."""
        return self._with_each(peers, lambda peer: self._paved(peer, device, may), is_out)

    def _with_each(
        self, peers: Iterable[int], make: Callable[[int], Made], is_out: Callable[[int], bool]
    ) -> dict[int, Made | Exception]:
        """What is made with each neighbour, or why it is not."""
        # All nodes begin with the same edges, so the first that is not there yet is being made at both of its ends.
        pairs = sorted((min(peer, self.rank), max(peer, self.rank)) for peer in peers)
        made: dict[int, Made | Exception] = {}

        def try_it(peer: int) -> None:
            try:
                made[peer] = make(peer)
            except Exception as error:
                made[peer] = error

        threads = {}
        for pair in pairs:
            peer = sum(pair) - self.rank
            threads[peer] = thread = threading.Thread(target=try_it, args=(peer,), daemon=True)
            thread.start()
            if not self.optional:
                thread.join()
        deadline = time.monotonic() + self._timeout.total_seconds()
        for peer, thread in threads.items():
            while thread.is_alive() and not is_out(peer) and time.monotonic() < deadline:
                thread.join(LOOK)  # gloo cannot be interrupted, but left alone
        return {peer: made.get(peer, RuntimeError("it does not connect")) for peer in threads}

    def _made(self, peer: int) -> dist.ProcessGroup:
        pair = min(peer, self.rank), max(peer, self.rank)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = _devices(self._address), 0
        options._timeout = min(self._timeout, CONNECT) if self.optional else self._timeout
        name = "edge/{}-{}".format(*(self._names[node] if self._names else node for node in pair))
        store, end = PrefixStore(name, self.store), pair.index(self.rank)
        password = secrets.token_bytes(PASSWORD)
        store.set(f"end/{end}", password.hex())
        store.wait([f"end/{1 - end}"], self._timeout)  # the other end may come late, but then it connects at once
        group: dist.ProcessGroup = dist.ProcessGroupGloo(store, end, 2, options)  # type: ignore[assignment]
        if self._guarded:
            _recognise(group, 1 - end, password, bytes.fromhex(store.get(f"end/{1 - end}").decode()))
            self._connections[peer] = _shared(group, 1 - end)
        return group

    def _paved(self, peer: int, device: torch.device, may: bool) -> Lane | None:
        """A lane, if both ends may have one and can; agreed on over the edge, without the store."""
        group, other, patience = self._groups[peer], int(peer > self.rank), min(CONNECT, self._timeout / 4)

        def both(own: bool) -> bool:
            return _exchanged(group, other, bytes([own]), READY_TAG, 2 * patience) == b"\1" and own

        if not both(may):
            return None
        lane = Lane(1 - other, device)
        own = bytes(INVITATION)
        if other:
            with suppress(RuntimeError):  # NCCL finds no network: the second end is told nothing, and both give up
                own = lane.invitation()
        theirs = _exchanged(group, other, own, INVITATION_TAG)
        # NCCL may be shut out where gloo is not, and then waits for ever.
        connecting = in_background("lane", lambda: lane.connect(own if other else theirs))
        connecting.join(patience.total_seconds())
        if both(not connecting.is_alive() and not lane.broken):
            in_background("tripwire", lambda: self._watch(peer, lane))
            return lane
        lane.end("it does not answer" if connecting.is_alive() else "the other end could not")
        warn(f"NCCL does not connect this GPU with that of neighbour {peer} ({lane.broken}); gloo is used instead")
        return None

    def _watch(self, peer: int, lane: Lane) -> None:
        """End a lane when its edge breaks, unless the other end has said that it needs it no more."""
        try:
            self.post(True, torch.empty(1, dtype=torch.uint8), peer, BYE_TAG).wait(FOREVER)
        except RuntimeError as error:
            lane.end(reason(error))
        lane.parted.set()

    def part(self, lanes: Mapping[int, Lane]) -> set[int]:
        """Wait a little until the other ends of lanes need them no more, either; returns who has not said so.

        What is on its way over NCCL may need its sender until it has come.
        """
        byes = []  # kept: gloo forgets what nobody holds
        for peer in lanes:
            with suppress(RuntimeError):
                byes.append(self.post(False, torch.zeros(1, dtype=torch.uint8), peer, BYE_TAG))
        deadline = time.monotonic() + LAST_WORDS
        for lane in lanes.values():
            lane.parted.wait(max(0.0, deadline - time.monotonic()))
        return {peer for peer, lane in lanes.items() if lane.broken or not lane.parted.is_set()}

    def flown(self) -> dict[int, Flown]:
        """What the system knows of guarded edges, by neighbour; nothing where addresses are translated on the way."""
        asked = {peer: [*starmap(_asked, found.items())] for peer, found in self._connections.copy().items()}
        told = {peer: [one for one in answers if one is not None] for peer, answers in asked.items()}
        return {
            peer: Flown(min(one.trip for one in some), sum(one.taken for one in some), sum(one.busy for one in some))
            for peer, some in told.items()
            if some
        }

    def post(self, incoming: bool, memory: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive from a neighbour, or to send to it; RuntimeError if the edge is closed."""
        if (group := self._groups.get(peer)) is None:
            raise RuntimeError("Connection closed by this rank")
        move = group.recv if incoming else group.send
        return move([memory], int(peer > self.rank), tag)

    def close(self, peer: int) -> None:
        """Close one edge: what is on its way over it fails at both ends, and memory for it is free again."""
        if (group := self._groups.pop(peer, None)) is not None:
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], int(peer > self.rank), CLOSING_TAG).wait(AT_ONCE)

    def close_all(self) -> None:
        """Close every edge."""
        for peer in [*self._groups]:
            self.close(peer)


def _recognise(group: dist.ProcessGroup, other: int, own: bytes, expected: bytes) -> None:
    """Exchange passwords over an edge, and refuse another end than the one that the store knows."""
    if not hmac.compare_digest(_exchanged(group, other, own, PASSWORD_TAG), expected):
        raise RuntimeError("a stranger has connected instead of the neighbour")


def _exchanged(group: dist.ProcessGroup, other: int, own: bytes, tag: int, within: timedelta | None = None) -> bytes:
    """What the other end of an edge gives for as many bytes of this one."""
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    heard = torch.zeros_like(sent)
    works = group.send([sent], other, tag), group.recv([heard], other, tag)
    for work in works:
        work.wait() if within is None else work.wait(within)
    return heard.numpy().tobytes()


# --- lanes ------------------------------------------------------------------------------------------------------------


class Lane:
    """A way between the GPUs of two neighbours, beside their edge: a communicator of NCCL, for two.

    Both ends post the same passages in the same order. NCCL does not see that the other end is gone or silent, and its
    kernels wait for ever; who sees it ends the lane, which lets them go. It is NCCL itself, and not torch's process
    group, whose watchdog ends the process where something fails.
    """

    def __init__(self, end: int, device: torch.device) -> None:
        self.end_of_pair, self.device = end, device
        self.broken = ""  # why, once it is
        self.parted = threading.Event()  # when the other end needs it no more, or the edge has broken
        self._using, self._unposted = threading.Lock(), set[Passage]()
        self._communicator = ctypes.c_void_p()

    def invitation(self) -> bytes:
        """What the second end must be told to connect with the first."""
        name = _Invitation()
        _nccl("ncclGetUniqueId", ctypes.byref(name))
        return bytes(name)

    def connect(self, invitation: bytes) -> None:
        """Meet the other end, and send something both ways, since the first time takes NCCL longer; on both ends."""
        try:
            if not any(invitation):
                raise RuntimeError("NCCL finds no network")
            self._meet(_Invitation.from_buffer_copy(invitation))
            if self.broken:  # nobody waits for it any more
                return self.end(self.broken)
            self._start(None, None)()
        except (OSError, RuntimeError) as error:
            self.broken = reason(error)

    def _meet(self, invitation: _Invitation) -> None:
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            settings = SETTINGS.pack(SETTINGS.size, 0xCAFEBEEF, 21700, 1, UNDEFINED, UNDEFINED, MOST_BLOCKS, 0)
            new = ctypes.c_void_p()
            _nccl("ncclCommInitRankConfig", ctypes.byref(new), 2, invitation, self.end_of_pair, settings)
            self._communicator, self._bytes = new, torch.zeros(2, 1, dtype=torch.uint8, device=self.device)

    def expect(self, room: Tensor) -> Passage:
        """A passage on which a message arrives."""
        passage = Passage(self, room)
        with self._using:
            self._unposted.add(passage)
        return passage

    def post(self, passage: Passage, message: Tensor | None) -> None:
        """Begin a passage, with a message or without, after what the current stream has to do; does not wait."""
        with self._using:
            self._unposted.discard(passage)
            try:
                if not self.broken:
                    passage.runs = self._start(passage.room, message)
            except RuntimeError as error:
                self.broken = reason(error)
        passage.posted.set()

    def _start(self, room: Tensor | None, message: Tensor | None) -> Callable[[], object]:
        """Begin to receive and to send; returns what waits until both have ended.

        Where there is no message, a byte goes instead: so neither end has done with it before the other has begun.
        """
        stream, other, (nothing, dummy) = self._stream, 1 - self.end_of_pair, self._bytes
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device):
            _nccl("ncclGroupStart")
            try:
                for call, memory in (
                    ("ncclRecv", dummy if room is None else room),
                    ("ncclSend", nothing if message is None else message),
                ):
                    memory.record_stream(stream)  # nobody else gets it before
                    place, on = ctypes.c_void_p(memory.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
                    _nccl(call, place, ctypes.c_size_t(memory.nbytes), BYTES, other, self._communicator, on)
            finally:
                _nccl("ncclGroupEnd")
            ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ended.record(stream)
        return ended.synchronize

    def fault(self) -> str:
        """Why it carries nothing any more, if so."""
        with self._using:
            if self._communicator and not self.broken:
                code = ctypes.c_int()
                _nccl("ncclCommGetAsyncError", self._communicator, ctypes.byref(code))
                self.broken = _meaning(code.value) if code.value else ""
        return self.broken

    def end(self, why: str) -> None:
        """Let go what waits for the other end: NCCL's kernels at once, and its memory in the background."""
        self.broken = self.broken or why
        free = self._using.acquire(timeout=1.0)  # NCCL itself may wait for the other end, until this ends it
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        for passage in [*self._unposted]:
            passage.posted.set()
        if free:
            self._using.release()
        if communicator and threading.main_thread().is_alive():  # otherwise the process ends, and all with it
            # No daemon, which would still use the GPU while the process gives it back.
            threading.Thread(target=self._let_go, args=(communicator,), name="klatsch lane").start()

    def _let_go(self, communicator: ctypes.c_void_p) -> None:
        _nccl("ncclCommAbort", communicator)


class Passage:
    """What goes over a lane at a time: a message at most each way."""

    def __init__(self, lane: Lane, room: Tensor | None = None) -> None:
        self.lane, self.room, self.posted = lane, room, threading.Event()
        self.runs: Callable[[], object] = lambda: None  # waits until it has ended

    def wait(self) -> None:
        """Wait until it has been posted and has ended; RuntimeError if the lane has, too."""
        self.posted.wait()
        self.runs()
        if self.lane.broken:
            raise RuntimeError(self.lane.broken)


class _Invitation(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * INVITATION),)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The one that torch has loaded; OSError without it."""
    library = ctypes.CDLL("librccl.so.1" if torch.version.hip else "libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _nccl(call: str, *words: object) -> None:
    if code := _library()[call](*words):
        raise RuntimeError(_meaning(code))


def _meaning(code: int) -> str:
    return f"NCCL: {_library().ncclGetErrorString(code).decode()}"


def gpu_of(device: torch.device) -> str:
    """MACHINE/GPU, named alike in all processes, if lanes are wanted and possible.

    KLATSCH_NCCL=1 asks for them, and KLATSCH_NCCL=everywhere makes all machines one: between them, NCCL chooses its own
    way, which may be another one than that of the edges.
    """
    choice = os.environ.get("KLATSCH_NCCL", "0")
    if device.type != "cuda" or choice == "0":
        return ""
    with suppress(AttributeError, OSError):  # an old torch, or one without NCCL
        _library()
        machine = "any" if choice == "everywhere" else MACHINE.read_text().strip()
        return f"{machine}/{torch.cuda.get_device_properties(device).uuid}"
    return ""


# --- what the system knows --------------------------------------------------------------------------------------------


def _shared(group: dist.ProcessGroup, other: int) -> dict[bytes, int]:
    """The connections of this process that are also the neighbour's, by name."""
    own = _connections()
    told = _exchanged(group, other, b"".join([*own][-NAMES:]).ljust(NAME * NAMES, b"\0"), NAMES_TAG)
    theirs = {told[k : k + NAME] for k in range(0, len(told), NAME)}
    return {name: descriptor for name, descriptor in own.items() if name in theirs}


def _connections() -> dict[bytes, int]:
    """The descriptors of all connections of this process, by name; none where the system does not list them."""
    found = {}
    with suppress(OSError):
        for descriptor in map(int, os.listdir(DESCRIPTORS)):
            with suppress(OSError, ValueError), _looked_at(descriptor) as one:
                found[_name(one)] = descriptor
    return found


@contextmanager
def _looked_at(descriptor: int) -> Iterator[socket.socket]:
    """A socket of somebody else, which it stays; OSError if it is none."""
    # Without the flag, a default timeout of sockets would be set on it: reads would no longer block.
    one = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=descriptor)
    try:
        yield one
    finally:
        one.detach()


def _name(one: socket.socket) -> bytes:
    """What both ends of a connection call it; ValueError if it is none between addresses."""
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        raise ValueError("not a connection of a network")
    ends = [
        (host.partition("%")[0].removeprefix("::ffff:"), port)
        for host, port, *_ in (one.getsockname(), one.getpeername())
    ]
    return blake2b(repr(sorted(ends)).encode(), digest_size=NAME).digest()


def _asked(name: bytes, descriptor: int) -> Flown | None:
    """What a connection has carried, unless its descriptor is another one's by now."""
    with suppress(OSError, ValueError), _looked_at(descriptor) as one:
        told = one.getsockopt(socket.IPPROTO_TCP, TCP_INFO, FIELDS.size)
        if _name(one) == name and len(told) == FIELDS.size:
            taken, trip, busy, held = FIELDS.unpack(told)
            return Flown(trip * 1e-6, taken, (busy - held) * 1e-6)
    return None


@lru_cache(maxsize=8)
def _devices(address: str) -> list[dist.ProcessGroupGloo.Device]:
    """Where gloo listens, with one thread for all edges of this process."""
    create = dist.ProcessGroupGloo.create_device
    if address:
        return [create(hostname=address)]
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [create(interface=name) for name in interfaces] or [dist.ProcessGroupGloo.create_default_device()]
