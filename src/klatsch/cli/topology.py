"""`klatsch topology`: how fast a graph mixes and what a round of it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.cli.app import app
from klatsch.cli.terminal import number, option, print_json

if TYPE_CHECKING:
    from klatsch.topology import Summary


@app.command(
    help="Show how fast a communication graph mixes and what a round of it costs."
    f"\n\nNAME is one of {', '.join(catalogue.TOPOLOGIES)}; ring/8 gossips in every 8th round only."
)
def topology(
    name: Annotated[str | None, typer.Argument(help="The graph to show.")] = None,
    nodes: Annotated[int | None, option("Number of nodes.", "-n", "--nodes")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All topologies side by side, sorted by rho.")] = False,
    k: Annotated[int | None, option("Largest degree of base_graph (1).")] = None,
    rows: Annotated[int | None, option("Rows of torus and grid (the squarest).")] = None,
    cols: Annotated[int | None, option("Columns of torus and grid.")] = None,
    p: Annotated[float | None, option("Probability of a link in erdos_renyi (2 ln n / n).", parser=number)] = None,
    degree: Annotated[int | None, option("Degree of random_regular (4).")] = None,
    seed: Annotated[int | None, option("Seed of the random graphs (0).")] = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Mix with (I + P) / 2.")] = False,
    params: Annotated[int, option("Parameters of the model, in float32, for the message size.")] = 1_000_000,
    draw: Annotated[Path | None, typer.Option(help="Draw every round with messages to FILE.svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show how fast a communication graph mixes and what a round of it costs."""
    from klatsch import topology as topologies
    from klatsch.topology.summary import beyond_solvers

    given = {"k": k, "rows": rows, "cols": cols, "p": p, "degree": degree, "seed": seed}
    choices = {key: value for key, value in given.items() if value is not None}
    if compare:
        _refuse_with_compare(name=name, lazy=lazy, draw=draw, rows=rows, cols=cols)
        if nodes is None:
            raise ValueError("--compare needs the number of nodes, for example -n 16")
        summaries, left_out = topologies.compare(nodes, params, **choices)
        if as_json:
            print_json({"topologies": [asdict(s) for s in summaries], "left_out": left_out})
        else:
            _print_comparison(summaries, left_out)
        return
    if name is None:
        raise ValueError("name a topology, for example klatsch topology ring -n 16, or give --compare")
    if nodes is None and rows is None and cols is None:
        raise ValueError(f"{name} needs the number of nodes, for example -n 16")
    topologies.builder(name, choices)  # a wrong name shows first
    closed = beyond_solvers(name, (rows or 1) * (cols or 1) if nodes is None else nodes, lazy)
    graph = topologies.make(name, nodes, **choices)
    graph = topologies.lazy(graph) if lazy else graph
    if draw is not None:  # first, since a wrong file name shows at once
        topologies.draw(graph, draw)
    rho = topologies.spectral_gap(name, graph.size, **choices) if closed else None
    summary = topologies.summarize(graph, params, rho=rho)
    if as_json:
        print_json(asdict(summary))
    else:
        _print_summary(summary)
        if draw is not None:
            print(f"drawn to {draw}")


def _refuse_with_compare(**options: Any) -> None:
    for name, value in options.items():
        if value:
            shown = f"the topology {value!r}" if name == "name" else f"--{name}"
            raise ValueError(f"--compare looks at all topologies and does not go with {shown}; leave one of them out")


# --- tables -------------------------------------------------------------------------------------------------------


def _print_summary(s: Summary) -> None:
    from klatsch.planning.words import size
    from klatsch.topology.summary import GAMMA

    table = Table(title=f"{s.name}, {s.nodes:,} nodes", show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    never = "never"
    for row in (
        ("nodes", f"{s.nodes:,}", ""),
        ("edges", f"{s.edges:,}", "distinct links over one period" + ("" if s.symmetric else ", one way each")),
        ("degree", f"{s.degree:,}", "most neighbours in one round"),
        *([("every", f"{s.every:,}", "rounds from one with messages to the next")] if s.every > 1 else []),
        ("period", f"{s.period:,}", "rounds until the graphs repeat"),
        ("symmetric", _yes(s.symmetric), ""),
        ("doubly stochastic", _yes(s.doubly_stochastic), "keeps the network mean"),
        ("rho", f"{s.rho:.6g}", "spectral gap per round"),
        ("rounds to halve", _count(s.rounds_to_halve), "the disagreement, from the worst start"),
        ("exact after", never if s.exact_after is None else f"{s.exact_after:,}", "rounds until all hold the mean"),
        ("smallest eigenvalue", _optional(s.smallest_eigenvalue), "D2 as published needs more than -1/3"),
        ("effective neighbours", _optional(s.effective_neighbors), f"for memory gamma = {GAMMA}"),
        ("messages", f"{s.messages_per_round:.4g}", "sent per node and round, on average"),
        ("bytes, D-SGD", size(s.bytes_per_round_dsgd), f"per node and round, {s.params:,} parameters"),
        ("bytes, DAT-SGD", size(s.bytes_per_round_dat), "the same; DAT sends w and x"),
    ):
        table.add_row(*row)
    terminal.console().print(table)


def _print_comparison(summaries: list[Summary], left_out: dict[str, str]) -> None:
    from klatsch.planning.words import size

    console = terminal.console()
    columns: dict[str, Callable[[Summary], str]] = {
        "topology": lambda s: s.name,
        "edges": lambda s: f"{s.edges:,}",
        "degree": lambda s: f"{s.degree:,}",
        "period": lambda s: f"{s.period:,}",
        "sym-\nmetric": lambda s: _yes(s.symmetric),
        "doubly\nstoch.": lambda s: _yes(s.doubly_stochastic),
        "rho": lambda s: f"{s.rho:.4g}",
        "rounds\nto halve": lambda s: _count(s.rounds_to_halve),
        "exact\nafter": lambda s: _count(s.exact_after),
        "messages\n/round": lambda s: f"{s.messages_per_round:,.4g}",
        "bytes\n/round": lambda s: size(s.bytes_per_round_dat),
    }
    expendable = ["doubly\nstoch.", "sym-\nmetric", "edges", "messages\n/round", "period", "exact\nafter", "degree"]
    title = f"{summaries[0].nodes:,} nodes, largest spectral gap rho first"
    shown = terminal.print_table(console, title, columns, summaries, expendable)
    notes = [f"per node; bytes for DAT-SGD with {summaries[0].params:,} float32 parameters, D-SGD sends half"]
    notes += [] if len(shown) == len(columns) else ["a wider terminal, or --json, shows more columns"]
    for note in notes + [f"left out: {reason}" for reason in left_out.values()]:
        console.print(note, style="dim", markup=False, highlight=False)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
