"""`klatsch plan`: how many machines pay, on which graph, with which rule."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.cli.app import app
from klatsch.cli.terminal import number, option, print_json
from klatsch.cli.terminal import words as listed

if TYPE_CHECKING:
    from klatsch.planning import Choice, Line, Plan, robust, sources
    from klatsch.planning.verify import Verification
    from klatsch.theory import Constants

GRADIENT, PARAMS = 0.1, 1_000_000  # where nothing is said of them
HANDLING, EFFICIENCY = 5e-10, 0.1  # as in planning.Network and planning.Task


@app.command(help="Say how many machines pay, on which graph and with which rule, before they stop helping.")
def plan(
    probe: Annotated[Path | None, typer.Argument(help="JSON of klatsch probe, for the constants.")] = None,
    samples: Annotated[float | None, option("Gradients to take in all, N = M T.", parser=number)] = None,
    target: Annotated[float | None, option("Error f(x) - f* to reach.", parser=number)] = None,
    sigma: Annotated[float | None, option("Noise of a gradient.", parser=number)] = None,
    zeta: Annotated[float | None, option("Heterogeneity of the nodes' gradients.", parser=number)] = None,
    L: Annotated[float | None, option("Smoothness.", "--L", parser=number)] = None,
    D1: Annotated[float | None, option("Distance from the start to the optimum.", "--D1", parser=number)] = None,
    params: Annotated[int | None, option(f"Parameters of the model ({PARAMS:,}).", parser=count)] = None,
    network: Annotated[str, typer.Option(help=f"One of {', '.join(catalogue.NETWORKS)}.", metavar="NAME")] = "10gbe",
    bandwidth: Annotated[float | None, option("Bytes per second of a machine's link.", parser=number)] = None,
    latency: Annotated[float | None, option("Seconds until a message arrives.", parser=number)] = None,
    gradient: Annotated[float | None, option(f"Seconds of one gradient ({GRADIENT}).", parser=number)] = None,
    handling: Annotated[float, option("Seconds of work per byte that travels.", parser=number)] = HANDLING,
    machines: Annotated[int, option("Most machines to think of.", "-n", "--machines", parser=count)] = 1024,
    efficiency: Annotated[float, option("Least speed-up per machine; 0: any.", parser=number)] = EFFICIENCY,
    rules: Annotated[str | None, typer.Option(help="Some of the rules, as dat,dsgd.", metavar="LIST")] = None,
    families: Annotated[
        str | None, typer.Option("--topologies", help="Some of the graphs, as ring,ring/8.", metavar="LIST")
    ] = None,
    uncalibrated: Annotated[bool, typer.Option("--uncalibrated", help="All constants of the rates 1.")] = False,
    check: Annotated[bool, typer.Option("--verify", help="Simulate the recommendation and its neighbours.")] = False,
    draw: Annotated[Path | None, typer.Option("--plot", help="Draw to FILE.png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Plan."""
    from klatsch import pictures, planning
    from klatsch.planning import curves as figures
    from klatsch.planning import robust, sources, words
    from klatsch.planning.verify import verify

    if draw is not None:
        pictures.check_path(draw)
    measured = None if probe is None else sources.read_probe(probe)
    given = {"sigma": sigma, "zeta": zeta, "L": L, "D1": D1}
    task = planning.Task(
        _constants(measured, **given),
        params if params is not None else measured.params if measured else PARAMS,
        planning.network(
            network,
            gradient if gradient is not None else measured.gradient_seconds if measured else GRADIENT,
            bandwidth=bandwidth,
            latency=latency,
            handling=handling,
        ),
        samples,
        target,
        machines,
        efficiency,
        planning.UNCALIBRATED if uncalibrated else None,
    )
    rule_names = {name.replace(" ", ""): name for name in planning.RULES} | {"dat-cta": "dat (cta)"}
    asked = [rule_names.get(name.replace(" ", ""), name) for name in listed(rules)] if rules is not None else None
    found = planning.plan(task, rules=asked, families=None if families is None else listed(families))
    own = measured.ranges if measured else {}
    ranges = robust.within_a_factor(found) | {name: ends for name, ends in own.items() if given[name] is None}
    between = robust.machines_between(found, ranges)
    checked = verify(found) if check else None
    if draw is not None:
        pictures.save(figures.curves(found), draw, dpi=120)
    if as_json:
        print_json(_plain(found, between, checked))
        return
    _print(found)
    if found.best.machines > 1:
        print(f"  - {words.span(between, measured is not None)}")
    if checked is not None:
        _print_check(checked)
    if draw is not None:
        print(f"drawn to {draw}")


def count(text: str | int) -> int:
    """A whole number from the command line, also written as 1e8."""
    value = number(text)
    if not value.is_integer():
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return int(value)


def _constants(measured: sources.Measured | None, **given: float | None) -> Constants:
    from klatsch.theory import Constants

    known = {} if measured is None else asdict(measured.constants)
    known |= {name: value for name, value in given.items() if value is not None}
    if missing := [name for name in ("sigma", "zeta", "L", "D1") if name not in known]:
        raise ValueError(
            f"{', '.join(missing)} missing; measure them with klatsch probe PROBLEM -o probe.json and give that file, "
            f"or give {' '.join(f'--{name} X' for name in missing)}"
        )
    return Constants(**known)


