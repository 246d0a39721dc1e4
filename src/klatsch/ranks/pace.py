"""How far neighbours have come: each rank tells its neighbours the rounds it has done, in small messages of their own.

A message of a round arrives when its receiver is there, too, so a rank that falls behind learns nothing from those.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.waiting import Transfer

END = -1  # instead of a number of rounds: this rank listens no more
PATIENCE = 1.0  # seconds for a neighbour to answer that it has heard this; its thread answers at once
Made = Callable[[Callable[..., dist.Work | None], Tensor, int], Transfer]  # a transfer with a neighbour


class Pace:
    """Two threads per neighbour; one listens, and one tells it the newest round, leaving out those it had no time for.

    When one end closes, the other answers and closes as well, so that no connection breaks while something travels.
    """

    def __init__(self, made: Made, peers: Iterable[int]) -> None:
        self.done = dict.fromkeys(peers, 0)  # by neighbour that is there: the rounds that it has done
        self._made, self._running = made, dict[tuple[int, bool], Transfer]()
        self._news = {peer: queue.SimpleQueue[int]() for peer in self.done}
        work = [(run, peer) for peer in self._news for run in (self._listen, self._tell)]
        self._threads = [threading.Thread(target=run, args=(peer,), daemon=True) for run, peer in work]
        for thread in self._threads:
            thread.start()

    def tell(self, rounds: int) -> None:
        """Tell all neighbours that this rank has done some rounds; returns at once."""
        for news in self._news.values():
            news.put(rounds)

    def end(self) -> None:
        """End the threads; those of a neighbour that does not answer end when its connection closes."""
        self.tell(END)
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for transfer in self._running.values():
            transfer.give_up()

    def _tell(self, peer: int) -> None:
        news, rounds = self._news[peer], 0
        while rounds != END:
            rounds = news.get()
            while rounds != END and not news.empty():
                rounds = news.get()
            if not self._passes(dist.isend, torch.tensor([rounds]), peer):
                return

    def _listen(self, peer: int) -> None:
        box = torch.zeros(1, dtype=torch.int64)
        while self._passes(dist.irecv, box, peer) and (rounds := int(box)) != END:
            self.done[peer] = rounds
        del self.done[peer]
        self._news[peer].put(END)

    def _passes(self, move: Callable[..., dist.Work | None], memory: Tensor, peer: int) -> bool:
        """Whether a message arrives or leaves, however long it takes; not if the neighbour is gone."""
        transfer = self._running[peer, move is dist.irecv] = self._made(move, memory, peer)
        transfer.waited_for = True
        transfer.start()
        transfer.finish()
        return transfer.ended(0.0) and transfer.error is None
