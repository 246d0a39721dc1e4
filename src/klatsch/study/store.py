"""All results in one SQLite file: a run is stored whole or not at all, and is never repeated.

Every batch is one transaction. A run's key is a hash of its settings, and a checksum covers everything stored about it.
Several processes may use one store: see `study/sharing.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from klatsch import own
from klatsch.arguments import printable, shown
from klatsch.files import json_of
from klatsch.study import spec
from klatsch.study.batches import Batch, Finished
from klatsch.study.cases import Case, LeftOut, Sources, check_sources, expand, grid, sources_of, with_seeds
from klatsch.study.database import Database
from klatsch.study.grids import Options
from klatsch.study.spec import Study
from klatsch.study.traffic import Exchange

if TYPE_CHECKING:
    from pandas import DataFrame

    from klatsch.clock import Clock

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


def _digest(facts: Any, metrics: list[Any]) -> str:
    return hashlib.sha256(json.dumps([facts, metrics], default=repr).encode()).hexdigest()


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
