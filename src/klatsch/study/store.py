"""All results in one SQLite file: a run is stored whole or not at all, and is never repeated.

Every batch is one transaction. A run's key is a hash of its settings, and a checksum covers everything stored about it.
SQLite itself keeps types and constraints, and verifies them when a file is opened. Several processes may use one store:
see `Claims` in `study/execute.py`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from klatsch import own
from klatsch.arguments import printable
from klatsch.extras import need
from klatsch.files import json_of
from klatsch.study.batches import Batch, Outcome
from klatsch.study.cases import Case, Exchange, LeftOut, Remembered
from klatsch.study.spec import Study

if TYPE_CHECKING:
    from pandas import DataFrame

    from klatsch.clock import Clock

FORMAT = 4
OLDEST = (3, 37)  # the SQLite that has STRICT tables
APPLICATION = 0x6B6C6174  # "klat": tells a store from other SQLite files
WAIT = 60.0  # seconds to wait for another process's transaction
# The columns kind and scale of studies are of no use any more, but part of the format.
TABLES = """
CREATE TABLE studies (
    name TEXT PRIMARY KEY, kind TEXT NOT NULL, scale TEXT NOT NULL, spec TEXT NOT NULL, command TEXT NOT NULL,
    begun TEXT NOT NULL
) STRICT;
CREATE TABLE graphs (digest TEXT PRIMARY KEY, links TEXT NOT NULL) STRICT;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, problem TEXT NOT NULL, rule TEXT NOT NULL, topology TEXT NOT NULL,
    nodes INTEGER NOT NULL, seed INTEGER NOT NULL, lr REAL NOT NULL, steps INTEGER NOT NULL, dtype TEXT NOT NULL,
    settings TEXT NOT NULL, diverged INTEGER NOT NULL, device TEXT NOT NULL, engine TEXT NOT NULL, batch TEXT NOT NULL,
    seconds REAL NOT NULL, environment TEXT NOT NULL, finished TEXT NOT NULL, exchange TEXT NOT NULL,
    graph TEXT NOT NULL REFERENCES graphs, checksum TEXT
) STRICT;
CREATE TABLE metrics (
    run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE, name TEXT NOT NULL, step INTEGER NOT NULL,
    value REAL NOT NULL, PRIMARY KEY (run, name, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE owners (id TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, beats INTEGER NOT NULL) STRICT;
CREATE TABLE claims (
    key TEXT PRIMARY KEY, batch TEXT NOT NULL, owner TEXT REFERENCES owners ON DELETE SET NULL
) STRICT, WITHOUT ROWID;
"""
METRICS = "SELECT name, step, value FROM metrics WHERE run = ?{} ORDER BY name, step"
DAMAGED = "if it is a store, it is damaged or was edited: move it away and run again, or restore a copy"
REMEDIES = {  # by what SQLite's message contains
    "full": "free some space and run again: what was stored before is safe",
    "disk I/O": "free some space and run again: what was stored before is safe",
    "readonly": "make the folder writable",
    "unable to open": "make the folder writable",
    "locked": f"another process held it for more than {WAIT:.0f} seconds; run again when that one is done",
}


class Store(AbstractContextManager["Store"]):
    """A store of results; a file that is damaged, foreign or newer than this version is refused and left untouched.

    Args:
        path: the file, created by the first transaction if it does not exist; ":memory:" for a temporary one.
        read_only: never write to the file, which must exist.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            has = sqlite3.sqlite_version
            raise ValueError(f"klatsch needs SQLite 3.37 or newer, and this Python has {has}; use another Python")
        self.path = str(path)
        self._ready = read_only  # else the first transaction makes the tables, if there are none
        self._base: sqlite3.Connection | None = None  # none as long as there are no tables
        self._sound: dict[int, str] = {}  # checksums of runs found whole, so that they are checked once
        self._graphs: dict[str, str] = {}  # the links of graphs found whole, by their digests
        with self._explained():
            if self.path == ":memory:" or not self._is_file(must_exist=read_only):
                return
            base = self._opened(read_only)
            if self._has_tables(base):
                self._base = base
                return
            base.close()
            if read_only:
                raise ValueError(f"{self.path} holds no finished run yet")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._base is not None:
            self._base.close()

    # --- writing -----------------------------------------------------------------------------------------------

    def save(self, batch: Batch, outcomes: Sequence[Outcome]) -> int:
        """Store the results of a batch; returns how many of its runs are new. Only damaged runs are replaced."""
        new: list[str] = []
        graphs: set[str] = set()  # of this transaction, which are remembered only after its commit
        with self.transaction():
            done = self.done()
            for case, outcome in zip(batch.cases, outcomes, strict=True):
                key, exchange = case.key, outcome.exchange
                self.execute("DELETE FROM claims WHERE key = ?", [key])
                if key in done:
                    continue
                new.append(key)
                self.execute("DELETE FROM runs WHERE key = ?", [key])
                graph = hashlib.sha256(exchange.links.encode()).hexdigest()
                if graph not in graphs and not self._has_links(graph):
                    graphs.add(graph)
                    self.execute("INSERT OR REPLACE INTO graphs VALUES (?, ?)", [graph, exchange.links])
                run = (
                    *(key, *map(own.label, (case.problem, case.rule, case.topology)), case.nodes, case.seed, case.lr),
                    *(case.steps, case.dtype, json.dumps(asdict(case)), outcome.diverged, outcome.device),
                    *(outcome.engine, batch.key, outcome.seconds, json.dumps(outcome.environment), outcome.finished),
                    *(exchange.text, graph),
                )
                insert = f"INSERT INTO runs VALUES (NULL, {_marks(run)}, NULL) RETURNING id"
                ((number,),) = self.execute(insert, run)
                values = (
                    (number, name, int(step), float(value))
                    for name, series in outcome.metrics.items()
                    for step, value in zip(outcome.steps, series, strict=True)
                )
                self.execute_many("INSERT INTO metrics VALUES (?, ?, ?, ?)", values)
                self._seal(number)
        return len(new)

    def remember(
        self, study: Study, command: str = "", expanded: tuple[list[Case], list[LeftOut]] | None = None
    ) -> Remembered:
        """Keep a study and what it leaves out; it replaces an older one of its name, whose runs stay."""
        remembered = Remembered.of(study, command, expanded)
        with self.transaction():
            self.execute(
                "INSERT INTO studies VALUES (?, 'study', '', ?, ?, strftime('%Y-%m-%dT%H:%M:%S+00:00', 'now')) "
                "ON CONFLICT (name) DO UPDATE SET spec = excluded.spec, command = excluded.command",
                [study.name, remembered.text, command],
            )
        return remembered

    # --- reading -----------------------------------------------------------------------------------------------

    def done(self) -> set[str]:
        """The keys of all undamaged runs."""
        return {key for key, flaw in self._examined().items() if not flaw}

    def damaged(self) -> set[str]:
        """The keys of all damaged runs."""
        return {key for key, flaw in self._examined().items() if flaw}

    def studies(self) -> list[Remembered]:
        """The studies that were run, oldest first."""
        rows = self.execute("SELECT spec, command FROM studies ORDER BY begun, rowid")
        with self._readable():
            return [Remembered.read(printable(json_of(content)), command) for content, command in rows]

    def runs(self) -> list[tuple[str, Case]]:
        """The keys and settings of all runs."""
        self._check()
        rows = self.execute("SELECT key, settings FROM runs ORDER BY id")
        with self._readable():
            return [(key, Case.read(printable(json_of(settings)))) for key, settings in rows]

    def outcomes(
        self, keys: Iterable[str], names: Sequence[str] | None = None, last: bool = False
    ) -> dict[str, Outcome]:
        """What the store has of these runs, by key: all metrics or those named, of all recorded rounds or the last."""
        wanted = set(keys)
        self._check(wanted)
        chosen = "" if names is None else f" AND name IN ({_marks(names)})"
        chosen += " AND step = (SELECT steps FROM runs WHERE id = run)" if last else ""
        outcomes: dict[str, Outcome] = {}
        exchanges: dict[tuple[str, str], Exchange] = {}  # which many runs share
        facts = "diverged, device, engine, seconds, finished"
        runs = self.execute(f"SELECT key, id, exchange, graph, environment, {facts} FROM runs ORDER BY id")
        for key, number, text, graph, environment, *rest in runs:
            if key not in wanted:
                continue
            self._has_links(graph)  # those of a run that was stored just now have not been read
            with self._readable():
                if (text, graph) not in exchanges:
                    exchanges[text, graph] = Exchange.read(text, self._graphs[graph])
                rest.append(json_of(environment))
            rows = self.execute(METRICS.format(chosen), [number, *(names or ())])
            metrics = {name: np.array([v for *_, v in part]) for name, part in groupby(rows, itemgetter(0))}
            steps = np.array([step for name, step, _ in rows if name == rows[0][0]], dtype=np.int64)
            outcomes[key] = Outcome(steps, metrics, exchanges[text, graph], *rest)
        return outcomes

    def frame(self, curves: bool = False, clock: Clock | None = None) -> DataFrame:
        """All runs for pandas, with options as columns: one line per run, or with `curves` per recorded round."""
        need("a frame", "pandas")
        import pandas as pd

        from klatsch.study import choices

        return pd.DataFrame(choices.records(self, self.runs(), curves, clock, options=True))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn errors about content that another version or a stranger wrote into one line."""
        try:
            yield
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ValueError(f"{self.path} holds settings that this klatsch cannot read ({reason})") from None

    # --- checksums ---------------------------------------------------------------------------------------------

    def _examined(self, keys: Collection[str] | None = None) -> dict[str, str]:
        """What is wrong with each of these runs, or with any, by key; empty if it is whole."""
        runs = self.execute("SELECT id, key, checksum FROM runs ORDER BY id")
        flaws = {key: (n, self._flaw(n, checksum)) for n, key, checksum in runs if keys is None or key in keys}
        return {key: flaw and f"number {number} {flaw}" for key, (number, flaw) in flaws.items()}

    def _check(self, keys: Collection[str] | None = None) -> None:
        """Refuse damaged runs."""
        examined = self._examined(keys)
        if flaws := [flaw for flaw in examined.values() if flaw]:
            are = "is" if len(flaws) == 1 else "are"
            raise ValueError(
                f"{self.path}: {len(flaws):,} of {len(examined):,} runs {are} damaged ({flaws[0]}); "
                "restore a copy of the store, or run the study again, which repeats them"
            )

    def _flaw(self, number: int, checksum: str | None) -> str:
        if checksum is None:
            return "has no checksum"
        if self._sound.get(number) == checksum:
            return ""
        facts, metrics = self._content(number)
        if checksum != _digest(facts, metrics):
            return "does not match its checksum"
        ((rounds, graph, environment),) = self.execute(
            "SELECT steps, graph, environment FROM runs WHERE id = ?", [number]
        )
        points = {tuple(step for _, step, _ in part) for _, part in groupby(metrics, itemgetter(0))}
        if len(set(map(len, points))) != 1 or {steps[-1] for steps in points} != {rounds}:
            return "lacks metrics"
        if not self._has_links(graph):
            return "lacks the links of its graph"
        try:
            printable([facts, json_of(environment), [name for name, *_ in metrics]])
            _ = [json_of(environment)[name] for name in ("processor", "torch")]
        except (ValueError, LookupError, TypeError) as reason:
            return f"cannot be read ({reason})"
        self._sound[number] = checksum
        return ""

    def _has_links(self, digest: str) -> bool:
        """Whether the links of a graph are there and whole."""
        if digest not in self._graphs:
            for (links,) in self.execute("SELECT links FROM graphs WHERE digest = ?", [digest]):
                if hashlib.sha256(links.encode()).hexdigest() == digest:
                    self._graphs[digest] = links
        return digest in self._graphs

    def _seal(self, number: int) -> None:
        """Give a run its checksum."""
        self._sound[number] = _digest(*self._content(number))
        self.execute("UPDATE runs SET checksum = ? WHERE id = ?", [self._sound[number], number])

    def _content(self, number: int) -> tuple[list[Any], list[Any]]:
        """Everything stored about a run."""
        ((_, *facts, _),) = self.execute("SELECT * FROM runs WHERE id = ?", [number])
        return facts, self.execute(METRICS.format(""), [number])

    # --- the file ----------------------------------------------------------------------------------------------

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        """Run a statement; returns its rows."""
        with self._explained():
            return [] if self._base is None else self._base.execute(statement, values).fetchall()

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement for every row, within a transaction."""
        with self._explained():
            self._writable().executemany(statement, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing."""
        with self._explained(), self._writable() as base:
            base.execute("BEGIN IMMEDIATE")
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

    def _is_file(self, must_exist: bool) -> bool:
        """Whether there is a file to open; a foreign one is refused unopened, since opening may change a file."""
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
            if path.suffix == ".toml":
                raise ValueError(f"{path} is a study file; give its store, such as {path.with_suffix('.sqlite')}")
            raise sqlite3.DatabaseError("file is not a database")
        self._is_made(*(int.from_bytes(head[k : k + 4], "big") for k in (68, 60)))
        return True

    def _is_made(self, application: int, version: int) -> bool:
        """Whether a file claims to be a store; one that claims nothing is empty, or shows by its tables what it is."""
        if application == version == 0:
            return False
        if application != APPLICATION:
            raise ValueError(f"{self.path} is a database, but not a klatsch store; give another name")
        if version < 1:
            raise sqlite3.DatabaseError(f"it has no format {version}")
        if version != FORMAT:
            of, remedy = (
                ("a newer", "update klatsch") if version > FORMAT else ("an older", "run the study into a new store")
            )
            raise ValueError(
                f"{self.path} was written by {of} klatsch (format {version}, this one knows {FORMAT}); {remedy}"
            )
        return True

    def _has_tables(self, base: sqlite3.Connection) -> bool:
        """Whether an open file holds tables, or will; refuses another schema and damage, and closes it."""
        try:
            base.execute("BEGIN")  # one moment for all that follows: another process may be making the file
            is_made = self._is_made(
                *(base.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version"))
            )
            entries = base.execute("SELECT type, name, rootpage, sql FROM sqlite_master").fetchall()
            if entries and not is_made:
                raise ValueError(f"{self.path} is a database, but not a klatsch store; give another name")
            for kind, name, page, _ in entries:
                if not page:  # without data of its own: a trigger, a view, a virtual table, which run by themselves
                    raise ValueError(
                        f"{self.path} holds a {kind} {name!r} that klatsch did not make and does not run; remove it "
                        f"with sqlite3 (DROP {kind.upper()}), or restore a copy"
                    )
            tables = {name: str(sql).split() for kind, name, _, sql in entries if kind == "table"}
            for statement in TABLES.split(";")[:-1] if is_made else ():
                if tables.get(name := statement.split()[2]) != statement.split():
                    flaw = "is not as klatsch makes it" if name in tables else "is missing"
                    raise sqlite3.DatabaseError(f"its table {name!r} {flaw}")
            ((problem,),) = base.execute("PRAGMA quick_check(1)").fetchall()  # types and constraints, too
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            base.execute("COMMIT")
        except BaseException:
            base.close()
            raise
        return is_made

    def _writable(self) -> sqlite3.Connection:
        """The file with its tables, in write-ahead mode."""
        if self._base is not None and self._ready:
            return self._base
        base = self._base
        if base is None:
            base = self._opened(read_only=False)
            self._has_tables(base)  # another process may have made them by now
        base.execute("PRAGMA synchronous = FULL")
        deadline = time.monotonic() + WAIT
        while True:  # SQLite does not wait for another process that is switching, too
            try:
                base.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)
        with base:
            base.execute("BEGIN IMMEDIATE")
            if base.execute("PRAGMA user_version").fetchone() == (0,):
                for statement in TABLES.split(";"):
                    base.execute(statement)
                base.execute(f"PRAGMA application_id = {APPLICATION}")
                base.execute(f"PRAGMA user_version = {FORMAT}")
        self._base, self._ready = base, True
        return base

    def _opened(self, read_only: bool) -> sqlite3.Connection:
        if not read_only:
            return self._connected("memory" if self.path == ":memory:" else "rwc")
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


def _digest(facts: list[Any], metrics: list[Any]) -> str:
    return hashlib.sha256(json.dumps([facts, metrics]).encode()).hexdigest()


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


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
