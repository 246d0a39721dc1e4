"""What a study found: the best learning rate for every rule, graph, size and setting; and all runs as a flat table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from klatsch import files
from klatsch.clock import Clock
from klatsch.extras import need
from klatsch.problems.base import DISTANCE, Headline
from klatsch.study.batches import Outcome
from klatsch.study.cases import Case, Exchange, elapsed, sent_by
from klatsch.study.spec import Options, Study, grouped
from klatsch.study.store import Store
from klatsch.units import in_words

Runs = Sequence[tuple[str, Case]]  # with their keys
BESIDE = {"merged": "merged model", "worst": "worst node"}  # what rows know beside the mean of nodes
LOSS = "train_loss"  # what they know beside an accuracy


@dataclass(frozen=True)
class Row:
    """One rule on one topology, with the learning rate whose mean final error (accuracy) over the seeds is best."""

    rule: str
    topology: str
    nodes: int
    lrs: tuple[float, ...]
    steps: tuple[int, ...]
    curves: NDArray[np.float64]  # (seeds, steps, lrs)
    consensus: NDArray[np.float64]  # Gamma, (seeds, steps, lrs)
    seconds: float
    setting: Options = field(default_factory=dict)  # the problem's options
    metric: str = "distance"  # what the curves show
    largest: bool = False  # whether large is good
    epochs: int | None = None  # how many the steps amount to, if the problem has a data set
    others: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # curves, where measured: BESIDE, "loss"
    tried: tuple[float, ...] = ()  # the learning rates that short runs chose from, if they did
    sent: float | None = None  # bytes per node over the run, if known
    case: Case | None = None  # one of its runs
    exchange: Exchange | None = None  # what its nodes send
    elapsed: tuple[float, ...] | None = None  # seconds to each of the steps, if there was a clock: see `timed`

    @property
    def final(self) -> NDArray[np.float64]:
        """The final values, (seeds, lrs)."""
        return np.asarray(self.curves[:, -1])

    @property
    def best(self) -> int:
        """The index of the chosen learning rate."""
        means = self.final.mean(axis=0)
        return int(means.argmax() if self.largest else means.argmin())

    @property
    def lr(self) -> float:
        return self.lrs[self.best]

    @property
    def curve(self) -> NDArray[np.float64]:
        """The values at the chosen learning rate, (seeds, steps)."""
        return np.asarray(self.curves[:, :, self.best])

    @property
    def title(self) -> str:
        """The name of its values."""
        metric, comma, which = self.metric.partition(",")
        return ("error" if metric == "distance" else metric) + comma + which

    @property
    def value(self) -> float:
        """The mean final error (or accuracy) over the seeds at the chosen learning rate; inf (or 0) if all diverged."""
        return float(self.curve[:, -1].mean())

    @property
    def low(self) -> float:  # of a seed
        return float(self.curve[:, -1].min())

    @property
    def high(self) -> float:  # of a seed
        return float(self.curve[:, -1].max())

    def beside(self, which: str) -> float:
        """The final value of a name in BESIDE, mean over the seeds at the chosen learning rate; nan if unknown."""
        return float(self.others[which][:, -1, self.best].mean()) if which in self.others else np.nan

    @property
    def megabytes(self) -> float:
        """What a node sends over the run; nan if that is not known."""
        return np.nan if self.sent is None else self.sent / 1e6

    @property
    def setting_text(self) -> str:
        return in_words(self.setting)

    @property
    def at_edge(self) -> bool:
        """Whether the chosen learning rate is the smallest or largest tried, so that a better one may lie beyond."""
        tried = self.tried or self.lrs
        return len(tried) > 1 and not self.diverged and self.lr in (min(tried), max(tried))

    @property
    def diverged(self) -> bool:
        """Whether every learning rate diverged."""
        return self.value == 0.0 if self.largest else not np.isfinite(self.value)

    def stopped(self, share: float) -> Row:
        """The row as if its runs had stopped after a share of the rounds, with the same learning rate."""
        if not 0 < share <= 1:
            raise ValueError(f"share = {share}; give a number above 0 and up to 1, such as 0.5")
        points = int(np.abs(np.array(self.steps) - share * self.steps[-1]).argmin()) + 1
        kept = slice(None), slice(points), [self.best]
        return replace(
            self,
            lrs=(self.lr,),
            tried=self.tried or self.lrs,
            steps=self.steps[:points],
            elapsed=None if self.elapsed is None else self.elapsed[:points],
            curves=self.curves[kept],
            consensus=self.consensus[kept],
            others={name: curves[kept] for name, curves in self.others.items()},
        )

    def showing(self, which: str) -> Row:
        """The row with its `merged` model, `worst` node or training `loss` instead, with the same learning rate."""
        metrics = {name: f"{self.metric}, {text}" for name, text in BESIDE.items()} | {"loss": LOSS}
        if which not in self.others:
            raise ValueError(f"{which!r} was not measured; choose from {', '.join(metrics)}")
        chosen, largest = self.stopped(1), self.largest and which != "loss"
        return replace(chosen, curves=chosen.others[which], metric=metrics[which], largest=largest, others={})


RowKey = tuple[str, str, str, int, str, str]
"""What a learning rate is chosen for: graph, setting, size and rule, with the sources of custom graphs and rules."""


def place(case: Case) -> RowKey:
    """The row that a run belongs to."""
    return case.graph_label, case.source("topology"), case.setting, case.nodes, case.label, case.source("rule")


class Names(NamedTuple):
    """What the parts of a run are called in tables."""

    problem: str
    rule: str
    topology: str


def names_of(cases: Iterable[Case]) -> Callable[[Case], Names]:
    """What to call runs in one table: versions of a file or of data are told apart, "mine.py:Extra [3fa2b1]"."""

    def parts(case: Case) -> list[tuple[str, str]]:
        sources = case.source("problem") or case.data, case.source("rule"), case.source("topology")
        return list(zip((case.problem_label, case.label, case.graph_label), sources, strict=True))

    versions = grouped({part for case in cases for part in parts(case)}, lambda part: part[0])
    return lambda case: Names(
        *(f"{label} [{version[:6]}]" if len(versions[label]) > 1 else label for label, version in parts(case))
    )


def summarize(runs: Runs, store: Store, metric: str | None = None) -> list[Row]:
    """The rows of those runs that the store holds, in order.

    Learning rates are chosen by this metric, or the problem's own, among those with as many seeds as the most complete.
    """
    return list(rows_by_place(runs, store, metric).values())


def rows_by_place(
    runs: Runs, store: Store, metric: str | None = None, names: Callable[[Case], Names] | None = None
) -> dict[RowKey, Row]:
    """The same by place; `names` tells these runs from others in the table."""
    cases = dict(runs)
    headline = next(iter(cases.values())).headline if cases else DISTANCE
    if metric is not None and metric != headline.metric:
        headline = Headline(metric, "")
    outcomes = store.outcomes(cases, (headline.metric, "Gamma", headline.of_mean, headline.of_worst, LOSS))
    if outcomes and not any(headline.metric in outcome.metrics for outcome in outcomes.values()):
        some = next(iter(store.outcomes([next(iter(outcomes))]).values()))
        raise ValueError(f"no metric {headline.metric!r}; there are {', '.join(some.metrics)}")
    names = names or names_of(cases.values())
    done = [(case, outcomes[key]) for key, case in cases.items() if key in outcomes]
    groups = grouped(done, lambda run: place(run[0]))
    return {place: _row(group, headline, names(group[0][0])) for place, group in groups.items()}


def _row(group: list[tuple[Case, Outcome]], headline: Headline, names: Names) -> Row:
    outcomes = {(case.lr, case.seed): outcome for case, outcome in group}
    by_rate = grouped(outcomes, lambda run: run[0])
    seeds = [seed for _, seed in max(by_rate.values(), key=len)]
    lrs = [lr for lr in by_rate if all((lr, seed) in outcomes for seed in seeds)]

    def stacked(name: str) -> NDArray[np.float64]:
        return np.array([[outcomes[lr, seed].metrics[name] for lr in lrs] for seed in seeds]).swapaxes(1, 2)

    first, others = group[0][0], {"merged": headline.of_mean, "worst": headline.of_worst, "loss": LOSS}
    measured = set.intersection(*(set(outcome.metrics) for outcome in outcomes.values()))
    return Row(
        rule=names.rule,
        topology=names.topology,
        nodes=first.nodes,
        lrs=tuple(lrs),
        steps=tuple(outcomes[lrs[0], seeds[0]].steps.tolist()),
        curves=stacked(headline.metric),
        consensus=stacked("Gamma"),
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        setting=first.problem_options,
        metric=headline.metric,
        largest=headline.metric in first.large_is_good,
        epochs=first.epochs,
        others={name: stacked(metric) for name, metric in others.items() if metric in measured},
        sent=group[0][1].exchange.sent,
        case=first,
        exchange=group[0][1].exchange,
    )


def timed(rows: Sequence[Row], clock: Clock | None) -> list[Row]:
    """Rows that know how long they take by a clock, if there is one."""
    if clock is None:
        return list(rows)
    return [
        row if row.case is None else replace(row, elapsed=elapsed(row.case, row.exchange, clock, row.steps))
        for row in rows
    ]


# --- learning rates chosen by short runs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Screened:
    """The runs of a study that are known so far."""

    short: list[Case]  # whose results choose; none in a study without screening
    full: list[Case]  # none until all the short ones are done
    tried: dict[RowKey, tuple[float, ...]] = field(default_factory=dict)  # the learning rates of the short runs

    @property
    def cases(self) -> list[Case]:
        """All of them, once each: a short run of the study's own length may be a full one, too."""
        return list({case.key: case for case in (*self.short, *self.full)}.values())

    def missing(self, store: Store) -> set[str]:
        """The keys of those that the store lacks."""
        return {case.key for case in self.cases} - store.done()

    def rows(self, store: Store) -> list[Row]:
        """What the full runs found."""
        rows = rows_by_place([(case.key, case) for case in self.full], store)
        return [replace(row, tried=self.tried.get(place, ())) for place, row in rows.items()]


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


