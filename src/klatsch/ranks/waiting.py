"""Messages on their way over gloo, and the threads that wait for them.

gloo can wait for a message, but it can neither be asked whether one has arrived nor given a time limit: a limit that
passes closes the connections to all ranks. So a thread per neighbour waits, and the rank waits for the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor

FOREVER = timedelta(days=3650)


def reason(error: BaseException) -> str:
    """What gloo says, without the place in its sources where it says so."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return (text.partition(".cc:")[2].partition("] ")[2] or text).partition(". ")[0]


class Transfer:
    """A message on its way."""

    def __init__(self, post: Callable[[], Any], memory: Tensor) -> None:
        self.memory = memory  # held until the message has arrived or left
        self.error: RuntimeError | None = None
        self.waited_for = False  # whether a thread has it in hand
        self._over = False
        self._done: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        try:
            self._work = post()
        except RuntimeError as error:  # the connection is closed already; it shows when this is waited for
            self._work, self.error = None, error

    def finish(self) -> None:
        """Wait for its end, however long that takes; in a thread of its own."""
        try:
            if self._work is not None:
                self._work.wait(FOREVER)
            self._done.put(self.error)
        except RuntimeError as error:
            self._done.put(error)

    def over(self) -> bool:
        """Whether it has ended well, as far as is known without waiting."""
        return self.ended(0.0) and self.error is None

    def give_up(self) -> None:
        """Close all connections if a thread waits for it in vain."""
        if self._work is not None and self.waited_for:
            with suppress(RuntimeError):
                self._work.wait(timedelta(milliseconds=1))

    def ended(self, seconds: float) -> bool:
        """Whether it has ended within so many seconds; `error` then says how."""
        if not self._over:
            try:
                self.error = self._done.get(timeout=max(seconds, 0.0))
            except queue.Empty:
                return False
            self._work, self._over = None, True
        return True


class Waiters:
    """A thread for each neighbour and direction."""

    def __init__(self) -> None:
        self._threads: dict[tuple[int, str], tuple[queue.SimpleQueue[Transfer | None], threading.Thread]] = {}

    def take(self, peer: int, side: str, transfer: Transfer) -> None:
        """Have a thread wait for a transfer."""
        if not transfer.waited_for:
            transfer.waited_for = True
            self.ready(peer, side).put(transfer)

    def ready(self, peer: int, side: str) -> queue.SimpleQueue[Transfer | None]:
        """Start the thread of a neighbour, if it is not there yet; what is put into its queue it waits for."""
        if (peer, side) not in self._threads:
            waiting: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
            name = f"klatsch {side} {peer}"
            thread = threading.Thread(target=_finish_all, args=(waiting,), name=name, daemon=True)
            self._threads[peer, side] = waiting, thread
            thread.start()
        return self._threads[peer, side][0]

    def end(self) -> None:
        """End the threads that have nothing to wait for."""
        for waiting, thread in self._threads.values():
            waiting.put(None)
            thread.join(1.0)
        self._threads.clear()


def _finish_all(waiting: queue.SimpleQueue[Transfer | None]) -> None:
    while (transfer := waiting.get()) is not None:
        transfer.finish()
