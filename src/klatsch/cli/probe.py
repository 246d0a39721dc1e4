"""`klatsch probe`: the constants of a problem, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from klatsch import catalogue, files
from klatsch.cli import terminal
from klatsch.cli.app import app
from klatsch.cli.data import use_folder
from klatsch.cli.terminal import number, option, print_json

if TYPE_CHECKING:
    from klatsch.planning.estimates import Probe

MEANINGS = {
    "sigma": "noise of a node's gradient, the largest on the way",
    "zeta": "how far nodes' gradients are apart, at the end",
    "L": "smoothness: the largest curvature of any node",
    "D1": "distance from the start to the optimum",
}


@app.command(
    help="Measure what the theory needs to know of a problem: noise, heterogeneity, smoothness and distance."
    f"\n\nPROBLEM is one of {', '.join(catalogue.PROBLEMS)}, or FILE.py:FUNCTION that returns a problem."
)
def probe(
    problem: Annotated[str, typer.Argument(help="A problem's name, or FILE.py:FUNCTION.")],
    nodes: Annotated[int | None, option("Number of nodes (16).", "-n", "--nodes")] = None,
    noise: Annotated[float | None, option("Noise sigma of least-squares (1).", parser=number)] = None,
    heterogeneity: Annotated[float | None, option("Spread zeta of least-squares' optima (1).", parser=number)] = None,
    alpha: Annotated[float | None, option("Label skew of logistic and fashion-mnist.", parser=number)] = None,
    dim: Annotated[int | None, option("Parameters of least-squares and logistic.")] = None,
    batch: Annotated[int | None, option("Mini-batch of logistic and fashion-mnist.")] = None,
    seed: Annotated[int | None, option("Seed of the problem (0).")] = None,
    rounds: Annotated[int, option("Rounds of the run that looks for an optimum that is not known.")] = 200,
    samples: Annotated[int, option("Gradients per node for each estimate of noise.")] = 64,
    folder: Annotated[Path | None, typer.Option("--data", help="Folder of Fashion-MNIST.", metavar="FOLDER")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the JSON to FILE, for klatsch plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs and klatsch plan.")] = False,
) -> None:
    """Measure the constants of a problem."""
    from klatsch import planning
    from klatsch.planning import sources

    if out is not None:
        files.check_output(out, "JSON")
    use_folder(folder)
    given = {"seed": seed, "noise": noise, "heterogeneity": heterogeneity, "alpha": alpha, "dim": dim, "batch": batch}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    found = planning.probe(sources.problem_of(problem, nodes, **options), rounds=rounds, samples=samples)
    if out is not None:
        files.save(out, json.dumps(found.as_dict(), indent=2, allow_nan=False).encode(), "JSON")
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
        if out is not None:
            print(f"written to {out}: klatsch plan {out} --samples 1e6")


def _print(found: Probe) -> None:
    from klatsch.planning import words

    table = Table(
        title=f"{found.problem}, {found.nodes} nodes, {found.params:,} parameters", title_justify="left", box=None
    )
    for heading in ("", "value", "from", "to", "gradients", ""):
        table.add_column(heading, justify="left" if not heading else "right", style="bold" if not heading else "")
    shown = {name: (getattr(found, name), meaning) for name, meaning in MEANINGS.items()}
    for stage in found.stages:
        shown |= {f"sigma, {stage.place}": (stage.sigma, ""), f"zeta, {stage.place}": (stage.zeta, "")}
    for name, (estimate, meaning) in shown.items():
        numbers = [f"{value:.4g}" for value in estimate[:3]]
        table.add_row(name, *numbers, f"{estimate.samples:,}", meaning)
    console = terminal.console()
    console.print(table)
    console.print(f"one node's gradient takes {words.duration(found.gradient_seconds)} here", style="dim")