def screened_in(store: Store) -> tuple[set[str], dict[RowKey, tuple[float, ...]]]:
    """The keys of all runs in a store that only chose learning rates, and what was tried for each place."""
    short, full, tried = set[str](), set[str](), dict[RowKey, tuple[float, ...]]()
    for remembered in store.studies():
        with suppress(ValueError):  # a study of another version
            runs = screened(remembered.study, remembered.cases, store)
            short |= {case.key for case in runs.short}
            full |= {case.key for case in runs.full}
            tried |= runs.tried
    return short - full, tried


# --- runs as a flat table -------------------------------------------------------------------------------------------


def differences(one: Store, other: Store, runs: Runs) -> tuple[list[Options], int, int]:
    """How far runs of one store are from those of another with equal settings, and how many only one of them has.

    `largest` is that of |a - b| / max(|a|, |b|) of the final values of a rule on a graph of a size; nan where one
    diverged alone.
    """
    keys_there = {key for key, _ in other.runs()}
    both = [run for run in runs if run[0] in keys_there]
    names = names_of(case for _, case in both)
    finals = [store.outcomes([key for key, _ in both], last=True) for store in (one, other)]

    def apart(key: str, case: Case) -> float:
        a, b = (float(outcomes[key].metrics[case.headline.metric][-1]) for outcomes in finals)
        return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))  # inf / inf is nan

    groups = grouped(both, lambda run: (names(run[1]).rule, names(run[1]).topology, run[1].nodes))
    rows: list[Options] = [
        {"rule": rule, "topology": topology, "nodes": nodes, "runs": len(group)}
        | {"largest": float(np.max([apart(*run) for run in group]))}
        for (rule, topology, nodes), group in groups.items()
    ]
    return rows, len(runs) - len(both), len(keys_there) - len(both)


