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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from klatsch import own
from klatsch.arguments import printable
from klatsch.files import json_of
from klatsch.study import spec
from klatsch.study.batches import Batch, Finished
from klatsch.study.cases import Case, LeftOut, Sources, check_sources, expand, grid, sources_of, with_seeds
from klatsch.study.spec import Options, Study
from klatsch.study.traffic import Exchange

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
# One statement, because another process may be creating the file: two queries would see it at two moments.
SEEN = (
    "SELECT v.user_version, a.application_id, m.type, m.name, m.rootpage, m.sql "
    "FROM pragma_user_version v, pragma_application_id a LEFT JOIN sqlite_master m"
)
METRICS = "SELECT name, step, value FROM metrics WHERE run = ?{} ORDER BY name, step"
DAMAGED = "if it is a store, it is damaged or was edited: move it away and run again, or restore a copy"
REMEDIES = {  # by what SQLite's message contains
    "full": "free some space and run again: what was stored before is safe",
    "disk I/O": "free some space and run again: what was stored before is safe",
    "readonly": "make the folder writable",
    "unable to open": "make the folder writable",
    "locked": f"another process held it for more than {WAIT:.0f} seconds; run again when that one is done",
}


@dataclass(frozen=True)
class Outcome:
    """The stored metrics of a run."""

    steps: NDArray[np.int64]
    metrics: dict[str, NDArray[np.float64]]
    seconds: float  # its share of the batch
    exchange: Exchange  # what its nodes send


@dataclass(frozen=True)
class Origin:
    """Where a study comes from."""

    command: str = ""


@dataclass(frozen=True)
class Remembered:
    """A study that was run into a store: what its file said, which is shown, and never run."""

    study: Study
    origin: Origin
    sources: Sources  # of its custom parts
    left_out: tuple[LeftOut, ...] = ()
    refused: frozenset[str] = frozenset()  # the keys of what is left out, with the first seed

    @cached_property
    def cases(self) -> list[Case]:
        """Its runs, whether or not the store has them."""
        firsts = (case for case in grid(self.study, self.sources) if case.key not in self.refused)
        return with_seeds(firsts, self.study)

    @classmethod
    def read(cls, content: Any, origin: Origin) -> Remembered:
        """From what a store holds of it, which may be forged."""
        sources, left_out, refused = (content.pop(name) for name in ("sources", "left_out", "refused"))
        study = spec.parse(content, stored=True)
        names = [study.problem.name, *(entry.name for pair in study.pairs for entry in pair)]
        check_sources({name: name for name in names}, sources)
        if not all(isinstance(text, str) for text in sources.get("data", {}).values()):
            raise ValueError("data are no texts")
        reasons = tuple(LeftOut(nodes, str(reason)) for nodes, reason in left_out)
        remembered = cls(study, origin, sources, reasons, frozenset(refused))
        _ = remembered.cases
        return remembered


class Database:
    """A store's file in write-ahead mode, created by the first transaction; a refused file is untouched."""

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            has = sqlite3.sqlite_version
            raise ValueError(f"klatsch needs SQLite 3.37 or newer, and this Python has {has}; use another Python")
        self.path = str(path)
        self._ready = read_only  # else the first transaction makes the tables, if there are none
        self._base: sqlite3.Connection | None = None  # none as long as there are no tables
        with self._explained():
            if self.path != ":memory:" and self._check_file(must_exist=read_only):
                base = self._opened(read_only)
                if self._has_tables(base, must_exist=read_only):
                    self._base = base
                else:
                    base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._base is not None:
            self._base.close()

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

    def _has_tables(self, base: sqlite3.Connection, must_exist: bool) -> bool:
        """Whether it holds tables; refuses what only an open file shows: numbers in its log, another schema, damage."""
        try:
            rows = base.execute(SEEN).fetchall()
            version, application = rows[0][:2]
            entries = [entry for _, _, *entry in rows if entry[0] is not None]
            if version or application or entries:
                self._check_numbers(version, application)
                self._check_schema(entries)
            elif must_exist:
                raise ValueError(f"{self.path} holds no finished run yet")
            ((problem,),) = base.execute("PRAGMA quick_check(1)").fetchall()  # types and constraints, too
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
        except BaseException:
            base.close()
            raise
        return bool(version)  # none: its creator was killed

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
            of, remedy = (
                ("a newer", "update klatsch") if version > FORMAT else ("an older", "run the study into a new store")
            )
            raise ValueError(
                f"{self.path} was written by {of} klatsch (format {version}, this one knows {FORMAT}); {remedy}"
            )

    def _writable(self) -> sqlite3.Connection:
        """The file with its tables, in write-ahead mode."""
        if self._base is not None and self._ready:
            return self._base
        base = self._base
        if base is None:
            base = self._opened(read_only=False)
            self._has_tables(base, must_exist=False)  # another process may have made them by now
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


