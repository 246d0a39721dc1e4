"""`klatsch results` and `klatsch report`: what a store holds."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klatsch import files, own, pictures
from klatsch.cli import terminal
from klatsch.cli.app import Timing, command
from klatsch.cli.rows import as_latex, finite, plain, print_rows, say_unknown, short
from klatsch.cli.terminal import AsJson, print_json, text
from klatsch.units import compact, counted

if TYPE_CHECKING:
    from klatsch.study.cases import Case
    from klatsch.study.choices import Row
    from klatsch.study.store import Store

    Runs = list[tuple[str, Case]]  # with their keys
    Kind = tuple[str, str, str, int, str, str]


@dataclass(frozen=True)
class Filters:
    """Which runs to look at."""

    rule: Annotated[str | None, text("Only these rules.", metavar="NAMES")] = None
    topology: Annotated[str | None, text("Only these graphs.", "-t", "--topology", metavar="NAMES")] = None
    nodes: Annotated[str | None, text("Only these sizes.", "-n", "--nodes", metavar="N,...")] = None
    seed: Annotated[str | None, text("Only these seeds.", metavar="N,...")] = None
    lr: Annotated[str | None, text("Only these learning rates.", metavar="X,...")] = None
    where: Annotated[list[str] | None, text("Only this setting, such as noise=10.", metavar="NAME=VALUE")] = None

    def apply(self, runs: Runs) -> Runs:
        """The runs that pass every filter."""
        from klatsch.arguments import named

        read = {"nodes": terminal.whole, "seed": terminal.whole, "lr": terminal.number}
        lists = {name: terminal.words(asked) for name, asked in vars(self).items() if isinstance(asked, str)}
        tests = [(name, [read.get(name, _value)(word) for word in asked]) for name, asked in lists.items()]
        for setting in self.where or []:
            name, equals, value = setting.partition("=")
            if not equals:
                raise ValueError(f"--where {setting}: give a name and a value, such as noise=10")
            named("setting", name, dict.fromkeys(option for _, case in runs for option in _settings(case)))
            tests.append((name, [_value(value)]))
        for name, wanted in tests:
            known = dict.fromkeys(compact(_spellings(case, name)[-1]) for _, case in runs)
            runs = [run for run in runs if any(value in wanted for value in _spellings(run[1], name))]
            if not runs:
                asked, some = ", ".join(map(compact, wanted)), ", ".join(list(known)[:12])
                raise ValueError(f"no run has {name} {asked}; there are {some}")
        return runs


@command(
    "results results.sqlite --rule dat --where noise=10",
    "results results.sqlite --all --csv runs.csv",
    "results results.sqlite --gradient 0.05 --network wan --plot curves.png --against seconds",
)
def results(
    store: Annotated[Path, typer.Argument(help="A store of klatsch run or klatsch reproduce.")],
    filters: Filters,
    timing: Timing,
    metric: Annotated[str | None, text("What learning rates are chosen by (the problem's own metric).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every run instead of the best learning rates.")] = False,
    curves: Annotated[bool, typer.Option("--curves", help="Export every recorded round, not only the last.")] = False,
    csv: Annotated[Path | None, text("Write the runs to FILE.csv.", metavar="FILE")] = None,
    parquet: Annotated[Path | None, text("Write the runs to FILE.parquet.", metavar="FILE")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to FILE.png, .svg or .pdf.")] = None,
    style: Annotated[Path | None, text("With --plot: a style file of matplotlib.", metavar="FILE")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Print the table for LaTeX (with booktabs).")] = False,
    compare: Annotated[
        Path | None, text("How far the same runs in another store are apart.", "--compare", metavar="STORE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print, filter and export the results in STORE: the best learning rates, or every run."""
    from klatsch.study import export
    from klatsch.study.choices import timed
    from klatsch.study.store import Store

    if curves and csv is None and parquet is None and not (every and as_json):
        raise ValueError("--curves is for exports: give --csv FILE, --parquet FILE, or --all --json as well")
    clock = timing.clock()
    if plot is not None:
        if every or csv is not None or parquet is not None:
            raise ValueError("--plot draws the best learning rates; leave --all, --csv and --parquet out")
        pictures.check_path(plot)
    if style is not None and plot is None:
        raise ValueError("--style is for a figure; give --plot FILE as well")
    if latex and (as_json or every):
        raise ValueError("--latex prints the best learning rates; leave --json and --all out")
    if csv is not None:
        files.check_output(csv, "CSV", store)
    if parquet is not None:
        files.check_output(parquet, "Parquet", store, *filter(None, [csv]))
    with Store(store, read_only=True) as opened:
        runs = sorted(opened.runs(), key=lambda run: _order(run[1]))
        if not runs:
            raise ValueError(f"{store} holds no finished run yet")
        runs = filters.apply(runs)
        if compare is not None:
            with Store(compare, read_only=True) as other:
                return _compare(opened, other, runs, as_json)
        if csv is not None or parquet is not None:
            records = export.records(opened, runs, curves, clock)
            for path, write in ((csv, export.to_csv), (parquet, export.to_parquet)):
                if path is not None:
                    write(records, path)
                    print(f"{counted(len(records), 'line')} written to {path}")
            if clock is not None:
                outcomes = opened.outcomes([key for key, _ in runs], last=True)
                say_unknown((case, outcomes[key].exchange) for key, case in runs)
        elif every and as_json:
            print_json({"runs": export.plain(export.records(opened, runs, curves, clock))})
        elif every:
            _print_runs(opened, runs, metric)
        else:
            tables = [(kind, timed(rows, clock)) for kind, rows in _tables(opened, runs, metric)]
            if plot is not None:
                _draw(tables, timing.against, plot, style)
            if as_json:
                told = [(kind, row) for kind, rows in tables for row in rows]
                return print_json({"rows": [{"problem": k[0]} | plain(row) | {"dtype": k[2]} for k, row in told]})
            for (problem, length, dtype, *_), rows in tables:
                if latex:
                    print(as_latex(rows, clocked=clock is not None))
                    continue
                print_rows(rows, [], f"{problem}: {rows[0].metric}, {length}, {dtype}", clocked=clock is not None)