# --- output -------------------------------------------------------------------------------------------------------


def _print(found: Plan) -> None:
    from klatsch.planning import words
    from klatsch.planning.graphs import LARGEST_BUILT
    from klatsch.topology.closed_form import CLOSED_FORMS
    from klatsch.topology.silence import split

    task, c = found.task, found.task.constants
    console = terminal.console()
    budget = f"at most {task.samples:,.4g} samples" if task.samples else "any number of samples"
    title = f"to error {task.goal:.3g} with {budget}, {task.params:,} parameters, {task.network.name}"
    soonest = {line.topology: line.best.seconds for line in sorted(found.lines, key=lambda line: -line.best.seconds)}
    lines = sorted(found.lines, key=lambda line: (soonest[line.topology], line.topology, line.best.seconds))
    columns = {
        "topology": lambda line: line.topology or "-",
        "rule": lambda line: line.rule,
        "largest M": lambda line: f"{line.largest:,}{'+' if line.largest >= line.choices[-1].machines > 1 else ''}",
        "best M": lambda line: f"{line.best.machines:,}" if _reached(line) else "-",
        "rounds": lambda line: f"{line.best.rounds:,.0f}" if _reached(line) else "never",
        "per round": lambda line: words.duration(line.best.seconds_per_round) if _reached(line) else "-",
        "time": lambda line: words.duration(line.best.seconds) if _reached(line) else "-",
        "speed-up": lambda line: f"{line.best.speedup:.3g}" if _reached(line) else "-",
        "sent per node": lambda line: words.size(line.best.bytes_per_node) if _reached(line) else "-",
    }
    terminal.print_table(
        console, title, columns, lines, ["sent per node", "per round", "speed-up"], section=lambda line: line.topology
    )
    families = [line.topology for line in found.lines if line.topology]
    built = [name for name in families if split(name)[0] not in CLOSED_FORMS]
    few = sorted(set(built)) if task.machines > LARGEST_BUILT else []
    for note in (
        f"sigma {c.sigma:.4g}, zeta {c.zeta:.4g}, L {c.L:.4g}, D1 {c.D1:.4g}; bandwidth "
        f"{words.size(task.network.bandwidth)}/s, latency {words.duration(task.network.latency)}, gradient "
        f"{words.duration(task.network.gradient)}; up to {task.machines:,} machines",
        "largest M: up to where noise is the larger half of the error; best M: the fastest that brings at least "
        f"{task.efficiency:.0%} of a machine each, or fewer within 5 %",
        *([f"up to {LARGEST_BUILT} machines only: {', '.join(few)}"] if few else []),
        *(
            f"left out, since {why}: {', '.join(what for what, other in found.left_out.items() if other == why)}"
            for why in dict.fromkeys(found.left_out.values())
        ),
    ):
        console.print(note, style="dim", markup=False, highlight=False)
    console.print(f"recommended: {words.recommendation(found)}", style="bold", markup=False, highlight=False)
    for reason in words.reasons(found):
        console.print(f"  - {reason}", markup=False, highlight=False)


def _reached(line: Line) -> bool:
    return math.isfinite(line.best.seconds)


def _print_check(checked: Verification) -> None:
    from klatsch.planning import words
    from klatsch.planning.verify import DIM

    console = terminal.console()
    columns = {
        "machines": lambda trial: f"{trial.machines:,}",
        "rounds": lambda trial: f"{trial.rounds:,}",
        "predicted error": lambda trial: f"{trial.predicted:.3g}",
        "simulated error": lambda trial: f"{trial.simulated:.3g}",
        "lr": lambda trial: f"{trial.lr:.3g}",
    }
    title = f"{checked.title}, in equal time, on least squares with these constants and {DIM} parameters"
    terminal.print_table(console, title, columns, checked.trials, [])
    if checked.most:
        console.print(f"more than {checked.most:,} machines are not simulated", style="dim")
    if checked.shortened:
        console.print("with fewer rounds than planned, so that it does not take long", style="dim")
    for sentence in words.verdict(checked):
        console.print(sentence, style="bold", markup=False, highlight=False)


def _plain(found: Plan, between: robust.Span, checked: Verification | None) -> dict[str, Any]:
    """A plan as plain data; what is never reached is null."""
    from klatsch.planning import words

    def choice(one: Choice) -> dict[str, Any]:
        plain = {name: value if _finite(value) else None for name, value in asdict(one).items()}
        return plain | {"rounds": None if plain["rounds"] is None else int(one.rounds)}

    task = found.task
    return {
        "constants": asdict(task.constants),
        "network": asdict(task.network),
        "params": task.params,
        "samples": task.samples,
        "target": task.target,
        "goal": task.goal,
        "machines": task.machines,
        "efficiency": task.efficiency,
        "recommended": choice(found.best) | {"text": words.recommendation(found), "reasons": words.reasons(found)},
        "machines_between": between._asdict(),
        "one_machine": choice(found.alone),
        "lines": [
            {"rule": line.rule, "topology": line.topology, "largest": line.largest, "best": choice(line.best)}
            for line in found.lines
        ],
        "left_out": dict(found.left_out),
        "verified": None
        if checked is None
        else asdict(checked) | {"held": checked.held, "text": words.verdict(checked)},
    }


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
