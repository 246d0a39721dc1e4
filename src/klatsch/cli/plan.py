"""`klatsch plan`: how many machines pay, on which graph, with which rule."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.cli.app import command
from klatsch.cli.settings import Settings, channel_parameters, chosen, setting
from klatsch.cli.terminal import AsJson, Data, number, option, print_json, text
from klatsch.cli.terminal import words as listed
from klatsch.own import is_own

if TYPE_CHECKING:
    from klatsch.planning import Choice, Line, Plan, planner, sources
    from klatsch.planning.verify import Verification
    from klatsch.theory import Constants

GRADIENT, PARAMS = 0.1, 1_000_000  # by default
HANDLING, EFFICIENCY = 5e-10, 0.1  # as in planning.Network and planning.Task


@dataclass(frozen=True)
class Known:
    """The constants of the problem."""

    sigma: Annotated[float | None, option("Noise of a gradient.", parser=number)] = None
    zeta: Annotated[float | None, option("Heterogeneity of the nodes' gradients.", parser=number)] = None
    L: Annotated[float | None, option("Smoothness.", "--L", parser=number)] = None
    D1: Annotated[float | None, option("Distance from the start to the optimum.", "--D1", parser=number)] = None
    params: Annotated[int | None, option(f"Parameters of the model ({PARAMS:,}).")] = None

    def constants(self, measured: sources.Measured | None) -> Constants:
        """The constants, given or measured."""
        from klatsch.theory import Constants

        known = {} if measured is None else asdict(measured.constants)
        known |= {name: value for name, value in vars(self).items() if value is not None and name != "params"}
        if missing := [name for name in ("sigma", "zeta", "L", "D1") if name not in known]:
            raise ValueError(
                f"{', '.join(missing)} missing; measure them with klatsch probe PROBLEM -o probe.json and give that "
                "file, as in klatsch plan probe.json --samples 1e6, or give "
                f"{' '.join(f'--{name} X' for name in missing)}"
            )
        return Constants(**known)


@dataclass(frozen=True)
class Links:
    """The network, and the work of a machine in a round."""

    network: Annotated[str, text(f"One of {', '.join(catalogue.NETWORKS)}.")] = "10gbe"
    bandwidth: Annotated[float | None, option("Bytes per second of a machine's link.", parser=number)] = None
    latency: Annotated[float | None, option("Seconds until a message arrives.", parser=number)] = None
    gradient: Annotated[
        str | None, text(f"Seconds of one gradient ({GRADIENT}), or 'lognormal(0.05, 0.5)'.", metavar="X")
    ] = None
    gpus: Annotated[int, option("GPUs of a machine, which average their gradients first.")] = 1
    handling: Annotated[float, option("Seconds of work per byte that travels.", parser=number)] = HANDLING


@dataclass(frozen=True)
class Trying:
    """How a problem is tried."""

    minutes: Annotated[float, option("How long a problem may race.", parser=number)] = 0.75
    everything: Annotated[bool, typer.Option("--all", help="All that a problem's race has tried.")] = False
    folder: Data = None


@command(
    "plan least-squares --set noise=10 --network wan --gradient 0.05",
    "plan mine.py:problem --target 0.01 --network wan --gradient 0.05",
    "plan probe.json --samples 1e6 --set late=7 --set wire=int8",
    "plan --target 1e-3 --sigma 1 --zeta 1 --L 10 --D1 1 --machines 64",
    more="By theory: give --samples, --target or both, and constants: JSON of klatsch probe, or --sigma, --zeta, --L "
    "and --D1.",
)
def plan(
    known: Known,
    links: Links,
    trying: Trying,
    problem: Annotated[
        str | None, typer.Argument(help="A problem, FILE.py:FUNCTION, or JSON of klatsch probe.")
    ] = None,
    samples: Annotated[float | None, option("Gradients to take in all, N = M T.", parser=number)] = None,
    target: Annotated[float | None, option("Error f(x) - f* to reach.", parser=number)] = None,
    machines: Annotated[
        int | None, option("Most machines to consider (64; 1,024 by theory).", "-n", "--machines")
    ] = None,
    efficiency: Annotated[float, option("Least speed-up per machine; 0: any.", parser=number)] = EFFICIENCY,
    rules: Annotated[str | None, text("Only these rules, such as dat,dsgd.", metavar="LIST")] = None,
    families: Annotated[str | None, text("Only these graphs, as ring,ring/8.", "--topologies", metavar="LIST")] = None,
    settings: Annotated[Settings, setting("An option of the problem; by theory late=7, wire=int8")] = None,
    uncalibrated: Annotated[bool, typer.Option("--uncalibrated", help="Set all constants of the rates to 1.")] = False,
    check: Annotated[bool, typer.Option("--verify", help="Simulate the recommendation and its neighbours.")] = False,
    draw: Annotated[Path | None, typer.Option("--plot", help="Draw to FILE.png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many machines are worth using, on which graph and with which rule.

    A problem runs itself, with 1, 2, 4, ... machines beside a clock. Without one, the theory predicts from constants.
    """
    from klatsch import pictures, planning
    from klatsch.cli.data import use_folder
    from klatsch.cli.measured import measured as measured_plan
    from klatsch.clock import Clock
    from klatsch.clock.network import links as links_of
    from klatsch.planning import curves as figures
    from klatsch.planning import planner, sources, words
    from klatsch.planning.verify import verify

    if draw is not None:
        pictures.check_path(draw)
    if problem is not None and (is_own(problem) or not (problem.lower().endswith(".json") or "/" in problem)):
        wrong = {"--samples": samples, "--rules": rules, "--topologies": families, "--verify": check or None}
        wrong |= {f"--{name}": value for name, value in vars(known).items() if name != "params"}
        wrong |= {
            "--uncalibrated": uncalibrated or None,
            "--efficiency": efficiency if efficiency != EFFICIENCY else None,
        }
        for flag in [flag for flag, value in wrong.items() if value is not None]:
            raise ValueError(f"{flag} is for plans by theory, from constants; a problem is measured: leave it out")
        use_folder(trying.folder)
        clock = Clock(
            str(GRADIENT) if links.gradient is None else links.gradient,
            links_of(links.network, bandwidth=links.bandwidth, latency=links.latency),
            handling=links.handling,
            gpus=links.gpus,
        )
        return measured_plan(
            problem,
            clock,
            network=links.network,
            target=target,
            machines=64 if machines is None else machines,
            params=known.params,
            settings=settings,
            minutes=trying.minutes,
            draw=draw,
            everything=trying.everything,
            as_json=as_json,
        )
    if trying.everything or links.gpus != 1:
        flag = "--all" if trying.everything else "--gpus"
        raise ValueError(f"{flag} is for a problem that is measured, as in klatsch plan least-squares; leave it out")
    machines = 1024 if machines is None else machines
    measured = None if problem is None else sources.read_probe(Path(problem))
    params, gradient = (measured.params, measured.gradient_seconds) if measured else (PARAMS, GRADIENT)
    params = params if known.params is None else known.params
    numbers = {name: value for name, value in asdict(links).items() if name not in ("network", "gpus")}
    numbers["gradient"] = gradient if links.gradient is None else number(links.gradient)
    network = planning.network(links.network, **numbers)
    rates = planning.UNCALIBRATED if uncalibrated else None
    travel = {name: parameter for name, parameter in channel_parameters().items() if name != "every"}
    channel: dict[str, Any] = chosen(settings, "plan", travel)  # Task checks the values
    goal = known.constants(measured), params, network, samples, target, machines, efficiency, rates
    task = planning.Task(*goal, **channel)
    rule_names = {name.replace(" ", ""): name for name in planning.CANDIDATES} | {"dat-cta": "dat (cta)"}
    asked = None if rules is None else [rule_names.get(name.replace(" ", ""), name) for name in listed(rules)]
    found = planning.plan(task, rules=asked, families=None if families is None else listed(families))
    own = measured.ranges if measured else {}
    ranges = planner.within_a_factor(found) | {name: ends for name, ends in own.items() if vars(known)[name] is None}
    between = planner.machines_between(found, ranges)
    checked = verify(found) if check else None
    if draw is not None:
        pictures.save(figures.curves(found), draw, dpi=120)
    if as_json:
        return print_json(_plain(found, between, checked))
    _print(found)
    if found.best.machines > 1:
        print(f"  - {words.span(between, measured is not None)}")
    if checked is not None:
        _print_check(checked)
    if draw is not None:
        print(f"drawn to {draw}")


