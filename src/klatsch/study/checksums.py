"""Whether the runs in a store are what was stored: a checksum over all that is kept of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from klatsch.files import json_of
from klatsch.study.database import Database

FACTS = (
    *("key", "problem", "rule", "topology", "nodes", "seed", "lr", "steps", "dtype", "settings", "diverged", "device"),
    *("engine", "batch", "seconds", "environment", "finished"),
)


class Checksums:
    """The checksums of a store's runs; one that was found right is not looked at again."""

    def __init__(self, base: Database) -> None:
        self.base = base
        self._sound: dict[int, str | None] = {}  # runs that were found whole, by number, with their checksum

    def keys(self, whole: bool) -> set[str]:
        """The keys of all runs that are whole, or of the others."""
        return {key for number, key, checksum in self._listed() if (self.flaw(number, checksum) is None) == whole}

    def _listed(self) -> list[tuple[int, str, str | None]]:
        checksum = "checksum" if self.base.format > 1 else "NULL"
        return self.base.execute(f"SELECT id, key, {checksum} FROM runs ORDER BY id").fetchall()

    def check(self, keys: Collection[str] | None = None) -> None:
        """Refuse to show runs that are not what was stored, of these keys or all."""
        listed = [(number, checksum) for number, key, checksum in self._listed() if keys is None or key in keys]
        flaws = [(number, flaw) for number, checksum in listed if (flaw := self.flaw(number, checksum)) is not None]
        if flaws:
            (number, flaw), are = flaws[0], "is" if len(flaws) == 1 else "are"
            raise ValueError(
                f"{self.base.path}: {len(flaws):,} of {len(listed):,} runs {are} damaged "
                f"(number {number} {flaw}); bring back a copy of the store, or run the study again, which does such "
                "runs anew"
            )

    def flaw(self, number: int, checksum: str | None) -> str | None:
        """What is wrong with a run, if anything; one of an older version has no checksum."""
        if number in self._sound and self._sound[number] == checksum:
            return None
        facts, metrics = self._content(number)
        if checksum is not None and checksum != _digest(facts, metrics):
            return "does not match its checksum"
        points: dict[str, list[int]] = {}
        for name, step, value in metrics:
            if not isinstance(value, float):
                return f"has {name} = {value!r} in round {step}"
            points.setdefault(name, []).append(step)
        rounds, even = facts[FACTS.index("steps")], len(metrics) / max(len(points), 1)
        if not points or any(steps[-1] != rounds or len(steps) != even for steps in points.values()):
            return "lacks metrics"
        try:
            environment = json_of(facts[-1] or "null")
        except ValueError:
            environment = None
        if not isinstance(environment, dict) or not {"processor", "torch"} <= environment.keys():
            return "has an environment that cannot be read"
        self._sound[number] = checksum
        return None

    def seal(self, number: int) -> None:
        """Give a run its checksum."""
        checksum = _digest(*self._content(number))
        self.base.execute("UPDATE runs SET checksum = ? WHERE id = ?", [checksum, number])
        self._sound[number] = checksum

    def _content(self, number: int) -> tuple[Any, list[Any]]:
        """All that is stored of a run, read back: SQLite may have given a value another form."""
        names = ", ".join(name for name in FACTS if name != "environment")
        joined = "runs LEFT JOIN environments ON environments.id = environment"
        facts = self.base.execute(f"SELECT {names}, facts FROM {joined} WHERE runs.id = ?", [number]).fetchone()
        rows = self.base.execute("SELECT name, step, value FROM metrics WHERE run = ? ORDER BY name, step", [number])
        return facts, rows.fetchall()


def _digest(facts: Any, metrics: list[Any]) -> str:
    return hashlib.sha256(json.dumps([facts, metrics], default=repr).encode()).hexdigest()
