"""`klatsch results` and `klatsch report`: what a store holds; and how rows and verdicts are printed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from klatsch import files, own
from klatsch.cli import terminal
from klatsch.cli.app import Exports, Plotting, Timing, command
from klatsch.cli.terminal import AsJson, print_json, text
from klatsch.units import compact, counted, duration, size

if TYPE_CHECKING:
    from klatsch.report.sentences import Verdict
    from klatsch.study.cases import Case, Exchange, LeftOut
    from klatsch.study.choices import Row
    from klatsch.study.store import Store

    Runs = list[tuple[str, Case]]  # with their keys
    Kind = tuple[str, str, str, int, str, str]

COLOURS = {"holds": "green", "does not hold": "red", "not decided": "yellow"}
EXPENDABLE = ("Gamma", "worst", "merged", "to", "from", "nodes")  # what a narrow terminal loses first


@dataclass(frozen=True)
class Filters:
    """Which runs to look at."""

    rule: Annotated[str | None, text("Only these rules.", metavar="NAMES")] = None
    topology: Annotated[str | None, text("Only these graphs.", "-t", "--topology", metavar="NAMES")] = None
    nodes: Annotated[str | None, text("Only these sizes.", "-n", "--nodes", metavar="N,...")] = None
    seed: Annotated[str | None, text("Only these seeds.", metavar="N,...")] = None
    lr: Annotated[str | None, text("Only these learning rates.", metavar="X,...")] = None
    where: Annotated[list[str] | None, text("Only with this setting, such as noise=10.", metavar="NAME=VALUE")] = None

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


def _settings(case: Case) -> dict[str, object]:
    """Everything about a run that has a name."""
    plain = {name: value for name, value in asdict(case).items() if not isinstance(value, dict)}
    return {**plain, **case.topology_options, "schedule": "constant", **case.rule_options, **case.problem_options}


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


@command(
    "results results.sqlite --rule dat --where noise=10",
    "results results.sqlite --all --csv runs.csv",
    "results results.sqlite --gradient 0.05 --network wan --plot curves.png --against seconds",
)
def results(
    store: Annotated[Path, typer.Argument(help="A store written by klatsch run or klatsch reproduce.")],
    filters: Filters,
    exports: Exports,
    figure: Plotting,
    metric: Annotated[str | None, text("Choose learning rates by this metric (the problem's own).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every run, not only the best learning rates.")] = False,
    curves: Annotated[bool, typer.Option("--curves", help="Export every recorded round, not only the last.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table (with booktabs).")] = False,
    compare: Annotated[Path | None, text("Compare with the same runs in another store.", metavar="STORE")] = None,
    as_json: AsJson = False,
) -> None:
    """Print, filter and export the results in STORE: the best learning rates, or every run."""
    from klatsch.study import choices
    from klatsch.study.choices import timed
    from klatsch.study.store import Store

    if curves and not exports.files and not (every and as_json):
        raise ValueError("--curves is for exports: give --csv FILE, --parquet FILE, or --all --json as well")
    clock = figure.clock()
    if figure.plot is not None and (every or exports.files):
        raise ValueError("--plot draws the best learning rates; leave --all, --csv and --parquet out")
    if latex and (as_json or every):
        raise ValueError("--latex prints the best learning rates; leave --json and --all out")
    exports.check(store)
    with Store(store, read_only=True) as opened:
        runs = sorted(opened.runs(), key=lambda run: _order(run[1]))
        if not runs:
            raise ValueError(f"{store} holds no finished run yet")
        runs = filters.apply(runs)
        if compare is not None:
            with Store(compare, read_only=True) as other:
                return _compare(opened, other, runs, as_json)
        if exports.files:
            exports.write(records := choices.records(opened, runs, curves, clock))
            for path in exports.files:
                print(f"{counted(len(records), 'line')} written to {path}")
            if clock is not None:
                outcomes = opened.outcomes([key for key, _ in runs], last=True)
                say_unknown((case, outcomes[key].exchange) for key, case in runs)
        elif every and as_json:
            print_json({"runs": choices.records(opened, runs, curves, clock)})
        elif every:
            _print_runs(opened, runs, metric)
        else:
            tables = [(kind, timed(rows, clock)) for kind, rows in _tables(opened, runs, metric)]
            if figure.plot is not None and len(tables) > 1:
                kinds = "; ".join(", ".join(kind[:3]) for kind, _ in tables)
                raise ValueError(f"--plot draws one kind of runs, not {kinds}; filter them, as with --where")
            (problem, length, *_), rows = tables[0]
            figure.draw(rows, f"{problem}, {length}")
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
    store: Annotated[Path, typer.Argument(help="A store written by klatsch run or klatsch reproduce.")],
    timing: Timing,
    out: Annotated[Path, text("File for the page.", "-o", "--out", metavar="FILE")] = Path("report.html"),
    title: Annotated[str | None, text("Title of the page.", metavar="TEXT")] = None,
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
    from klatsch.study.choices import differences

    pairs, only_one, only_other = differences(one, other, runs)
    if as_json:
        return print_json({"differences": pairs, "only_here": only_one, "only_there": only_other})
    alone = f"{counted(only_one, 'run')} only in {one.path}, {only_other:,} only in {other.path}"
    if not pairs:
        raise ValueError(f"the stores have no run in common: {alone}")
    lines = [
        {name: str(value) for name, value in row.items() if name != "largest"}
        | {"largest difference": "one diverged" if math.isnan(row["largest"]) else f"{row['largest']:.2g}"}
        for row in pairs
    ]
    terminal.print_table(f"{sum(row['runs'] for row in pairs):,} runs in both stores", lines, section="topology")
    terminal.note(f"difference of final values, as a share of the larger one; {alone}")


def _print_runs(store: Store, runs: Runs, metric: str | None) -> None:
    from klatsch.study.choices import records

    settings = dict.fromkeys(name for _, case in runs for name in case.problem_options)
    measured = dict.fromkeys(metric or case.headline.metric for _, case in runs)
    known = [record for record in records(store, runs) if any(record.get(name) is not None for name in measured)]
    if not known:
        (outcome,) = store.outcomes([runs[0][0]], last=True).values()
        raise ValueError(f"no metric {metric!r}; there are {', '.join(outcome.metrics)}")
    lines = [
        {"topology": record["topology"]}
        | {name: "-" if record[name] is None else compact(record[name]) for name in settings}
        | {
            "nodes": str(record["nodes"]),
            "rule": record["rule"],
            "lr": f"{record['lr']:g}",
            "seed": str(record["seed"]),
        }
        | {"rounds": f"{record['steps']:,}", "engine": record["engine"], "seconds": f"{record['seconds']:.2g}"}
        | {name: "-" if record[name] is None else short(record[name]) for name in measured}
        for record in known
    ]
    terminal.print_table(f"{len(lines):,} runs", lines, ("engine", "seconds", "rounds"))


# --- rows and verdicts, also of `klatsch run` -------------------------------------------------------------------------


def print_rows(
    rows: Sequence[Row], left_out: Sequence[LeftOut], title: str, device: str = "cpu", clocked: bool = False
) -> None:
    """Print one line per row, then notes; with a clock also seconds and bytes, which are there if channels differ."""
    from klatsch import native

    lines, counts = _lines(rows, clocked), sorted({len(row.curves) for row in rows})
    kept = terminal.print_table(title, lines, EXPENDABLE, section="topology")
    notes = {
        "from": f"from, to: smallest and largest of {' or '.join(map(str, counts))} seeds",
        "merged": "merged: mean of all models",
        "worst": "worst: worst node",
        "Gamma": "Gamma: consensus distance of the points where gradients are taken",
        "time": "time: by the clock, until all nodes are done",
        "sent": "sent: by a node",
    }
    terminal.note("; ".join(note for name, note in notes.items() if name in kept))
    if clocked:
        say_unknown((row.case, row.exchange) for row in rows if row.case is not None)
    if any(row.at_edge for row in rows):
        terminal.note("* the smallest or largest learning rate tried: a better one may lie beyond")
    for reason in dict.fromkeys(item.reason for item in left_out):
        sizes = ", ".join(str(item.nodes) for item in left_out if item.reason == reason)
        terminal.note(f"left out at {sizes} nodes: {reason}")
    if native.why_not() is not None and device == "cpu":
        terminal.note(f"slower than it could be: {native.why_not()}")


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print sentences, whether they hold, and the numbers that decide."""
    for verdict in verdicts:
        terminal.console().print(Text.assemble((verdict.word, COLOURS[verdict.word]), f": {verdict.claim}"))
        for line in verdict.figures:
            terminal.note(f"    {line}")


