"""Running a study: what the store lacks is packed into batches, handed to workers, and stored as it comes back."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from klatsch import problems
from klatsch.engine.checks import check_place
from klatsch.study import workers
from klatsch.study.batches import Batch, Finished, pack
from klatsch.study.cases import Case, LeftOut, expand
from klatsch.study.spec import Study
from klatsch.study.store import Origin, Store
from klatsch.study.summary import Row, summarize
from klatsch.study.workers import Open, Workers

STALE = 7 * 86400.0  # seconds after which a checkpoint that nobody went on from is nobody's
MOST_LOSSES = 5  # times in a row that workers may die without a batch done in between


@dataclass
class Progress:
    """How far a study is."""

    batches: int
    runs: int
    work: int
    began: float
    workers: int = 0
    batches_done: int = 0
    runs_done: int = 0
    work_done: int = 0
    best: tuple[float, Case] | None = None
    first: tuple[float, int] | None = None  # when the first batch came back, and its work

    @property
    def seconds(self) -> float:
        """Time so far."""
        return time.monotonic() - self.began

    @property
    def runs_per_second(self) -> float:
        """Runs finished per second."""
        return self.runs_done / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Time left at the pace since the first batch came back, once every worker has done one."""
        if self.first is None or self.batches_done <= min(max(self.workers, 1), self.batches - 1):
            return None
        since, work = self.first  # before that, workers were starting
        return (time.monotonic() - since) * (self.work - self.work_done) / max(self.work_done - work, 1)


Told = Callable[[Progress], None]


def execute(
    cases: list[Case],
    store: Store,
    *,
    device: str = "cpu",
    executor: Executor | Open | None = None,
    told: Told | None = None,
) -> Progress:
    """Do every run that the store does not hold yet.

    Args:
        cases: the runs, of `expand(study)`.
        store: where results go; only this process writes to it.
        device: "cpu", "cuda", ...
        executor: what runs the batches: any `concurrent.futures.Executor`, or a function such as `workers.processes`
            that opens one, and again if its workers die. By default one process per core, or a thread for a GPU.
        told: is told how far it is, at the beginning and after every batch.

    Returns:
        What was done.

    Raises:
        ValueError: a batch failed, workers keep dying, or the store cannot be written; what was stored stays.
        KeyboardInterrupt: running batches have saved themselves and go on from there next time.
    """
    done = store.done()
    todo = [left for batch in pack(cases, device) for left in batch.without(done) if left.networks]
    todo.sort(key=lambda batch: -batch.work)  # the largest first, so that none is left for the end
    progress = Progress(len(todo), sum(len(b.cases) for b in todo), sum(b.work for b in todo), began=time.monotonic())
    tell = told or (lambda progress: None)
    tell(progress)
    losses = 0
    while todo:
        before = progress.batches_done
        with _opened(executor, device) as crew:
            progress.workers = crew.count
            try:
                todo = _run(todo, crew, store, progress, tell)
            except BaseException:  # Ctrl-C, or a batch that failed: the others save themselves and end
                if crew.stop is not None:
                    crew.stop.set()
                raise
        if todo:
            losses = losses + 1 if progress.batches_done == before else 1
            if losses > MOST_LOSSES or isinstance(executor, Executor):
                raise ValueError(
                    f"worker processes died {losses} times in a row, perhaps for lack of memory; "
                    "run again with fewer workers (--workers): what was stored is safe"
                )
    sweep(store)
    return progress


@dataclass(frozen=True)
class StudyResult:
    """What a study found, and what was left out with the reason."""

    rows: list[Row]
    left_out: list[LeftOut]
    progress: Progress


