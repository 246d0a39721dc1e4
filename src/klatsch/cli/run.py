"""`klatsch list`, `klatsch run` and `klatsch demo`: rules side by side."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table

from klatsch import algorithms, pictures, problems
from klatsch import topology as topologies
from klatsch.cli import terminal
from klatsch.cli.app import app
from klatsch.cli.terminal import number, option, print_json
from klatsch.engine import native
from klatsch.engine.progress import bars
from klatsch.study import demo as demos
from klatsch.study import figures
from klatsch.study.compare import PAPER_GRID, LeftOut, Plan, Row, Told, compare, rounds_by_topology

GRID = ",".join(f"{lr:g}" for lr in PAPER_GRID)


@app.command(name="list", help="List the rules, topologies and problems, with a line on each.")
def list_() -> None:
    """List everything that has a name."""
    console = terminal.console()
    tables: dict[str, dict[str, Callable[..., Any]]] = {
        "rules": dict(algorithms.ALGORITHMS),
        "topologies": dict(topologies.TOPOLOGIES),
        "problems": dict(problems.PROBLEMS),
    }
    for title, entries in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, thing in entries.items():
            table.add_row(name, (thing.__doc__ or "").strip().splitlines()[0])
        console.print(table, "")


@app.command(
    help="Compare rules on topologies; each gets the best learning rate of a grid.\n\n"
    f"Rules: {', '.join(algorithms.ALGORITHMS)}. Problems: {', '.join(problems.PROBLEMS)}. "
    "Names of rules, topologies and numbers in lists are separated by commas."
)
def run(
    rules: Annotated[str, typer.Option(help="Rules to compare.", metavar="NAMES")] = "dat,dsgd",
    topology: Annotated[str, typer.Option("-t", "--topology", help="Topologies.", metavar="NAMES")] = "ring",
    nodes: Annotated[str, typer.Option("-n", "--nodes", help="Numbers of nodes.", metavar="N,...")] = "16",
    steps: Annotated[int, option("Rounds.", "--steps")] = 10_000,
    lr: Annotated[str, typer.Option(help="Learning rates to choose from.", metavar="X,...")] = GRID,
    seeds: Annotated[int, option("Number of seeds: 0, 1, 2...", "--seeds")] = 3,
    problem: Annotated[str, typer.Option(help="Problem to solve.", metavar="NAME")] = "least-squares",
    dim: Annotated[int | None, option("Parameters of the problem.")] = None,
    noise: Annotated[float | None, option("Gradient noise sigma (least-squares).", parser=number)] = None,
    heterogeneity: Annotated[
        float | None, option("How far the nodes' own optima scatter (least-squares).", parser=number)
    ] = None,
    batch: Annotated[int | None, option("Size of a mini-batch (logistic).")] = None,
    alpha: Annotated[float | None, option("Dirichlet label skew (logistic).", parser=number)] = None,
    averaging: Annotated[
        str | None, typer.Option(help="Anytime weights: constant, linear, polynomial(2), fixed(0.9).", metavar="NAME")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Order of dat: atc or cta.", metavar="NAME")] = None,
    momentum: Annotated[float | None, option("Local momentum, for rules that have it.", parser=number)] = None,
    k: Annotated[int | None, option("Largest degree of base_graph.")] = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Mix with (I + P) / 2.")] = False,
    any_graph: Annotated[bool, typer.Option("--any-graph", help="Run also where a rule refuses the graph.")] = False,
    float32: Annotated[bool, typer.Option("--float32", help="Compute in float32: faster.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.", metavar="NAME")] = "cpu",
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to FILE.png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compare rules on topologies."""
    plan = Plan(
        rules=_words(rules),
        topologies=_words(topology),
        nodes=[terminal.whole(word) for word in _words(nodes)],
        steps=steps,
        lrs=[terminal.number(word) for word in _words(lr)],
        seeds=seeds,
        problem=problem,
        problem_options=_given(dim=dim, noise=noise, heterogeneity=heterogeneity, batch=batch, alpha=alpha),
        rule_options=_given(averaging=averaging, order=order, momentum=momentum),
        topology_options=_given(k=k),
        lazy=lazy,
        dtype=torch.float32 if float32 else torch.float64,
        device=device,
        any_graph=any_graph,
    )
    if plot is not None:
        pictures.check_path(plot)
    with _told(plan) as told:
        rows, left_out = compare(plan, told)
    if as_json:
        print_json({"rows": [_plain(row) for row in rows], "left_out": [item._asdict() for item in left_out]})
    else:
        _print_rows(rows, left_out, plan)
    if plot is not None:
        several = len(plan.nodes) > 1
        draw = figures.error_against_nodes if several else figures.error_against_rounds
        title = f"{plan.problem}, {plan.steps:,} rounds, {plan.seeds} seeds"
        pictures.save(draw(rows, title), plot, dpi=160)
        if not as_json:
            print(f"drawn to {plot}")


