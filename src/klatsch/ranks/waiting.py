"""Messages on their way over gloo: threads that wait for them, and notes that tell other ranks about waiting.

gloo can wait for a message, but cannot say whether one has arrived, and when a time limit passes it closes the
connection. So a thread per neighbour waits for gloo, and the rank waits for the thread.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

Answer = TypeVar("Answer")
Landed = tuple[Tensor, torch.cuda.Event]  # a copy of a message, and the event after which it is there
FOREVER = timedelta(days=3650)
ANSWER_WITHIN = 1.0  # seconds; a store on a stopped host never answers
END = -1  # instead of a number of rounds: this rank listens no more
ROUND, WHOLE = 1 << 32, 1 << 16  # what a round and a gradient in every round are in the news of a pace
LAST_WORDS = 1.0  # seconds for a neighbour to answer that it has heard this; its thread answers at once


class Transfer:
    """A message on its way from or to a neighbour."""

    after: torch.cuda.Event | None = None  # before which it must not start
    land: Callable[[], Landed] | None = None  # brings it on when it has arrived
    beside: Callable[[], None] | None = None  # waits for the part of it that goes another way

    def __init__(self, peer: int, incoming: bool, memory: Tensor, post: Callable[[], dist.Work | None]) -> None:
        self.peer, self.incoming, self._post = peer, incoming, post
        self.memory = memory  # kept alive until the message has arrived or left
        self.waited_for, self._started, self._over = False, False, False  # waited_for: by a thread
        self.error: RuntimeError | None = None
        self.ended_at = 0.0  # by the clock of this machine
        self.landed: Landed | None = None
        self.broken: Exception | None = None  # why it could not land
        self._work: dist.Work | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def start(self) -> None:
        """Post it."""
        self._started = True
        try:
            if self.after is not None:
                self.after.synchronize()
            self._work = self._post()
        except Exception as error:  # the connection is already closed, or of this rank's GPU
            self.error = error if isinstance(error, RuntimeError) else RuntimeError(str(error))

    def finish(self) -> None:
        """Wait for its end without a limit; start it first where it has not been."""
        if not self._started:
            self.start()
        if (work := self._work) is not None:
            try:
                work.wait(FOREVER)
                if self.beside is not None:
                    self.beside()
            except RuntimeError as error:
                self.error = error
            else:
                try:
                    self.landed = None if self.land is None else self.land()
                except Exception as error:  # of this rank's GPU, not of the neighbour
                    self.broken = error
        self.ended_at = time.monotonic()
        self._running.release()

    def ended(self, seconds: float) -> bool:
        """Whether it ends within some seconds; `error` is then set if it failed."""
        if not self._over and self._running.acquire(timeout=max(seconds, 0.0)):
            self._work, self._over = None, True
        return self._over


def in_background(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread that does not keep the process alive."""
    thread = threading.Thread(target=run, name=f"klatsch {name}", daemon=True)
    thread.start()
    return thread


