"""`klatsch plan` and `klatsch probe`: how many machines pay, and the constants of a problem."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import catalogue, files, pictures
from klatsch.cli import terminal
from klatsch.cli.app import Settings, chosen, command, setting
from klatsch.cli.parts import use_folder
from klatsch.cli.terminal import AsJson, Data, Plot, number, option, print_json, text, words
from klatsch.files import token_of
from klatsch.own import label
from klatsch.units import duration

if TYPE_CHECKING:
    from klatsch.clock import Clock, Links
    from klatsch.planning.race import Answer, Task, Trial

    Again = Callable[[Trial], str]

MACHINES, MINUTES, GRADIENT = 64, 1.15, "0.1"  # by default
MEANINGS = {
    "sigma": "noise of a node's gradient, the largest on the way",
    "zeta": "how far nodes' gradients are apart, at the end",
    "L": "smoothness: the largest curvature of any node",
    "D1": "distance from the start to the optimum",
}


@dataclass(frozen=True)
class Machines:
    """The network, and the work of a machine in a round."""

    network: Annotated[
        str, text(f"One of {', '.join(catalogue.NETWORKS)}, a CSV file of links, or HOST:PORT of a crew.")
    ] = "10gbe"
    token_file: Annotated[Path | None, text("File with the crew's token.", "--token-file", metavar="FILE")] = None
    bandwidth: Annotated[float | None, option("Bytes per second of a machine's link.", parser=number)] = None
    latency: Annotated[float | None, option("Seconds until a message arrives.", parser=number)] = None
    gradient: Annotated[
        str | None, text(f"Seconds per gradient ({GRADIENT}): 0.05, or 'lognormal(0.05, 0.5)'.", metavar="X")
    ] = None
    gpus: Annotated[int, option("GPUs per machine, which average their gradients first.")] = 1

    def links(self) -> Links:
        from klatsch.clock import links
        from klatsch.ranks.edges import links_of
        from klatsch.ranks.registry import address_of, ask

        file, crew = self.network.lower().endswith(".csv"), ":" in self.network
        if file or not crew:
            if self.token_file is not None:
                raise ValueError(f"--token-file {self.token_file} is for a crew; give --network HOST:PORT, too")
            if not file and "." in self.network:
                raise ValueError(f"--network {self.network!r}: a crew is HOST:PORT; give {self.network}:4711")
            return links(self.network, self.bandwidth, self.latency)
        for name, given in (("bandwidth", self.bandwidth), ("latency", self.latency)):
            if given is not None:
                raise ValueError(f"the crew at {self.network} knows its links; leave --{name} {given:g} out")
        addresses = [address_of(one) for one in words(self.network)]
        told = ask(addresses, token_of(self.token_file), {"op": "status", "links": True})
        return links_of(told["members"], f"the crew at {self.network}")

    def clock(self, links: Links, measured: float | None = None) -> Clock:
        """Its clock; a gradient may have been measured."""
        from klatsch.clock import Clock

        if measured is not None and self.gradient is not None:
            raise ValueError(f"--measure and --gradient {self.gradient} both say how long a gradient takes; give one")
        gradient = self.gradient or GRADIENT if measured is None else measured
        return Clock(gradient, links, gpus=self.gpus)


@command(
    "plan least-squares --set noise=10 --network wan --gradient 0.05",
    "plan mine.py:problem --target 0.01 --network wan --gradient 0.05",
    "plan train.py:task --network wan --measure --minutes 5",
    "plan train.py:task --network 10.0.0.1:4711 --token-file token --measure",
)
def plan(
    problem: Annotated[str, typer.Argument(help="A problem's name, or FILE.py:FUNCTION, also of (model, loss, data).")],
    hardware: Machines,
    target: Annotated[float | None, option("Value of the problem's metric to reach.", parser=number)] = None,
    machines: Annotated[int, option("Most machines to consider.", "-n", "--machines")] = MACHINES,
    settings: Annotated[Settings, setting("An option of the problem")] = None,
    params: Annotated[int | None, option("Parameters of the model (the problem's).")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure how long a gradient takes here.")] = False,
    minutes: Annotated[float, option("How long planning may take.", parser=number)] = MINUTES,
    device: Annotated[str, text("Where to simulate: cpu, cuda, cuda:1...")] = "cpu",
    everything: Annotated[bool, typer.Option("--all", help="Show everything that was tried.")] = False,
    folder: Data = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Say how many machines are worth using, on which graph and with which rule.

    Runs the problem itself with 1, 2, 4, ... simulated machines, beside a clock.
    """
    from klatsch import arguments
    from klatsch.planning import answers, gradient_seconds, of_any_size, race

    if plot is not None:
        pictures.check_path(plot)
    arguments.number("--minutes", minutes, lambda v: v > 0, "a positive number of minutes")
    use_folder(folder)
    options = chosen(settings, "problem", problem)
    links = hardware.links()
    make, seeded = of_any_size(problem, machines, **options)
    clock = hardware.clock(links, gradient_seconds(make(1, 0)) if measure else None)
    task = race.Task(make, clock, target, machines, params, race.SEEDS if seeded else 1, 60 * minutes, device)
    with terminal.bar() as told:
        answer = race.race(task, told)
    if plot is not None:
        pictures.save(answers.curves(answer), plot, dpi=120)
    again = _again(task, problem, options, folder)
    if as_json:
        return print_json(_plain(answer, again))
    terminal.note(
        f"{label(problem)} to {answer.metric} {answer.target:.3g}, {params or make(1, 0).dim:,} parameters, "
        f"{hardware.network}, gradient {duration(clock.times.mean)}, up to {machines:,} machine{'s' * (machines > 1)}"
    )
    first, *others = answers.lines(task, answer)
    terminal.note(first, "bold")
    for line in others:
        terminal.note(line, "")
    if answer.best is not None:
        print(f"  again: {again(answer.best)}")
        print(f"  on ranks: {answer.best.way.python(answer.best.lr)}")
    if everything:
        terminal.print_table("all that was tried", [_cells(trial) for trial in answer.trials])
    if plot is not None:
        print(f"drawn to {plot}")


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
    rounds: Annotated[int, option("Rounds of the run that looks for an unknown optimum.")] = 200,
    samples: Annotated[int, option("Gradients per node for each estimate of noise.")] = 64,
    folder: Data = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the JSON to FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the constants of a problem that the theory needs: noise, heterogeneity, smoothness, distance."""
    from klatsch import planning

    if out is not None:
        files.check_output(out, "JSON")
    use_folder(folder)
    options = ({} if seed is None else {"seed": seed}) | chosen(settings, "problem", problem)
    measured = planning.probe(planning.problem_of(problem, nodes, **options), rounds=rounds, samples=samples)
    if out is not None:
        files.save(out, json.dumps(asdict(measured), indent=2, allow_nan=False).encode(), "JSON")
    if as_json:
        return print_json(asdict(measured))
    estimates = {name: vars(measured)[name] for name in MEANINGS}
    for stage in measured.stages:
        estimates |= {f"sigma, {stage.place}": stage.sigma, f"zeta, {stage.place}": stage.zeta}
    lines = [
        {
            "property": name,
            "value": f"{estimate.value:.4g}",
            "from": f"{estimate.low:.4g}",
            "to": f"{estimate.high:.4g}",
            "gradients": f"{estimate.samples:,}",
            "meaning": MEANINGS.get(name, ""),
        }
        for name, estimate in estimates.items()
    ]
    terminal.print_table(f"{measured.problem}, {measured.nodes} nodes, {measured.params:,} parameters", lines)
    terminal.note(f"one node's gradient takes {duration(measured.gradient_seconds)} here")
    if out is not None:
        print(f"written to {out}")


def _again(task: Task, problem: str, options: dict[str, Any], folder: Path | None) -> Again:
    """A function that gives the command which runs what has raced, with its first seed."""
    from klatsch import problems

    if problems.declared(problem).on_fewer is not None:  # all sizes share the data of the largest
        options = {"pool": 1 << (task.machines.bit_length() - 1)} | options
    before = ["--problem", problem, *(w for name, value in options.items() for w in ("--set", f"{name}={value}"))]
    after = ["--seeds", "1", *(["--float32"] if task.in_float32(task.make(1, 0)) else [])]
    after += [] if task.device == "cpu" else ["--device", task.device]
    after += [] if folder is None else ["--data", str(folder)]
    return lambda trial: shlex.join(["klatsch", "run", *before, *trial.way.flags(trial.lr, trial.rounds), *after])


def _cells(trial: Trial) -> dict[str, str]:
    way, reached = trial.way, math.isfinite(trial.rounds)
    graph = "-" if way.machines == 1 else "all-reduce" if way.reduces else way.graph
    return {
        "machines": f"{way.machines:,}",
        "topology": graph + (f"/{way.every}" if way.every > 1 else "") + (f" late {way.late}" if way.late else ""),
        "rule": way.named_rule,
        "wire": way.wire,
        "lr": f"{trial.lr:.2g}",
        "rounds": f"{trial.rounds:,.0f}" if reached else f"more than {trial.tried:,}",
        "per round": duration(trial.each),
        "time": duration(trial.seconds) if reached else "-",
        "seeds": str(trial.seeds),
    }


def _plain(answer: Answer, again: Again) -> dict[str, object]:
    """An answer for JSON."""

    def plain(trial: Trial | None) -> dict[str, object] | None:
        if trial is None:
            return None
        way = {**trial.way._asdict(), "rule": trial.way.rule, "options": trial.way.options}
        numbers = asdict(trial) | {"way": way, "seconds": trial.seconds}
        if math.isfinite(trial.rounds):
            numbers |= {"command": again(trial), "python": trial.way.python(trial.lr)}
        return numbers

    return {
        "metric": answer.metric,
        "target": answer.target,
        "recommended": plain(answer.best),
        "one_machine": plain(answer.alone),
        "all_reduce": plain(answer.reduced),
        "next": [plain(trial) for trial in answer.others],
        "trials": [plain(trial) for trial in answer.trials],
        "not_more": answer.most,
        "stopped": answer.stopped,
        "untried": answer.untried,
    }
