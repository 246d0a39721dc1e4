"""The registry of a crew: it knows who is there, and agrees with the members on when the crew changes.

It runs in a process of its own (`klatsch crew serve`), which outlives any member, and holds nothing that members do not
know: a new one adopts what they tell. Messages are JSON behind their length; nothing is unpickled. Before anything
else, both ends prove that they know the crew's token (HMAC of two nonces), without sending it.

A change goes in three steps. The registry proposes it; every member answers with the last round that it has begun, and
promises to begin at most two more; the new epoch starts one round after the last of those. So nobody has begun that
round when it is fixed, and everybody learns of it in time.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from klatsch.files import json_of
from klatsch.units import counted

Message: TypeAlias = "dict[str, Any]"
PROTOCOL, PORT = 2, 4711
LARGEST = 1 << 20  # bytes of a message
GREETING = 1 << 9  # bytes of a message from a stranger
STRANGERS = 100  # at a time; one more, and the first is shut out
PATIENCE = 5.0  # seconds for a stranger to prove itself
AHEAD = 2  # rounds that a member may begin after its answer
GRACE = 0.7  # seconds in which a member whose connection broke may return
TICK = 0.25  # seconds between two looks at the clock
MEND, MOST = 2.0, 600.0  # seconds until edges that broke are made anew: the first time, and at most


class Epoch(NamedTuple):
    """Who trains from round `start` on: node k of the graph is members[k]. Newcomers have no state yet."""

    number: int
    members: tuple[str, ...]
    newcomers: tuple[str, ...]
    start: int

    @classmethod
    def read(cls, told: Sequence[Any]) -> Epoch:
        number, members, newcomers, start = told
        return cls(int(number), tuple(map(str, members)), tuple(map(str, newcomers)), int(start))


# --- messages and tokens ----------------------------------------------------------------------------------------------


def framed(message: Mapping[str, object]) -> bytes:
    """A message as it travels."""
    body = json.dumps(message).encode()
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body):,} bytes; the registry takes at most {LARGEST:,}")
    return len(body).to_bytes(4, "big") + body


def read(body: bytes) -> Message:
    """A message that has arrived."""
    message = json_of(body)
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def length(head: bytes, largest: int) -> int:
    """Of the message behind its first four bytes."""
    if (size := int.from_bytes(head, "big")) > largest:
        raise ValueError(f"a message of {size:,} bytes where at most {largest:,} are expected")
    return size


def proof(token: bytes, who: str, nonces: Sequence[str]) -> str:
    """That one end knows the token."""
    return hmac.new(token, " ".join(("klatsch crew", who, *nonces)).encode(), "sha256").hexdigest()


def proves(given: object, token: bytes, who: str, nonces: Sequence[str]) -> bool:
    """Whether the other end does; compared in constant time."""
    return hmac.compare_digest(str(given).encode(errors="replace"), proof(token, who, nonces).encode())


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT, HOST or [IPV6]:PORT."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text.strip(), str(PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or (":" in host and host[0] != "["):
        raise ValueError(f"{text!r} is not the address of a registry; give HOST:PORT, such as 10.0.0.1:{PORT}")
    return host.strip("[]"), int(port)


class TokenError(ValueError):
    """The other end does not know the token."""


class Line:
    """A member's end of a connection to a registry that has proved that it knows the token."""

    def __init__(self, address: tuple[str, int], token: bytes, seconds: float) -> None:
        self.socket = socket.create_connection(address, seconds)
        self._arrived, self._sending = bytearray(), threading.Lock()
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = self.receive()
            if greeting.get("crew") != PROTOCOL:
                raise ValueError("no registry of a crew, or one of another version of klatsch")
            nonces = str(greeting["nonce"]), secrets.token_hex(16)
            self.send({"nonce": nonces[1], "proof": proof(token, "member", nonces)})
            answer = self.receive()
            if "refused" in answer or not proves(answer.get("proof"), token, "registry", nonces):
                raise TokenError("its token is another one")
            self.timeout, self.quorum = float(answer["timeout"]), float(answer["quorum"])
        except BaseException:
            self.socket.close()
            raise

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message, from any thread, or fail within the seconds that the socket was given."""
        with self._sending:
            self.socket.sendall(framed(message))

    def receive(self) -> Message:
        while True:
            for message in self.arrived():
                return message
            self.take()

    def take(self) -> None:
        """Read what is there, at least a byte."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the registry has closed the connection")
        self._arrived += data

    def arrived(self) -> list[Message]:
        """The next of the messages that are whole, if there is one."""
        head = bytes(self._arrived[:4])
        if len(head) < 4 or len(self._arrived) < 4 + (size := length(head, LARGEST)):
            return []
        body = bytes(self._arrived[4 : 4 + size])
        del self._arrived[: 4 + size]
        return [read(body)]


