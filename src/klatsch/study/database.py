"""A SQLite file that is ours: opened with care, written in transactions, its errors one line with a remedy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

FORMAT = 1
APPLICATION = 0x6B6C6174  # "klat": tells a store from other SQLite files
WAIT = 60.0  # seconds that a process waits for another one's transaction


class Database:
    """A SQLite file in write-ahead mode.

    Args:
        path: the file, made if it does not exist; ":memory:" for one that is gone afterwards.
        tables: the statements that make a new one.
        read_only: only look: the file must exist, and is not written to.

    Raises:
        ValueError: the file is damaged, not ours, or written by a newer version; it is left as it is.
    """

    def __init__(self, path: str, tables: str, read_only: bool) -> None:
        self.path = path
        with self.explained():
            if self.path != ":memory:":
                self._check_file(must_exist=read_only)
            self._base = self._open(read_only)
            if self.path != ":memory:":
                self._check_content(must_exist=read_only)
            if read_only:
                return
            for setting in ("foreign_keys = ON", "synchronous = FULL", "journal_mode = WAL"):
                self._base.execute(f"PRAGMA {setting}")
            with self.transaction():
                if self._pragma("user_version") == 0:
                    for statement in tables.split(";"):
                        self._base.execute(statement)
                    self._base.execute(f"PRAGMA application_id = {APPLICATION}")
                    self._base.execute(f"PRAGMA user_version = {FORMAT}")

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
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what SQLite says into one line with the file and a remedy."""
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            remedy = "see that the folder can be written to"
            if "full" in text or "disk I/O" in text:
                remedy = "free some space and run again: what was stored before is safe"
            elif "malformed" in text or "not a database" in text or "***" in text or "Page" in text:
                remedy = "if it is a store, it is damaged: move it away and run again, or bring back a copy"
            elif "locked" in text:
                remedy = f"another process held it for more than {WAIT:.0f} seconds; run again when that is done"
            raise ValueError(f"{self.path}: {text}; {remedy}") from None

    # --- inside -------------------------------------------------------------------------------------------------

    def _check_file(self, must_exist: bool) -> None:
        """Refuse what is no store of ours by its first bytes, since opening may already change a file."""
        path = Path(self.path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}; make it first, or give another name for the store")
        if not path.exists() or path.stat().st_size == 0:  # empty: one that was killed as it began
            if must_exist:
                raise ValueError(f"there is no store {path}; klatsch run and klatsch reproduce make one")
            return
        with path.open("rb") as file:
            head = file.read(100)
        if len(head) < 100 or not head.startswith(b"SQLite format 3\0"):
            raise sqlite3.DatabaseError("file is not a database")
        version, ours = (int.from_bytes(head[k : k + 4], "big") for k in (60, 68))
        if (version, ours) != (0, 0):  # else it was killed as it began, or its content will tell
            self._check_numbers(version, ours)

    def _check_content(self, must_exist: bool) -> None:
        """Refuse what only shows when the file is open: numbers that are still in its log, tables, damage."""
        try:
            version, ours = self._pragma("user_version"), self._pragma("application_id")
            tables = self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version or ours or tables:
                self._check_numbers(version, ours)
            elif must_exist:
                raise ValueError(f"{self.path} holds no finished run yet")
            if (problem := self._pragma("quick_check(1)")) != "ok":
                raise sqlite3.DatabaseError(problem)
        except BaseException:
            self._base.close()
            raise

    def _check_numbers(self, version: int, ours: int) -> None:
        if ours != APPLICATION:
            raise ValueError(f"{self.path} is a database, but no store of klatsch; give another name")
        if version > FORMAT:
            raise ValueError(
                f"{self.path} was written by a newer klatsch (format {version}, this one knows {FORMAT}); "
                "update klatsch"
            )

    def _open(self, read_only: bool) -> sqlite3.Connection:
        if not read_only:
            return sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
        address = f"file:{quote(str(Path(self.path).absolute()))}"
        base = sqlite3.connect(f"{address}?mode=rw", uri=True, timeout=WAIT)
        try:
            base.execute("PRAGMA query_only = ON")
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
