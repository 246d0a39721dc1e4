"""All results in one SQLite file: a run is there whole or not at all, and is never done twice.

A transaction per finished batch, write-ahead log, runs keyed by a hash of what determines them, each with a checksum.
Several processes may use one store: see `study/sharing.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from klatsch import own
from klatsch.files import json_of
from klatsch.study import before, spec
from klatsch.study.batches import Batch, Finished
from klatsch.study.cases import Case, Sources, sources_of
from klatsch.study.checksums import FACTS, Checksums
from klatsch.study.database import Database
from klatsch.study.spec import Study

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
    seconds REAL NOT NULL, environment INTEGER NOT NULL REFERENCES environments, finished TEXT NOT NULL, checksum TEXT
);
CREATE TABLE metrics (
    run INTEGER NOT NULL REFERENCES runs, name TEXT NOT NULL, step INTEGER NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (run, name, step)
) WITHOUT ROWID;
CREATE TABLE owners (id TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, beats INTEGER NOT NULL);
CREATE TABLE claims (
    key TEXT PRIMARY KEY, batch TEXT NOT NULL, owner TEXT NOT NULL REFERENCES owners ON DELETE CASCADE
) WITHOUT ROWID;
"""
UPGRADES = {1: f"ALTER TABLE runs ADD COLUMN checksum TEXT; {TABLES[TABLES.index('CREATE TABLE owners') :]}"}


@dataclass(frozen=True)
class Outcome:
    """What is stored of a run's metrics."""

    steps: NDArray[np.int64]
    metrics: dict[str, NDArray[np.float64]]
    seconds: float  # its share of the batch


@dataclass(frozen=True)
class Origin:
    """How a study was asked for."""

    command: str = ""
    kind: str = "study"  # or what of the paper it reproduces
    scale: str = ""


@dataclass(frozen=True)
class Remembered:
    """A study that was run into a store."""

    study: Study
    origin: Origin
    sources: Sources | None = None  # what was kept of parts of one's own; None of klatsch 0.1


