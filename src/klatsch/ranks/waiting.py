"""Waiting for messages over gloo with a time limit, and telling others about it.

gloo can wait for a message, but cannot say whether one has arrived, and when a time limit passes it closes the
connections to all ranks. So a thread per neighbour waits for gloo, and the rank waits for the thread.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

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


class Notes:
    """Who is waiting: a rank that waits long says so, and its neighbours do not blame it for being late.

    When one rank stops, its neighbours wait for it, and theirs wait for them. All run out of patience at about the same
    time, and without notes the network would fall apart. Notes go through the process group's store, the only central
    thing, used only when something is wrong; if the store does not answer, there are no notes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._count = dist.get_rank(group), 0
        self._place = self._said = "in 0"  # "in" a round, or "after" one, when it asks all ranks for something
        self._read: dict[int, bytes] = {}
        self._store: Store | None = None
        with suppress(AttributeError, RuntimeError, ValueError):
            store, name = dist.distributed_c10d._get_default_store(), group.group_name
            MADE[name] += 1  # a group may have the name of one that is gone
            self._store = PrefixStore(f"klatsch/{name}/{MADE[name]}", store)
            self._store.set(str(self._rank), f"0 {self._said}")

    def waiting(self) -> None:
        """Say that this rank is alive and waiting for another."""
        self._count, self._said = self._count + 1, self._place
        text = f"{self._count} {self._said}"
        self._ask(lambda store: store.set(str(self._rank), text))

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

    def is_waiting(self, peer: int) -> bool:
        """Whether a neighbour has said since the last call that it is waiting."""
        key = str(peer)
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        if not found or found == self._read.get(peer):
            return False
        self._read[peer] = found
        return True

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
