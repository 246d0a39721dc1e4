"""Who is waiting: a rank that waits long says so, lest those who wait for it take it for the one that is late.

When one rank stops, its neighbours wait for it, and theirs wait for them. All run out of patience at about the same
time, and without a word the network would fall apart. The notes go through the store of the process group; this is the
only use of anything central, and only while something is wrong. Where the store does not answer, there are no notes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

ANSWER_WITHIN = 1.0  # seconds; a store whose host has stopped would never answer


class Notes:
    """The notes of one rank, and those that it has read of others."""

    def __init__(self, group: Any) -> None:
        self._rank = dist.get_rank(group)
        self._count = 0
        self._read: dict[int, str] = {}
        self._store: Any = None
        with suppress(AttributeError, RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.distributed_c10d.PrefixStore(f"klatsch/{group.group_name}", store)

    def waiting(self) -> None:
        """Say that this rank is alive and waits for another one."""
        self._count += 1
        text = str(self._count)
        self._ask(lambda: self._store.set(str(self._rank), text))

    def is_waiting(self, peer: int) -> bool:
        """Whether a neighbour has said since the last question that it waits itself."""
        found = self._ask(lambda: self._store.get(str(peer)).decode() if self._store.check([str(peer)]) else "")
        if not found or found == self._read.get(peer):
            return False
        self._read[peer] = found
        return True

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self._store is None:
            return None
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            with suppress(RuntimeError, ValueError):
                answer.put(question())

        threading.Thread(target=ask, name="klatsch notes", daemon=True).start()
        with suppress(queue.Empty):
            return answer.get(timeout=ANSWER_WITHIN)
        return None
