"""A SQLite file that is ours: opened with care, written in transactions, its errors one line with a remedy."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import quote

FORMAT = 2
APPLICATION = 0x6B6C6174  # "klat": tells a store from other SQLite files
WAIT = 60.0  # seconds that a process waits for another one's transaction
# In one statement: another process may be making the file, and two questions would see it at two moments.
SEEN = (
    "SELECT v.user_version, a.application_id, m.type, m.name, m.rootpage "
    "FROM pragma_user_version v, pragma_application_id a LEFT JOIN sqlite_master m"
)
DAMAGED = "if it is a store, it is damaged or was edited: move it away and run again, or bring back a copy"


class Database:
    """A SQLite file in write-ahead mode. It is made, or brought to this version's format, by the first transaction.

    Args:
        path: the file; ":memory:" for one that is gone afterwards.
        tables: the statements that make a new one.
        upgrades: by format, the statements that make the next one of it.
        read_only: only look: the file must exist, and is not written to.

    Raises:
        ValueError: the file is damaged, not ours, written by a newer version, or cannot be written; it is left as it
            is.
    """

    def __init__(self, path: str, tables: str, upgrades: Mapping[int, str], read_only: bool) -> None:
        self.path = path
        self._tables, self._upgrades = tables, upgrades
        with self.explained():
            there = self.path != ":memory:" and self._check_file(must_exist=read_only)
            if there:
                self._base = self._open(read_only)
                self._check_content(must_exist=read_only)
                there = self.format > 0  # else it was killed as it began
            if not there:  # until the file is made, an empty one in memory answers
                self._base = sqlite3.connect(":memory:", isolation_level=None)
                self._base.execute("PRAGMA foreign_keys = ON")
                self._make()
            self._lacking = not there and self.path != ":memory:"
            self._ready = read_only or self.path == ":memory:"

    @property
    def format(self) -> int:
        """The format that its tables have now."""
        return int(self._pragma("user_version"))

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run a statement."""
        return self._base.execute(statement, values)

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for every row."""
        self._base.executemany(statement, rows)

    def close(self) -> None:
        """Let go of the file."""
        self._base.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what follows, or nothing."""
        if not self._ready:
            self._prepare()
        with self._whole_or_not():
            yield

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what SQLite says into one line with the file and a remedy."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            text, remedy = str(error).splitlines()[0], DAMAGED
            if isinstance(error, UnicodeDecodeError) or text.startswith("Could not decode"):
                text = "it holds text that is not UTF-8"
            elif "full" in text or "disk I/O" in text:
                remedy = "free some space and run again: what was stored before is safe"
            elif "readonly" in text or "unable to open" in text:
                remedy = "see that the folder can be written to"
            elif "locked" in text:
                remedy = f"another process held it for more than {WAIT:.0f} seconds; run again when that is done"
            raise ValueError(f"{self.path}: {text}; {remedy}") from None

    # --- inside -------------------------------------------------------------------------------------------------

    def _check_file(self, must_exist: bool) -> bool:
        """Whether there is something to open.

        What is no store of ours is refused by its first bytes, since opening may already change a file.
        """
        path = Path(self.path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}; make it first, or give another name for the store")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no plain file, but a device or a pipe; give another name for the store")
        if not must_exist:
            self._check_writable(path)
        if not path.exists() or path.stat().st_size == 0:  # empty: one that was killed as it began
            if must_exist:
                raise ValueError(f"there is no store {path}; klatsch run and klatsch reproduce make one")
            return False
        with path.open("rb") as file:
            head = file.read(100)
        if len(head) < 100 or not head.startswith(b"SQLite format 3\0"):
            raise sqlite3.DatabaseError("file is not a database")
        version, ours = (int.from_bytes(head[k : k + 4], "big") for k in (60, 68))
        if (version, ours) != (0, 0):  # else it was killed as it began, or its content will tell
            self._check_numbers(version, ours)
        return True

    def _check_writable(self, path: Path) -> None:
        """SQLite writes to the file, and makes others beside it; a folder tells only when it is tried."""
        try:
            with NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
                pass
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            remedy = "free some space" if error.errno == errno.ENOSPC else "see that file and folder can be written to"
            raise ValueError(f"{path}: {error.strerror}; {remedy}, or give another name for the store") from None

    def _check_content(self, must_exist: bool) -> None:
        """Refuse what only shows when the file is open: numbers that are still in its log, tables, damage."""
        try:
            rows = self._base.execute(SEEN).fetchall()
            version, ours = rows[0][:2]
            entries = [entry for _, _, *entry in rows if entry[0] is not None]
            if version or ours or entries:
                self._check_numbers(version, ours)
                self._check_entries(version, entries)
            elif must_exist:
                raise ValueError(f"{self.path} holds no finished run yet")
            if (problem := self._pragma("quick_check(1)")) != "ok":
                raise sqlite3.DatabaseError(problem)
        except BaseException:
            self._base.close()
            raise

    def _check_entries(self, version: int, entries: Sequence[Sequence[Any]]) -> None:
        """Refuse triggers and the like, which would act in our place, and a file that lacks a table."""
        for kind, name, page in entries:
            if not page:  # no data of its own: a trigger, a view, a virtual table
                raise ValueError(
                    f"{self.path} holds a {kind} {name!r} that klatsch did not make and does not run; remove it with "
                    f"sqlite3 (DROP {kind.upper()}), or bring back a copy"
                )
        later = "".join(text for number, text in self._upgrades.items() if number >= version)
        names = {name for kind, name, _ in entries if kind == "table"}
        for name in re.findall(r"CREATE TABLE (\w+)", self._tables):
            if name not in names and f"CREATE TABLE {name} " not in later:
                raise sqlite3.DatabaseError(f"it has no table {name!r}")

    def _check_numbers(self, version: int, ours: int) -> None:
        if ours != APPLICATION:
            raise ValueError(f"{self.path} is a database, but no store of klatsch; give another name")
        if version < 1:
            raise sqlite3.DatabaseError(f"it has no format {version}")
        if version > FORMAT:
            raise ValueError(
                f"{self.path} was written by a newer klatsch (format {version}, this one knows {FORMAT}); "
                "update klatsch"
            )

    @contextmanager
    def _whole_or_not(self) -> Iterator[None]:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise

    def _prepare(self) -> None:
        """Make the file, or bring it to this format."""
        if self._lacking:
            self._base.close()
            self._base, self._lacking = self._open(read_only=False), False
            self._check_content(must_exist=False)  # somebody else may have made it by now
        for setting in ("foreign_keys = ON", "synchronous = FULL"):
            self._base.execute(f"PRAGMA {setting}")
        self._use_log()
        with self._whole_or_not():
            self._make()
        self._ready = True

    def _use_log(self) -> None:
        """Write ahead, once no other process is just doing the same: SQLite does not wait for that by itself."""
        deadline = time.monotonic() + WAIT
        while True:
            try:
                self._base.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def _make(self) -> None:
        have = self.format
        texts = [self._tables] if have == 0 else [self._upgrades[number] for number in range(have, FORMAT)]
        for statement in ";".join(texts).split(";"):
            self._base.execute(statement)
        if have < FORMAT:
            self._base.execute(f"PRAGMA application_id = {APPLICATION}")
            self._base.execute(f"PRAGMA user_version = {FORMAT}")

    def _open(self, read_only: bool) -> sqlite3.Connection:
        if not read_only:
            base = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            base.execute("PRAGMA trusted_schema = OFF")
            return base
        address = f"file:{quote(str(Path(self.path).absolute()))}"
        base = sqlite3.connect(f"{address}?mode=rw", uri=True, timeout=WAIT)
        try:
            base.execute("PRAGMA query_only = ON")
            base.execute("PRAGMA trusted_schema = OFF")
            base.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            base.close()
            if "readonly" not in str(error) and "unable to open" not in str(error):
                raise
            log = Path(f"{self.path}-wal")
            if log.exists() and log.stat().st_size:
                raise ValueError(
                    f"{self.path} has a log beside it ({log.name}) that can only be read where one may write; "
                    "copy both into another folder"
                ) from None
            # A folder that cannot be written to: nobody else writes there either.
            return sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True)
        return base

    def _pragma(self, name: str) -> Any:
        return self._base.execute(f"PRAGMA {name}").fetchone()[0]