# --- output -------------------------------------------------------------------------------------------------------


def _print(found: Plan) -> None:
    from klatsch.planning import words
    from klatsch.planning.graphs import LARGEST_BUILT, is_built

    task, c = found.task, found.task.constants
    budget = f"at most {task.samples:,.4g} samples" if task.samples else "any number of samples"
    channel = f", {task.channel}" if task.channel else ""
    title = f"to error {task.goal:.3g} with {budget}, {task.params:,} parameters, {task.network.name}{channel}"
    soonest = {line.topology: line.best.seconds for line in sorted(found.lines, key=lambda line: -line.best.seconds)}
    lines = sorted(found.lines, key=lambda line: (soonest[line.topology], line.topology, line.best.seconds))
    terminal.print_table(title, list(map(_cells, lines)), ["sent per node", "per round", "speed-up"], "topology")
    few = sorted({name for line in lines if (name := line.topology) and is_built(name, task.late)})
    for note in (
        f"sigma {c.sigma:.4g}, zeta {c.zeta:.4g}, L {c.L:.4g}, D1 {c.D1:.4g}; bandwidth "
        f"{words.size(task.network.bandwidth)}/s, latency {words.duration(task.network.latency)}, gradient "
        f"{words.duration(task.network.gradient)}; up to {task.machines:,} machines",
        "largest M: up to where noise is the larger half of the error; best M: the fastest that brings at least "
        f"{task.efficiency:.0%} of a machine each, or fewer within 5 %",
        *([f"up to {LARGEST_BUILT} machines only: {', '.join(few)}"] if few and task.machines > LARGEST_BUILT else []),
        *(
            f"left out, since {why}: {', '.join(what for what, other in found.left_out.items() if other == why)}"
            for why in dict.fromkeys(found.left_out.values())
        ),
    ):
        terminal.note(note)
    terminal.note(f"recommended: {words.recommendation(found)}", "bold")
    for reason in words.reasons(found):
        terminal.note(f"  - {reason}", "")


