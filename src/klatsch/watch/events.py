"""One stream of events: everything that one can watch, as plain dictionaries that go to sinks.

An event has `event` (its kind), `time` (Unix seconds) and, except in a study, `member` (who it is about), and the
facts of its kind; docs/watching.md lists them. A sink is a function of an event. All sinks of a process run in one
thread: no training waits for a disk or a server, and none ends because of them. The last event is `end`, at which sinks
close.

    log = Log([Lines("runs/a")])
    log.emit("round", "0", round=1, loss=0.5)
    log.close(round=1)
    events = [*read("runs/a")]

Users name sinks: a folder, "terminal", "tensorboard:FOLDER", "wandb:PROJECT", trackio and MLflow (`sinks_of`).
"""

from __future__ import annotations

import fcntl
import heapq
import json
import math
import os
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeGuard

from klatsch.extras import need
from klatsch.files import finite, folder_for
from klatsch.units import size

if TYPE_CHECKING:
    from rich.table import Table

Event = dict[str, Any]
Sink = Callable[[Event], object]
Given = str | Path | Sink | Sequence[str | Path | Sink] | None

OFTEN, SELDOM = 0.2, 2.0  # seconds between two rounds that are told: at first, and after two hours
SLOWS_DOWN = 3600.0  # seconds of training that make them a second longer
SYNC = 5.0  # seconds between two times that a file is brought to the disk
LARGEST, KEPT = 1 << 26, 16  # bytes of a file of a member, and files of it
LONGEST = 1 << 20  # bytes of a line
PIECE = 1 << 22  # bytes of a file that are read at a time
LAST_WORDS = 30.0  # seconds for sinks to close
ENDING = ".jsonl"
NUMBERS = ("round", "epoch", "bytes", "waited", "seconds", "lag", "loss", "lr", "consensus", "size", "parameters")
Run = Any  # of a library that may not be there
ENVIRONMENT = "KLATSCH_LOG"  # for scripts that say nothing themselves; several by commas
ABOUT = ("event", "time", "member", "round")  # what numbers are about, and no numbers themselves
ROW = ("state", "host", "lost", "events", "last", "started", "saved")  # of a member, and no numbers of a round
SILENT = 60.0  # seconds after which a member that says nothing is not shown
PRINTED = 30.0  # seconds between two tables that are printed to what is no terminal


class Log:
    """The events of one optimizer, simulation or study on their way to some sinks.

    Args:
        sinks: functions of an event.
        warn: told, in the thread that emits, why a sink has failed; the others go on without it.
    """

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], object] = warnings.warn) -> None:
        self._sinks, self._warn, self._failures = list(sinks), warn, list[str]()
        self._began = time.monotonic()
        self._next: float = 0.0  # when a round may be told again
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="klatsch log", daemon=True)
        self._thread.start()

    def is_due(self) -> bool:
        """Whether it is time to tell of a round: five times a second at first, every two seconds in a long training."""
        if (now := time.monotonic()) < self._next:
            return False
        self._next = now + min(max(OFTEN, (now - self._began) / SLOWS_DOWN), SELDOM)
        return True

    def emit(self, kind: str, member: str | None = None, **facts: object) -> None:
        """Send an event to all sinks."""
        who = {} if member is None else {"member": member}
        self._queue.put({"event": kind, "time": time.time(), **who, **facts})
        self._complain()

    def close(self, member: str | None = None, **facts: object) -> None:
        """Send the last event, and wait until the sinks have closed."""
        if self._thread.is_alive():
            self.emit("end", member, **facts)
            self._queue.put(None)
            self._thread.join(LAST_WORDS)
            self._complain()

    def _complain(self) -> None:
        while self._failures:
            self._warn(self._failures.pop())

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            for sink in self._sinks.copy():
                try:
                    sink(event)
                except Exception as error:  # whatever it is, training goes on
                    self._sinks.remove(sink)
                    why = error.strerror if isinstance(error, OSError) and error.strerror else error
                    self._failures.append(
                        f"log = {getattr(sink, '__name__', sink)} has failed ({why}); it goes on without this log"
                    )


