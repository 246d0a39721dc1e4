"""Waiting for messages over gloo with a time limit, and telling others about it.

gloo can wait for a message, but cannot say whether one has arrived, and when a time limit passes it closes the
connections to all ranks. So a thread per neighbour waits for gloo, and the rank waits for the thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

Answer = TypeVar("Answer")
FOREVER = timedelta(days=3650)
Landed = tuple[Tensor, torch.cuda.Event]  # a message on a GPU, and the event after which it is there
MADE: Counter[str] = Counter()  # notes by the name of their group
ANSWER_WITHIN = 1.0  # seconds; a store on a stopped host never answers


class Transfer:
    """A message on its way from or to a neighbour; `post` starts it, and `land` brings it on when it has arrived."""

    def __init__(
        self,
        peer: int,
        incoming: bool,
        memory: Tensor,
        post: Callable[[], dist.Work | None],
        land: Callable[[Tensor], Landed] | None = None,
    ) -> None:
        self.peer, self.incoming = peer, incoming
        self.memory = memory  # kept alive until the message has arrived or left
        self.error: RuntimeError | None = None
        self.waited_for, self._over = False, False  # waited_for: by a thread
        self._done: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._work: dist.Work | None = None
        self.landed: Landed | None = None
        self.broken: Exception | None = None  # why it could not land
        self._post, self._land, self._started = post, land, threading.Event()

    def start(self) -> None:
        """Post it."""
        try:
            self._work = self._post()
        except Exception as error:  # the connection is already closed; waiting for it will raise
            self.fail(error)
        self._started.set()

    def fail(self, error: Exception) -> None:
        """It was not posted."""
        self.error = error if isinstance(error, RuntimeError) else RuntimeError(str(error))
        self._started.set()

    def finish(self) -> None:
        """Wait for its end without a limit."""
        self._started.wait()
        try:
            if self._work is not None:
                self._work.wait(FOREVER)
        except RuntimeError as error:
            self._done.put(error)
            return
        if self._work is not None and self._land is not None:
            try:
                self.landed = self._land(self.memory)
            except Exception as error:  # of this rank's GPU, not of the neighbour
                self.broken = error
        self._done.put(self.error)

    def ended(self, seconds: float) -> bool:
        """Whether it ends within some seconds; `error` is then set if it failed."""
        if not self._over:
            try:
                self.error = self._done.get(timeout=max(seconds, 0.0))
            except queue.Empty:
                return False
            self._work, self._over = None, True
        return True

    def give_up(self) -> None:
        """Close all connections if a thread waits for it in vain."""
        if self._work is not None and self.waited_for:
            with suppress(RuntimeError):
                self._work.wait(timedelta(milliseconds=1))


class Waiter(threading.Thread):
    """A thread that waits for the messages of one neighbour in one direction."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._transfers: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            transfer.finish()

    def take(self, transfer: Transfer) -> None:
        """Wait for a transfer, once."""
        if not transfer.waited_for:
            transfer.waited_for = True
            self._transfers.put(transfer)

    def end(self) -> None:
        """End the thread, unless it waits for a message that never comes."""
        self._transfers.put(None)
        self.join(1.0)


class Stopwatch:
    """Seconds of waiting, without those in which this rank was itself stopped: its neighbours may have been in time.

    It is read after every step of waiting and a few questions to the store; what took longer was no waiting.
    """

    def __init__(self, step: float) -> None:
        self.step, self._seconds, self._last = step, 0.0, time.monotonic()

    def read(self) -> float:
        """The seconds until now."""
        passed = time.monotonic() - self._last
        self._seconds += passed if passed < 2 * self.step + 4 * ANSWER_WITHIN else self.step
        self._last += passed
        return self._seconds


class Note(NamedTuple):
    """What a rank says while something is wrong."""

    number: int  # how often it has said that it waits
    how: str  # "in" a round, or "after" one
    round: int
    waits_for: int | None  # the rank that it waits for; None where it asks all
    without: list[int]  # ranks that it goes on without

    @classmethod
    def read(cls, text: bytes) -> Note:
        """A note from its text."""
        number, how, t, peer, without = text.decode().split()
        gone = [] if without == "-" else [int(node) for node in without.split(",")]
        return cls(int(number), how, int(t), None if peer == "-" else int(peer), gone)


