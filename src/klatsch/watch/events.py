"""One stream of events: everything that one can watch, as plain dictionaries that go to sinks.

An event has `event` (its kind), `time` (Unix seconds) and, except in a study, `member` (who it is about), and the
facts of its kind; docs/watching.md lists them. A sink is a function of an event. All sinks of a process run in one
thread: no training waits for a disk or a server, and none ends because of them. The last event is `end`, at which sinks
close.

    log = Log([Lines("runs/a")])
    log.emit("round", "0", round=1, loss=0.5)
    log.close(round=1)
    events = [*read("runs/a")]
"""

from __future__ import annotations

import heapq
import json
import math
import os
import queue
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from klatsch.files import finite, folder_for

Event = dict[str, Any]
Sink = Callable[[Event], object]

OFTEN, SELDOM = 0.2, 2.0  # seconds between two rounds that are told: at first, and after two hours
SLOWS_DOWN = 3600.0  # seconds of training that make them a second longer
SYNC = 5.0  # seconds between two times that a file is brought to the disk
LARGEST, KEPT = 1 << 26, 16  # bytes of a file of a member, and files of it
LONGEST = 1 << 20  # bytes of a line
PIECE = 1 << 22  # bytes of a file that are read at a time
LAST_WORDS = 30.0  # seconds for sinks to close
ENDING = ".jsonl"
NUMBERS = ("round", "epoch", "bytes", "waited", "seconds", "lag", "loss", "lr", "consensus", "size", "parameters")


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
        """Write an event."""
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
            raise ValueError(f"{path} is not a folder; give that of a log, as in Gossip(..., log=FOLDER)")
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