@command("report results.sqlite", "report results.sqlite -o ring.html --title 'How far a ring goes'")
def report(
    store: Annotated[Path, typer.Argument(help="A store of klatsch run or klatsch reproduce.")],
    timing: Timing,
    out: Annotated[Path, text("The page.", "-o", "--out", metavar="FILE")] = Path("report.html"),
    title: Annotated[str | None, text("Its title.", metavar="TEXT")] = None,
) -> None:
    """Write everything that STORE holds as one self-contained HTML page."""
    from klatsch.report.pages import report as write_report
    from klatsch.study.store import Store

    clock = timing.clock()
    files.check_output(out, "HTML", store)
    with Store(store, read_only=True) as opened:
        pages = write_report(opened, out, title, clock, timing.against)
    for flaw in (page.flaw for page in pages if page.flaw):
        terminal.note(flaw)
    print(f"{counted(len(pages), 'page')} of results written to {out}")


def _settings(case: Case) -> dict[str, object]:
    """Everything about a run that has a name."""
    plain = {name: value for name, value in asdict(case).items() if not isinstance(value, dict)}
    options = {"schedule": "constant"} | case.rule_options
    return {**plain, **case.topology_options, **options, **case.problem_options}


def _spellings(case: Case, name: str) -> tuple[object, ...]:
    """What a filter may call a setting of a run; the last one is shown."""
    if name == "rule":
        return own.label(case.rule), case.label
    if name == "topology":
        return own.label(case.topology), case.graph_label
    return (_value(str(_settings(case).get(name, "-"))),)