def connect(addresses: Sequence[tuple[str, int]], token: bytes, seconds: float = PATIENCE) -> Line:
    """A line to the first registry that answers."""
    errors = []
    for address in addresses:
        where = "{}:{}".format(*address)
        try:
            return Line(address, token, seconds)
        except TokenError as error:
            raise ValueError(f"the registry at {where} is not ours: {error}; give a copy of its token file") from None
        except (OSError, KeyError, TypeError, ValueError) as error:
            errors.append(f"{where}: {(isinstance(error, OSError) and error.strerror) or error}")
    raise ConnectionError(f"no registry answers ({'; '.join(errors)}); check the address, or run klatsch crew serve")


def ask(addresses: Sequence[tuple[str, int]], token: bytes, message: Mapping[str, object]) -> Message:
    """One question to a registry."""
    line = connect(addresses, token)
    try:
        line.send({**message, "id": 0})
        while (answer := line.receive()).get("op") != "answer":
            pass
    finally:
        line.socket.close()
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


# --- who is there -----------------------------------------------------------------------------------------------------


class Speaker:
    """The registry's end of a connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer, self.member, self.heard = writer, "", time.monotonic()  # member: who speaks, once it has joined
        self.address: str = writer.get_extra_info("peername")[0]

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message, which may get lost if the connection breaks; whoever does not read is shut out."""
        if self.writer.transport.get_write_buffer_size() > 4 * LARGEST:
            self.writer.transport.abort()
        elif not self.writer.is_closing():
            self.writer.write(framed(message))


@dataclass
class Member:
    """Who is in an epoch, or waits for one."""

    id: str
    host: str = ""
    formers: frozenset[str] = frozenset()  # the places that it has given up
    rounds: int = 0  # that it had done when it joined, or that it has read from a checkpoint
    place: int = 0  # the node that the checkpoint is of
    resumes: bool = False  # whether it has read one, or found none, and waits for the others to do so
    round: int = 0  # that it is in
    line: Speaker | None = None  # None while it is away
    address: str = ""
    heard: float = 0.0
    ended: bool = False  # its connection was closed while it was well: it has ended, or returns at once
    leaving: bool = False
    begun: int | None = None  # its answer to the proposal
    report: Message = field(default_factory=dict)


