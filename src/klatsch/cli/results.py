"""`klatsch results` and `klatsch report`: what a store holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import files
from klatsch.cli import terminal
from klatsch.cli.app import command
from klatsch.cli.rows import plain, print_rows, short
from klatsch.cli.terminal import AsJson, print_json, text

if TYPE_CHECKING:
    from klatsch.study.cases import Case
    from klatsch.study.choices import Row
    from klatsch.study.store import Store

    Run = tuple[Case, dict[str, Any]]
    Runs = list[Run]
    Kind = tuple[object, ...]


@dataclass(frozen=True)
class Filters:
    """Which runs to look at."""

    rule: Annotated[str | None, text("Only these rules.", metavar="NAMES")] = None
    topology: Annotated[str | None, text("Only these graphs.", "-t", "--topology", metavar="NAMES")] = None
    nodes: Annotated[str | None, text("Only these sizes.", "-n", "--nodes", metavar="N,...")] = None
    seed: Annotated[str | None, text("Only these seeds.", metavar="N,...")] = None
    lr: Annotated[str | None, text("Only these learning rates.", metavar="X,...")] = None
    where: Annotated[
        list[str] | None, text("Only this value of a setting, such as noise=10.", metavar="NAME=VALUE")
    ] = None

    def apply(self, runs: Runs) -> Runs:
        """The runs that pass every filter."""
        from klatsch import own
        from klatsch.arguments import named

        lists: list[tuple[str, str | None, Callable[[Case], tuple[object, ...]], Callable[[str], object]]] = [
            ("rule", self.rule, lambda case: (own.label(case.rule), case.label), str),
            ("topology", self.topology, lambda case: (own.label(case.topology), case.graph_label), str),
            ("nodes", self.nodes, lambda case: (case.nodes,), terminal.whole),
            ("seed", self.seed, lambda case: (case.seed,), terminal.whole),
            ("lr", self.lr, lambda case: (case.lr,), terminal.number),
        ]
        tests = [
            (name, of, [read(word) for word in terminal.words(asked)])
            for name, asked, of, read in lists
            if asked is not None
        ]
        for setting in self.where or []:
            name, equals, value = setting.partition("=")
            if not equals:
                raise ValueError(f"--where {setting}: give a name and a value, such as noise=10")
            named("setting", name, dict.fromkeys(option for case, _ in runs for option in _settings(case)))
            tests.append((name, partial(_setting_of, name), [_as_number(value)]))
        for name, of, wanted in tests:
            there = list(dict.fromkeys(str(of(case)[-1]) for case, _ in runs))
            runs = [run for run in runs if any(value in wanted for value in of(run[0]))]
            if not runs:
                raise ValueError(f"no run has {name} {', '.join(map(str, wanted))}; there are {', '.join(there[:12])}")
        return runs


@command(
    "results results.sqlite --rule dat --where noise=10",
    "results results.sqlite --all --csv runs.csv",
    help_="Print, filter and export the results in STORE: the best learning rates, or every run.",
)
def results(
    store: Annotated[Path, typer.Argument(help="A store of klatsch run or klatsch reproduce.")],
    filters: Filters,
    metric: Annotated[str | None, text("What learning rates are chosen by (the problem's own metric).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every run instead of the best learning rates.")] = False,
    curves: Annotated[bool, typer.Option("--curves", help="Export every recorded round, not only the last.")] = False,
    csv: Annotated[Path | None, text("Write the runs to FILE.csv.", metavar="FILE")] = None,
    parquet: Annotated[Path | None, text("Write the runs to FILE.parquet.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Print, filter and export what a store holds."""
    from klatsch.study import export
    from klatsch.study.grids import counted
    from klatsch.study.store import Store

    if curves and csv is None and parquet is None and not (every and as_json):
        raise ValueError("--curves is for exports: give --csv FILE, --parquet FILE, or --all --json as well")
    if csv is not None:
        files.check_output(csv, "CSV", store)
    if parquet is not None:
        files.check_output(parquet, "Parquet", store, *([] if csv is None else [csv]))
    with Store(store, read_only=True) as opened:
        runs = sorted(opened.runs(), key=lambda run: _order(run[0]))
        if not runs:
            raise ValueError(f"{store} holds no finished run yet")
        runs = filters.apply(runs)
        if csv is not None or parquet is not None:
            found = export.records(opened, runs, curves)
            for path, write in ((csv, export.to_csv), (parquet, export.to_parquet)):
                if path is not None:
                    write(found, path)
                    print(f"{counted(len(found), 'line')} written to {path}")
        elif every and as_json:
            print_json({"runs": export.plain(export.records(opened, runs, curves))})
        elif every:
            _print_runs(opened, runs, metric)
        else:
            kinds: dict[Kind, list[tuple[str, Case]]] = {}
            for case, facts in runs:
                kind = case.problem_label, case.length, case.dtype, case.record, case.source("problem")
                kinds.setdefault(kind, []).append((facts["key"], case))
            tables = _tables(opened, kinds, metric)
            if as_json:
                print_json({"rows": [plain(row) | {"dtype": key[2]} for key, rows in tables for row in rows]})
                return
            for (problem, length, dtype, *_), rows in tables:
                print_rows(rows, [], f"{problem}: {rows[0].metric}, {length}, {dtype}", "cpu")