class Notes:
    """Who is waiting: a rank that waits long says so, and its neighbours do not blame it for being late.

    When one rank stops, its neighbours wait for it, and theirs wait for them. All run out of patience at about the same
    time, and without notes the network would fall apart. Notes go through the process group's store, the only central
    thing, used only when something is wrong; if the store does not answer, there are no notes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._count = dist.get_rank(group), 0
        self._place = self._said = "in 0"  # "in" a round, or "after" one, when it asks all ranks for something
        self._without: list[int] = []
        self._read: dict[int, int] = {}
        self._store: Store | None = None
        with suppress(AttributeError, RuntimeError, ValueError):
            store, name = dist.distributed_c10d._get_default_store(), group.group_name
            MADE[name] += 1  # a group may have the name of one that is gone
            self._store = PrefixStore(f"klatsch/{name}/{MADE[name]}", store)
            self._store.set(str(self._rank), self._text(None))

    def waiting(self, peer: int | None = None) -> None:
        """Say that this rank is alive and waiting for another, or for all."""
        self._count, self._said = self._count + 1, self._place
        self._say(peer)

    def goes_on_without(self, peer: int) -> None:
        """Say that this rank has given up on another."""
        self._without.append(peer)
        self._say(None)

    def _say(self, peer: int | None) -> None:
        text = self._text(peer)
        self._ask(lambda store: store.set(str(self._rank), text))

    def _text(self, peer: int | None) -> str:
        return f"{self._count} {self._said} {'-' if peer is None else peer} {','.join(map(str, self._without)) or '-'}"

    @contextmanager
    def excuse(self, t: int, every: float) -> Iterator[None]:
        """Say so every few seconds while this rank asks all others for something after round t."""
        over, self._place = threading.Event(), f"after {t}"

        def tell() -> None:
            while not over.wait(every):
                self.waiting()

        thread = threading.Thread(target=tell, name="klatsch excuse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        self.go_on(t)

    def go_on(self, t: int) -> None:
        """Be in round t again; what a failed rank has said last stays true, and readable, until then."""
        self._place = f"in {t}"
        if self._said.startswith("after"):
            self.waiting()

    def of(self, peer: int) -> Note | None:
        """The last note of a rank, if there is one."""
        told = self.read([str(peer)])
        return Note.read(told[str(peer)]) if told else None

    def is_waiting(self, peer: int) -> bool:
        """Whether a neighbour has said since the last call that it is waiting."""
        if (note := self.of(peer)) is None or note.number == self._read.get(peer, 0):
            return False
        self._read[peer] = note.number
        return True

    def leads_to_another(self, peer: int) -> bool:
        """Whether a neighbour waits, perhaps through others, for a rank that is itself not waiting.

        Somebody is about to give that one up; so there is an end to it.
        """
        chain, note = [self._rank, peer], self.of(peer)
        while note is not None and note.waits_for is not None and note.waits_for not in chain:
            chain.append(note.waits_for)
            note = self.of(chain[-1])
        return len(chain) > 2 and (note is None or note.waits_for is None)

    def read(self, keys: list[str]) -> dict[str, bytes] | None:
        """The last notes of some ranks, or else; None if the store does not answer."""

        def looked_up(store: Store) -> dict[str, bytes]:
            there = keys if store.check(keys) else [key for key in keys if store.check([key])]
            with suppress(RuntimeError):  # not every store can
                return dict(zip(there, store.multi_get(there), strict=True))
            return {key: store.get(key) for key in there}

        return self._ask(looked_up)

    def tell(self, key: str, text: str) -> None:
        """Leave a note of another kind."""
        self._ask(lambda store: store.set(key, text))

    def _ask(self, question: Callable[[Store], Answer]) -> Answer | None:
        if (store := self._store) is None:
            return None
        answer: queue.SimpleQueue[Answer] = queue.SimpleQueue()

        def ask() -> None:
            with suppress(RuntimeError, ValueError):
                answer.put(question(store))

        threading.Thread(target=ask, name="klatsch notes", daemon=True).start()
        with suppress(queue.Empty):
            return answer.get(timeout=ANSWER_WITHIN)
        return None
