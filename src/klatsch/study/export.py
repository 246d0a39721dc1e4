"""Runs of a store as a flat table: CSV, or Parquet for many runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from klatsch import files
from klatsch.clock import Clock
from klatsch.extras import need
from klatsch.study.cases import Case
from klatsch.study.choices import names_of
from klatsch.study.spec import Options
from klatsch.study.store import Store
from klatsch.study.traffic import elapsed, sent_by

Runs = Sequence[tuple[str, Case]]  # with their keys


def differences(one: Store, other: Store, runs: Runs) -> tuple[list[Options], int, int]:
    """How far runs of one store are from those of another with equal settings, and how many only one of them has.

    `largest` is that of |a - b| / max(|a|, |b|) of the final values of a rule on a graph of a size; nan where one
    diverged alone.
    """
    keys_there = {key for key, _ in other.runs()}
    both = [run for run in runs if run[0] in keys_there]
    names = names_of(case for _, case in both)
    finals = [store.outcomes([key for key, _ in both], last=True) for store in (one, other)]
    apart: dict[tuple[str, str, int], list[float]] = {}
    for key, case in both:
        a, b = (float(outcomes[key].metrics[case.headline.metric][-1]) for outcomes in finals)
        far = 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))  # inf / inf is nan
        apart.setdefault((names(case).rule, names(case).topology, case.nodes), []).append(far)
    rows: list[Options] = [
        {"rule": rule, "topology": topology, "nodes": nodes, "runs": len(far), "largest": float(np.max(far))}
        for (rule, topology, nodes), far in apart.items()
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
