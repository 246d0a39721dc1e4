"""All results in one SQLite file: a run is stored whole or not at all, and is never repeated.

Every batch is one transaction. A run's key is a hash of its settings, and a checksum covers everything stored about it.
Several processes may use one store: see `study/sharing.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from klatsch import own
from klatsch.files import json_of
from klatsch.study import spec
from klatsch.study.batches import Batch, Finished
from klatsch.study.cases import Case, Sources, sources_of
from klatsch.study.database import Database
from klatsch.study.grids import Options
from klatsch.study.spec import Study

FACTS = (  # the columns of a run that its checksum covers
    *("key", "problem", "rule", "topology", "nodes", "seed", "lr", "steps", "dtype", "settings", "diverged", "device"),
    *("engine", "batch", "seconds", "environment", "finished"),
)
METRICS = "SELECT name, step, value FROM metrics WHERE run = ?{} ORDER BY name, step"


@dataclass(frozen=True)
class Outcome:
    """The stored metrics of a run."""

    steps: NDArray[np.int64]
    metrics: dict[str, NDArray[np.float64]]
    seconds: float  # its share of the batch


@dataclass(frozen=True)
class Origin:
    """Where a study comes from."""

    command: str = ""
    kind: str = "study"  # or the target that it reproduces
    scale: str = ""


@dataclass(frozen=True)
class Remembered:
    """A study that was run into a store."""

    study: Study
    origin: Origin
    sources: Sources | None = None  # of its custom parts; None in stores of klatsch 0.1


class Store(AbstractContextManager["Store"]):
    """A store of results; a file that is damaged, foreign or newer than this version is refused and left untouched.

    Args:
        path: the file, created if it does not exist; ":memory:" for a temporary one.
        read_only: never write to the file, which must exist.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path = str(path)
        self.base = Database(self.path, read_only)
        self._all_sealed = False  # whether this process has seen that every run has a checksum
        self._sound: dict[int, str | None] = {}  # checksums of runs found whole, so that they are checked once

    def close(self) -> None:
        self.base.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing -----------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; the first transaction adds the checksums that runs of an older version lack."""
        with self.base.transaction():
            if not self._all_sealed:
                for (number,) in self.base.execute("SELECT id FROM runs WHERE checksum IS NULL"):
                    if self._flaw(number, None) is None:
                        self._seal(number)
                self._all_sealed = True
            yield

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
                run = (
                    *(key, *map(own.label, (case.problem, case.rule, case.topology)), case.nodes, case.seed, case.lr),
                    *(case.steps, case.dtype, json.dumps(asdict(case)), finished.diverged[k], batch.device),
                    *(finished.engine, batch.key, finished.seconds / len(batch.cases), environment, now),
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

    def remember(self, study: Study, origin: Origin) -> None:
        """Keep a study; it replaces an older one of the same name, whose runs stay."""
        content = json.dumps({**study.model_dump(mode="json"), "sources": sources_of(study)})
        with self.transaction():
            self.base.execute(
                "INSERT INTO studies VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "kind = excluded.kind, scale = excluded.scale, spec = excluded.spec, command = excluded.command",
                [study.name, origin.kind, origin.scale, content, origin.command, _now()],
            )

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
            return [_remembered(json_of(content), Origin(*rest)) for content, *rest in rows]

    def outcomes(
        self, keys: Iterable[str], names: Sequence[str] | None = None, last: bool = False
    ) -> dict[str, Outcome]:
        """Metrics of the runs that the store has, by key: all or those named, of all recorded rounds or the last."""
        wanted = set(keys)
        self._check(wanted)
        chosen = "" if names is None else f" AND name IN ({_marks(names)})"
        chosen += " AND step = (SELECT steps FROM runs WHERE id = run)" if last else ""
        found: dict[str, Outcome] = {}
        for key, number, seconds in self.base.execute("SELECT key, id, seconds FROM runs"):
            if key in wanted:
                rows = self.base.execute(METRICS.format(chosen), [number, *(names or ())])
                metrics = {name: np.array([v for *_, v in part]) for name, part in groupby(rows, itemgetter(0))}
                steps = np.array([step for name, step, _ in rows if name == rows[0][0]], dtype=np.int64)
                found[key] = Outcome(steps, metrics, seconds)
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
                (Case(**settings_of(json_of(settings))), dict(zip((*names, "environment"), rest, strict=True)))
                for settings, *rest in rows
            ]

    def environments(self) -> list[dict[str, str]]:
        """The versions and machines behind the runs."""
        rows = self.base.execute("SELECT facts FROM environments ORDER BY id")
        with self._readable():
            return [json_of(facts) for (facts,) in rows]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn errors about content that another version or a user wrote into one line."""
        try:
            yield
        except (TypeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self.path} holds settings that this klatsch cannot read ({reason})") from None

    # --- checksums ---------------------------------------------------------------------------------------------

    def _examined(self, keys: Collection[str] | None = None) -> Iterator[tuple[int, str, str | None]]:
        """Number, key and flaw (None if it is whole) of these runs, or of all."""
        column = "checksum" if self.base.format > 1 else "NULL"
        for number, key, checksum in self.base.execute(f"SELECT id, key, {column} FROM runs ORDER BY id"):
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
        """What is wrong with a run, or None; a run of an older version has no checksum."""
        if number in self._sound and self._sound[number] == checksum:
            return None
        facts, metrics = self._content(number)
        if checksum is not None and checksum != _digest(facts, metrics):
            return "does not match its checksum"
        for name, step, value in metrics:
            if not isinstance(value, float):
                return f"has {name} = {value!r} in round {step}"
        rounds = facts[FACTS.index("steps")]
        points = {tuple(step for _, step, _ in part) for _, part in groupby(metrics, itemgetter(0))}
        if len({len(steps) for steps in points}) != 1 or {steps[-1] for steps in points} != {rounds}:
            return "lacks metrics"
        environment = None
        with suppress(ValueError):
            environment = json_of(facts[-1] or "null")
        if not isinstance(environment, dict) or not {"processor", "torch"} <= environment.keys():
            return "has an environment that cannot be read"
        self._sound[number] = checksum
        return None

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