def records(
    store: Store, runs: Runs, curves: bool = False, clock: Clock | None = None, options: bool = False
) -> list[Options]:
    """One record per run with its final metrics, or with `curves` one per recorded round.

    `bytes_sent` is what a node has sent up to that round, and with a clock `elapsed` the seconds until it is done. With
    `options`, those of rules and graphs are columns, too; "rule." or "topology." is before a name that is taken.
    """
    outcomes = store.outcomes([key for key, _ in runs], last=not curves)
    records: list[Options] = []
    names_by_run = names_of(case for _, case in runs)
    for key, case in runs:
        outcome, names = outcomes[key], names_by_run(case)
        head: Options = {
            "problem": names.problem,
            **case.problem_options,
            "topology": names.topology,
            "nodes": case.nodes,
            "rule": names.rule,
            "lr": case.lr,
            "seed": case.seed,
            "steps": case.steps,
            "dtype": case.dtype,
            **{name: vars(outcome)[name] for name in ("device", "engine", "seconds", "finished")},
            "key": key,
        }
        if options:
            for kind, given in (("rule", case.rule_options), ("topology", case.topology_options)):
                head |= {f"{kind}.{name}" if name in head else name: v for name, v in given.items() if name != "lr"}
        steps, bytes_ = outcome.steps.tolist(), outcome.exchange.sent
        when = None if clock is None else elapsed(case, outcome.exchange, clock, steps)
        for k, step in enumerate(steps):
            cost: Options = {"bytes_sent": None if bytes_ is None else sent_by(case, step, bytes_)}
            cost |= {} if clock is None else {"elapsed": None if when is None else when[k]}
            metrics = {name: float(series[k]) for name, series in outcome.metrics.items()}
            records.append({**head, "step": step, **cost, **metrics})
    columns = list(dict.fromkeys(name for record in records for name in record))
    return [{name: record.get(name) for name in columns} for record in records]


def to_csv(records: Sequence[Options], path: Path) -> None:
    """Write records as CSV; diverged values are inf."""
    save_csv([records[0].keys(), *(record.values() for record in records)], path)


def save_csv(lines: Iterable[Iterable[object]], path: Path) -> None:
    """Write lines of cells as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_quoted, line) for line in lines)
    files.save(path, text.getvalue().encode(), "CSV")


def _quoted(cell: object) -> object:
    """A cell; one that a spreadsheet would take for a formula begins with its mark of a text."""
    if not isinstance(cell, str) or cell[:1] not in ("=", "+", "-", "@") or cell == "-":
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def to_parquet(records: Sequence[Options], path: Path) -> None:
    """Write records as Parquet, with types."""
    need("--parquet", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(records)), data)
    files.save(path, data.getvalue().to_pybytes(), "Parquet")
