"""Messages on their way over gloo: threads that wait for them, and notes that tell other ranks about waiting.

gloo can wait for a message, but cannot say whether one has arrived, and when a time limit passes it closes the
connections to all ranks. So a thread per neighbour waits for gloo, and the rank waits for the thread.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

Answer = TypeVar("Answer")
Landed = tuple[Tensor, torch.cuda.Event]  # a message on a GPU, and the event after which it is there
FOREVER = timedelta(days=3650)
ANSWER_WITHIN = 1.0  # seconds; a store on a stopped host never answers
MADE: Counter[str] = Counter()  # notes by the name of their group
END = -1  # instead of a number of rounds: this rank listens no more
LAST_WORDS = 1.0  # seconds for a neighbour to answer that it has heard this; its thread answers at once


class Transfer:
    """A message on its way from or to a neighbour; `post` starts it, and `land` brings it on when it has arrived."""

    land: Callable[[], Landed] | None = None

    def __init__(self, peer: int, incoming: bool, memory: Tensor, post: Callable[[], dist.Work | None]) -> None:
        self.peer, self.incoming = peer, incoming
        self.memory = memory  # kept alive until the message has arrived or left
        self.waited_for = False  # by a thread
        self.error: RuntimeError | None = None
        self.landed: Landed | None = None
        self.broken: Exception | None = None  # why it could not land
        self._post, self._started = post, threading.Event()
        self._work: dist.Work | None = None
        self._over, self._running = False, threading.Lock()
        self._running.acquire()

    def start(self) -> None:
        """Post it."""
        try:
            self._work = self._post()
        except Exception as error:  # the connection is already closed
            self.fail(error)
        self._started.set()

    def fail(self, error: Exception) -> None:
        """It was not posted."""
        self.error = error if isinstance(error, RuntimeError) else RuntimeError(str(error))
        self._started.set()

    def finish(self) -> None:
        """Wait for its end without a limit."""
        self._started.wait()
        if (work := self._work) is not None:
            try:
                work.wait(FOREVER)
            except RuntimeError as error:
                self.error = error
            else:
                try:
                    self.landed = None if self.land is None else self.land()
                except Exception as error:  # of this rank's GPU, not of the neighbour
                    self.broken = error
        self._running.release()

    def ended(self, seconds: float) -> bool:
        """Whether it ends within some seconds; `error` is then set if it failed."""
        if not self._over and self._running.acquire(timeout=max(seconds, 0.0)):
            self._work, self._over = None, True
        return self._over

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


class Stage:
    """Copies between one rank's GPU and the pinned memory that gloo sends from, on streams of their own.

    The rank waits for none of them. What leaves is copied when the GPU has computed it, and a thread posts it then;
    what arrives is copied by the thread that has waited for it, while the GPU computes the next gradient.
    """

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
        while (computed := self._posts.get()) is not None:
            copied, transfers = computed
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


class Pace:
    """How far neighbours have come: each rank tells its neighbours the rounds it has done, in small messages.

    A message of a round arrives when its receiver is there, too, so a rank that falls behind learns nothing from those.
    There are two threads per neighbour; one listens, and one tells it the newest round, leaving out those it had no
    time for. When one end closes, the other answers and closes as well, so that no connection breaks while something
    travels.
    """

    def __init__(self, transfer: Callable[[bool, Tensor, int], Transfer], peers: Iterable[int]) -> None:
        self.done = dict.fromkeys(peers, 0)  # by neighbour that is there: the rounds that it has done
        self._transfer, self._running = transfer, dict[tuple[int, bool], Transfer]()
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
        deadline = time.monotonic() + LAST_WORDS
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
            if not self._passes(False, torch.tensor([rounds]), peer):
                return

    def _listen(self, peer: int) -> None:
        box = torch.zeros(1, dtype=torch.int64)
        while self._passes(True, box, peer) and (rounds := int(box)) != END:
            self.done[peer] = rounds
        del self.done[peer]
        self._news[peer].put(END)

    def _passes(self, incoming: bool, memory: Tensor, peer: int) -> bool:
        """Whether a message arrives or leaves, however long it takes; not if the neighbour is gone."""
        transfer = self._running[peer, incoming] = self._transfer(incoming, memory, peer)
        transfer.waited_for = True
        transfer.start()
        transfer.finish()
        return transfer.ended(0.0) and transfer.error is None


class Note(NamedTuple):
    """What a rank says while something is wrong."""

    number: int = 0  # how often it has said that it waits
    how: str = "in"  # "in" a round, or "after" one, when it asks all ranks for something
    round: int = 0
    waits_for: int | None = None  # the rank that it waits for; None where it asks all
    without: Sequence[int] = ()  # ranks that it goes on without


class Notes:
    """Who is waiting: a rank that waits long says so, and its neighbours do not blame it for being late.

    When one rank stops, its neighbours wait for it, and theirs wait for them. All run out of patience at about the same
    time, and without notes the network would fall apart. Notes go through the process group's store, the only central
    thing, used only when something is wrong; if the store does not answer, there are no notes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._own, self._place = dist.get_rank(group), Note(), ("in", 0)
        self._numbers: dict[int, int] = {}  # by rank: of the last note that `is_waiting` saw
        self._store: Store | None = None
        with suppress(AttributeError, RuntimeError, ValueError):
            store, name = dist.distributed_c10d._get_default_store(), group.group_name
            MADE[name] += 1  # a group may have the name of one that is gone
            self._store = PrefixStore(f"klatsch/{name}/{MADE[name]}", store)
            self._store.set(str(self._rank), json.dumps(self._own))

    def waiting(self, peer: int | None = None) -> None:
        """Say that this rank is alive and waiting for another, or for all."""
        how, t = self._place
        self._own = Note(self._own.number + 1, how, t, peer, self._own.without)
        self.tell(str(self._rank), json.dumps(self._own))

    def goes_on_without(self, peer: int) -> None:
        """Say that this rank has given up on another."""
        self._own = self._own._replace(waits_for=None, without=[*self._own.without, peer])
        self.tell(str(self._rank), json.dumps(self._own))

    @contextmanager
    def excuse(self, t: int, every: float) -> Iterator[None]:
        """Say so every few seconds while this rank asks all others for something after round t."""
        over, self._place = threading.Event(), ("after", t)

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
        self._place = ("in", t)
        if self._own.how == "after":
            self.waiting()

    def of(self, *ranks: int) -> dict[int, Note] | None:
        """The last notes of some ranks, where there are any; None if the store does not answer."""
        told = self.read([*map(str, ranks)])
        return None if told is None else {int(rank): Note(*json.loads(text)) for rank, text in told.items()}

    def is_waiting(self, peer: int) -> bool:
        """Whether a neighbour has said since the last call that it is waiting."""
        note = (self.of(peer) or {}).get(peer)
        if note is None or note.number == self._numbers.get(peer, 0):
            return False
        self._numbers[peer] = note.number
        return True

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

        def looked_up(store: Store) -> dict[str, bytes]:
            known = keys if store.check(keys) else [key for key in keys if store.check([key])]
            with suppress(RuntimeError):  # not every store can
                return dict(zip(known, store.multi_get(known), strict=True))
            return {key: store.get(key) for key in known}

        return self._ask(looked_up)

    def tell(self, key: str, text: str) -> None:
        """Leave a text under a key."""
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
