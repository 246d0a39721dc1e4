"""Several processes on one store: each claims batches that no other works on, and a dead process's claims expire.

Clocks are never compared. A process counts its signs of life in the store, and the others watch that number by their
own clocks. A dead process on the same machine is noticed at once.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path

from klatsch.study.batches import Batch
from klatsch.study.screening import screened
from klatsch.study.store import Store

BEAT = 5.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without one before a process counts as dead
STALE = 7 * 86400.0  # seconds before an unfinished checkpoint counts as abandoned


class Share(AbstractContextManager["Share"]):
    """One process's share of a store's missing runs; leaving it releases what is not done."""

    def __init__(self, store: Store) -> None:
        self.store, self.base = store, store.base
        self.owner = secrets.token_hex(8)
        self._known = False  # to others
        self._beaten = time.monotonic()
        self._seen: dict[str, tuple[int, float]] = {}  # by process: its signs of life, and when the last one came

    def __exit__(self, *_: object) -> None:
        if self._known:
            with suppress(ValueError), self.store.transaction():  # on a full disk the claims stay until they expire
                self.base.execute("DELETE FROM owners WHERE id = ?", [self.owner])

    def take(self, todo: Sequence[Batch], most: int) -> tuple[list[Batch], list[Batch]]:
        """Claim up to `most` batches that no other process works on; returns them, and the others still missing."""
        mine: list[Batch] = []
        left: list[Batch] = []
        with self.store.transaction():
            self._live()
            self._bury()
            done = self.store.done()
            theirs = {key for (key,) in self.base.execute("SELECT key FROM claims WHERE owner != ?", [self.owner])}
            for part in (part for batch in todo for part in batch.without(done)):
                keys = [case.key for case in part.cases]
                if len(mine) == most or not theirs.isdisjoint(keys):
                    left.append(part)
                    continue
                mine.append(part)
                rows = [(key, part.key, self.owner) for key in keys]
                self.base.execute_many("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", rows)
        return mine, left

    def beat(self) -> None:
        """Give a sign of life when one is due."""
        if time.monotonic() - self._beaten > BEAT:
            with self.store.transaction():
                self._live()
                self.base.execute("UPDATE owners SET beats = beats + 1 WHERE id = ?", [self.owner])
            self._beaten = time.monotonic()

    def sweep(self) -> None:
        """Remove checkpoints that killed processes left beside the store and nobody can resume."""
        if self.store.path == ":memory:":
            return
        place = Path(self.store.path)
        name = re.compile(rf"\.?{re.escape(place.name)}-([0-9a-f]{{32}})\.safetensors(\.[0-9a-f]+)?")
        found = {file: match for file in place.parent.iterdir() if (match := name.fullmatch(file.name))}
        if not found:
            return
        with self.store.transaction():
            self._bury()
            claimed = self.base.execute("SELECT DISTINCT batch FROM claims WHERE owner != ?", [self.owner])
            left = self.base.execute("SELECT key, batch FROM claims WHERE owner IS NULL")  # by a process that has ended
        missing = _missing(self.store)
        unfinished = {batch for key, batch in left if key in missing}
        for file, match in found.items():
            torn = match[2] is not None  # killed while it was written
            with suppress(FileNotFoundError):  # another process was faster
                kept = not torn and time.time() - file.stat().st_mtime < STALE
                if (match[1],) not in claimed and not (kept and match[1] in unfinished):
                    file.unlink()

    def _live(self) -> None:
        """Register as an owner, again if others mistook a long pause for death."""
        self._known = True
        values = [self.owner, _machine(), os.getpid()]
        self.base.execute("INSERT OR IGNORE INTO owners VALUES (?, ?, ?, 0)", values)

    def _bury(self) -> None:
        """Release what dead processes claimed."""
        others = self.base.execute("SELECT id, host, pid, beats FROM owners WHERE id != ?", [self.owner])
        for owner, host, pid, beats in others:
            last, since = self._seen.get(owner, (None, 0.0))
            if last != beats:
                self._seen[owner] = (beats, time.monotonic())
            silent = last == beats and time.monotonic() - since > SILENCE
            if silent or (host == _machine() and not _alive(pid)):
                self.base.execute("DELETE FROM owners WHERE id = ?", [owner])


def checkpoint(store: Store, batch: Batch) -> Path | None:
    """The file of a batch in progress, beside the store; None if the store is in memory."""
    return None if store.path == ":memory:" else Path(f"{store.path}-{batch.key}.safetensors")


def _missing(store: Store) -> set[str]:
    """The keys of runs that the studies of a store still lack."""
    runs = (screened(remembered.study, remembered.cases, store) for remembered in store.studies())
    return {case.key for each in runs for case in each.cases} - store.done()


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