@app.command(help="DAT-SGD against D-SGD on three graphs: how many machines help? About a minute.")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure.", metavar="FOLDER")] = Path(),
    steps: Annotated[int, option("Rounds.", "--steps")] = 20_000,
    seeds: Annotated[int, option("Number of seeds.", "--seeds")] = 2,
) -> None:
    """Run the demo."""
    plan = demos.plan(steps, seeds)
    with _told(plan) as told:
        found = demos.demo(plan, out, told)
    _print_rows(found.rows, found.left_out, plan)
    print(found.sentence)
    print(f"drawn to {' and '.join(str(file) for file in found.files)}")


# --- output -------------------------------------------------------------------------------------------------------


def _print_rows(rows: list[Row], left_out: list[LeftOut], plan: Plan) -> None:
    console = terminal.console()
    columns: dict[str, Callable[[Row], str]] = {
        "topology": lambda row: row.topology,
        "nodes": lambda row: str(row.nodes),
        "rule": lambda row: row.rule,
        "error": lambda row: _short(row.error),
        "lr": lambda row: f"{row.lr:g}" + ("*" if row.at_edge else ""),
        "from": lambda row: _short(row.low),
        "to": lambda row: _short(row.high),
        "Gamma": lambda row: _short(float(row.consensus[:, -1, row.best].mean())),
    }

    def table() -> Table:
        shown = Table(title=plan.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in columns:
            justify, style = (
                ("left", "bold") if heading == "rule" else ("left" if heading == "topology" else "right", "")
            )
            shown.add_column(heading, justify=justify, style=style, no_wrap=True)  # type: ignore[arg-type]
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            last = following is not None and following.topology != row.topology
            shown.add_row(*(cell(row) for cell in columns.values()), end_section=last)
        return shown

    expendable = ["Gamma", "to", "from", "nodes"]
    while (
        Measurement.get(console, console.options.update(max_width=1000), table()).maximum > console.width and expendable
    ):
        del columns[expendable.pop(0)]  # a narrow terminal loses columns, not digits
    console.print(table())
    notes = {
        "from": f"from, to: smallest and largest of {plan.seeds} seeds",
        "Gamma": "Gamma: consensus distance of the points evaluated",
    }
    shown = [note for name, note in notes.items() if name in columns]
    if expendable != ["Gamma", "to", "from", "nodes"]:
        shown.append("a wider terminal, or --json, shows more columns")
    console.print("; ".join(shown), style="dim")
    if any(row.at_edge for row in rows):
        console.print("* the smallest or largest learning rate tried: a better one may lie beyond", style="dim")
    for reason in dict.fromkeys(item.reason for item in left_out):
        sizes = ", ".join(str(item.nodes) for item in left_out if item.reason == reason)
        console.print(f"left out at {sizes} nodes: {reason}", style="dim", markup=False, highlight=False)
    if native.why_not() is not None and plan.device == "cpu":
        console.print(f"slower than it could be: {native.why_not()}", style="dim", markup=False, highlight=False)


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "diverged"


def _plain(row: Row) -> dict[str, Any]:
    return {
        "rule": row.rule,
        "topology": row.topology,
        "nodes": row.nodes,
        "lr": row.lr,
        "lr_at_edge": row.at_edge,
        "error": _finite(row.error),
        "low": _finite(row.low),
        "high": _finite(row.high),
        "Gamma": _finite(row.consensus[:, -1, row.best].mean()),
        "seconds": row.seconds,
        "steps": list(row.steps),
        "curve": [_finite(value) for value in row.curves[:, :, row.best].mean(axis=0)],
        "final_by_lr": {f"{lr:g}": _finite(value) for lr, value in zip(row.lrs, row.final.mean(axis=0), strict=True)},
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON has no infinity


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def _told(plan: Plan) -> Iterator[Told | None]:
    """A bar for every topology if a terminal is attached, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    totals = rounds_by_topology(plan)
    with bars() as progress:
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        yield lambda name, rounds: progress.advance(tasks[name], rounds)