class Store:
    """A store of results.

    Args:
        path: the file, made if it does not exist; ":memory:" for one that is gone afterwards.
        read_only: only look: the file must exist, and is not written to.

    Raises:
        ValueError: the file is damaged, no store, or written by a newer version; it is left as it is.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path = str(path)
        self.base = Database(self.path, TABLES, UPGRADES, read_only)
        self._sealed = False  # whether every run has a checksum, as far as this process knows
        self.checksums = Checksums(self.base)

    def close(self) -> None:
        """Let go of the file."""
        self.base.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing -----------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what follows, or nothing; the first one gives runs of an older version their checksums."""
        with self.base.explained(), self.base.transaction():
            if not self._sealed:
                for (number,) in self.base.execute("SELECT id FROM runs WHERE checksum IS NULL").fetchall():
                    if self.checksums.flaw(number, None) is None:
                        self.checksums.seal(number)
                self._sealed = True
            yield

    def save(self, batch: Batch, finished: Finished) -> int:
        """Keep what came out of a batch, in one transaction; gives how many of its runs are new.

        A run that is there already stays as it is, unless it is damaged.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        steps = [int(step) for step in finished.steps]
        new = 0
        with self.transaction():
            self.base.execute(
                "INSERT OR IGNORE INTO environments (facts) VALUES (?)", [json.dumps(finished.environment)]
            )
            (environment,) = self.base.execute(
                "SELECT id FROM environments WHERE facts = ?", [json.dumps(finished.environment)]
            ).fetchone()
            done = self.done()
            for k, case in enumerate(batch.cases):
                self.base.execute("DELETE FROM claims WHERE key = ?", [finished.keys[k]])
                if finished.keys[k] in done:
                    continue
                self._forget(finished.keys[k])
                run = (
                    *(finished.keys[k], *map(own.label, (case.problem, case.rule, case.topology))),
                    *(case.nodes, case.seed, case.lr),
                    *(case.steps, case.dtype, json.dumps(asdict(case)), finished.diverged[k], batch.device),
                    *(finished.engine, batch.key, finished.seconds / len(batch.cases), environment, now),
                )
                marks = ", ".join("?" * len(run))
                cursor = self.base.execute(f"INSERT INTO runs ({', '.join(FACTS)}) VALUES ({marks})", run)
                number = cursor.lastrowid
                assert number is not None
                self.base.execute_many(
                    "INSERT INTO metrics VALUES (?, ?, ?, ?)",
                    [
                        (number, name, step, float(value))
                        for name, values in finished.metrics.items()
                        for step, value in zip(steps, values[:, k], strict=True)
                    ],
                )
                self.checksums.seal(number)
                new += 1
        return new

    def _forget(self, key: str) -> None:
        """Make room for a run that is damaged."""
        for (number,) in self.base.execute("SELECT id FROM runs WHERE key = ?", [key]).fetchall():
            self.base.execute("DELETE FROM metrics WHERE run = ?", [number])
            self.base.execute("DELETE FROM runs WHERE id = ?", [number])

    def remember(self, study: Study, origin: Origin) -> None:
        """Keep what was asked for; a study of the same name takes the place of the old one, whose runs stay."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        content = json.dumps({**study.model_dump(mode="json"), "sources": sources_of(study)})
        with self.transaction():
            self.base.execute(
                "INSERT INTO studies VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "kind = excluded.kind, scale = excluded.scale, spec = excluded.spec, command = excluded.command",
                [study.name, origin.kind, origin.scale, content, origin.command, now],
            )

    # --- reading -----------------------------------------------------------------------------------------------

    def done(self) -> set[str]:
        """The keys of all runs in the store that are whole."""
        with self.base.explained():
            return self.checksums.keys(whole=True)

    def damaged(self) -> set[str]:
        """The keys of all other runs in the store."""
        with self.base.explained():
            return self.checksums.keys(whole=False)

    def studies(self) -> list[Remembered]:
        """The studies that were run, in the order of their beginning."""
        with self.base.explained():
            rows = self.base.execute("SELECT spec, command, kind, scale FROM studies ORDER BY begun, rowid").fetchall()
        with self._readable():
            return [_remembered(json_of(content), Origin(*rest)) for content, *rest in rows]

    def outcomes(
        self, keys: Iterable[str], names: Sequence[str] | None = None, last: bool = False
    ) -> dict[str, Outcome]:
        """The metrics of runs by key, all or those named, of all rounds or the last; what is not there is left out.

        Raises:
            ValueError: one of them is damaged.
        """
        wanted = set(keys)
        chosen = "" if names is None else f" AND name IN ({', '.join('?' * len(names))})"
        chosen += " AND step = (SELECT steps FROM runs WHERE id = run)" if last else ""
        found: dict[str, Outcome] = {}
        with self.base.explained():
            self.checksums.check(wanted)
            for key, number, seconds in self.base.execute("SELECT key, id, seconds FROM runs").fetchall():
                if key not in wanted:
                    continue
                rows = self.base.execute(
                    f"SELECT name, step, value FROM metrics WHERE run = ?{chosen} ORDER BY name, step",
                    [number, *(names or ())],
                ).fetchall()
                metrics: dict[str, list[float]] = {}
                for name, _, value in rows:
                    metrics.setdefault(name, []).append(value)
                steps = np.array([step for name, step, _ in rows if name == rows[0][0]], dtype=np.int64)
                found[key] = Outcome(steps, {name: np.array(values) for name, values in metrics.items()}, seconds)
        return found

    def runs(self) -> list[tuple[Case, dict[str, Any]]]:
        """All runs with what is known of them beside their metrics.

        Raises:
            ValueError: one of them is damaged, or of another version.
        """
        with self.base.explained():
            self.checksums.check()
            rows = self.base.execute(
                "SELECT settings, key, diverged, device, engine, seconds, finished, facts "
                "FROM runs JOIN environments ON environments.id = environment ORDER BY runs.id"
            ).fetchall()
        names = ("key", "diverged", "device", "engine", "seconds", "finished", "environment")
        with self._readable():
            return [
                (Case(**before.settings_of(json_of(settings))), dict(zip(names, rest, strict=True)))
                for settings, *rest in rows
            ]

    def environments(self) -> list[dict[str, str]]:
        """The versions and machines that the runs were done with."""
        with self.base.explained():
            rows = self.base.execute("SELECT facts FROM environments ORDER BY id").fetchall()
        with self._readable():
            return [json_of(facts) for (facts,) in rows]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """What another version, or another hand, wrote into the tables."""
        try:
            yield
        except (TypeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self.path} holds settings that this klatsch cannot read ({reason})") from None


def _remembered(content: dict[str, Any], origin: Origin) -> Remembered:
    """A study as it was stored; one of klatsch 0.1 says nothing of sources."""
    sources = content.pop("sources", None)
    content = before.study_of(content) if sources is None else content
    return Remembered(spec.parse(content, stored=True), origin, sources)
