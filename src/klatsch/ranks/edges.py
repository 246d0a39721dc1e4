"""Connections between neighbours: each is a gloo group of two ranks, made over a store, so that nobody opens a mesh.

An edge takes one descriptor and no thread: those of gloo's groups are for collectives, and one thread per process moves
the bytes of all edges. An edge that breaks, or that one end closes, takes no other with it.

On Linux the system knows how long bytes travel and how fast they were taken; `Edges.flown` asks it.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from klatsch.clock.network import Table
from klatsch.units import size

CLOSING_TAG = (1 << 20) - 2  # of a message that never comes
PASSWORD_TAG, PASSWORD = (1 << 20) - 5, 32  # bytes
NAMES_TAG, NAME, NAMES = (1 << 20) - 6, 8, 256  # bytes of a connection's name, and how many a neighbour is told
# Bytes acknowledged, and microseconds: of the fastest trip, those busy, and those of them that the reader was slow.
TCP_INFO, FIELDS = 11, struct.Struct("=120xQ20xI16xQQ")
TELLING = 1 << 18  # bytes that say how fast a link is
DESCRIPTORS = Path("/proc/self/fd")
CONNECT = timedelta(seconds=10)  # once both ends are there
AT_ONCE = timedelta(milliseconds=1)
LOOK = 0.05  # seconds between two looks at whether the other end is still expected

Pair = tuple[int, int]


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
        # All nodes begin with the same edges, so the first that is not there yet is being made at both of its ends.
        pairs = sorted((min(peer, self.rank), max(peer, self.rank)) for peer in peers)
        made: dict[int, dist.ProcessGroup | Exception] = {}

        def make(pair: Pair, peer: int) -> None:
            try:
                made[peer] = self._made(pair)
            except Exception as error:
                made[peer] = error

        threads = {}
        for pair in pairs:
            peer = sum(pair) - self.rank
            threads[peer] = thread = threading.Thread(target=make, args=(pair, peer), daemon=True)
            thread.start()
            if not self.optional:
                thread.join()
        failures, deadline = {}, time.monotonic() + self._timeout.total_seconds()
        for peer, thread in threads.items():
            while thread.is_alive() and not is_out(peer) and time.monotonic() < deadline:
                thread.join(LOOK)  # gloo cannot be interrupted, but left alone
            edge = made.get(peer, RuntimeError("it does not connect"))
            if isinstance(edge, Exception):
                failures[peer] = edge
            else:
                self._groups[peer] = edge
        return failures

    def _made(self, pair: Pair) -> dist.ProcessGroup:
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
            self._connections[sum(pair) - self.rank] = _shared(group, 1 - end)
        return group

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


def _exchanged(group: dist.ProcessGroup, other: int, own: bytes, tag: int) -> bytes:
    """What the other end of an edge gives for as many bytes of this one."""
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    heard = torch.zeros_like(sent)
    works = group.send([sent], other, tag), group.recv([heard], other, tag)
    for work in works:
        work.wait()
    return heard.numpy().tobytes()


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
