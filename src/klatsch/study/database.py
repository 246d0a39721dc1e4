"""The SQLite file of a store: its tables, checks when it is opened, transactions, and errors of one line each."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

FORMAT = 3
APPLICATION = 0x6B6C6174  # "klat": tells a store from other SQLite files
WAIT = 60.0  # seconds to wait for another process's transaction
TABLES = """
CREATE TABLE studies (
    name TEXT PRIMARY KEY, kind TEXT NOT NULL, scale TEXT NOT NULL, spec TEXT NOT NULL, command TEXT NOT NULL,
    begun TEXT NOT NULL
);
CREATE TABLE environments (id INTEGER PRIMARY KEY, facts TEXT NOT NULL UNIQUE);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, problem TEXT NOT NULL, rule TEXT NOT NULL, topology TEXT NOT NULL,
    nodes INTEGER NOT NULL, seed INTEGER NOT NULL, lr REAL NOT NULL, steps INTEGER NOT NULL, dtype TEXT NOT NULL,
    settings TEXT NOT NULL, diverged INTEGER NOT NULL, device TEXT NOT NULL, engine TEXT NOT NULL, batch TEXT NOT NULL,
    seconds REAL NOT NULL, environment INTEGER NOT NULL REFERENCES environments, finished TEXT NOT NULL,
    exchange TEXT NOT NULL, graph TEXT NOT NULL REFERENCES graphs, checksum TEXT
);
CREATE TABLE graphs (digest TEXT PRIMARY KEY, links TEXT NOT NULL);
CREATE TABLE metrics (
    run INTEGER NOT NULL REFERENCES runs, name TEXT NOT NULL, step INTEGER NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (run, name, step)
) WITHOUT ROWID;
CREATE TABLE owners (id TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, beats INTEGER NOT NULL);
CREATE TABLE claims (
    key TEXT PRIMARY KEY, batch TEXT NOT NULL, owner TEXT REFERENCES owners ON DELETE SET NULL
) WITHOUT ROWID;
"""
# One statement, because another process may be creating the file: two queries would see it at two moments.
SEEN = (
    "SELECT v.user_version, a.application_id, m.type, m.name, m.rootpage, m.sql "
    "FROM pragma_user_version v, pragma_application_id a LEFT JOIN sqlite_master m"
)
DAMAGED = "if it is a store, it is damaged or was edited: move it away and run again, or restore a copy"
REMEDIES = {  # by what SQLite's message contains
    "full": "free some space and run again: what was stored before is safe",
    "disk I/O": "free some space and run again: what was stored before is safe",
    "readonly": "make the folder writable",
    "unable to open": "make the folder writable",
    "locked": f"another process held it for more than {WAIT:.0f} seconds; run again when that one is done",
}


class Database:
    """A store's file in write-ahead mode, created by the first transaction; a refused file is untouched."""

    def __init__(self, path: str, read_only: bool) -> None:
        self.path = path
        in_memory, there = path == ":memory:", False
        with self._explained():
            if not in_memory and self._check_file(must_exist=read_only):
                self._base = self._opened(read_only)
                self._check_content(must_exist=read_only)
                there = self.format > 0  # else its creator was killed
                if not there:
                    self._base.close()
            if not there:  # an empty one in memory stands in until the file is created
                self._base = self._connected("memory")
                self._make()
        self._lacking = not there and not in_memory
        self._ready = read_only or in_memory

    @property
    def format(self) -> int:
        return int(self._pragma("user_version"))

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        """Run a statement; returns its rows."""
        with self._explained():
            return self._base.execute(statement, values).fetchall()

    def execute_many(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement for every row."""
        with self._explained():
            self._base.executemany(statement, rows)

    def close(self) -> None:
        self._base.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing."""
        with self._explained():
            if not self._ready:
                self._prepare()
            with self._base:
                self._base.execute("BEGIN IMMEDIATE")
                yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into one line with file and remedy."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            text = str(error).splitlines()[0]
            if isinstance(error, UnicodeDecodeError) or text.startswith("Could not decode"):
                text = "it holds text that is not UTF-8"
            remedy = next((remedy for part, remedy in REMEDIES.items() if part in text), DAMAGED)
            raise ValueError(f"{self.path}: {text}; {remedy}") from None

    def _check_file(self, must_exist: bool) -> bool:
        """Whether there is a file to open; foreign ones are refused unopened, since opening may change a file."""
        path = Path(self.path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}; make it first, or give another name for the store")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a plain file, but a device or a pipe; give another name for the store")
        if not must_exist:
            _check_writable(path)
        if not path.exists() or path.stat().st_size == 0:  # empty: its creator was killed
            if must_exist:
                raise ValueError(f"there is no store {path}; klatsch run and klatsch reproduce create one")
            return False
        with path.open("rb") as file:
            head = file.read(100)
        if len(head) < 100 or not head.startswith(b"SQLite format 3\0"):
            raise sqlite3.DatabaseError("file is not a database")
        version, application = (int.from_bytes(head[k : k + 4], "big") for k in (60, 68))
        if (version, application) != (0, 0):  # else its creator was killed, or its content shows what it is
            self._check_numbers(version, application)
        return True

    def _check_content(self, must_exist: bool) -> None:
        """Refuse what only an open file shows: numbers still in its log, a foreign schema, damage."""
        try:
            rows = self._base.execute(SEEN).fetchall()
            version, application = rows[0][:2]
            entries = [entry for _, _, *entry in rows if entry[0] is not None]
            if version or application or entries:
                self._check_numbers(version, application)
                self._check_schema(entries)
            elif must_exist:
                raise ValueError(f"{self.path} holds no finished run yet")
            if (problem := self._pragma("quick_check(1)")) != "ok":
                raise sqlite3.DatabaseError(problem)
        except BaseException:
            self._base.close()
            raise

    def _check_schema(self, entries: Sequence[Sequence[Any]]) -> None:
        """Refuse triggers and the like, which would run by themselves, and tables that are not those of klatsch."""
        for kind, name, page, _ in entries:
            if not page:  # without data of its own: a trigger, a view, a virtual table
                raise ValueError(
                    f"{self.path} holds a {kind} {name!r} that klatsch did not make and does not run; remove it with "
                    f"sqlite3 (DROP {kind.upper()}), or restore a copy"
                )
        made = {name: " ".join(str(sql).split()) for kind, name, _, sql in entries if kind == "table"}
        for statement in TABLES.split(";")[:-1]:
            name = statement.split()[2]
            if name not in made:
                raise sqlite3.DatabaseError(f"it has no table {name!r}")
            if made[name] != " ".join(statement.split()):
                raise sqlite3.DatabaseError(f"its table {name!r} is not as klatsch makes it")

    def _check_numbers(self, version: int, application: int) -> None:
        if application != APPLICATION:
            raise ValueError(f"{self.path} is a database, but not a klatsch store; give another name")
        if version < 1:
            raise sqlite3.DatabaseError(f"it has no format {version}")
        if version != FORMAT:
            age, remedy = (
                ("newer", "update klatsch") if version > FORMAT else ("older", "run the study into a new store")
            )
            raise ValueError(
                f"{self.path} was written by a{'n' * (age == 'older')} {age} klatsch (format {version}, this one knows "
                f"{FORMAT}); {remedy}"
            )

    def _prepare(self) -> None:
        """Create the file, if it is not there."""
        if self._lacking:
            self._base.close()
            self._base, self._lacking = self._opened(read_only=False), False
            self._check_content(must_exist=False)  # another process may have created it by now
        self._base.execute("PRAGMA synchronous = FULL")
        self._use_log()
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            self._make()
        self._ready = True

    def _use_log(self) -> None:
        """Switch to write-ahead mode; SQLite does not wait for another process that is switching too."""
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
        if self.format == 0:
            for statement in TABLES.split(";"):
                self._base.execute(statement)
            self._base.execute(f"PRAGMA application_id = {APPLICATION}")
            self._base.execute(f"PRAGMA user_version = {FORMAT}")

    def _opened(self, read_only: bool) -> sqlite3.Connection:
        if not read_only:
            return self._connected("rwc")
        base = self._connected("rw")
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
                    f"{self.path} has a log beside it ({log.name}), which can only be read in a writable folder; copy "
                    "both into one"
                ) from None
            return self._connected("ro&immutable=1")  # the folder is read-only, so nobody else writes there
        return base

    def _connected(self, mode: str) -> sqlite3.Connection:
        address = f"{Path(self.path).absolute().as_uri()}?mode={mode}"
        base = sqlite3.connect(address, uri=True, timeout=WAIT, isolation_level=None)
        base.execute("PRAGMA trusted_schema = OFF")
        base.execute("PRAGMA foreign_keys = ON")
        return base

    def _pragma(self, name: str) -> Any:
        return self._base.execute(f"PRAGMA {name}").fetchone()[0]


def _check_writable(path: Path) -> None:
    """SQLite writes to the file and creates others beside it; only trying shows whether the folder allows that."""
    try:
        with NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "make file and folder writable"
        raise ValueError(f"{path}: {error.strerror}; {remedy}, or give another name for the store") from None