class Store(Database):
    """A store of results; a file that is damaged, foreign or newer than this version is refused and left untouched.

    Args:
        path: the file, created if it does not exist; ":memory:" for a temporary one.
        read_only: never write to the file, which must exist.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        super().__init__(path, read_only)
        self._sound: dict[int, str] = {}  # checksums of runs found whole, so that they are checked once
        self._graphs: dict[str, str] = {}  # the links of graphs found whole, by their digests

    # --- writing -----------------------------------------------------------------------------------------------

    def save(self, batch: Batch, finished: Finished) -> int:
        """Store the results of a batch; returns how many of its runs are new. Only damaged runs are replaced."""
        new: set[str] = set()  # graphs of this transaction, which are remembered only after its commit
        with self.transaction():
            done, now = self.done(), _now()
            for k, (key, case) in enumerate(zip(finished.keys, batch.cases, strict=True)):
                self.execute("DELETE FROM claims WHERE key = ?", [key])
                if key in done:
                    continue
                self.execute("DELETE FROM runs WHERE key = ?", [key])
                exchange = finished.exchanges[k]
                graph = hashlib.sha256(exchange.links.encode()).hexdigest()
                if graph not in new and not self._has_links(graph):
                    new.add(graph)
                    self.execute("INSERT OR REPLACE INTO graphs VALUES (?, ?)", [graph, exchange.links])
                run = (
                    *(key, *map(own.label, (case.problem, case.rule, case.topology)), case.nodes, case.seed, case.lr),
                    *(case.steps, case.dtype, json.dumps(asdict(case)), finished.diverged[k], batch.device),
                    *(finished.engine, batch.key, finished.seconds / len(batch.cases)),
                    *(json.dumps(finished.environment), now, exchange.text, graph),
                )
                insert = f"INSERT INTO runs VALUES (NULL, {_marks(run)}, NULL) RETURNING id"
                ((number,),) = self.execute(insert, run)
                values = (
                    (number, name, int(step), float(value))
                    for name, series in finished.metrics.items()
                    for step, value in zip(finished.steps, series[:, k], strict=True)
                )
                self.execute_many("INSERT INTO metrics VALUES (?, ?, ?, ?)", values)
                self._seal(number)
        return len(set(finished.keys) - done)

    def remember(
        self, study: Study, origin: Origin, expanded: tuple[list[Case], list[LeftOut]] | None = None
    ) -> Remembered:
        """Keep a study, with its runs and what it leaves out; it replaces an older one of its name, whose runs stay."""
        cases, left_out = expanded or expand(study)
        sources, keys = sources_of(study), {case.key for case in cases}
        refused = [case.key for case in grid(study, sources) if case.key not in keys] if left_out else []
        beside = {"sources": sources, "left_out": left_out, "refused": refused}
        content = json.dumps({**study.model_dump(mode="json"), **beside})
        with self.transaction():
            self.execute(
                "INSERT INTO studies VALUES (?, 'study', '', ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "spec = excluded.spec, command = excluded.command",
                [study.name, content, origin.command, _now()],
            )
        return Remembered(study, origin, sources, tuple(left_out), frozenset(refused))

    # --- reading -----------------------------------------------------------------------------------------------

    def done(self) -> set[str]:
        """The keys of all undamaged runs."""
        return {key for _, key, flaw in self._examined() if flaw is None}

    def damaged(self) -> set[str]:
        """The keys of all damaged runs."""
        return {key for _, key, flaw in self._examined() if flaw is not None}

    def studies(self) -> list[Remembered]:
        """The studies that were run, oldest first."""
        rows = self.execute("SELECT spec, command FROM studies ORDER BY begun, rowid")
        with self._readable():
            return [Remembered.read(printable(json_of(content)), Origin(command)) for content, command in rows]

    def outcomes(
        self, keys: Iterable[str], names: Sequence[str] | None = None, last: bool = False
    ) -> dict[str, Outcome]:
        """Metrics of the runs that the store has, by key: all or those named, of all recorded rounds or the last."""
        wanted = set(keys)
        self._check(wanted)
        chosen = "" if names is None else f" AND name IN ({_marks(names)})"
        chosen += " AND step = (SELECT steps FROM runs WHERE id = run)" if last else ""
        outcomes: dict[str, Outcome] = {}
        exchanges: dict[tuple[str, str], Exchange] = {}  # which many runs share
        for key, number, seconds, *said in self.execute("SELECT key, id, seconds, exchange, graph FROM runs"):
            if key not in wanted:
                continue
            text, graph = said
            if (text, graph) not in exchanges and self._has_links(graph):  # which a run stored just now has not read
                with self._readable():
                    exchanges[text, graph] = Exchange.read(text, self._graphs[graph])
            rows = self.execute(METRICS.format(chosen), [number, *(names or ())])
            metrics = {name: np.array([v for *_, v in part]) for name, part in groupby(rows, itemgetter(0))}
            steps = np.array([step for name, step, _ in rows if name == rows[0][0]], dtype=np.int64)
            outcomes[key] = Outcome(steps, metrics, seconds, exchanges[text, graph])
        return outcomes

    def runs(self) -> list[tuple[Case, Options]]:
        """All runs, each with what is stored besides its metrics."""
        self._check()
        names = ("key", "diverged", "device", "engine", "seconds", "finished", "environment")
        rows = self.execute(f"SELECT settings, {', '.join(names)} FROM runs ORDER BY id")
        with self._readable():
            return [
                (Case.read(printable(json_of(settings))), dict(zip(names, rest, strict=True)))
                for settings, *rest in rows
            ]

    def frame(self, curves: bool = False, clock: Clock | None = None) -> DataFrame:
        """All runs for pandas, with options as columns: one line per run, or with `curves` per recorded round."""
        from klatsch.study import export

        return export.frame(self, curves, clock)

    def environments(self) -> list[dict[str, str]]:
        """The versions and machines behind the runs."""
        rows = self.execute("SELECT environment FROM runs GROUP BY environment ORDER BY min(id)")
        with self._readable():
            return [json_of(facts) for (facts,) in rows]

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

    def _examined(self, keys: Collection[str] | None = None) -> Iterator[tuple[int, str, str | None]]:
        """Number, key and flaw (None if it is whole) of these runs, or of all."""
        for number, key, checksum in self.execute("SELECT id, key, checksum FROM runs ORDER BY id"):
            if keys is None or key in keys:
                yield number, key, self._flaw(number, checksum)

    def _check(self, keys: Collection[str] | None = None) -> None:
        """Refuse damaged runs."""
        examined = list(self._examined(keys))
        if flaws := [(number, flaw) for number, _, flaw in examined if flaw is not None]:
            (number, flaw), are = flaws[0], "is" if len(flaws) == 1 else "are"
            raise ValueError(
                f"{self.path}: {len(flaws):,} of {len(examined):,} runs {are} damaged (number {number} {flaw}); "
                "restore a copy of the store, or run the study again, which repeats them"
            )

    def _flaw(self, number: int, checksum: str | None) -> str | None:
        """What is wrong with a run, or None."""
        if checksum is None:
            return "has no checksum"
        if self._sound.get(number) == checksum:
            return None
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
        return None

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


def _digest(facts: list[Any], metrics: list[Any]) -> str:
    return hashlib.sha256(json.dumps([facts, metrics]).encode()).hexdigest()


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