# --- files ------------------------------------------------------------------------------------------------------------


class Lines:
    """Writes events to files of JSON lines in a folder, one per member.

    A full file, 0.jsonl, becomes 0.1.jsonl, the next one 0.2.jsonl, and so on; the oldest are removed. Lines are in the
    file at once, and on the disk some seconds later. Numbers that are not finite are null.
    """

    def __init__(self, folder: str | Path, largest: int = LARGEST) -> None:
        self.folder, self.largest = folder_for("a log", folder), largest
        self._files: dict[str, tuple[int, int]] = {}  # by member: the file, and its size
        self._synced = time.monotonic()

    def __str__(self) -> str:
        return str(self.folder)

    def __call__(self, event: Event) -> None:
        stem = re.sub(r"[^\w-]", "-", str(event.get("member", "study")))
        if stem not in self._files:
            self._files[stem] = self._opened(stem)
        file, size = self._files[stem]
        line = json.dumps(finite(event), default=str).encode() + b"\n"
        if size and size + len(line) > self.largest:
            file, size = self._rotated(stem)
        written = os.write(file, line)
        if written < len(line):
            raise OSError(0, "the disk is full")
        self._files[stem] = file, size + len(line)
        if event["event"] == "end":
            for file, _ in self._files.values():
                os.fsync(file)
                os.close(file)
            self._files.clear()
        elif time.monotonic() > self._synced + SYNC:
            os.fsync(file)
            self._synced = time.monotonic()

    def _opened(self, stem: str) -> tuple[int, int]:
        path = self.folder / (stem + ENDING)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # torn when it was killed
            size += os.write(file, b"\n")
        return file, size

    def _rotated(self, stem: str) -> tuple[int, int]:
        os.close(self._files[stem][0])
        older = _by_member(self.folder).get(stem, [])[:-1]
        newest = _number(older[-1]) if older else 0
        (self.folder / (stem + ENDING)).rename(self.folder / f"{stem}.{newest + 1}{ENDING}")
        for path in older[: max(0, len(older) + 2 - KEPT)]:
            path.unlink(missing_ok=True)
        self._files[stem] = self._opened(stem)
        return self._files[stem]


class Folder:
    """A log folder, also while members write to it. Damaged lines are left out, and `damaged` counts them."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.damaged = Path(path), 0
        self._done: dict[int, int] = {}  # by inode, which a file keeps when it is rotated: the bytes that were read
        if not self.path.is_dir():
            raise ValueError(f"there is no folder {path}; give that of a log, as in KLATSCH_LOG=FOLDER")
        inside = sorted({str(file.parent) for file in self.path.glob("*/*.jsonl")})
        if inside and not any(self.path.glob("*.jsonl")):
            raise ValueError(f"{path} is no log, but holds some; give one of {', '.join(inside)}")

    def __iter__(self) -> Iterator[Event]:
        """All events by time, without holding them."""
        return heapq.merge(*map(self._told_in, _by_member(self.path).values()), key=_time)

    def new(self) -> list[Event]:
        """What has come since the last call, by time, and empty if nothing has: it does not wait.

        Of a long file it is the next piece: call it until it is empty to see all.
        """
        parts = list[list[Event]]()
        for path in chain.from_iterable(_by_member(self.path).values()):
            with suppress(OSError), path.open("rb") as file:  # it may have been removed
                status = os.fstat(file.fileno())
                begin = self._done.get(status.st_ino, 0)
                begin = begin if begin <= status.st_size else 0  # another file
                file.seek(begin)
                piece = file.read(PIECE)
                end = piece.rfind(b"\n") + 1 or len(piece) // PIECE * PIECE  # a torn line may still become whole
                parts.append([*self._parsed(piece[:end].splitlines())])
                self._done[status.st_ino] = begin + end
        return [*heapq.merge(*parts, key=_time)]

    def _told_in(self, paths: Sequence[Path]) -> Iterator[Event]:
        for path in paths:
            with suppress(OSError), path.open("rb") as file:
                yield from self._parsed(iter(partial(file.readline, LONGEST), b""))

    def _parsed(self, lines: Iterable[bytes]) -> Iterator[Event]:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if is_event(event):
                yield event
            elif line.strip():
                self.damaged += 1


def read(folder: str | Path) -> Iterator[Event]:
    """All events of a log folder by time."""
    return iter(Folder(folder))


def is_event(content: object) -> TypeGuard[Event]:
    """Whether something that was read is an event, and the facts that every reader uses are of their types."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("event"), str)
        and is_number(content.get("time"))
        and isinstance(content.get("member", ""), str)
        and all(is_number(content[name]) for name in NUMBERS if content.get(name) is not None)
        and all(isinstance(content.get(name, []), list) for name in ("members", "neighbours"))
        and all(isinstance(content.get(name, {}), dict) for name in ("waits", "metrics"))
    )


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _time(event: Event) -> float:
    return float(event["time"])