class Coordinator:
    """Decides who is in the crew, and from which round on. It has no clock and no sockets: those call it.

    Args:
        timeout: seconds without a word after which a member is out.
        settle: seconds in which a first epoch gathers members, and in which those of an earlier registry come back.
        least: members of the first epoch, which begins as soon as they are there; 0 for those of the first seconds.
        quorum: an epoch keeps more than this share of the last one, not counting those that left or have ended; with
            exactly this share, the first member decides.
        tell: is told what happens, one line at a time.
    """

    def __init__(
        self,
        timeout: float = 10.0,
        settle: float = 3.0,
        least: int = 0,
        quorum: float = 0.5,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.timeout, self.settle, self.least, self.quorum, self.tell = timeout, settle, least, quorum, tell
        self.epoch = Epoch(0, (), (), 0)
        self.members: dict[str, Member] = {}  # of the epoch, and those that wait for the next one
        self.facts: dict[str, str] = {}
        self.waits_for = ""  # why there is no change, though one is due
        self._parting: list[Speaker] = []  # lines of those who train until an epoch starts that they are not in
        self._listeners: list[Speaker] = []  # lines of ranks beside the one that speaks for a host
        self._out: set[str] = set()  # of whom members know that they are out, so they cannot return
        self._ballot, self._proposing = 0, False
        self._since = 0.0  # when the first of those who wait has come
        self._broken = ""  # which members that are there have lost each other, and what will happen
        self._patience, self._mend_at, self._broken_at = MEND, 0.0, -math.inf  # when edges were broken last
        self._looked, self._woken = math.inf, -math.inf  # at the clock, and when it could again after a pause
        self.resumed = 0.0  # when members could reach it again, or it them

    def hear(self, line: Speaker, message: Message, now: float) -> None:
        """A message from a member, or from one that wants to become one."""
        line.heard = now
        member = self.members.get(line.member)
        if member and member.line is not line:  # what it has sent before it came back, when it knew less
            member = None
        match message:
            case {"op": "join", "member": str(), "host": str(), "facts": dict(), "rounds": int()}:
                self._join(line, message, now)
            case {"op": "return", "member": str(), "host": str(), "facts": dict(), "epoch": list(), "bound": int()}:
                self._return(line, message, now)
            case {"op": "begun", "ballot": int(ballot), "round": int(begun)}:
                if member and self._proposing and ballot == self._ballot:
                    member.begun = begun
            case {"op": "resume", "epoch": int(number), "rounds": int(rounds), "place": int(place)}:
                if member and number == self.epoch.number:
                    member.rounds, member.place, member.resumes = rounds, place, True
            case {"op": "leave"}:
                if member and member.id not in self.epoch.members:
                    self._dismiss(line, "it left before it was let in", again=False)
                    self._forget(member)
                elif member:
                    member.leaving = True
            case {"op": "listen"}:
                self._listeners.append(line)
                line.send({"op": "gone", "gone": [*self._out]})
            case {"op": "beat", "round": int(begun), "report": dict(report)}:
                if member:
                    member.round, member.report = begun, {**member.report, **report}
            case _:
                raise ValueError(f"an unknown message: {message.get('op')!r}")
        self.step(now)

    def lost(self, line: Speaker, now: float) -> None:
        self._look(now)
        self._listeners = [other for other in self._listeners if other is not line]
        # One that closes a connection on which it has not spoken for long was cut off, and may live. After a pause of
        # the registry, what it has sent before comes first.
        has_ended, parting = now - line.heard < self.timeout / 2 <= now - self._woken, self._parting
        self._parting = [other for other in parting if other is not line]
        if len(self._parting) < len(parting) and not has_ended:  # others wait for its last rounds, and no step sees it
            gone = {"op": "gone", "gone": [line.member]}
            self._tell_all(gone, [*self.members.values()], self._parting, self._listeners)
        member = self.members.get(line.member)
        if member is None or member.line is not line:
            return
        member.line, member.heard, member.ended = None, line.heard, has_ended
        if member.id not in self.epoch.members:
            del self.members[member.id]
        elif member.ended:
            member.heard = now
        self.step(now)

    def drop(self, which: str, now: float) -> None:
        """Go on without a member, at once; the first letters of its id are enough."""
        meant = [member for name, member in self.members.items() if which and name.startswith(which)]
        meant = [self.members[which]] if which in self.members else meant
        if len(meant) != 1:
            known = ", ".join(member.id for member in meant) or ", ".join(self.members) or "none"
            raise ValueError(f"there is no {'one ' * bool(meant)}member {which!r}; there are {known}")
        (member,) = meant
        if member.line:
            self._dismiss(member.line, "it was dropped by klatsch crew drop", again=False)
        self._forget(member)
        self.tell(f"{member.id} on {member.host} was dropped")
        self.step(now)

    def _forget(self, member: Member) -> None:
        """Go on without a member that is known not to return."""
        member.line, member.ended, member.heard = None, True, -math.inf
        if member.id not in self.epoch.members:
            del self.members[member.id]

    def _dismiss(self, line: Speaker, why: str, again: bool = True) -> None:
        line.member = ""
        line.send({"op": "dropped", "why": why, "again": again})

    def _join(self, line: Speaker, message: Message, now: float) -> None:
        facts = {str(name): str(text) for name, text in message["facts"].items()}
        if all(member.ended for member in self.members.values()):
            self.facts = facts
        for name in {**self.facts, **facts}:
            own, theirs = (some.get(name, "nothing") for some in (facts, self.facts))
            if own != theirs:
                why = f"this member's {name} is {own}, the crew's {theirs}; make them the same"
                return line.send({"op": "refused", "why": why})
        for other in self.members.values():
            if other.line and _is_local(other.line.address) != _is_local(line.address):
                far, near = sorted((other.line.address, line.address), key=_is_local)
                why = f"members at {far} cannot reach one at {near}; join over an address of this machine's network"
                return line.send({"op": "refused", "why": why})
        formers = frozenset(map(str, message.get("formers", ())))
        for name in {line.member, *formers}:  # it has given up what it was
            if (before := self.members.get(name)) is not None:
                self._forget(before)
        if not self._waiting():
            self._since = now
        line.member, host, rounds = message["member"], message["host"], message["rounds"]
        self.members[line.member] = Member(line.member, host, formers, rounds, line=line, address=line.address)
        self.tell(f"{line.member} on {host} ({line.address}) joins")

    def _return(self, line: Speaker, message: Message, now: float) -> None:
        """A member has lost its connection, or the registry that it knew; it begins no round after `bound` yet."""
        known, name = Epoch.read(message["epoch"]), message["member"]
        if known.number > self.epoch.number:
            for other in self.members.values():
                if other.line and other.id in self.epoch.members:
                    self._dismiss(other.line, f"it does not know of epoch {known.number}")
            waiting = self._waiting()
            self.epoch, self.facts, self._proposing = known, message["facts"], False
            self.members = {id_: Member(id_, heard=now) for id_ in known.members} | {m.id: m for m in waiting}
            for given_up in {name for m in waiting for name in m.formers} & {*known.members}:
                self._forget(self.members[given_up])
            many = counted(len(known.members), "member")
            self.tell(f"epoch {known.number} from round {known.start} is adopted: {many}")
            self._tell_all({"op": "news", "epoch": known, "gone": []}, (), self._listeners)
        missed = known.number == self.epoch.number - 1 and message["bound"] < self.epoch.start
        member = self.members.get(name)
        if member is None or name not in {*self.epoch.members} - self._out or (known != self.epoch and not missed):
            return self._dismiss(line, f"epoch {self.epoch.number} goes on without it")
        if not any(self.members[other].line for other in self.epoch.members):  # this registry was cut off, not they
            self.resumed = now
        line.member = name
        member.line, member.host, member.address = line, message["host"], line.address
        member.ended, member.begun, member.leaving = False, None, bool(message.get("leaving"))
        line.send({"op": "welcome", "epoch": self.epoch, "gone": [*self._out.intersection(self.epoch.members)]})
        if self._proposing:
            line.send({"op": "propose", "ballot": self._ballot})

    def _waiting(self) -> list[Member]:
        return [member for member in self.members.values() if member.id not in self.epoch.members]

    def _is_out(self, member: Member, now: float) -> bool:
        if member.ended:
            return now >= member.heard + GRACE
        return now >= max(member.heard, self.resumed) + self.timeout

    def _look(self, now: float) -> None:
        """See whether it was stopped itself: those who wrote meanwhile are not late."""
        if now - self._looked > self.timeout / 4:
            self.resumed = self._woken = now
        self._looked = now

    def step(self, now: float) -> None:
        """Begin a change where one is due, and end it once all have answered."""
        self._look(now)
        crew = [self.members[name] for name in self.epoch.members]
        present, away = [m for m in crew if m.line], [m for m in crew if not m.line]
        waiting = self._waiting()
        if present and (out := [m.id for m in away if m.id not in self._out and self._is_out(m, now)]):
            self._out.update(out)
            # Nobody waits for them.
            self._tell_all({"op": "gone", "gone": out}, present, self._parting, self._listeners)
        # The last ones to leave first hand over what they hold.
        staying = [m for m in present if not m.leaving] or (present if waiting else [])
        again = {name for m in waiting for name in m.formers} & {*self.epoch.members}
        back = again & {name for m in waiting if m.rounds for name in m.formers}  # what they hold is still the crew's
        voters = [m for m in crew if not m.leaving and (not m.ended or m.id in back)]
        ready = [m for m in present if m.resumes]
        at_hand = [bool(m.line) or m.id in back for m in voters]
        mends = self._mends(present, now)
        if not away and len(staying) == len(crew) and not waiting and not ready and not mends:
            self.waits_for = self._broken
        elif not all(self._is_out(m, now) for m in away):
            self.waits_for = f"{', '.join(m.id for m in away)} may return"
        elif not self._is_quorum(at_hand):
            lost = ", ".join(m.id for m, is_at_hand in zip(voters, at_hand, strict=True) if not is_at_hand)
            share = f"{sum(at_hand)} of {len(voters)} members are there"
            self.waits_for = f"{share}, and quorum = {self.quorum:g} asks for more; wait for or drop {lost}"
        elif not present and not again and (not waiting or len(waiting) < self.least):
            self.waits_for = f"{len(waiting)} of {max(self.least, 1)} members are there"
        elif not present and not again and not self.least and now < self._since + self.settle:
            self.waits_for = "more members may come"
        elif 0 < len(ready) < len(present):
            self.waits_for = f"{len(ready)} of {len(present)} members have looked for their checkpoints"
        elif ready or not present:  # nobody trains: those who have done most go on from what they hold
            candidates = staying or waiting
            most = max((m.rounds for m in candidates), default=0)
            holders = sorted((m for m in candidates if m.rounds == most), key=lambda m: m.place)
            new = [m for m in (*staying, *waiting) if m.id not in {holder.id for holder in holders}]
            return self._fix(most + 1, holders, new)
        elif not self._proposing:
            self.waits_for = f"{len(present)} members answer"
            self._ballot, self._proposing = self._ballot + 1, True
            for member in present:
                member.begun = None
            self._tell_all({"op": "propose", "ballot": self._ballot}, present)
            return
        elif any(m.begun is None for m in present):
            return
        else:
            start = max(self.epoch.start, max(m.begun or 0 for m in present) + AHEAD) + 1
            return self._fix(start, staying, waiting)
        if self._proposing:
            self._proposing = False
            self._tell_all({"op": "cancel", "ballot": self._ballot}, present)

    def _mends(self, present: Sequence[Member], now: float) -> bool:
        """Whether two that are there have lost each other for long enough: a new epoch gives all of them new edges."""
        told = {m.id: m.report.get("lost") for m in present if m.report.get("epoch") == self.epoch.number}
        lost = {name: {*map(str, others)} for name, others in told.items() if others and isinstance(others, list)}
        pairs = [(one, two) for one in lost for two in lost if one < two and two in lost[one] and one in lost[two]]
        if not pairs:
            self._broken = ""
            return False
        if not self._broken:
            if now > self._broken_at + MOST:
                self._patience = MEND
            self._mend_at = now + self._patience
            self._broken = f"{' and '.join(pairs[0])} have lost each other, and connect anew in {self._patience:g} s"
            self.tell(self._broken)
        self._broken_at = now
        return now >= self._mend_at

    def _is_quorum(self, at_hand: Sequence[bool]) -> bool:
        asked = self.quorum * len(at_hand)
        return not at_hand or sum(at_hand) > asked or (sum(at_hand) == asked and at_hand[0])

    def _fix(self, start: int, holders: Sequence[Member], newcomers: Sequence[Member]) -> None:
        """Make the next epoch, of which nobody has begun the first round, of those who hold a state and others."""
        before, everyone, chosen = self.epoch, [*self.members.values()], (*holders, *newcomers)
        members = tuple(m.id for m in chosen)
        self.epoch = Epoch(before.number + 1, members, tuple(m.id for m in newcomers), start)
        gone = [name for name in before.members if name not in members]
        come = [name for name in members if name not in before.members]
        away = [name for name in gone if not self.members[name].line]  # others train until the epoch starts
        self._proposing, self.waits_for = False, ""
        if self._broken and not gone and not come:  # it may break again, or still be broken: not all the time
            self._broken, self._patience = "", min(4 * self._patience, MOST)
        self._parting += [m.line for m in everyone if m.line and m.id in gone]
        for member in chosen:
            if member.resumes or member.id in come:
                member.round, member.resumes = start - 1, False
        self._tell_all({"op": "epoch", "epoch": self.epoch, "gone": away}, everyone)
        self._tell_all({"op": "news", "epoch": self.epoch, "gone": away}, (), self._listeners)
        self.members = {m.id: m for m in chosen}
        changes = [*(f"-{name}" for name in gone), *(f"+{name}" for name in come)] or ["new edges"]
        many = counted(len(members), "member")
        self.tell(f"epoch {self.epoch.number} from round {start}: {many} ({', '.join(changes)})")

    def _tell_all(self, message: Mapping[str, object], members: Sequence[Member], *others: Sequence[Speaker]) -> None:
        for line in (*(member.line for member in members if member.line), *chain(*others)):
            line.send(message)

    def status(self, links: bool = False) -> Message:
        """What there is to see; links, of which there may be many, only where they are asked for."""
        ahead = max((m.round for m in self.members.values()), default=0)
        rows = [
            {name: value for name, value in m.report.items() if links or name != "links"}
            | {"member": m.id, "host": m.host, "address": m.address, "state": self._state(m)}
            | {"round": m.round, "lag": ahead - m.round}
            for m in self.members.values()
        ]
        seen = {"epoch": self.epoch.number, "start": self.epoch.start, "members": rows}
        return {**seen, "waits_for": self.waits_for, "facts": self.facts}

    def _state(self, member: Member) -> str:
        if member.id not in self.epoch.members:
            return "waits"
        return "leaves" if member.leaving else "trains" if member.line else "is away"


def _is_local(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = (isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped) or ip  # where the registry listens on ::
    return ip.is_loopback


# --- the server -------------------------------------------------------------------------------------------------------


class Keys:
    """Texts by key, through which members tell each other where they listen; each lives for three epochs."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._epochs: dict[str, int] = {}  # in which a key was set
        self._waiting: list[tuple[Speaker, int, list[str], float]] = []  # and until when

    def do(self, line: Speaker, message: Message, epoch: int, now: float) -> None:
        """What a member asks for."""
        values, number = self._values, int(message["id"])
        match message:
            case {"do": "get", "keys": [*keys], "seconds": float(seconds)}:
                self._waiting.append((line, number, [str(key) for key in keys], now + seconds))
                return self._answer()
            case {"do": "check", "keys": [*keys]}:
                answer: object = all(key in values for key in keys)
            case {"do": "set", "key": str(key), "value": str(value)}:
                answer = values[key] = value
            case {"do": "add", "key": str(key), "value": int(value)}:
                values[key] = str(int(values.get(key, "0")) + value)
                answer = int(values[key])
            case _:
                raise ValueError(f"an unknown message: {message.get('do')!r}")
        if "key" in message:
            self._epochs[message["key"]] = epoch
        line.send({"op": "answer", "id": number, "value": answer})
        self._answer()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for line, number, keys, until in waiting:
            if all(key in self._values for key in keys):
                line.send({"op": "answer", "id": number, "value": [self._values[key] for key in keys]})
            else:
                self._waiting.append((line, number, keys, until))

    def forget(self, line: Speaker) -> None:
        """Whatever a connection that is gone was waiting for."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not line]

    def age(self, epoch: int, now: float) -> None:
        """Forget keys of epochs that are over, and who has waited for too long."""
        self._waiting = [entry for entry in self._waiting if entry[3] > now]
        for key in [key for key, number in self._epochs.items() if number < epoch - 2]:
            self._values.pop(key, None)
            del self._epochs[key]


class Registry:
    """A server for a crew: connections, keys, and the `Coordinator`."""

    def __init__(self, token: bytes, coordinator: Coordinator) -> None:
        self.token, self.coordinator = token, coordinator
        self._keys, self._lines = Keys(), set[Speaker]()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._complained = 0.0

    async def serve(self, host: str, port: int, ready: Callable[[str, int], None] = lambda host, port: None) -> None:
        """Listen until cancelled; `ready` is told the address."""
        server = await asyncio.start_server(self._welcome, host, port)
        ready(*server.sockets[0].getsockname()[:2])
        try:
            await self._watch(self.coordinator.timeout)
        finally:
            server.close()

    async def _watch(self, timeout: float) -> None:
        """Keep time: for the coordinator, for those who are silent, and for those who wait for a sign of life."""
        beaten = 0.0
        while True:
            await asyncio.sleep(min(TICK, timeout / 8))
            now = time.monotonic()
            self.coordinator.step(now)
            self._keys.age(self.coordinator.epoch.number, now)
            beats = now > beaten + timeout / 4
            beaten = now if beats else beaten
            for line in self._lines:
                if now > max(line.heard, self.coordinator.resumed) + timeout:
                    line.writer.transport.abort()
                elif beats:
                    line.send({"op": "beat"})

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers[writer] = None
        if len(self._strangers) > STRANGERS:
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.transport.abort()
        known = False
        try:
            line = Speaker(writer)
            async with asyncio.timeout(PATIENCE):
                known = await self._is_known(reader, line)
            self._strangers.pop(writer, None)
            if known:
                await self._listen(reader, line)
        except (OSError, EOFError, asyncio.CancelledError):  # it is gone, or this registry ends
            pass
        except Exception as error:  # garbage: nothing that comes in may end the registry
            if known:
                self.coordinator.tell(f"the connection of {line.address} was closed: {error!r}")
        finally:
            self._strangers.pop(writer, None)
            writer.close()

    async def _is_known(self, reader: asyncio.StreamReader, line: Speaker) -> bool:
        nonce = secrets.token_hex(16)
        line.send({"crew": PROTOCOL, "nonce": nonce})
        answer = await _received(reader, GREETING)
        nonces = nonce, str(answer["nonce"])
        if not proves(answer["proof"], self.token, "member", nonces):
            line.send({"refused": "the token is another one"})
            if line.heard > self._complained + 1.0:  # not a flood of them
                self._complained = line.heard
                self.coordinator.tell(f"{line.address} was refused: its token is another one")
            return False
        choices = {"timeout": self.coordinator.timeout, "quorum": self.coordinator.quorum}
        line.send({"proof": proof(self.token, "registry", nonces), **choices})
        return True

    async def _listen(self, reader: asyncio.StreamReader, line: Speaker) -> None:
        self._lines.add(line)
        line.heard = time.monotonic()
        try:
            while True:
                self._handle(line, await _received(reader, LARGEST))
        except Exception:
            self._keys.forget(line)
            self.coordinator.lost(line, time.monotonic())
            raise
        finally:
            self._lines.discard(line)

    def _handle(self, line: Speaker, message: Message) -> None:
        line.heard = now = time.monotonic()
        match message.get("op"):
            case "keys":
                self._keys.do(line, message, self.coordinator.epoch.number, now)
            case "status":
                line.send(
                    {"op": "answer", "id": message["id"], **self.coordinator.status(message.get("links") is True)}
                )
            case "drop":
                try:
                    self.coordinator.drop(str(message["member"]), now)
                    answer = {}
                except ValueError as error:
                    answer = {"error": str(error)}
                line.send({"op": "answer", "id": message["id"], **answer})
            case _:
                self.coordinator.hear(line, message, now)


async def _received(reader: asyncio.StreamReader, largest: int) -> Message:
    return read(await reader.readexactly(length(await reader.readexactly(4), largest)))