def say_unknown(runs: Iterable[tuple[Case, Exchange | None]]) -> None:
    """Say of which runs bytes or seconds are not known, and why."""
    from klatsch.study.cases import why_unknown

    reasons = {(case.label, case.graph_label): why_unknown(case, exchange) for case, exchange in runs}
    for (rule, graph), reason in reasons.items():
        if reason:
            terminal.note(f"no time of {rule} on {graph}: {reason}")


def _lines(rows: Sequence[Row], clocked: bool) -> list[dict[str, str]]:
    """The cells of a table by their headings."""
    from klatsch.report.selection import varying
    from klatsch.study.choices import BESIDE

    if not rows:
        raise ValueError("no run is finished yet")
    spread = {len(row.curves) for row in rows} != {1}  # of the seeds
    channels = {(row.case.channel.every, row.case.channel.wire) for row in rows if row.case is not None}
    sending = clocked or len(channels) > 1
    measured = [name for name in BESIDE if not all(math.isnan(row.beside(name)) for row in rows)]
    return [
        {
            "topology": row.topology,
            **{name: compact(row.setting.get(name, "-")) for name in varying(rows)},
            "nodes": str(row.nodes),
            "rule": row.rule,
            row.title: "diverged" if row.diverged else short(row.value),
            "lr": f"{row.lr:g}" + ("*" if row.at_edge else ""),
            **({"from": short(row.low), "to": short(row.high)} if spread else {}),
            **{name: "-" if math.isnan(v := row.beside(name)) else short(v) for name in measured},
            "Gamma": short(float(row.consensus[:, -1, row.best].mean())),
            **({"time": "-" if row.elapsed is None else duration(row.elapsed[-1])} if clocked else {}),
            **({"sent": "-" if row.sent is None else size(row.sent)} if sending else {}),
        }
        for row in rows
    ]