@command(
    "report results.sqlite",
    "report results.sqlite -o ring.html --title 'How far a ring goes'",
    help_="Write everything that STORE holds as one self-contained HTML page.",
)
def report(
    store: Annotated[Path, typer.Argument(help="A store of klatsch run or klatsch reproduce.")],
    out: Annotated[Path, text("The page.", "-o", "--out", metavar="FILE")] = Path("report.html"),
    title: Annotated[str | None, text("Its title.", metavar="TEXT")] = None,
) -> None:
    """Write a report."""
    from klatsch.paper.report import report as write_report
    from klatsch.study.store import Store

    files.check_output(out, "HTML", store)
    with Store(store, read_only=True) as opened:
        pages = write_report(opened, out, title)
    print(f"{len(pages)} {'page' if len(pages) == 1 else 'pages'} of results written to {out}")


def _settings(case: Case) -> dict[str, object]:
    """Everything about a run that has a name."""
    plain = {name: value for name, value in asdict(case).items() if not isinstance(value, dict)}
    return {**plain, **case.topology_options, **case.rule_options, **case.problem_options}


def _setting_of(name: str, case: Case) -> tuple[str]:
    """A setting as text, numbers in one way of writing them."""
    return (_as_number(str(_settings(case).get(name, "-"))),)


def _as_number(text: str) -> str:
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _order(case: Case) -> tuple[object, ...]:
    return case.problem_label, case.steps, case.graph_label, case.setting, case.nodes, case.label, case.lr, case.seed


def _tables(
    store: Store, kinds: Mapping[Kind, list[tuple[str, Case]]], metric: str | None
) -> list[tuple[Kind, list[Row]]]:
    """The rows of each kind of runs; kinds that do not have the metric are left out, if others do."""
    from klatsch.study.choices import summarize

    tables, refusals = [], []
    for kind, mine in kinds.items():
        try:
            tables.append((kind, summarize(mine, store, metric)))
        except ValueError as refusal:
            refusals.append(refusal)
    if not tables:
        raise refusals[0]
    return tables


def _print_runs(store: Store, runs: Runs, metric: str | None) -> None:
    outcomes = store.outcomes([facts["key"] for _, facts in runs], last=True)
    shown = {case.problem: metric or case.headline.metric for case, _ in runs}
    runs = [run for run in runs if shown[run[0].problem] in outcomes[run[1]["key"]].metrics]
    if not runs:
        there = dict.fromkeys(name for outcome in outcomes.values() for name in outcome.metrics)
        raise ValueError(f"no metric {metric!r}; there are {', '.join(there)}")
    settings = list(dict.fromkeys(name for case, _ in runs for name in case.problem_options))

    def setting(name: str, run: Run) -> str:
        return _setting_of(name, run[0])[0]

    def final(run: Run) -> str:
        return short(float(outcomes[run[1]["key"]].metrics[shown[run[0].problem]][-1]))

    columns: dict[str, Callable[[Run], str]] = {
        "topology": lambda run: run[0].graph_label,
        **{name: partial(setting, name) for name in settings},
        "nodes": lambda run: str(run[0].nodes),
        "rule": lambda run: run[0].label,
        "lr": lambda run: f"{run[0].lr:g}",
        "seed": lambda run: str(run[0].seed),
        "rounds": lambda run: f"{run[0].steps:,}",
        " / ".join(dict.fromkeys(shown.values())): final,
        "seconds": lambda run: f"{run[1]['seconds']:.2g}",
        "engine": lambda run: run[1]["engine"],
    }
    terminal.print_table(terminal.console(), f"{len(runs):,} runs", columns, runs, ("engine", "seconds", "rounds"))
