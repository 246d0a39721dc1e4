"""Messages between a GPU and gloo, which sends from the machine's memory: copies on streams of their own.

The rank waits for none of them. What leaves is copied when the GPU has computed it, and a thread hands it to gloo then;
what arrives is copied by the thread that has waited for it, while the GPU computes the next gradient.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from klatsch.ranks.waiting import Landed, Transfer


class Stage:
    """The streams of one rank between its GPU and pinned memory, and the thread that posts what leaves."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._ends = device, False
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._posts: queue.SimpleQueue[tuple[torch.cuda.Event, Sequence[Transfer]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._post, name="klatsch stage", daemon=True)
        self._thread.start()

    def room(self, like: Tensor) -> Tensor:
        """Pinned memory; torch does not give it to others while a copy to or from it is on its way."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy_out(self, message: Tensor, tail: int) -> tuple[Tensor, torch.cuda.Event]:
        """A copy of a message in pinned memory but for its tail, and the event after which it is there."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        pinned = self.room(message)
        with torch.cuda.stream(self._out):
            pinned[:-tail].copy_(message[:-tail], non_blocking=True)
            return pinned, self._out.record_event()

    def post(self, copied: torch.cuda.Event, transfers: Sequence[Transfer]) -> None:
        """Start transfers after an event, in order."""
        self._posts.put((copied, transfers))

    def copy_in(self, pinned: Tensor) -> Landed:
        """The same on the GPU, and the event after which it is there."""
        with torch.cuda.stream(self._in):
            return pinned.to(self.device, non_blocking=True), self._in.record_event()

    def at_hand(self, landed: Landed) -> Tensor:
        """What has landed, for the current stream, which waits for it."""
        copied, event = landed
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        copied.record_stream(stream)
        return copied

    def end(self) -> None:
        """End the thread; what is not posted by now will not be."""
        self._ends = True
        self._posts.put(None)
        self._thread.join(1.0)

    def _post(self) -> None:
        while (some := self._posts.get()) is not None:
            copied, transfers = some
            try:
                if self._ends:
                    raise RuntimeError("the rank has ended before this message was computed")
                copied.synchronize()
            except Exception as error:  # of this rank's GPU
                for transfer in transfers:
                    transfer.fail(error)
            else:
                for transfer in transfers:
                    transfer.start()
