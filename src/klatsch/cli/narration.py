"""The progress of a study: a bar on a terminal, a few lines in the log of a long one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from klatsch.cli import terminal

if TYPE_CHECKING:
    from klatsch.study.execute import Progress, Told
    from klatsch.study.store import Store

LONG = 60.0  # seconds from which a study is worth a line in a log
TENTHS = 10  # lines in the log of a long study


@contextmanager
def shown() -> Iterator[Told]:
    """A function to call with the progress of a study."""
    printed: list[int] = []

    def log(progress: Progress) -> None:
        left = progress.seconds_left
        if left is None or progress.seconds + left < LONG:
            return
        tenth = TENTHS * progress.work_done // max(progress.work, 1)
        if not printed:
            total = words(progress.seconds + left)
            print(f"projected: {total} for {progress.runs:,} runs in {progress.batches:,} batches", file=sys.stderr)
        if tenth not in printed:
            print(facts(progress), file=sys.stderr, flush=True)
            printed.append(tenth)

    with terminal.bar() as bar:
        yield log if bar is None else lambda progress: bar(facts(progress), progress.work_done / max(progress.work, 1))


@contextmanager
def interruptible(store: Store) -> Iterator[None]:
    """On Ctrl-C, say what is saved and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if store.path != ":memory:":
            done = len(store.done())
            print(f"stopped; {store.path} holds {done:,} runs; the same command continues from here", file=sys.stderr)
        raise


def facts(progress: Progress) -> str:
    """Batches done, runs per second, time left, best so far."""
    parts = [f"{progress.batches_done}/{progress.batches} batches"]
    if progress.runs_done:
        parts.append(f"{progress.runs_per_second:.3g} runs/s")
    if (left := progress.seconds_left) is not None and left > 0:
        parts.append(f"{words(left)} left")
    if progress.elsewhere:
        parts.append(f"waiting for {progress.elsewhere} that other processes run")
    if progress.best is not None:
        error, case = progress.best
        parts.append(f"best {error:.2g} ({case.label}, {case.graph_label}, M={case.nodes}, lr {case.lr:g})")
    return ", ".join(parts)


def words(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
