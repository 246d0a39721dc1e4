"""Where batches run: one process per core, threads, a Dask cluster, or any `concurrent.futures.Executor`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from klatsch.native import cores, quiet_threads
from klatsch.study.batches import Batch, Finished, run_batch
from klatsch.study.crew import Crew, no_ctrl_c

MOST_WORKERS = 1024  # on one machine


@dataclass(frozen=True)
class Workers:
    """An executor in use."""

    executor: Executor
    task: Callable[[Batch, Path | None], Finished]  # takes a batch and the path of its checkpoint
    count: int  # batches that run at the same time
    stop: Callable[[], None] | None = None  # tells running batches to save and end; None where that is impossible
    shares_files: bool = True  # whether workers see this machine's files, and so its checkpoints
    losses: tuple[type[BaseException], ...] = (BrokenExecutor,)  # errors that mean a dead worker
    alive: Callable[[], bool] = lambda: True  # whether results can still arrive


Open = Callable[[], AbstractContextManager[Workers]]


def work(batch: Batch, checkpoint: Path | None, stop: threading.Event | None = None) -> Finished:
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
    with closing(Crew(number, work)) as crew, ThreadPoolExecutor(number, initializer=no_ctrl_c) as executor:
        yield Workers(executor, crew.work, number, crew.stop)


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
    """The workers of a Dask cluster, which repeats a lost worker's batch on another one."""
    try:
        from distributed import Client
        from distributed.scheduler import KilledWorker
    except ModuleNotFoundError:
        raise ValueError("--dask needs Dask: pip install 'klatsch[dask]'") from None
    with _quiet_logs("distributed", "tornado"):  # tornado runs its callbacks
        try:
            client: Any = Client(address, timeout=10, set_as_default=False)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"no Dask scheduler answers at {address} ({reason}); start one (dask scheduler), or check its address"
            ) from None
        with client:
            yield Workers(
                client.get_executor(pure=False),  # not as a context, which would wait for cancelled batches
                work,
                sum(client.nthreads().values()),
                shares_files=False,
                # KilledWorker: several workers died of this batch. CancelledError: the scheduler is gone.
                losses=(BrokenExecutor, CancelledError, KilledWorker),
                # A result that is on its way when the scheduler dies neither arrives nor raises.
                alive=lambda: client.status != "closed",
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
    heard: list[int] = []

    def check() -> None:
        if heard:
            raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield check  # somebody else handles it
        return

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, usual)
