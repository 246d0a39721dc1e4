"""Where batches run: one process per core, threads, a Dask cluster, or any `concurrent.futures.Executor`."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from klatsch.extras import need
from klatsch.native import MMAP_THRESHOLD, TRIM_THRESHOLD, allocator, cores, quiet_threads
from klatsch.study.batches import Batch, Outcome, run_batch

MOST_WORKERS = 1024  # on one machine
MOST_LOSSES = 5  # how often in a row workers may die of a batch
SAFE = "what was stored is safe"
# Asks a worker to save its batch and end; ends one that is just starting.
STOP = signal.SIGUSR1 if os.name == "posix" else signal.SIGTERM

Task = Callable[..., Any]  # its last argument is a threading.Event that asks it to save itself and end


@dataclass(frozen=True)
class Workers:
    """An executor in use."""

    executor: Executor
    task: Callable[[Batch, Path | None], list[Outcome]]  # takes a batch and the path of its checkpoint
    count: int  # batches that run at the same time
    stop: Callable[[], None] = lambda: None  # tells running batches to save and end, where that is possible
    shares_files: bool = True  # whether workers see this machine's files, and so its checkpoints
    losses: tuple[type[BaseException], ...] = (BrokenExecutor,)  # errors that mean a dead worker
    check: Callable[[], None] = lambda: None  # raises if no result can arrive any more


Open = Callable[[], AbstractContextManager[Workers]]


def work(batch: Batch, checkpoint: Path | None, stop: threading.Event | None = None) -> list[Outcome]:
    """Run a batch on one thread; on a request to stop it saves itself and raises KeyboardInterrupt."""
    torch.set_num_threads(1)

    def progress(_: int) -> None:
        if stop is not None and stop.is_set():
            raise KeyboardInterrupt

    return run_batch(batch, checkpoint, progress)


@contextmanager
def processes(count: int | None = None) -> Iterator[Workers]:
    """One process per core, one thread each."""
    number = cores() if count is None else count
    with closing(Pool(work)) as pool, ThreadPoolExecutor(number, initializer=no_ctrl_c) as executor:
        yield Workers(executor, pool.work, number, pool.stop)


@contextmanager
def threads(count: int | None = None) -> Iterator[Workers]:
    """Threads of this process: they start at once, and are enough where native code does the work."""
    number = cores() if count is None else count
    stop = threading.Event()
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # MKL applies the latest setting to all threads, and more threads round differently
    try:
        with quiet_threads(number) as executor:
            yield Workers(executor, partial(work, stop=stop), number, stop.set)
    finally:
        torch.set_num_threads(usual)


@contextmanager
def dask(address: str) -> Iterator[Workers]:
    """The workers of a Dask cluster; it repeats a lost worker's batch on another."""
    need("--dask", "distributed")
    from distributed import Client
    from distributed.scheduler import KilledWorker

    with _quiet_logs("distributed", "tornado", "concurrent"):  # which run its callbacks
        try:
            client: Any = Client(address, timeout=10, set_as_default=False)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"no Dask scheduler answers at {address} ({reason}); start one (dask scheduler), or check its address"
            ) from None

        def check() -> None:  # a result that is on its way when the scheduler dies neither arrives nor raises
            if client.status != "running":
                raise ValueError(f"the Dask scheduler at {address} is gone; start one and run again: {SAFE}")

        with client:
            yield Workers(
                client.get_executor(pure=False),  # not as a context, which would wait for cancelled batches
                work,
                sum(client.nthreads().values()),
                shares_files=False,
                # KilledWorker: several workers died of this batch. CancelledError: the scheduler is gone.
                losses=(BrokenExecutor, CancelledError, KilledWorker),
                check=check,
            )


@contextmanager
def _quiet_logs(*names: str) -> Iterator[None]:
    """Silence logs of broken connections, which end in a one-line error anyway."""
    known = [logger for logger in logging.root.manager.loggerDict if logger.partition(".")[0] in names]
    usual = {logger: logger.level for logger in map(logging.getLogger, known)}
    for logger in usual:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in usual.items():
            logger.setLevel(level)