def _value(text: str) -> object:
    """A number however it is written, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def _order(case: Case) -> tuple[object, ...]:
    return case.problem_label, case.steps, case.graph_label, case.setting, case.nodes, case.label, case.lr, case.seed


def _tables(store: Store, runs: Runs, metric: str | None) -> list[tuple[Kind, list[Row]]]:
    """The rows of each kind of runs; kinds that do not have the metric are left out, if others do.

    Short runs that only chose learning rates are left out, too; the rows of the full runs know what these tried.
    """
    from klatsch.study.choices import names_of, rows_by_place, screened_in

    names, (short, tried) = names_of(case for _, case in runs), screened_in(store)
    kinds: dict[Kind, list[tuple[str, Case]]] = {}
    for key, case in [run for run in runs if run[0] not in short] or runs:
        kind = names(case).problem, case.length, case.dtype, case.record, case.source("problem"), case.data
        kinds.setdefault(kind, []).append((key, case))
    tables, refusals = [], []
    for kind, cases in kinds.items():
        try:
            rows = rows_by_place(cases, store, metric, names)
            for place, row in rows.items():
                if set(row.lrs) < set(rates := tried.get(place, ())):
                    rows[place] = replace(row, tried=rates)
            tables.append((kind, list(rows.values())))
        except ValueError as refusal:
            refusals.append(refusal)
    if not tables:
        raise refusals[0]
    return tables


def _compare(one: Store, other: Store, runs: Runs, as_json: bool) -> None:
    """Print how far the runs of two stores are apart."""
    from klatsch.study.export import differences

    pairs, only_one, only_other = differences(one, other, runs)
    if as_json:
        rows = [row._asdict() | {"largest": finite(row.largest)} for row in pairs]
        return print_json({"differences": rows, "only_here": only_one, "only_there": only_other})
    alone = f"{counted(only_one, 'run')} only in {one.path}, {only_other:,} only in {other.path}"
    if not pairs:
        raise ValueError(f"the stores have no run in common: {alone}")
    lines = [
        {
            "topology": row.topology,
            "nodes": str(row.nodes),
            "rule": row.rule,
            "runs": f"{row.runs:,}",
            "largest difference": "one diverged" if math.isnan(row.largest) else f"{row.largest:.2g}",
        }
        for row in pairs
    ]
    terminal.print_table(f"{sum(row.runs for row in pairs):,} runs in both stores", lines, section="topology")
    terminal.note(f"difference of final values, as a share of the larger one; {alone}")


def _draw(tables: list[tuple[Kind, list[Row]]], across: str, plot: Path, style: Path | None) -> None:
    """The curves of one kind of runs."""
    from klatsch.report import figures

    if len(tables) > 1:
        kinds = "; ".join(f"{problem}, {length}, {dtype}" for (problem, length, dtype, *_), _ in tables)
        raise ValueError(
            f"--plot draws one kind of runs, and there are several ({kinds}); filter them, as with --where"
        )
    (((problem, length, *_), rows),) = tables
    pictures.save(figures.plot(rows, across, f"{problem}, {length}", style=style), plot, dpi=160)
    print(f"drawn to {plot}", file=sys.stderr)


def _print_runs(store: Store, runs: Runs, metric: str | None) -> None:
    from klatsch.study.choices import names_of

    names = names_of(case for _, case in runs)
    outcomes = store.outcomes([key for key, _ in runs], last=True)
    metrics = {case.problem: metric or case.headline.metric for _, case in runs}
    runs = [(key, case) for key, case in runs if metrics[case.problem] in outcomes[key].metrics]
    if not runs:
        known = dict.fromkeys(name for outcome in outcomes.values() for name in outcome.metrics)
        raise ValueError(f"no metric {metric!r}; there are {', '.join(known)}")
    settings = list(dict.fromkeys(name for _, case in runs for name in case.problem_options))
    lines = [
        {
            "topology": names(case).topology,
            **{name: compact(case.problem_options.get(name, "-")) for name in settings},
            "nodes": str(case.nodes),
            "rule": names(case).rule,
            "lr": f"{case.lr:g}",
            "seed": str(case.seed),
            "rounds": f"{case.steps:,}",
            " / ".join(dict.fromkeys(metrics.values())): short(float(outcomes[key].metrics[metrics[case.problem]][-1])),
            "seconds": f"{outcomes[key].seconds:.2g}",
            "engine": outcomes[key].engine,
        }
        for key, case in runs
    ]
    terminal.print_table(f"{len(runs):,} runs", lines, ("engine", "seconds", "rounds"))
