"""All results in one SQLite file: a run is stored whole or not at all, and is never repeated.

Every batch is one transaction. A run's key is a hash of its settings, and a checksum covers everything stored about it.
Several processes may use one store: see `Claims` in `study/execute.py`.
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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from klatsch import own
from klatsch.arguments import printable, shown
from klatsch.files import json_of
from klatsch.study import spec
from klatsch.study.batches import Batch, Finished
from klatsch.study.cases import Case, LeftOut, Sources, check_sources, expand, grid, sources_of, with_seeds
from klatsch.study.spec import Options, Study
from klatsch.study.traffic import Exchange

if TYPE_CHECKING:
    from pandas import DataFrame

    from klatsch.clock import Clock

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
FACTS = (  # the columns of a run that its checksum covers
    *("key", "problem", "rule", "topology", "nodes", "seed", "lr", "steps", "dtype", "settings", "diverged", "device"),
    *("engine", "batch", "seconds", "environment", "finished", "exchange", "graph"),
)
NUMBERS = {"nodes": int, "seed": int, "lr": float, "steps": int, "diverged": int, "seconds": float}  # others are texts
Expanded = tuple[list[Case], list[LeftOut]]
METRICS = "SELECT name, step, value FROM metrics WHERE run = ?{} ORDER BY name, step"


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
    kind: str = "study"  # or the target that it reproduces
    scale: str = ""


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
        found = cls(
            study, origin, sources, tuple(LeftOut(n, str(reason)) for n, reason in left_out), frozenset(refused)
        )
        _ = found.cases
        return found


class Store(AbstractContextManager["Store"]):
    """A store of results; a file that is damaged, foreign or newer than this version is refused and left untouched.

    Args:
        path: the file, created if it does not exist; ":memory:" for a temporary one.
        read_only: never write to the file, which must exist.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path = str(path)
        self.base = Database(self.path, read_only)
        self._sound: dict[int, str] = {}  # checksums of runs found whole, so that they are checked once
        self._graphs: dict[str, str] = {}  # the links of graphs found whole, by their digests

    def close(self) -> None:
        self.base.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing -----------------------------------------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing."""
        return self.base.transaction()

    def save(self, batch: Batch, finished: Finished) -> int:
        """Store the results of a batch; returns how many of its runs are new. Only damaged runs are replaced."""
        facts, now = [json.dumps(finished.environment)], _now()
        with self.transaction():
            self.base.execute("INSERT OR IGNORE INTO environments (facts) VALUES (?)", facts)
            ((environment,),) = self.base.execute("SELECT id FROM environments WHERE facts = ?", facts)
            done = self.done()
            for k, (key, case) in enumerate(zip(finished.keys, batch.cases, strict=True)):
                self.base.execute("DELETE FROM claims WHERE key = ?", [key])
                if key in done:
                    continue
                self.base.execute("DELETE FROM metrics WHERE run IN (SELECT id FROM runs WHERE key = ?)", [key])
                self.base.execute("DELETE FROM runs WHERE key = ?", [key])
                exchange = finished.exchanges[k]
                graph = hashlib.sha256(exchange.links.encode()).hexdigest()
                self.base.execute(
                    "INSERT INTO graphs VALUES (?, ?) ON CONFLICT DO UPDATE SET links = excluded.links "
                    "WHERE links != excluded.links",
                    [graph, exchange.links],
                )
                run = (
                    *(key, *map(own.label, (case.problem, case.rule, case.topology)), case.nodes, case.seed, case.lr),
                    *(case.steps, case.dtype, json.dumps(asdict(case)), finished.diverged[k], batch.device),
                    *(finished.engine, batch.key, finished.seconds / len(batch.cases), environment, now),
                    *(exchange.text, graph),
                )
                self.base.execute(f"INSERT INTO runs ({', '.join(FACTS)}) VALUES ({_marks(run)})", run)
                ((number,),) = self.base.execute("SELECT last_insert_rowid()")
                values = [
                    (number, name, int(step), float(value))
                    for name, series in finished.metrics.items()
                    for step, value in zip(finished.steps, series[:, k], strict=True)
                ]
                self.base.execute_many("INSERT INTO metrics VALUES (?, ?, ?, ?)", values)
                self._seal(number)
        return len(set(finished.keys) - done)

    def remember(self, study: Study, origin: Origin, expanded: Expanded | None = None) -> Remembered:
        """Keep a study, with its runs and what it leaves out; it replaces an older one of its name, whose runs stay."""
        cases, left_out = expanded or expand(study)
        sources, keys = sources_of(study), {case.key for case in cases}
        refused = [case.key for case in grid(study, sources) if case.key not in keys] if left_out else []
        beside = {"sources": sources, "left_out": left_out, "refused": refused}
        content = json.dumps({**study.model_dump(mode="json"), **beside})
        with self.transaction():
            self.base.execute(
                "INSERT INTO studies VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "kind = excluded.kind, scale = excluded.scale, spec = excluded.spec, command = excluded.command",
                [study.name, origin.kind, origin.scale, content, origin.command, _now()],
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
        rows = self.base.execute("SELECT spec, command, kind, scale FROM studies ORDER BY begun, rowid")
        with self._readable():
            return [Remembered.read(printable(json_of(content)), Origin(*map(str, rest))) for content, *rest in rows]

    def outcomes(
        self, keys: Iterable[str], names: Sequence[str] | None = None, last: bool = False
    ) -> dict[str, Outcome]:
        """Metrics of the runs that the store has, by key: all or those named, of all recorded rounds or the last."""
        wanted = set(keys)
        self._check(wanted)
        chosen = "" if names is None else f" AND name IN ({_marks(names)})"
        chosen += " AND step = (SELECT steps FROM runs WHERE id = run)" if last else ""
        found: dict[str, Outcome] = {}
        known: dict[tuple[str, str], Exchange] = {}  # which many runs share
        facts = self.base.execute("SELECT key, id, seconds, exchange, graph FROM runs")
        for key, number, seconds, exchange, graph in facts:
            if key in wanted:
                if (exchange, graph) not in known and self._has_links(graph):
                    with self._readable():
                        known[exchange, graph] = Exchange.read(exchange, self._graphs[graph])
                rows = self.base.execute(METRICS.format(chosen), [number, *(names or ())])
                metrics = {name: np.array([v for *_, v in part]) for name, part in groupby(rows, itemgetter(0))}
                steps = np.array([step for name, step, _ in rows if name == rows[0][0]], dtype=np.int64)
                found[key] = Outcome(steps, metrics, seconds, known[exchange, graph])
        return found

    def runs(self) -> list[tuple[Case, Options]]:
        """All runs, each with what is stored besides its metrics."""
        self._check()
        names = ("key", "diverged", "device", "engine", "seconds", "finished")
        rows = self.base.execute(
            f"SELECT settings, {', '.join(names)}, facts "
            "FROM runs JOIN environments ON environments.id = environment ORDER BY runs.id"
        )
        with self._readable():
            return [
                (Case.read(printable(json_of(settings))), dict(zip((*names, "environment"), rest, strict=True)))
                for settings, *rest in rows
            ]

    def frame(self, curves: bool = False, clock: Clock | None = None) -> DataFrame:
        """All runs for pandas, with options as columns: one line per run, or with `curves` per recorded round."""
        from klatsch.study import export

        return export.frame(self, curves, clock)

    def environments(self) -> list[dict[str, str]]:
        """The versions and machines behind the runs."""
        rows = self.base.execute("SELECT facts FROM environments ORDER BY id")
        with self._readable():
            return [json_of(facts) for (facts,) in rows]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn errors about content that another version or a stranger wrote into one line."""
        try:
            yield
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.path} holds settings that this klatsch cannot read ({reason})") from None

    # --- checksums ---------------------------------------------------------------------------------------------

    def _examined(self, keys: Collection[str] | None = None) -> Iterator[tuple[int, str, str | None]]:
        """Number, key and flaw (None if it is whole) of these runs, or of all."""
        for number, key, checksum in self.base.execute("SELECT id, key, checksum FROM runs ORDER BY id"):
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
        if checksum is not None and self._sound.get(number) == checksum:
            return None
        content, metrics = self._content(number)
        if checksum is None:
            return "has no checksum"
        if checksum != _digest(content, metrics):
            return "does not match its checksum"
        *columns, facts = content
        names = [name for name in FACTS if name != "environment"]
        for name, value in zip(names, columns, strict=True):
            if type(value) is not NUMBERS.get(name, str):
                return f"has {name} = {shown(value)}"
        for name, step, value in metrics:
            if not isinstance(value, float) or not isinstance(step, int) or not isinstance(name, str):
                return f"has {shown(name)} = {shown(value)} in round {shown(step)}"
        rounds = columns[names.index("steps")]
        points = {tuple(step for _, step, _ in part) for _, part in groupby(metrics, itemgetter(0))}
        if len({len(steps) for steps in points}) != 1 or {steps[-1] for steps in points} != {rounds}:
            return "lacks metrics"
        if not self._has_links(columns[names.index("graph")]):
            return "lacks the links of its graph"
        try:
            environment = printable(json_of(facts or "null"))
            printable([columns, [name for name, *_ in metrics]])
        except ValueError as reason:
            return f"cannot be read ({reason})"
        if not isinstance(environment, dict) or not {"processor", "torch"} <= environment.keys():
            return "has an environment that cannot be read"
        self._sound[number] = checksum
        return None

    def _has_links(self, digest: str) -> bool:
        """Whether the links of a graph are there and whole."""
        if digest not in self._graphs:
            for (links,) in self.base.execute("SELECT links FROM graphs WHERE digest = ?", [digest]):
                if isinstance(links, str) and hashlib.sha256(links.encode()).hexdigest() == digest:
                    self._graphs[digest] = links
        return digest in self._graphs

    def _seal(self, number: int) -> None:
        """Give a run its checksum."""
        self._sound[number] = _digest(*self._content(number))
        self.base.execute("UPDATE runs SET checksum = ? WHERE id = ?", [self._sound[number], number])

    def _content(self, number: int) -> tuple[Any, list[Any]]:
        """Everything stored about a run, read back: SQLite may have converted a value."""
        names = ", ".join(name for name in FACTS if name != "environment")
        joined = "runs LEFT JOIN environments ON environments.id = environment"
        (facts,) = self.base.execute(f"SELECT {names}, facts FROM {joined} WHERE runs.id = ?", [number])
        return facts, self.base.execute(METRICS.format(""), [number])


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


def _digest(facts: Any, metrics: list[Any]) -> str:
    return hashlib.sha256(json.dumps([facts, metrics], default=repr).encode()).hexdigest()


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