@contextmanager
def ctrl_c_kept() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt after Ctrl-C, even if that came where Python drops exceptions.

    It does so in finalizers and weak references, of which Dask has many.
    """
    heard = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        heard.set()
        signal.default_int_handler(number, frame)

    def check() -> None:
        if heard.is_set():
            raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT)  # another one than Python's is somebody else's, who handles it
    is_ours = usual is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, usual)


# --- worker processes ----------------------------------------------------------------------------------------------


class Pool:
    """Processes that may be killed at any moment: one for each thread that asks for work, and another if it dies.

    Each has a pipe of its own, whose end tells that it has died. The pool of the standard library shares pipes and
    locks among its processes: if one is killed while another one starts, or while it hands over a result, the rest
    wait forever.
    """

    def __init__(self, task: Task) -> None:
        self._task = task  # what they do, a function that can be imported
        self._stopped = False
        self._changing = threading.Lock()  # none is started unheard by `stop`
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}  # by thread
        resource_tracker.ensure_running()  # its start would let Ctrl-C through

    def work(self, *arguments: Any) -> Any:
        """What the task returns for these arguments, or raises."""
        content, thread = pickle.dumps(arguments), threading.get_ident()
        try:
            pipe = self._pipe_of(thread)
            pipe.send_bytes(content)
            answer = pipe.recv_bytes()
        except (EOFError, OSError) as loss:
            self._end(thread)
            raise BrokenExecutor("a worker is dead, or there is no room for another one") from loss
        value, error = pickle.loads(answer)
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """Ask for the end of all that runs."""
        with self._changing:
            self._stopped = True
            for process, _ in self._workers.values():
                with suppress(ProcessLookupError):  # it has ended already
                    os.kill(process.pid or 0, STOP)

    def close(self) -> None:
        """Stop all that runs, and wait until the processes are gone."""
        self.stop()
        for thread in list(self._workers):
            self._end(thread)

    def _pipe_of(self, thread: int) -> Connection:
        """The pipe to the worker of a thread, which is started if there is none."""
        with self._changing:
            if self._stopped:
                raise KeyboardInterrupt
            if thread not in self._workers:
                # Not forked: a fork would copy the locks of torch's threads in whatever state they are.
                context = mp.get_context("spawn")
                pipe, far_end = context.Pipe()
                process = context.Process(target=_serve, args=(far_end, self._task))
                try:
                    process.start()
                finally:
                    far_end.close()  # now the pipe ends with the process
                self._workers[thread] = process, pipe
            return self._workers[thread][1]

    def _end(self, thread: int) -> None:
        with self._changing:  # no signal to a process of the same number
            if thread in self._workers:
                process, pipe = self._workers.pop(thread)
                pipe.close()
                process.join()


def no_ctrl_c() -> None:
    """Let the processes that this thread starts ignore Ctrl-C, which a terminal sends to all."""
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def keep_dying(times: int) -> ValueError:
    """The error that ends a study."""
    return ValueError(
        f"worker processes died {times} times in a row, perhaps for lack of memory, or because a "
        "script lacks `if __name__ == '__main__':`, without which each worker starts it again; run "
        f"again with fewer workers (--workers), or with that line: {SAFE}"
    )


# --- in a worker process ----------------------------------------------------------------------------------------


def _serve(pipe: Connection, task: Task) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(STOP, lambda *_: stop.set())
    if libc := allocator():  # keep freed memory: taking it from the system again costs a third of the time
        libc.mallopt(MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    with suppress(EOFError, OSError):  # the driver has closed it
        while True:
            pipe.send_bytes(_answer(task, pipe.recv_bytes(), stop))
    os._exit(0)


def _end_with_driver() -> None:
    """Exit when the driver is gone: workers left behind would write the same files."""
    if driver := mp.parent_process():
        driver.join()
        os._exit(0)


def _answer(task: Task, content: bytes, stop: threading.Event) -> bytes:
    """The task's value or its error, with its traceback."""
    try:
        return pickle.dumps((task(*pickle.loads(content), stop), None))
    except BaseException as raised:
        error: BaseException = raised
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # one of a user's own kind, which does not come through
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        error.add_note(f"In a worker process:\n{traceback.format_exc()}")
        return pickle.dumps((None, error))