def _cells(line: Line) -> dict[str, str]:
    from klatsch.planning import words

    best, most = line.best, line.choices[-1].machines
    cells = {
        "topology": line.topology or "-",
        "rule": line.rule,
        "largest M": f"{line.largest:,}{'+' if line.largest >= most > 1 else ''}",
        **dict.fromkeys(("best M", "rounds", "per round", "time", "speed-up", "sent per node"), "-"),
    }
    if not math.isfinite(best.seconds):
        return cells | {"rounds": "never"}
    return cells | {
        "best M": f"{best.machines:,}",
        "rounds": f"{best.rounds:,.0f}",
        "per round": words.duration(best.seconds_per_round),
        "time": words.duration(best.seconds),
        "speed-up": f"{best.speedup:.3g}",
        "sent per node": words.size(best.bytes_per_node),
    }


def _print_check(checked: Verification) -> None:
    from klatsch.planning import words
    from klatsch.planning.verify import DIM

    lines = [
        {
            "machines": f"{trial.machines:,}",
            "rounds": f"{trial.rounds:,}",
            "predicted error": f"{trial.predicted:.3g}",
            "simulated error": f"{trial.simulated:.3g}",
            "lr": f"{trial.lr:.3g}",
        }
        for trial in checked.trials
    ]
    title = f"{checked.title}, in equal time, on least squares with these constants and {DIM} parameters"
    terminal.print_table(title, lines)
    if checked.most:
        terminal.note(f"more than {checked.most:,} machines are not simulated")
    if checked.shortened:
        terminal.note("with fewer rounds than planned, so that it does not take long")
    for sentence in words.verdict(checked):
        terminal.note(sentence, "bold")


def _plain(found: Plan, between: planner.Span, checked: Verification | None) -> dict[str, object]:
    """A plan as plain data; what is never reached is null."""
    from klatsch.planning import words

    def choice(one: Choice) -> dict[str, object]:
        never = (name for name, value in vars(one).items() if isinstance(value, float) and not math.isfinite(value))
        rounds = int(one.rounds) if math.isfinite(one.rounds) else None
        return asdict(one) | {"rounds": rounds} | dict.fromkeys(never)

    given = asdict(found.task)
    verified = checked and asdict(checked) | {"held": checked.held, "text": words.verdict(checked)}
    return {
        **{name: given[name] for name in ("constants", "network", "params", "samples", "target", "late", "wire")},
        "goal": found.task.goal,
        **{name: given[name] for name in ("machines", "efficiency")},
        "recommended": choice(found.best) | {"text": words.recommendation(found), "reasons": words.reasons(found)},
        "machines_between": between._asdict(),
        "one_machine": choice(found.alone),
        "lines": [
            {"rule": line.rule, "topology": line.topology, "largest": line.largest, "best": choice(line.best)}
            for line in found.lines
        ],
        "left_out": dict(found.left_out),
        "verified": verified,
    }
