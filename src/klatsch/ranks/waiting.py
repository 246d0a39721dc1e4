"""Waiting for messages over gloo, with a limit, and telling others about it.

gloo can wait for a message, but it can neither say whether one has arrived nor keep a time limit: when a limit passes,
it closes the connections to all ranks. So a thread per neighbour waits for gloo, and the rank waits for the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

Queue: TypeAlias = "queue.SimpleQueue[Transfer | None]"
FOREVER = timedelta(days=3650)
ANSWER_WITHIN = 1.0  # seconds; a store whose host has stopped would never answer


class Transfer:
    """A message on its way.

    Args:
        peer: the neighbour.
        incoming: whether it comes from there, or goes there.
        memory: held until the message has arrived or left.
        thread: the queue of the thread that waits for it if asked to.
        post: starts it.
    """

    def __init__(
        self, peer: int, incoming: bool, memory: Tensor, thread: Queue, post: Callable[[], dist.Work | None]
    ) -> None:
        self.peer, self.incoming, self.memory = peer, incoming, memory
        self.error: RuntimeError | None = None
        self.waited_for, self._over = False, False
        self._thread = thread
        self._done: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._work: dist.Work | None = None
        try:
            self._work = post()
        except RuntimeError as error:  # the connection is already closed, which whoever waits will see
            self.error = error

    def finish(self) -> None:
        """Wait for its end, however long that takes."""
        try:
            if self._work is not None:
                self._work.wait(FOREVER)
            self._done.put(self.error)
        except RuntimeError as error:
            self._done.put(error)

    def finish_in_thread(self) -> None:
        """Have its thread wait for the end, unless it does so already."""
        if not self.waited_for:
            self.waited_for = True
            self._thread.put(self)

    def ended(self, seconds: float) -> bool:
        """Whether it ends within some seconds; `error` then says how."""
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


class Threads:
    """A thread for each neighbour and direction, which waits for transfers."""

    def __init__(self) -> None:
        self._threads: dict[tuple[int, bool], tuple[Queue, threading.Thread]] = {}

    def queue(self, peer: int, incoming: bool) -> Queue:
        """What the thread of a neighbour waits for; it starts here unless it runs already."""
        if (peer, incoming) not in self._threads:
            waiting: Queue = queue.SimpleQueue()
            name = f"klatsch {'source' if incoming else 'target'} {peer}"
            thread = threading.Thread(target=_finish_all, args=(waiting,), name=name, daemon=True)
            self._threads[peer, incoming] = waiting, thread
            thread.start()
        return self._threads[peer, incoming][0]

    def end(self) -> None:
        """End the threads that have nothing to wait for."""
        for waiting, thread in self._threads.values():
            waiting.put(None)
            thread.join(1.0)
        self._threads.clear()


def _finish_all(waiting: Queue) -> None:
    while (transfer := waiting.get()) is not None:
        transfer.finish()


class Notes:
    """Who is waiting: a rank that waits long says so, and its neighbours do not blame it for being late.

    When one rank stops, its neighbours wait for it, and theirs wait for them. All run out of patience at about the same
    time, and without notes the network would fall apart. They go through the process group's store: the only use of
    anything central, and only while something is wrong. Where the store does not answer, there are no notes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._count = dist.get_rank(group), 0
        self._read: dict[int, bytes] = {}
        self._store: Store | None = None
        with suppress(AttributeError, RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            self._store = PrefixStore(f"klatsch/{group.group_name}", store)

    def waiting(self) -> None:
        """Say that this rank is alive and waits for another one."""
        self._count += 1
        text = str(self._count)
        self._ask(lambda store: store.set(str(self._rank), text))

    def is_waiting(self, peer: int) -> bool:
        """Whether a neighbour has said since the last question that it waits itself."""
        key = str(peer)
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        if not found or found == self._read.get(peer):
            return False
        self._read[peer] = found
        return True

    def _ask(self, question: Callable[[Store], bytes | None]) -> bytes | None:
        if (store := self._store) is None:
            return None
        answer: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

        def ask() -> None:
            with suppress(RuntimeError, ValueError):
                answer.put(question(store))

        threading.Thread(target=ask, name="klatsch notes", daemon=True).start()
        with suppress(queue.Empty):
            return answer.get(timeout=ANSWER_WITHIN)
        return None