class Waiter:
    """A thread that waits for the messages of one neighbour in one direction."""

    def __init__(self, name: str) -> None:
        self._transfers: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread = in_background(name, self._run)

    def _run(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            transfer.finish()

    def take(self, transfer: Transfer) -> None:
        """Wait for a transfer, once."""
        if not transfer.waited_for:
            transfer.waited_for = True
            self._transfers.put(transfer)

    def end(self) -> None:
        """End the thread after the last transfer."""
        self._transfers.put(None)

    def join(self) -> None:
        """Wait for its end, unless it waits for a message that never comes."""
        self._thread.join(LAST_WORDS)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()


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


class Stage:
    """Copies between one rank's GPU and the pinned memory that gloo sends from, on streams of their own.

    The rank waits for none of them: threads post what leaves once it is copied, and copy what has arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def room(self, like: Tensor) -> Tensor:
        """Pinned memory; torch does not give it to others while a copy to or from it is on its way."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy_out(self, message: Tensor, tail: int) -> Landed:
        """A copy of a message in pinned memory but for its tail, and the event after which it is there."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        pinned = self.room(message)
        with torch.cuda.stream(self._out):
            pinned[:-tail].copy_(message[:-tail], non_blocking=True)
            return pinned, self._out.record_event()

    def copy_in(self, pinned: Tensor) -> Landed:
        """The same on the GPU."""
        with torch.cuda.stream(self._in):
            return pinned.to(self.device, non_blocking=True), self._in.record_event()

    def at_hand(self, landed: Landed) -> Tensor:
        """What has landed, for the current stream, which waits for it."""
        copied, event = landed
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        copied.record_stream(stream)
        return copied


class Pace:
    """How far neighbours have come, in small messages: those of rounds only arrive when their receiver is there, too.

    They also pass on how much of its gradients each rank of the network takes.

    There are two threads per neighbour; one listens, and one tells it the newest round, leaving out those it had no
    time for. When one end closes, the other answers and closes as well, so that no connection breaks in between.
    """

    def __init__(
        self, transfer: Callable[[bool, Tensor, int], Transfer], peers: Iterable[int], rank: int, size: int
    ) -> None:
        self.done = dict.fromkeys(peers, 0)  # by neighbour that is there: the rounds that it has done
        # By rank: its rounds, times ROUND, and how much of its gradients it takes, times WHOLE.
        self._known, self._rank, self._lock = torch.full((size,), WHOLE), rank, threading.Lock()
        self._transfer = transfer
        self._news = {peer: queue.SimpleQueue[int]() for peer in self.done}
        work = [partial(run, peer) for peer in self._news for run in (self._listen, self._tell)]
        self._threads = [in_background("pace", run) for run in work]

    def tell(self, rounds: int, taken: float) -> None:
        """Tell all neighbours how many rounds this rank has done, and how much of its gradients it takes; at once."""
        with self._lock:
            self._known[self._rank] = rounds * ROUND + int(taken * WHOLE)
        self._put(rounds)

    def taken(self) -> Tensor:
        """By rank: how much of its gradients it takes, as far as this rank knows; 1 if it leaves none out."""
        return (self._known % ROUND) / WHOLE

    def _put(self, rounds: int) -> None:
        for news in self._news.values():
            news.put(rounds)

    def end(self) -> None:
        """End the threads; those of a neighbour that does not answer end when its connection closes."""
        self._put(END)
        deadline = time.monotonic() + LAST_WORDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _tell(self, peer: int) -> None:
        news, rounds = self._news[peer], 0
        while rounds != END:
            rounds = news.get()
            while rounds != END and not news.empty():
                rounds = news.get()
            told = self._known.clone() if rounds != END else torch.full_like(self._known, END)
            if not self._passes(False, told, peer):
                return

    def _listen(self, peer: int) -> None:
        box = torch.empty_like(self._known)
        while self._passes(True, box, peer) and int(box[peer]) != END:
            self.done[peer] = int(box[peer]) // ROUND
            with self._lock:
                torch.maximum(self._known, box, out=self._known)
        del self.done[peer]
        self._news[peer].put(END)

    def _passes(self, incoming: bool, memory: Tensor, peer: int) -> bool:
        """Whether a message arrives or leaves, however long it takes; not if the neighbour is gone."""
        transfer = self._transfer(incoming, memory, peer)
        transfer.finish()
        return transfer.ended(0.0) and transfer.error is None


class Note(NamedTuple):
    """What a rank says of itself: at the start, while it waits, and when it goes on without another."""

    number: int = 0  # how often it has said that it waits
    how: str = "in"  # "in" a round, or "after" one, when it asks all ranks for something
    round: int = 0
    waits_for: int | None = None  # the rank that it waits for; None where it asks all
    without: Sequence[int] = ()  # ranks that it goes on without
    gpu: str = ""  # the name of its GPU, where rounds may go from GPU to GPU


class Notes:
    """Who is waiting: a rank that waits long says so, and its neighbours do not blame it for being late.

    Else all would run out of patience with each other when one rank stops. Notes go through the store of the edges, the
    only central thing: one when a rank starts, and then one after every step of a long wait. If the store does not
    answer, there are no notes.
    """

    def __init__(self, store: Store, rank: int, gpu: str = "") -> None:
        self._store, self._rank, self._own, self._place = store, rank, Note(gpu=gpu), ("in", 0)
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: the number of its last note, and when that was new
        self.tell(str(rank), json.dumps(self._own))

    def waiting(self, peer: int | None = None) -> None:
        """Say that this rank is alive and waiting for another, or for all."""
        how, t = self._place
        self._own = self._own._replace(number=self._own.number + 1, how=how, round=t, waits_for=peer)
        self.tell(str(self._rank), json.dumps(self._own))

    def goes_on_without(self, peer: int) -> None:
        """Say that this rank has given up on another."""
        self._own = self._own._replace(waits_for=None, without=[*self._own.without, peer])
        self.tell(str(self._rank), json.dumps(self._own))

    @contextmanager
    def excuse(self, t: int, every: float) -> Iterator[None]:
        """Say that it waits every few seconds while this rank asks all others for something after round t."""
        over, self._place = threading.Event(), ("after", t)

        def tell() -> None:
            while not over.wait(every):
                self.waiting()

        thread = in_background("excuse", tell)
        try:
            yield
        finally:
            over.set()
            thread.join()
        self.go_on(t)

    def go_on(self, t: int) -> None:
        """Be in round t again; what a failed rank has said last stays true, and readable, until then."""
        self._place = ("in", t)
        if self._own.how == "after":
            self.waiting()

    def of(self, *ranks: int) -> dict[int, Note] | None:
        """The last notes of some ranks, where there are any; None if the store does not answer."""
        if (told := self.read([*map(str, ranks)])) is None:
            return None
        notes = {int(rank): Note(*json.loads(text)) for rank, text in told.items()}
        for rank, note in notes.items():
            number, since = self._heard.get(rank, (0, 0.0))
            self._heard[rank] = note.number, since if note.number == number else time.monotonic()
        return notes

    def since(self, rank: int) -> float:
        """When a rank was last found to say something new; 0 where it never was."""
        return self._heard[rank][1] if rank in self._heard else 0.0

    def leads_to_another(self, peer: int) -> bool:
        """Whether a neighbour waits, perhaps through others, for a rank that is itself not waiting.

        Somebody is about to give that one up; so there is an end to it.
        """
        chain = [self._rank]
        waits_for: int | None = peer
        while waits_for is not None and waits_for not in chain:
            chain.append(waits_for)
            note = (self.of(waits_for) or {}).get(waits_for, Note())
            waits_for = note.waits_for
        return len(chain) > 2 and waits_for is None

    def read(self, keys: list[str]) -> dict[str, bytes] | None:
        """The last texts under some keys; None if the store does not answer."""

        def known(store: Store) -> dict[str, bytes]:
            return values(store, keys if store.check(keys) else [key for key in keys if store.check([key])])

        return self._ask(known)

    def tell(self, key: str, text: str) -> None:
        """Leave a text under a key."""
        self._ask(lambda store: store.set(key, text))

    def _ask(self, question: Callable[[Store], Answer]) -> Answer | None:
        answer: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put(question(self._store))
            except (RuntimeError, ValueError):  # such as that the registry of a crew is gone: nothing to wait for
                answer.put(None)

        in_background("notes", ask)
        with suppress(queue.Empty):
            return answer.get(timeout=ANSWER_WITHIN)
        return None


def values(store: Store, keys: list[str]) -> dict[str, bytes]:
    """What a store has under some keys, which are all there."""
    with suppress(RuntimeError):  # not every store can
        return dict(zip(keys, store.multi_get(keys), strict=True))
    return {key: store.get(key) for key in keys}