def settings_of(stored: Mapping[str, Any]) -> Options:
    """The settings of a stored run for `Case`; klatsch 0.1 had `lazy_rule`, which made that rule's graph lazy."""
    settings = dict(stored)
    if "lazy_rule" not in settings:
        return settings
    lazy_rule, lazy_graph = settings.pop("lazy_rule"), settings.pop("lazy_graph")
    settings["lazy"] = lazy_graph if settings["rule"] == "d2" else lazy_rule or lazy_graph
    if settings["rule"] == "d2" and (lazy_graph or not lazy_rule):
        settings["rule_options"] = {**settings["rule_options"], "lazy": False}
    return settings


def _remembered(content: Options, origin: Origin) -> Remembered:
    sources = content.pop("sources", None)
    content = _study_of(content) if sources is None else content
    return Remembered(spec.parse(content, stored=True), origin, sources)


def _study_of(stored: Mapping[str, Any]) -> Options:
    """A study stored by klatsch 0.1, as `Study` takes it."""
    graphs = [bool(graph.get("lazy")) for graph in stored["topologies"]]
    rules = []
    for entry in map(dict, stored["rules"]):
        lazy = entry.pop("lazy", False)
        if entry["name"] == "d2":  # "auto" was lazy on some graphs only: its runs have one of two keys
            entry["lazy"] = [True, False] if lazy == "auto" or (lazy and any(graphs)) else bool(lazy)
        elif lazy is True and not all(graphs):
            raise ValueError(
                f"study {stored['name']} needs klatsch 0.1: lazy = true on {entry['name']}; use klatsch results here"
            )
        rules.append(entry)
    return {**stored, "rules": rules}


def _digest(facts: Any, metrics: list[Any]) -> str:
    return hashlib.sha256(json.dumps([facts, metrics], default=repr).encode()).hexdigest()


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