def run_study(
    study: Study,
    store: Store | str | Path = ":memory:",
    *,
    executor: Executor | Open | None = None,
    told: Told | None = None,
    expanded: tuple[list[Case], list[LeftOut]] | None = None,
    origin: Origin | None = None,
) -> StudyResult:
    """Run what is missing of a study, and choose the learning rates.

    Args:
        study: of `load(file)`, or made in Python.
        store: a store, or the name of its file; by default results are kept in memory only.
        executor: see `execute`.
        told: see `execute`.
        expanded: what `expand(study)` gave, where that was done already.
        origin: how it was asked for, to be kept in the store for reports.
    """
    if not isinstance(study, Study):
        raise ValueError(f"study is a {type(study).__name__}; make one with study.parse({{...}}) or study.load(file)")
    if not isinstance(store, Store):
        with Store(store) as opened:
            return run_study(study, opened, executor=executor, told=told, expanded=expanded, origin=origin)
    cases, left_out = expanded or expand(study)
    # Before it takes an old study's place. What is done can be looked at without the device; others have their own.
    if executor is None and not {case.key for case in cases} <= store.done():
        check_place(getattr(torch, study.dtype), study.device)
        problems.make_ready(study.problem.name)
    store.remember(study, origin or Origin())
    progress = execute(cases, store, device=study.device, executor=executor, told=told)
    return StudyResult(summarize([(case.key, case) for case in cases], store), left_out, progress)


def _run(todo: list[Batch], crew: Workers, store: Store, progress: Progress, tell: Told) -> list[Batch]:
    """Run batches; gives back those whose worker died."""
    running: dict[Future[Finished], Batch] = {}
    try:
        return _collect(todo, running, crew, store, progress, tell)
    finally:
        for future in running:  # what was not begun need not be
            future.cancel()


def _collect(
    todo: list[Batch],
    running: dict[Future[Finished], Batch],
    crew: Workers,
    store: Store,
    progress: Progress,
    tell: Told,
) -> list[Batch]:
    lost: list[Batch] = []
    for batch in todo:
        try:
            running[crew.executor.submit(crew.task, batch, checkpoint(store, batch) if crew.shares_files else None)] = (
                batch
            )
        except crew.losses:
            lost.append(batch)
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            batch = running.pop(future)
            try:
                outcome = future.result()
            except crew.losses:
                lost.append(batch)
                continue
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error):
                    raise
                first = batch.cases[0]
                raise ValueError(
                    f"{first.label} on {first.graph_label} with up to {max(c.nodes for c in batch.cases)} nodes and "
                    f"{len(batch.networks[0])} columns does not fit into memory; use fewer workers, or smaller grids"
                ) from None
            store.save(batch, outcome)
            if (file := checkpoint(store, batch)) is not None:
                file.unlink(missing_ok=True)
            _count(progress, batch, outcome)
            tell(progress)
    return lost


def checkpoint(store: Store, batch: Batch) -> Path | None:
    """The file of a batch in progress, beside the store; None for a store in memory."""
    return None if store.path == ":memory:" else Path(f"{store.path}-{batch.key}.safetensors")


def sweep(store: Store) -> None:
    """Remove what batches left behind that were begun, killed, and packed differently since."""
    if store.path == ":memory:":
        return
    place = Path(store.path)
    name = glob.escape(place.name)
    for pattern in (f"{name}-*.safetensors", f".{name}-*.safetensors.*"):  # the second: killed while it was written
        for file in place.parent.glob(pattern):
            with suppress(FileNotFoundError):  # another process was faster
                if time.time() - file.stat().st_mtime > STALE:
                    file.unlink()


def _count(progress: Progress, batch: Batch, outcome: Finished) -> None:
    progress.batches_done += 1
    progress.runs_done += len(batch.cases)
    progress.work_done += batch.work
    progress.first = progress.first or (time.monotonic(), batch.work)
    headline = problems.headline(batch.cases[0].problem)
    finals = outcome.metrics.get(headline.metric)
    if finals is not None:
        sign = -1.0 if headline.largest else 1.0
        k = int(np.argmin(sign * finals[-1]))
        if progress.best is None or sign * finals[-1, k] < sign * progress.best[0]:
            progress.best = float(finals[-1, k]), batch.cases[k]


def _opened(executor: Executor | Open | None, device: str) -> Any:
    if isinstance(executor, Executor):
        return workers.given(executor)
    if executor is not None:
        return executor()
    return workers.processes() if device == "cpu" else workers.threads(1)
