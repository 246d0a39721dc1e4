"""Runs of a store as a flat table: CSV, or Parquet for many runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from klatsch import files
from klatsch.clock import Clock
from klatsch.study.cases import Case
from klatsch.study.choices import names_of
from klatsch.study.grids import Options
from klatsch.study.store import Store
from klatsch.study.traffic import elapsed, sent_by


def records(
    store: Store, runs: Sequence[tuple[Case, Options]], curves: bool = False, clock: Clock | None = None
) -> list[Options]:
    """One record per run with its final metrics, or with `curves` one per recorded round.

    `bytes_sent` is what a node has sent up to that round, and with a clock `elapsed` the seconds until it is done.
    """
    outcomes = store.outcomes([facts["key"] for _, facts in runs], last=not curves)
    found: list[Options] = []
    names_by_run = names_of(case for case, _ in runs)
    for case, facts in runs:
        outcome, names = outcomes[facts["key"]], names_by_run(case)
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
            **{name: facts[name] for name in ("device", "engine", "seconds", "finished", "key")},
        }
        steps, bytes_ = outcome.steps.tolist(), outcome.exchange.sent
        when = None if clock is None else elapsed(case, outcome.exchange, clock, steps)
        for k, step in enumerate(steps):
            cost: Options = {"bytes_sent": None if bytes_ is None else sent_by(case, step, bytes_)}
            cost |= {} if clock is None else {"elapsed": None if when is None else when[k]}
            metrics = {name: float(series[k]) for name, series in outcome.metrics.items()}
            found.append({**head, "step": step, **cost, **metrics})
    columns = list(dict.fromkeys(name for record in found for name in record))
    return [{name: record.get(name) for name in columns} for record in found]


def to_csv(found: Sequence[Options], path: Path) -> None:
    """Write records as CSV; diverged values are inf."""
    save_csv([found[0].keys(), *(record.values() for record in found)], path)


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


def to_parquet(found: Sequence[Options], path: Path) -> None:
    """Write records as Parquet, with types."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ValueError("--parquet needs pyarrow: pip install 'klatsch[parquet]'") from None
    data = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(found)), data)
    files.save(path, data.getvalue().to_pybytes(), "Parquet")


def plain(found: Sequence[Options]) -> list[Options]:
    """Records for JSON: None instead of inf."""
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()} for record in found
    ]
