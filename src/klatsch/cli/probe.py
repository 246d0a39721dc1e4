"""`klatsch probe`: the constants of a problem, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import catalogue, files
from klatsch.cli import terminal
from klatsch.cli.app import command
from klatsch.cli.data import use_folder
from klatsch.cli.settings import Settings, chosen, parameters_of, setting
from klatsch.cli.terminal import AsJson, Data, option, print_json
from klatsch.own import label

if TYPE_CHECKING:
    from klatsch.planning import Probe

MEANINGS = {
    "sigma": "noise of a node's gradient, the largest on the way",
    "zeta": "how far nodes' gradients are apart, at the end",
    "L": "smoothness: the largest curvature of any node",
    "D1": "distance from the start to the optimum",
}


@command(
    "probe least-squares -n 16 --set noise=10 -o probe.json",
    "probe logistic -n 8 --set alpha=0.1 --set batch=4 --json",
    "probe mine.py:problem -n 8 -o probe.json",
    more=f"PROBLEM is one of {', '.join(catalogue.PROBLEMS)}, or FILE.py:FUNCTION that returns a problem.",
)
def probe(
    problem: Annotated[str, typer.Argument(help="A problem's name, or FILE.py:FUNCTION.")],
    nodes: Annotated[int | None, option("Number of nodes (16).", "-n", "--nodes")] = None,
    settings: Annotated[Settings, setting("An option of the problem: noise=10 of least-squares")] = None,
    seed: Annotated[int | None, option("Seed of the problem (0).")] = None,
    rounds: Annotated[int, option("Rounds of the run that looks for an optimum that is not known.")] = 200,
    samples: Annotated[int, option("Gradients per node for each estimate of noise.")] = 64,
    folder: Data = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the JSON to FILE, for klatsch plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what the theory needs to know of a problem: noise, heterogeneity, smoothness and distance."""
    from klatsch import planning
    from klatsch.planning import sources

    if out is not None:
        files.check_output(out, "JSON")
    use_folder(folder)
    options: dict[str, Any] = {} if seed is None else {"seed": seed}
    if settings:
        options |= chosen(settings, label(problem), parameters_of("problem", problem))
    found = planning.probe(sources.problem_of(problem, nodes, **options), rounds=rounds, samples=samples)
    if out is not None:
        files.save(out, json.dumps(found.as_dict(), indent=2, allow_nan=False).encode(), "JSON")
    if as_json:
        return print_json(found.as_dict())
    _print(found)
    if out is not None:
        print(f"written to {out}: klatsch plan {out} --target 0.01")


def _print(found: Probe) -> None:
    from klatsch.units import duration

    estimates = {"sigma": found.sigma, "zeta": found.zeta, "L": found.L, "D1": found.D1}
    for stage in found.stages:
        estimates |= {f"sigma, {stage.place}": stage.sigma, f"zeta, {stage.place}": stage.zeta}
    lines = [
        {
            "constant": name,
            "value": f"{estimate.value:.4g}",
            "from": f"{estimate.low:.4g}",
            "to": f"{estimate.high:.4g}",
            "gradients": f"{estimate.samples:,}",
            "meaning": MEANINGS.get(name, ""),
        }
        for name, estimate in estimates.items()
    ]
    terminal.print_table(f"{found.problem}, {found.nodes} nodes, {found.params:,} parameters", lines)
    terminal.note(f"one node's gradient takes {duration(found.gradient_seconds)} here")
