"""Learning rates chosen by short runs: `screen` of a study runs the whole grid short, and in full only what is best."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from klatsch.study.cases import Case
from klatsch.study.choices import Place, Row, place, rows_by_place
from klatsch.study.spec import Study
from klatsch.study.store import Store


@dataclass(frozen=True)
class Screened:
    """The runs of a study, as far as they are known."""

    short: list[Case]  # whose results choose; none in a study without screening
    full: list[Case]  # none until all the short ones are done
    tried: dict[Place, tuple[float, ...]] = field(default_factory=dict)  # the learning rates of the short runs

    @property
    def cases(self) -> list[Case]:
        """All of them, once each: a short run of the study's own length may be a full one, too."""
        return list({case.key: case for case in (*self.short, *self.full)}.values())

    def rows(self, store: Store) -> list[Row]:
        """What the full runs found."""
        found = rows_by_place([(case.key, case) for case in self.full], store)
        return [replace(row, tried=self.tried.get(where, ())) for where, row in found.items()]


def screened(study: Study, cases: Sequence[Case], store: Store) -> Screened:
    """Which runs of a study are needed, given with all of its grid, by the short ones that the store holds."""
    if study.screen is None:
        return Screened([], list(cases))
    short = [
        replace(
            case,
            seed=seed,
            steps=study.screen.rounds(case.steps, study.epochs),
            epochs=case.epochs and (study.screen.epochs or case.epochs),
            record=study.screen.record or case.record,
        )
        for case in cases
        if case.seed == study.seeds[0]
        for seed in study.screen.seeds or study.seeds[:1]
    ]
    if not {case.key for case in short} <= store.done():
        return Screened(short, [])
    rows = rows_by_place([(case.key, case) for case in short], store)
    full = [case for case in cases if case.lr == rows[place(case)].lr]
    return Screened(short, full, {where: row.lrs for where, row in rows.items()})


def screened_in(store: Store) -> tuple[set[str], dict[Place, tuple[float, ...]]]:
    """Of all studies in a store: the keys of runs that only chose learning rates, and what was tried for each place."""
    short, full, tried = set[str](), set[str](), dict[Place, tuple[float, ...]]()
    for remembered in store.studies():
        with suppress(ValueError):  # a study of another version
            runs = screened(remembered.study, remembered.cases, store)
            short |= {case.key for case in runs.short}
            full |= {case.key for case in runs.full}
            tried |= runs.tried
    return short - full, tried
