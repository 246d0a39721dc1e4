"""Running a study: missing runs are packed into batches, handed to workers, and stored as they come back."""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from pathlib import Path

import torch

from klatsch import problems
from klatsch.own import explained, is_own
from klatsch.simulation.simulator import check_place
from klatsch.study import workers
from klatsch.study.batches import DTYPES, Batch, Outcome, pack, quick
from klatsch.study.cases import Case, LeftOut, Remembered, dim_of, expand
from klatsch.study.choices import Row, screened
from klatsch.study.spec import Study
from klatsch.study.store import Store
from klatsch.study.workers import MOST_LOSSES, Open, Workers, keep_dying
from klatsch.watch.events import Given, Log, sinks_of
from klatsch.wire.rehearsal import Rehearsal

BEAT = 5.0  # seconds between two signs of life
STALE = 7 * 86400.0  # seconds before an unfinished checkpoint counts as abandoned
POLL = 0.5  # seconds between two looks at what other processes have done


@dataclass
class Progress:
    """How far a study has come."""

    began: float
    batches: int = 0  # of this process only
    runs: int = 0
    work: int = 0
    damaged: int = 0  # runs in the store that are repeated
    elsewhere: int = 0  # batches of other processes, while this one has nothing else to do
    workers: int = 0
    batches_done: int = 0
    runs_done: int = 0
    work_done: int = 0
    best: tuple[float, Case] | None = None
    first: tuple[float, int] | None = None  # when the first batch came back, and its work
    newest: list[tuple[Case, Outcome]] = field(default_factory=list)  # the runs of the last batch

    def expect(self, missing: Sequence[Batch]) -> None:
        """Set the totals to what is done plus what is missing."""
        self.batches = self.batches_done + len(missing)
        self.runs = self.runs_done + sum(len(batch.cases) for batch in missing)
        self.work = self.work_done + sum(batch.work for batch in missing)

    def count(self, batch: Batch, outcomes: Sequence[Outcome], new: int) -> None:
        """Add a finished batch; `new` is the number of its runs that no other process stored first."""
        self.newest = [*zip(batch.cases, outcomes, strict=True)]
        self.batches_done += 1
        self.runs_done += new
        self.work_done += batch.work
        self.first = self.first or (time.monotonic(), batch.work)
        headline = batch.cases[0].headline
        if headline.metric in outcomes[0].metrics:
            finals = [(float(outcome.metrics[headline.metric][-1]), case) for case, outcome in self.newest]
            best = max if headline.largest else min
            self.best = best([self.best, *finals] if self.best else finals, key=itemgetter(0))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def runs_per_second(self) -> float:
        return self.runs_done / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Time left at the pace since the first batch came back; None until every worker has done one."""
        if self.first is None or self.batches_done <= min(max(self.workers, 1), self.batches - 1):
            return None
        since, work = self.first  # workers were starting before
        return (time.monotonic() - since) * (self.work - self.work_done) / max(self.work_done - work, 1)


Told = Callable[[Progress], None]


def execute(
    cases: list[Case],
    store: Store,
    *,
    device: str = "cpu",
    executor: Executor | Open | None = None,
    told: Told | None = None,
    earlier: Progress | None = None,
) -> Progress:
    """Do every run that the store lacks; returns what this process did.

    Results stay when a batch fails or workers keep dying. On Ctrl-C, running batches save themselves and resume next
    time.

    Args:
        cases: the runs, from `expand(study)`.
        store: where results go; other processes may share it and the work.
        device: "cpu", "cuda", ...
        executor: any `concurrent.futures.Executor`, or a function such as `workers.processes` that opens one. By
            default one process per core (threads for a few seconds of work), or one thread for a GPU.
        told: called with the progress at the start and after every batch.
        earlier: of runs before these, to be counted in.
    """
    stored, damaged = store.done(), store.damaged()
    todo = [left for batch in pack(cases, device) for left in batch.without(stored)]
    todo.sort(key=lambda batch: -batch.work)  # largest first, so that none is left to the end
    progress = earlier or Progress(began=time.monotonic())
    progress.damaged += sum(case.key in damaged for case in cases)
    progress.expect(todo)
    tell = told or (lambda progress: None)
    tell(progress)
    running: dict[Future[list[Outcome]], Batch] = {}
    losses: Counter[str] = Counter()  # of workers, by batch
    with Claims(store) as claims, _opened(executor, device, todo) as crew, workers.ctrl_c_kept() as check:
        progress.workers = crew.count
        try:
            while todo or running:
                check()
                crew.check()
                # A few ahead keep workers busy; other processes take the rest. Workers elsewhere may grow in number.
                room = 2 * crew.count - len(running) if crew.shares_files else len(todo)
                claimed, todo = claims.take(todo, room) if todo and room > 0 else ([], todo)
                for batch in claimed:
                    file = checkpoint(store, batch) if crew.shares_files else None
                    try:
                        running[crew.executor.submit(crew.task, batch, file)] = batch
                    except Exception as error:
                        crew.check()  # a scheduler that is gone says so in words of its own
                        raise (keep_dying(1) if isinstance(error, crew.losses) else error) from None
                elsewhere = 0 if running else len(todo)
                if progress.elsewhere != elsewhere:
                    progress.elsewhere = elsewhere
                    tell(progress)
                if elsewhere:  # other processes work on everything missing: wait for their results, or their death
                    time.sleep(POLL)
                    continue
                done = wait(running, timeout=BEAT, return_when=FIRST_COMPLETED).done
                claims.beat()
                for future in done:
                    batch = running.pop(future)
                    try:
                        outcomes = future.result()
                    except crew.losses:
                        crew.check()
                        losses[batch.key] += 1
                        if losses[batch.key] > MOST_LOSSES or isinstance(executor, Executor):
                            raise keep_dying(losses[batch.key]) from None
                        todo.insert(0, batch)
                        continue
                    except (MemoryError, RuntimeError) as error:
                        raise _too_large(batch, error) from None
                    new = store.save(batch, outcomes)
                    if (file := checkpoint(store, batch)) is not None:
                        file.unlink(missing_ok=True)
                    progress.count(batch, outcomes, new)
                    progress.expect([*running.values(), *todo])
                    tell(progress)
        except BaseException:  # Ctrl-C, or a failed batch: cancel what has not begun; running batches save themselves
            for future in running:
                future.cancel()
            crew.stop()
            raise
        claims.sweep()
    return progress


@dataclass(frozen=True)
class StudyResult:
    """What a study found, and what it left out and why."""

    rows: list[Row]
    left_out: list[LeftOut]
    progress: Progress
    remembered: Remembered  # what the store keeps of the study


def run_study(
    study: Study,
    store: Store | str | Path = ":memory:",
    *,
    executor: Executor | Open | None = None,
    told: Told | None = None,
    expanded: tuple[list[Case], list[LeftOut]] | None = None,
    command: str = "",
    log: Given = None,
) -> StudyResult:
    """Run what is missing of a study, and choose the learning rates.

    Args:
        study: from `load(file)` or `parse(content)`.
        store: a store, or the name of its file; by default results stay in memory.
        executor: see `execute`.
        told: see `execute`.
        expanded: the result of `expand(study)`, if you have it.
        command: that runs it, kept in the store for reports.
        log: where events of runs that are done go, as in `Gossip`: a folder, or a function of an event.
    """
    if not isinstance(study, Study):
        raise ValueError(f"study is a {type(study).__name__}; make one with study.parse({{...}}) or study.load(file)")
    if not isinstance(store, Store):
        with Store(store) as opened:
            return run_study(study, opened, executor=executor, told=told, expanded=expanded, command=command, log=log)
    cases, left_out = expanded or expand(study)
    if executor is None:  # other executors have their own device and data
        check_ready(study, cases, store)
    remembered = store.remember(study, command, (cases, left_out))
    runs = screened(study, cases, store)
    with _logged(log, study, store, told) as tell:
        run = partial(execute, store=store, device=study.device, executor=executor, told=tell)
        progress = run(runs.short) if runs.short else None
        runs = screened(study, cases, store)
        progress = run(runs.full, earlier=progress)
    return StudyResult(runs.rows(store), left_out, progress, remembered)


@contextmanager
def _logged(log: Given, study: Study, store: Store, told: Told | None) -> Iterator[Told | None]:
    """A function to call with the progress; it also writes to the log, if one is given."""
    if log is None:
        yield told
        return
    story, path, done = Log(sinks_of(log)), str(store.path), 0

    def tell(progress: Progress) -> None:
        nonlocal done
        if done == 0 and not progress.newest:
            story.emit("study", name=study.name, path=path, rows=progress.runs)
        for case, outcome in progress.newest:
            done += 1
            words = {"study": study.name, "key": case.key, "label": case.label, "setting": case.setting}
            words |= {"topology": case.graph_label, "state": "failed" if outcome.diverged else "done"}
            numbers = {"nodes": case.nodes, "lr": case.rule_options["lr"], "seed": case.seed}
            numbers |= {"seconds": outcome.seconds, "done": done, "of": max(progress.runs, done)}
            metrics = {name: float(values[-1]) for name, values in outcome.metrics.items()}
            story.emit("run", None, **words, **numbers, metrics=metrics)
        progress.newest.clear()
        if told is not None:
            told(progress)

    with closing(story):
        yield tell


def is_unfinished(study: Study, cases: Sequence[Case], store: Store) -> bool:
    """Whether the store lacks runs of a study."""
    runs = screened(study, cases, store)
    return not runs.full or bool(runs.missing(store))


def check_ready(study: Study, cases: Sequence[Case], store: Store) -> None:
    """Check that this machine has the device and data for missing runs, and that rules of one's own can be run.

    This is before anything is written.
    """
    if is_unfinished(study, cases, store):
        check_place(DTYPES[study.dtype], study.device)
        for case in {case.rule: case for case in cases if is_own(case.rule)}.values():
            with explained(case.rule):
                Rehearsal(case.make_rule(), torch.zeros(1, 1, dim_of(case)))
        if fetch := problems.declared(study.problem.name).ready:  # once, before many processes need the data
            fetch()


def _too_large(batch: Batch, error: MemoryError | RuntimeError) -> Exception:
    """A lack of memory as one line; any other error as it is."""
    if isinstance(error, RuntimeError) and "memory" not in str(error):
        return error
    first, nodes = batch.cases[0], max(case.nodes for case in batch.cases)
    return ValueError(
        f"{first.label} on {first.graph_label} with up to {nodes} nodes and "
        f"{len(batch.networks[0])} columns does not fit in memory; use fewer workers, or smaller grids"
    )


def _opened(executor: Executor | Open | None, device: str, todo: Sequence[Batch]) -> AbstractContextManager[Workers]:
    if not todo or (executor is None and device != "cpu"):
        return workers.threads(1)
    if isinstance(executor, Executor):
        return nullcontext(Workers(executor, workers.work, 1, shares_files=False))  # it stays open
    if executor is not None:
        return executor()
    # Threads start at once; processes are faster over hours, and one may die without harm.
    return workers.threads() if quick(todo) else workers.processes()


# --- several processes on one store -----------------------------------------------------------------------------------


class Claims(AbstractContextManager["Claims"]):
    """The missing runs that one process works on; those it has not done are released when it leaves.

    Clocks are never compared. A process counts its signs of life in the store, and the others watch that number by
    their own clocks. A dead process on the same machine is noticed at once.
    """

    silence = 60.0  # seconds without a sign of life before a process counts as dead

    def __init__(self, store: Store) -> None:
        self.store = store
        self.owner = secrets.token_hex(8)
        self._known = False  # to others
        self._beaten = time.monotonic()
        self._seen: dict[str, tuple[int, float]] = {}  # by process: its signs of life, and when the last one came

    def __exit__(self, *_: object) -> None:
        if self._known:
            with suppress(ValueError), self.store.transaction():  # on a full disk the claims stay until they expire
                self.store.execute("DELETE FROM owners WHERE id = ?", [self.owner])

    def take(self, todo: Sequence[Batch], most: int) -> tuple[list[Batch], list[Batch]]:
        """Claim up to `most` batches that no other process works on; returns them, and the others still missing."""
        taken, left = list[Batch](), list[Batch]()
        with self.store.transaction():
            self._live()
            self._bury()
            done = self.store.done()
            others = {key for (key,) in self.store.execute("SELECT key FROM claims WHERE owner != ?", [self.owner])}
            for part in (part for batch in todo for part in batch.without(done)):
                is_free = others.isdisjoint(case.key for case in part.cases)
                (taken if is_free and len(taken) < most else left).append(part)
            claims = [(case.key, part.key, self.owner) for part in taken for case in part.cases]
            self.store.execute_many("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", claims)
        return taken, left

    def beat(self) -> None:
        """Give a sign of life when one is due."""
        if time.monotonic() - self._beaten > BEAT:
            with self.store.transaction():
                self._live()
                self.store.execute("UPDATE owners SET beats = beats + 1 WHERE id = ?", [self.owner])
            self._beaten = time.monotonic()

    def sweep(self) -> None:
        """Remove checkpoints of killed processes that nobody can resume."""
        if self.store.path == ":memory:":
            return
        place = Path(self.store.path)
        name = re.compile(rf"\.?{re.escape(place.name)}-([0-9a-f]{{32}})\.safetensors(\.[0-9a-f]+)?")
        left_behind = {file: match for file in place.parent.iterdir() if (match := name.fullmatch(file.name))}
        if not left_behind:
            return
        with self.store.transaction():
            self._bury()
            claimed = self.store.execute("SELECT DISTINCT batch FROM claims WHERE owner != ?", [self.owner])
            released = self.store.execute("SELECT key, batch FROM claims WHERE owner IS NULL")  # by who has ended
        runs = [screened(each.study, each.cases, self.store) for each in self.store.studies()]
        missing = set[str]().union(*(each.missing(self.store) for each in runs))
        unfinished = {batch for key, batch in released if key in missing}
        for file, match in left_behind.items():
            torn = match[2] is not None  # killed while it was written
            with suppress(FileNotFoundError):  # another process was faster
                kept = not torn and time.time() - file.stat().st_mtime < STALE
                if (match[1],) not in claimed and not (kept and match[1] in unfinished):
                    file.unlink()

    def _live(self) -> None:
        """Register as an owner, again if others mistook a long pause for death."""
        self._known = True
        values = [self.owner, _machine(), os.getpid()]
        self.store.execute("INSERT OR IGNORE INTO owners VALUES (?, ?, ?, 0)", values)

    def _bury(self) -> None:
        """Release what dead processes claimed."""
        others = self.store.execute("SELECT id, host, pid, beats FROM owners WHERE id != ?", [self.owner])
        for owner, host, pid, beats in others:
            last, since = self._seen.get(owner, (None, 0.0))
            if last != beats:
                self._seen[owner] = (beats, time.monotonic())
            silent = last == beats and time.monotonic() - since > self.silence
            if silent or (host == _machine() and not _alive(pid)):
                self.store.execute("DELETE FROM owners WHERE id = ?", [owner])


def checkpoint(store: Store, batch: Batch) -> Path | None:
    """The file of a batch in progress, beside the store; None if the store is in memory."""
    return None if store.path == ":memory:" else Path(f"{store.path}-{batch.key}.safetensors")


@cache
def _machine() -> str:
    """A name for this machine and container: each container numbers its own processes."""
    facts = [platform.node()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


def _alive(pid: int) -> bool:
    """Whether this process runs on this machine, or may."""
    try:
        if os.name == "posix":
            os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, TypeError):  # another user's process, or not a process number
        pass
    return True