def _by_member(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder by the name of the member, the oldest first."""
    files: dict[str, list[Path]] = {}
    for path in sorted(filter(Path.is_file, folder.glob(f"*{ENDING}")), key=_number):
        files.setdefault(path.name.partition(".")[0], []).append(path)
    return files


def _number(path: Path) -> float:
    """Of a rotated file; the one that is written is the last."""
    number = path.name.removesuffix(ENDING).partition(".")[2]
    return int(number) if number.isdecimal() else math.inf


# --- sinks by name ----------------------------------------------------------------------------------------------------


def sinks_of(given: Given) -> list[Sink]:
    """The sinks that a user names, or that the environment does."""
    if given is None:
        given = list(filter(None, map(str.strip, os.environ.get(ENVIRONMENT, "").split(","))))
    return [*map(_sink, given if isinstance(given, list | tuple) else [given])]


def _sink(given: str | Path | Sink) -> Sink:
    if callable(given):
        return given
    if not isinstance(given, str | Path) or not str(given):
        wanted = "a folder, a function of an event, or one of " + ", ".join(BY_NAME)
        raise ValueError(f"log = {given!r}; give {wanted}")
    name, colon, place = str(given).partition(":")
    if colon and name.isalpha() and name not in BY_NAME and not isinstance(given, Path):
        names = ", ".join(BY_NAME)
        raise ValueError(f"log = {given!r}: there is no {name}; give one of {names}, or a folder as ./{given}")
    try:
        return BY_NAME[name](place) if name in BY_NAME else Lines(given)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # of a tool that is not set up
        raise ValueError(f"log = {str(given)!r}: {str(error).partition(chr(10))[0] or type(error).__name__}") from None


def numbers_of(event: Event) -> dict[str, float]:
    """The numbers of a round by name; those by neighbour are waits/NEIGHBOUR."""
    if event["event"] != "round":
        return {}
    flat = event | {f"waits/{name}": seconds for name, seconds in event.get("waits", {}).items()}
    return {name: v for name, v in flat.items() if name not in ABOUT and isinstance(v, int | float)}


def words_of(event: Event) -> str:
    """An event in words: lost 3 (connection closed)."""
    facts = [str(event[name]) for name in ("neighbour", "epoch", "path") if name in event]
    return " ".join([event["event"], *facts, *([f"({event['why']})"] if event.get("why") else [])])


class Members:
    """How members are doing, by what they have told last: one row each."""

    def __init__(self) -> None:
        self.rows: dict[str, Event] = {}

    def take(self, event: Event) -> None:
        if (member := event.get("member")) is None:
            return
        row = self.rows.setdefault(member, {"member": member, "state": "trains", "round": 0, "lost": [], "events": 0})
        row |= {"events": row["events"] + 1, "last": event["time"]}
        row["state"] = "trains" if row["state"] == "gone" else row["state"]
        match event:
            case {"event": "round", **facts}:
                row |= {name: v for name, v in facts.items() if name not in ("time", "member", "waits", *ROW)}
            case {"event": "start", **facts}:
                row |= {"state": "trains", "lost": [], "host": facts.get("host", "")}
                row["started"] = row.get("started", 0) + 1
            case {"event": "epoch"}:
                row["epoch"] = event.get("epoch")
            case {"event": "lost", "neighbour": neighbour}:
                row["lost"] = [*row["lost"], str(neighbour)]
                other = self.rows.get(str(neighbour), {})
                other |= {"state": "gone"} if other.get("state") == "trains" else {}  # until it says something
            case {"event": "back", "neighbour": neighbour}:
                row["lost"] = [name for name in row["lost"] if name != str(neighbour)]
            case {"event": "checkpoint"}:
                row["saved"] = event.get("round")
            case {"event": "end"} if row["state"] == "trains":
                row["state"] = "ended"
            case {"event": "left" | "dropped" as state}:
                row["state"] = state

    def in_order(self) -> list[Event]:
        """The rows by member, 2 before 10."""
        return sorted(self.rows.values(), key=lambda row: (len(row["member"]), row["member"]))


def shown(rows: Iterable[Event]) -> list[dict[str, str]]:
    """Rows of members as texts, in the columns that some of them have."""

    def text(value: object) -> str:
        return "" if not is_number(value) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"

    lines = [
        {
            "member": row["member"],
            "host": str(row.get("host", "")),
            "address": str(row.get("address", "")),
            "state": row["state"],
            "round": text(row["round"]),
            "lag": text(row.get("lag")),
            "loss": text(row.get("loss")) if row.get("loss", "") is not None else "nan",
            "lr": text(row.get("lr")),
            "consensus": text(row.get("consensus")),
            "sent": size(int(row["bytes"])) if is_number(row.get("bytes")) else "",
            "waited": f"{row['waited']:.1f} s" if is_number(row.get("waited")) else "",
            "skipped": text(row.get("skipped")),
            "neighbours": ", ".join(
                f"{one}{' (NCCL)' * (one in row.get('nccl', ()))}" for one in row.get("neighbours", ())
            ),
            "lost": ", ".join(map(str, row.get("lost", ()))),
        }
        for row in rows
    ]
    used = {name for line in lines for name in line if line[name]}
    return [{name: cell for name, cell in line.items() if name in used} for line in lines]


class Terminal:
    """Shows a line for every member on this machine: one of their processes does, on a terminal or every 30 s in a log.

    Processes of one training tell each other through a folder of temporary files, which the last one removes.
    """

    def __init__(self, _: str = "") -> None:
        need("log = 'terminal'", "rich")
        from rich.console import Console
        from rich.live import Live

        crew, launcher = os.environ.get("KLATSCH_CREW"), f"{os.getppid()}-{os.environ.get('MASTER_PORT', os.getpid())}"
        name = re.sub(r"[^\w.-]", "-", f"klatsch-{os.getuid()}-{crew or launcher}")
        folder = Path(tempfile.gettempdir(), name)
        with suppress(OSError):
            folder.mkdir(0o700)  # whatever the umask is
        self._lines = Lines(folder)
        if (status := self._lines.folder.lstat()).st_uid != os.getuid() or status.st_mode & 0o22:
            raise ValueError(
                f"{self._lines.folder} belongs to another user; remove it, or set TMPDIR to your own folder"
            )
        self._folder, self._members = Folder(self._lines.folder), Members()
        self._console, self._open, self._printed = Console(stderr=True, emoji=False), ExitStack(), time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False)
        self._shows: bool | None = None if os.environ.get("LOCAL_RANK", "0") == "0" else False  # None: not yet
        self._there: TextIO | None = None  # a file that is locked while this process lives

    def __str__(self) -> str:
        return "terminal"

    def __call__(self, event: Event) -> None:
        """Tell the others of an event, and show what they tell, if it is this process's turn."""
        self._lines(event)
        if self._there is None:
            self._there = self._locked("there", fcntl.LOCK_SH)
        if self._shows is None:
            self._shows = self._takes_turn()
        if self._shows:
            self._show(event["event"] == "end")
        if event["event"] == "end":
            self._open.close()
            with self._there, suppress(BlockingIOError):  # others are there
                fcntl.flock(self._there, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._lines.folder, ignore_errors=True)

    def _show(self, is_over: bool) -> None:
        while events := self._folder.new():
            for told in events:
                self._members.take(told)
        if self._console.is_terminal:
            self._live.update(self._table(), refresh=True)
        elif is_over or time.monotonic() > self._printed + PRINTED:
            self._printed = time.monotonic()
            self._console.print(self._table())

    def _locked(self, name: str, how: int) -> TextIO:
        file = (self._lines.folder / name).open("w")
        try:
            fcntl.flock(file, how)
        except OSError:
            file.close()
            raise
        return file

    def _takes_turn(self) -> bool | None:
        try:
            self._open.enter_context(self._locked("shows", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return None
        if self._console.is_terminal:
            self._open.enter_context(self._live)
        return True

    def _table(self) -> Table:
        from rich.table import Table

        now = time.time()
        lines = shown(row for row in self._members.in_order() if row["last"] > now - SILENT)
        table = Table(*(lines[0] if lines else ()), box=None, padding=(0, 2, 0, 0))
        for line in lines:
            table.add_row(*line.values())
        return table


class Runs:
    """Numbers of rounds for a tool that calls what it shows runs: one for every member."""

    def __init__(
        self,
        name: str,
        begin: Callable[[str, Event], Run],
        tell: Callable[[Run, Event], object],
        end: Callable[[Run], object],
    ) -> None:
        self._name, self._begin, self._tell, self._end = name, begin, tell, end
        self._runs: dict[str, Run] = {}

    def __str__(self) -> str:
        return self._name

    def __call__(self, event: Event) -> None:
        """Begin a run for a new member, tell it of an event, or end all."""
        if event["event"] == "end":
            while self._runs:
                self._end(self._runs.popitem()[1])
            return
        member = re.sub(r"[^\w-]", "-", str(event.get("member", "study")))
        if member not in self._runs:
            self._runs[member] = self._begin(member, event)
        self._tell(self._runs[member], event)


def tensorboard(folder: str) -> Sink:
    """Scalars of rounds and texts of other events for TensorBoard."""
    need("log = 'tensorboard:FOLDER'", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    place = folder_for("a log", folder or "runs")

    def tell(writer: Run, event: Event) -> None:
        step, when = event.get("round", 0), event["time"]
        if event["event"] != "round":
            writer.add_text("events", words_of(event), step, when)
        for name, value in numbers_of(event).items():
            writer.add_scalar(name, value, step, when)

    def begin(member: str, _: Event) -> SummaryWriter:
        return SummaryWriter(str(place / member), flush_secs=10)

    return Runs(f"tensorboard:{place}", begin, tell, SummaryWriter.close)


def tracker(library: str, project: str, **options: str) -> Sink:
    """W&B, or trackio, which is called in the same way."""
    need(f"log = '{library}:PROJECT'", library)
    init, project = import_module(library).init, project or "klatsch"

    def begin(member: str, event: Event) -> object:
        config = {name: v for name, v in event.items() if isinstance(v, str | int | float)}
        return init(project=project, name=member, config=config, **options)

    def tell(run: Run, event: Event) -> None:
        if numbers := numbers_of(event):
            run.log(numbers, step=event["round"])

    return Runs(f"{library}:{project}", begin, tell, lambda run: run.finish())


def mlflow(experiment: str) -> Sink:
    """MLflow."""
    need("log = 'mlflow:EXPERIMENT'", "mlflow")
    library, experiment = import_module("mlflow"), experiment or "klatsch"
    client, number = library.MlflowClient(), library.set_experiment(experiment).experiment_id

    def tell(run: str, event: Event) -> None:
        for name, value in numbers_of(event).items():
            client.log_metric(run, name, value, int(event["time"] * 1000), event["round"])

    def begin(member: str, _: Event) -> object:
        return client.create_run(number, run_name=member).info.run_id

    return Runs(f"mlflow:{experiment}", begin, tell, client.set_terminated)


BY_NAME: dict[str, Callable[[str], Sink]] = {
    "terminal": Terminal,
    "tensorboard": tensorboard,
    "wandb": partial(tracker, "wandb", reinit="create_new"),
    "trackio": partial(tracker, "trackio"),
    "mlflow": mlflow,
}
