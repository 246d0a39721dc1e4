"""Where batches run: a process per core, a thread beside the GPU, or a Dask cluster.

Each is a function that gives a `concurrent.futures.Executor`; any other executor does as well.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

import torch

from klatsch.simulation.native import cores, quiet_threads
from klatsch.study.batches import Batch, Finished, run_batch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
MOST_WORKERS = 1024  # of one machine


class Stop(Protocol):
    """A wish to stop, seen by all workers: an Event of threads or of processes."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...

    def set(self) -> None:
        """Ask all to stop."""
        ...


@dataclass(frozen=True)
class Workers:
    """An executor in use.

    Args:
        executor: takes the batches.
        task: what it is given with a batch and the name of its checkpoint.
        count: how many run at a time, for the projection of the time left.
        stop: how to ask running batches to save themselves and end; None where they cannot be asked.
        shares_files: whether workers see the files of this machine, so that checkpoints are of use.
        losses: what a batch raises whose worker is gone.
        alive: whether anybody is still there to bring results.
    """

    executor: Executor
    task: Callable[[Batch, Path | None], Finished]
    count: int
    stop: Stop | None = None
    shares_files: bool = True
    losses: tuple[type[BaseException], ...] = (BrokenExecutor,)
    alive: Callable[[], bool] = lambda: True


Open = Callable[[], Any]  # gives a context manager of Workers

_inherited: Stop | None = None  # in a worker process: the wish of the driver


def work(batch: Batch, checkpoint: Path | None, stop: Stop | None = None) -> Finished:
    """Run a batch in a worker; a wish to stop is an interrupt, before which the run saves itself."""
    wish = stop if stop is not None else _inherited

    def progress(_: int) -> None:
        if wish is not None and wish.is_set():
            raise KeyboardInterrupt

    return run_batch(batch, checkpoint, progress)


@contextmanager
def processes(count: int | None = None) -> Iterator[Workers]:
    """One process per core, one thread each."""
    number = cores() if count is None else count
    # Fresh processes: a fork would copy the locks of torch's threads in whatever state they are.
    context = mp.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(number, context, initializer=_begin, initargs=(stop,)) as executor:
        with _ctrl_c_held_back():
            for _ in range(number):
                executor.submit(int)  # starts a worker as long as none is idle
        yield Workers(executor, work, number, stop)


@contextmanager
def threads(count: int | None = None) -> Iterator[Workers]:
    """Threads of this process: no start-up time, and enough where native code does the work."""
    number = cores() if count is None else count
    stop = threading.Event()
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # also here: MKL takes the latest for all threads, and with several it rounds as it likes
    try:
        with quiet_threads(number) as executor:
            yield Workers(executor, partial(work, stop=stop), number, stop)
    finally:
        torch.set_num_threads(usual)


@contextmanager
def dask(address: str) -> Iterator[Workers]:
    """The workers of a Dask cluster; the scheduler gives a lost worker's batch to another one.

    Raises:
        ValueError: Dask is not installed, or no scheduler answers.
    """
    with _client(address) as (client, killed):
        executor = client.get_executor(pure=False)  # not as a context: leaving it would wait for what is cancelled
        count = sum(client.nthreads().values())
        # The scheduler gives a batch up that several workers died of, and cancels all when it is gone itself.
        losses = (BrokenExecutor, CancelledError, killed)
        # A result that was on its way when the scheduler died never comes, and raises nothing either.
        alive = lambda: client.status != "closed"  # noqa: E731
        yield Workers(executor, single_threaded, count, shares_files=False, losses=losses, alive=alive)


def check_dask(address: str) -> None:
    """See that a Dask cluster answers.

    Raises:
        ValueError: Dask is not installed, or no scheduler answers.
    """
    with _client(address):
        pass


@contextmanager
def _client(address: str) -> Iterator[tuple[Any, type[BaseException]]]:
    """A connection to a Dask scheduler, and what it raises for workers that died."""
    try:
        from distributed import Client
        from distributed.scheduler import KilledWorker
    except ModuleNotFoundError:
        raise ValueError("--dask needs Dask: pip install 'klatsch[dask]'") from None
    with _quiet_logs("distributed"):
        try:
            client: Any = Client(address, timeout=10, set_as_default=False)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"no Dask scheduler answers at {address} ({reason}); start one with dask scheduler, or see its address"
            ) from None
        with client:
            yield client, KilledWorker


@contextmanager
def _quiet_logs(name: str) -> Iterator[None]:
    """Say nothing of connections that broke: that is said in one line, by whom it stops."""
    known = [other for other in logging.root.manager.loggerDict if other == name or other.startswith(f"{name}.")]
    usual = {other: logging.getLogger(other).level for other in known}
    for other in known:
        logging.getLogger(other).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for other, level in usual.items():
            logging.getLogger(other).setLevel(level)


@contextmanager
def given(executor: Executor) -> Iterator[Workers]:
    """An executor of somebody else's, which stays open; nothing is known of its workers."""
    yield Workers(executor, single_threaded, 1, shares_files=False)


def single_threaded(batch: Batch, checkpoint: Path | None) -> Finished:
    """Run a batch where nobody has set the number of threads: somebody else's worker."""
    torch.set_num_threads(1)
    return run_batch(batch, checkpoint)


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Processes that are started here do not hear Ctrl-C, which a terminal sends to all; this one hears it afterwards.

    The driver alone decides what it means, and says so through `stop`.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    # The mask is what children inherit. It keeps the signal from this thread alone: any other one may still take it,
    # and Python then runs the handler here, in the middle of a start.
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what was held back arrives now, with those that were heard
        signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _begin(stop: Stop) -> None:
    """Set up a worker process."""
    global _inherited
    _inherited = stop
    torch.set_num_threads(1)
    _keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also in a worker that was started later
    threading.Thread(target=_end_with_the_driver, daemon=True).start()


def _keep_memory() -> None:
    """Have the C library keep memory that is freed: to take it from the system again costs a third of the time."""
    with suppress(OSError, AttributeError):  # not the GNU library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def _end_with_the_driver() -> None:
    """A driver that was killed must not leave workers behind: they would wait for ever, or work on the same files."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