def short(value: float) -> str:
    """A number for a table."""
    return f"{value:.3g}" if math.isfinite(value) else "diverged"


def as_latex(rows: Sequence[Row], clocked: bool = False) -> str:
    """The same table for LaTeX."""
    lines = _lines(rows, clocked)
    columns = "".join("l" if heading in terminal.LEFT else "r" for heading in lines[0])
    table = [list(lines[0]), *(list(line.values()) for line in lines)]
    head, *body = (" & ".join(map(_in_latex, cells)) + r" \\" for cells in table)
    beginning = rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"
    return "\n".join([*beginning, *body, r"\bottomrule", r"\end{tabular}"])


def _in_latex(text: str) -> str:
    """A text whose characters LaTeX prints as they are, and numbers as 10^-3."""
    if power := re.fullmatch(r"(-?[\d.]+)e([+-]\d+)(\*?)", text):
        return rf"${power[1]} \cdot 10^{{{int(power[2])}}}${power[3]}"
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def plain(row: Row) -> dict[str, object]:
    """A row for JSON."""
    from klatsch.study.choices import BESIDE

    same = ("rule", "topology", "nodes", "setting", "lr", "low", "high", "seconds")
    return {
        **dict(zip(same, attrgetter(*same)(row), strict=True)),
        "lr_at_edge": row.at_edge,
        row.title: row.value,
        **{name: row.beside(name) for name in BESIDE},
        "Gamma": float(row.consensus[:, -1, row.best].mean()),
        "bytes_sent": row.sent,
        "steps": row.steps,
        "elapsed": row.elapsed,
        "curve": row.curve.mean(axis=0).tolist(),
        "final_by_lr": {f"{lr:g}": value for lr, value in zip(row.lrs, row.final.mean(axis=0).tolist(), strict=True)},
    }
