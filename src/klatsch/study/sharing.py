"""Several processes on one store: each takes batches that no other one is at, and those of a dead one are free again.

Clocks are never compared. A process counts its signs of life in the store; whoever waits for it watches that number by
its own clock. On one machine, a process that is gone is known at once.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from klatsch.study.batches import Batch
from klatsch.study.store import Store

BEAT = 5.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without one after which a process counts as dead


class Share:
    """What one process does of a store's missing runs; leaving it gives back what was not done."""

    def __init__(self, store: Store) -> None:
        self.store, self.base = store, store.base
        self.owner = secrets.token_hex(8)
        self._known = False  # to others
        self._beaten = time.monotonic()
        self._seen: dict[str, tuple[int, float]] = {}  # of others: the signs of life so far, and when the last one came

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        if self._known:
            with suppress(ValueError), self.store.transaction():  # on a full disk it stays, and is silent from now on
                self.base.execute("DELETE FROM owners WHERE id = ?", [self.owner])

    def take(self, todo: Sequence[Batch], most: int) -> tuple[list[Batch], list[Batch]]:
        """Take up to so many batches that nobody else is at; gives these, and what is still missing beside them."""
        mine: list[Batch] = []
        left: list[Batch] = []
        with self.store.transaction():
            self._live()
            self._bury()
            done = self.store.done()
            claimed = self.base.execute("SELECT key FROM claims WHERE owner != ?", [self.owner])
            theirs = {key for (key,) in claimed.fetchall()}
            for batch in todo:
                for part in batch.without(done):
                    keys = [case.key for case in part.cases]
                    if len(mine) == most or not theirs.isdisjoint(keys):
                        left.append(part)
                        continue
                    mine.append(part)
                    rows = [(key, part.key, self.owner) for key in keys]
                    self.base.execute_many("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", rows)
        return mine, left

    def beat(self) -> None:
        """Give a sign of life, if it is time for one."""
        if time.monotonic() - self._beaten > BEAT:
            with self.store.transaction():
                self._live()
                self.base.execute("UPDATE owners SET beats = beats + 1 WHERE id = ?", [self.owner])
            self._beaten = time.monotonic()

    def others(self) -> set[str]:
        """The batches that other living processes are at, by key."""
        with self.store.transaction():
            self._bury()
            claimed = self.base.execute("SELECT DISTINCT batch FROM claims WHERE owner != ?", [self.owner])
            return {batch for (batch,) in claimed.fetchall()}

    def _live(self) -> None:
        """Be among the owners; one that was paused for long may have been buried."""
        self._known = True
        values = [self.owner, _machine(), os.getpid()]
        self.base.execute("INSERT OR IGNORE INTO owners VALUES (?, ?, ?, 0)", values)

    def _bury(self) -> None:
        """Free what dead processes claimed."""
        owners = self.base.execute("SELECT id, host, pid, beats FROM owners WHERE id != ?", [self.owner]).fetchall()
        for owner, host, pid, beats in owners:
            last, since = self._seen.get(owner, (None, 0.0))
            if last != beats:
                self._seen[owner] = (beats, time.monotonic())
            silent = last == beats and time.monotonic() - since > SILENCE
            if silent or (host == _machine() and not _alive(pid)):
                self.base.execute("DELETE FROM owners WHERE id = ?", [owner])


def _machine() -> str:
    """What tells machines apart, and containers, whose processes are numbered by themselves."""
    facts = [platform.node()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


def _alive(pid: int) -> bool:
    """Whether there is such a process here, as far as can be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, TypeError):  # somebody else's; or no number that a process has
        return True
    return True
