"""A member's side of a crew: it joins, learns of every change in time, and tells how it is doing.

    crew = Crew("10.0.0.1:4711", token)
    epoch = crew.join({"rule": "dsgd", ...})
    for t in range(epoch.start, ...):
        epoch = crew.before(t) or epoch     # raises Dropped if the crew went on without this member
        ...

One thread talks to the registry. If the registry is gone, members train on without changes, and look for it, or for
another one at their addresses, which then adopts the epoch that they tell.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from klatsch.ranks.agreement import brief
from klatsch.ranks.failures import warn
from klatsch.ranks.registry import AHEAD, PATIENCE, TICK, Epoch, Line, Message, address_of, connect

RETRY = 0.3  # seconds between two attempts to find a registry
FIRST = 30.0  # seconds for the registry to start
SILENCE = 20.0  # seconds after which a member that waits says so
WAIT = 300.0  # seconds for a key, as in torch's stores


class Dropped(RuntimeError):  # noqa: N818
    """The crew goes on without this member; `again` says whether it may join as a newcomer."""

    def __init__(self, why: str, again: bool = True) -> None:
        remedy = "it may join again as a newcomer" if again else "start it again to join as a newcomer"
        super().__init__(f"this member is out of the crew: {why}; {remedy}")
        self.again = again


class Calendar:
    """What a member knows of the epochs, and how far it may train."""

    def __init__(self, member: str = "") -> None:
        self.member = member
        self.epoch: Epoch | None = None  # the one that it is in
        self.coming: list[Epoch] = []  # those that are fixed and have not started
        self.begun = 0  # the last round that it has begun
        self.bound = math.inf  # the last one that it may begin

    @property
    def newest(self) -> Epoch | None:
        """The last epoch that it knows of."""
        return self.coming[-1] if self.coming else self.epoch

    def promise(self) -> int:
        """Begin no round after the one returned, until the next epoch, or that there is none, is known."""
        self.bound = min(self.bound, self.begun + AHEAD)
        return int(self.bound)

    def hear(self, message: Message) -> Message | None:
        """What the registry says; returns the answer, if there is one."""
        match message:
            case {"op": "propose", "ballot": ballot}:
                return {"op": "begun", "ballot": ballot, "round": self.promise() - AHEAD}
            case {"op": "cancel"}:
                self.bound = math.inf
            case {"op": "epoch" | "welcome", "epoch": told}:
                epoch, newest = Epoch.read(told), self.newest
                self.bound = math.inf
                if newest is None and self.member in epoch.members:
                    self.epoch, self.begun = epoch, epoch.start - 1
                elif newest is not None and epoch.number > newest.number:
                    self.coming.append(epoch)
        return None

    def leap(self) -> Epoch:
        """Go to the newest epoch, whatever its first round is, before any was begun."""
        self.epoch, self.coming = self.coming[-1], []
        self.begun = self.epoch.start - 1
        return self.epoch

    def begin(self, t: int) -> Epoch | None:
        """Begin a round; returns the epoch that starts with it."""
        self.begun = t
        if not self.coming or self.coming[0].start > t:
            return None
        if self.coming[0].start < t:
            raise ValueError(f"round {t} is not the next one: an epoch started with round {self.coming[0].start}")
        self.epoch = self.coming.pop(0)
        return self.epoch


class Crew:
    """Membership of this process in a crew.

    Args:
        addresses: of the registry, HOST:PORT, and of others that may take its place, separated by commas.
        token: what all members know.
        leads: whether this process speaks for a member. Others of a host only use the store and hear who is out; what
            the member does, they learn from the one that leads.

    `member` is its id (another one for every time it joins), `address` the IP address of this machine from which it
    reaches the registry, `quorum` what that asks for, `store` a torch Store over the registry, through which members
    tell each other where they listen. Waiting for a key ends with an error as soon as a member whose id is part of the
    key is out.
    """

    def __init__(self, addresses: str, token: str | bytes = b"", leads: bool = True) -> None:
        self.leads = leads
        self._addresses = [address_of(text) for text in addresses.split(",")]
        self._token = token.encode() if isinstance(token, str) else token
        self.member, self._facts, self._rounds = "", dict[str, str](), 0
        self._formers = list[str]()  # ids that it has given up since it was last let in
        self.store = CrewStore(self)
        self._calendar = Calendar()
        self._news = threading.Condition()
        self._error: Exception | None = None  # of joining, or that it is out
        self.leaving = False  # whether it has asked to leave
        self._wants_in, self._ended = False, threading.Event()
        self.alone = False  # whether no registry is there: training goes on, and nothing changes
        self._report: Message = {}
        self._answers: dict[int, Message | None] = {}  # to questions about keys; None while there is none
        self._numbers = itertools.count()
        self._gone: set[str] = set()
        self._changing = False  # whether the training thread is making a change
        self._proposal: Message | None = None  # of the next one, which is answered then
        self._resuming: Message | None = None  # what it has read from a checkpoint, until the crew goes on from there
        self._line: Line | None = self._first_line()
        self.address: str = self._line.socket.getsockname()[0]
        self.quorum = self._line.quorum
        _crews.add(self)
        self._listen()
        self._thread = threading.Thread(target=self._run, name="klatsch-crew", daemon=True)
        self._thread.start()

    def _first_line(self) -> Line:
        deadline = time.monotonic() + FIRST
        while True:
            try:
                return connect(self._addresses, self._token)
            except ConnectionError as error:
                if time.monotonic() > deadline:
                    raise ValueError(str(error)) from None
                time.sleep(RETRY)

    # --- for the training thread -------------------------------------------------------------------------------

    def join(self, facts: Mapping[str, str], rounds: int = 0) -> Epoch:
        """Wait for the first epoch that has this member.

        Args:
            facts: what members must agree on, by name; those of the first member hold.
            rounds: that this member has done. They count only where nobody is in the crew: those who have done most
                then go on from what they hold, and the others are newcomers.
        """
        with self._news:
            self._facts, self._rounds, self._error = brief(facts), int(rounds), None
            self._wants_in, self._report = True, {}
            self._ask_to_join()
            self._wait_for(lambda: self._calendar.epoch, "to join the crew")
            assert self._calendar.epoch is not None
            self._formers = []
            return self._calendar.epoch

    def resume(self, rounds: int, place: int) -> Epoch:
        """Wait for an epoch that goes on from checkpoints, in a crew whose members have all not begun a round.

        Args:
            rounds: of the checkpoint that this member has read; 0 without one. Those with most go on from there, and
                the others are newcomers.
            place: the node that it was; members come in this order.
        """
        with self._news:
            before = self._calendar.newest
            assert before is not None
            self._resuming = {"op": "resume", "epoch": before.number, "rounds": rounds, "place": place}
            self._send(self._resuming)
            self._wait_for(lambda: self._calendar.newest != before, "for all members to call Checkpointer.resume")
            self._resuming, self._changing = None, True
            return self._calendar.leap()

    def _wait_for(self, happened: Callable[[], object], what: str) -> None:
        """Wait for news, and say so if it takes long."""
        while not self._news.wait_for(lambda: self._error or happened() or (self.leaving and self.alone), SILENCE):
            where = ", ".join("{}:{}".format(*address) for address in self._addresses)
            why = "no registry answers" if self.alone else "the registry waits; klatsch crew status says what for"
            warn(f"still waiting {what} at {where}: {why}")
        if self._error is not None:
            raise self._error
        if not happened():  # it leaves, and nobody is there to agree with
            raise Dropped("it left before it was let in", again=False)

    def before(self, t: int) -> Epoch | None:
        """To be called before round t: the epoch that starts with it, if one does; without this member if it leaves.

        Waits only while a change is being agreed on.
        """
        with self._news:
            self._news.wait_for(lambda: self._error or t <= self._calendar.bound)
            if self._error is not None:
                raise self._error
            epoch, newest = self._calendar.begin(t), self._calendar.newest
            self._changing = epoch is not None or t == 1  # before the first round, it may resume from a checkpoint
            self._answer_proposal()
            if self.leaving and self.alone and newest is not None:  # nobody is there to agree with
                return newest._replace(members=tuple(name for name in newest.members if name != self.member), start=t)
            return epoch

    def _answer_proposal(self) -> None:
        """Answer one that came while a change was being made."""
        if self._proposal is not None and not self._changing and not self._calendar.coming:
            if answer := self._calendar.hear(self._proposal):
                self._send(answer)
            self._proposal = None

    def expects_change(self, seconds: float) -> bool:
        """Wait, at most for some seconds, until the next epoch is fixed, or this member is out.

        To be called between two rounds, when no change is being made.
        """
        with self._news:
            self._changing = False
            self._answer_proposal()
            return bool(self._news.wait_for(lambda: self._error or self._calendar.coming, seconds))

    def is_out(self, member: str) -> bool:
        """Whether the crew goes on without a member that is not there any more."""
        return member in self._gone

    def leave(self) -> None:
        """Ask to leave, also from a handler of signals: `before` will return an epoch that this member is not in.

        The thread tells the registry. Without one that is the next round, and the others take it for a death.
        """
        self.leaving = True

    def report(self, report: Mapping[str, object]) -> None:
        """How it is doing, for `klatsch crew status`."""
        self._report = {**self._report, **report}

    def close(self) -> None:
        self._ended.set()
        if line := self._line:
            with suppress(OSError):  # it is closed, as in a process that was forked
                line.socket.shutdown(socket.SHUT_RDWR)  # which ends the thread's waiting
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def ask(self, do: str, seconds: float, **question: Any) -> Any:
        """Ask the registry's store."""
        names = set(re.split("[/-]", "/".join(question.get("keys", ()))))
        with self._news:
            number = next(self._numbers)
            self._answers[number] = None
            self._send({"op": "keys", "do": do, "id": number, "seconds": float(seconds), **question})
            try:
                in_time = self._news.wait_for(
                    lambda: self._answers.get(number, True) or names & self._gone or self.alone, seconds
                )
                answer = self._answers.get(number)
            finally:
                self._answers.pop(number, None)
        if answer is None:
            gone = ", ".join(sorted(names & self._gone))
            why = f"{gone} is out of the crew" if gone else "the registry is gone"
            why = why if in_time else f"no answer within {seconds:g} s"
            raise RuntimeError(f"{do} {', '.join(question.get('keys', [question.get('key', '')]))}: {why}")
        return answer["value"]

    def _send(self, message: Message) -> None:
        """Send a message; if the line is broken or gone, the next one says again what matters."""
        if line := self._line:
            try:
                line.send(message)
            except OSError:  # perhaps half of it has left: the thread makes a new line, and says it there
                with suppress(OSError):
                    line.socket.shutdown(socket.SHUT_RDWR)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while line := self._line:
            with suppress(Exception):  # whatever comes over it, there may be a better one
                self._talk(line)
            self._line = None
            line.socket.close()
            self._look_for_a_line()

    def _look_for_a_line(self) -> None:
        """Another line to a registry. While it looks for one, training goes on for a few rounds only."""
        with self._news:
            promised = self._calendar.bound < math.inf
            self._calendar.promise()
            self._forget_questions()
        lost = time.monotonic()
        while not self._ended.is_set():
            with suppress(OSError, ValueError):
                line = connect(self._addresses, self._token, PATIENCE / 2)
                self.alone, self.quorum = False, line.quorum
                with self._news:
                    self._line = line
                    self._forget_questions()
                    self._listen()
                    if self._calendar.newest is not None:
                        self._return(line)
                    elif self._wants_in and self._error is None:
                        self._ask_to_join()
                return
            # A change that was proposed may have been agreed on: a new registry would know.
            with self._news:
                if not promised or time.monotonic() > lost + 2 * PATIENCE:
                    self._calendar.bound = math.inf
                self.alone = True
                self._news.notify_all()
            self._ended.wait(RETRY)

    def _forget_questions(self) -> None:
        """What was asked on a line that is gone has no answer, and needs none."""
        self._proposal = None
        self._answers.clear()
        self._news.notify_all()

    def _listen(self) -> None:
        if not self.leads:
            self._send({"op": "listen"})

    def _ask_to_join(self) -> None:
        self._formers += [self.member] * bool(self.member)
        self.member = secrets.token_hex(4)
        self._calendar, self._changing, self._proposal = Calendar(self.member), True, None
        message = {"op": "join", "member": self.member, "formers": self._formers, "host": socket.gethostname()}
        self._send({**message, "facts": self._facts, "rounds": self._rounds})
        if self.leaving:
            self._send({"op": "leave"})

    def _return(self, line: Line) -> None:
        message = {"op": "return", "member": self.member, "host": socket.gethostname(), "facts": self._facts}
        bound = self._calendar.promise()
        line.send({**message, "epoch": self._calendar.newest, "bound": bound, "leaving": self.leaving})
        if self._resuming is not None:
            line.send(self._resuming)

    def _talk(self, line: Line) -> None:
        """Pass on messages, both ways, until the line breaks."""
        spoken, heard, told, has_left = 0.0, time.monotonic(), self._report, not self.leads
        with selectors.DefaultSelector() as selector:
            selector.register(line.socket, selectors.EVENT_READ)
            while not self._ended.is_set():
                now = time.monotonic()
                if now > heard + line.timeout:
                    raise TimeoutError
                if now > spoken + line.timeout / 4 or (self._report is not told and now > spoken + TICK):
                    spoken, told = now, self._report
                    line.send({"op": "beat", "round": self._calendar.begun, "report": told})
                if self.leaving and not has_left:
                    has_left = True
                    line.send({"op": "leave"})
                if selector.select(min(TICK, line.timeout / 8)):
                    line.take()
                    heard = time.monotonic()
                while messages := line.arrived():
                    with self._news:
                        self._hear(line, messages[0])
                        self._news.notify_all()

    def _hear(self, line: Line, message: Message) -> None:
        match message:
            case {"op": "dropped", "why": str(why), "again": bool(again)}:
                self._calendar = Calendar()
                self._error = Dropped(why, again)
            case {"op": "refused", "why": str(why)}:
                self._error = ValueError(why)
            case {"op": "answer", "id": int(number)}:
                if number in self._answers:
                    self._answers[number] = message
            case {"op": "propose"} if self._changing or self._calendar.coming:
                self._proposal = message  # one change at a time
            case _:
                self._gone.difference_update(message["epoch"][1] if "epoch" in message else ())  # another registry's
                self._gone.update(message.get("gone", ()))
                self._proposal = None if message["op"] in ("cancel", "epoch", "welcome") else self._proposal
                if answer := self._calendar.hear(message):
                    line.send(answer)


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _after_fork() -> None:
    """A worker that loads data must not keep the connection of a member that dies open."""
    for crew in list(_crews):
        if crew._line is not None:
            crew._line.socket.close()


os.register_at_fork(after_in_child=_after_fork)


class CrewStore(Store):
    """A torch Store over the registry; keys live for three epochs."""

    def __init__(self, crew: Crew) -> None:
        super().__init__()
        self._crew, self._seconds = weakref.proxy(crew), WAIT

    def _ask(self, do: str, seconds: float | None = None, **question: object) -> Any:
        return self._crew.ask(do, self._seconds if seconds is None else seconds, **question)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=value if isinstance(value, str) else bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", keys=[key])[0], "latin-1")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:  # what all have told may be too long for one message
            self._ask("get", None if timeout is None else timeout.total_seconds(), keys=[key])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys=list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key=key, value=amount))
