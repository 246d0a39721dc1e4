"""`klatsch plan`: how many machines pay, on which graph, with which rule."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.cli.app import command
from klatsch.cli.settings import Settings, chosen, parameters_of, setting
from klatsch.cli.terminal import AsJson, Data, number, option, print_json, text
from klatsch.own import is_own, label

if TYPE_CHECKING:
    from klatsch.clock import Clock
    from klatsch.planning.race import Answer, Task, Trial
    from klatsch.planning.sources import Measured
    from klatsch.theory import Constants

    Command = Callable[[Trial], str]

GRADIENT, PARAMS, MACHINES = 0.1, 1_000_000, 64  # by default


@dataclass(frozen=True)
class Known:
    """The constants of a problem, where it cannot run itself."""

    sigma: Annotated[float | None, option("Noise of a gradient.", parser=number)] = None
    zeta: Annotated[float | None, option("Heterogeneity of the nodes' gradients.", parser=number)] = None
    L: Annotated[float | None, option("Smoothness.", "--L", parser=number)] = None
    D1: Annotated[float | None, option("Distance from the start to the optimum.", "--D1", parser=number)] = None
    params: Annotated[int | None, option("Parameters of the model, if not those of the problem.")] = None

    def constants(self, measured: Measured | None) -> Constants:
        """The constants, given or measured."""
        from klatsch.theory import Constants

        known = {} if measured is None else asdict(measured.constants)
        known |= {name: value for name, value in vars(self).items() if value is not None and name != "params"}
        if missing := [name for name in ("sigma", "zeta", "L", "D1") if name not in known]:
            raise ValueError(
                f"{', '.join(missing)} missing; give a problem, as in klatsch plan least-squares, or JSON of klatsch "
                f"probe, or {' '.join(f'--{name} X' for name in missing)}"
            )
        return Constants(**known)


@dataclass(frozen=True)
class Links:
    """The network, and the work of a machine in a round."""

    network: Annotated[str, text(f"One of {', '.join(catalogue.NETWORKS)}, or a CSV file of links.")] = "10gbe"
    bandwidth: Annotated[float | None, option("Bytes per second of a machine's link.", parser=number)] = None
    latency: Annotated[float | None, option("Seconds until a message arrives.", parser=number)] = None
    gradient: Annotated[
        str | None, text(f"Seconds of one gradient ({GRADIENT}), or 'lognormal(0.05, 0.5)'.", metavar="X")
    ] = None
    gpus: Annotated[int, option("GPUs of a machine, which average their gradients first.")] = 1

    def clock(self, usual: float) -> Clock:
        """The clock; `usual` are the seconds of a gradient, if none are given."""
        from klatsch.clock import Clock
        from klatsch.clock.network import links

        network = links(self.network, bandwidth=self.bandwidth, latency=self.latency)
        return Clock(str(usual) if self.gradient is None else self.gradient, network, gpus=self.gpus)


@dataclass(frozen=True)
class Trying:
    """How it is tried."""

    minutes: Annotated[float, option("How long it may take.", parser=number)] = 0.85
    device: Annotated[str, text("Where to simulate: cpu, cuda, cuda:1...")] = "cpu"
    everything: Annotated[bool, typer.Option("--all", help="Show all that was tried.")] = False
    folder: Data = None


@command(
    "plan least-squares --set noise=10 --network wan --gradient 0.05",
    "plan mine.py:problem --target 0.01 --network wan --gradient 0.05",
    "plan probe.json --target 1e-3 --network 1gbe",
    "plan --theory --samples 1e6 --sigma 1 --zeta 1 --L 10 --D1 1",
    more="With constants alone (JSON of klatsch probe, or --sigma, --zeta, --L and --D1) least squares with these "
    "constants runs instead.",
)
def plan(
    known: Known,
    links: Links,
    trying: Trying,
    problem: Annotated[
        str | None, typer.Argument(help="A problem, FILE.py:FUNCTION, or JSON of klatsch probe.")
    ] = None,
    target: Annotated[
        float | None, option("Value of the metric to reach; of constants, f(x) - f*.", parser=number)
    ] = None,
    machines: Annotated[int | None, option(f"Most machines to consider ({MACHINES}).", "-n", "--machines")] = None,
    settings: Annotated[Settings, setting("An option of the problem")] = None,
    theory: Annotated[bool, typer.Option("--theory", help="Bounds of the paper instead, for constants.")] = False,
    samples: Annotated[float | None, option("With --theory: gradients to take in all.", parser=number)] = None,
    draw: Annotated[Path | None, typer.Option("--plot", help="Draw to FILE.png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many machines are worth using, on which graph and with which rule.

    The problem runs itself, with 1, 2, 4, ... machines beside a clock.
    """
    from klatsch import pictures
    from klatsch.arguments import whole
    from klatsch.cli.data import use_folder
    from klatsch.planning import answers, race, sources, ways
    from klatsch.planning.curves import curves
    from klatsch.units import duration

    if draw is not None:
        pictures.check_path(draw)
    file = problem is not None and not is_own(problem) and (problem.lower().endswith(".json") or "/" in problem)
    named = None if file else problem
    if named is not None and named.endswith(".py"):
        raise ValueError(f"{named} names no function; give {named}:FUNCTION")
    _check(known, trying, named, theory, samples, draw)
    asked = whole(MACHINES if machines is None else machines, "machines", 1)
    if not theory:
        whole(asked, "machines", 1, ways.MOST_MACHINES)
    most = 1 << (asked.bit_length() - 1)  # 1, 2, 4, ... machines
    use_folder(trying.folder)
    if named is not None:
        options: dict[str, Any] = chosen(settings, label(named), parameters_of("problem", named))
        (make, seeded), measured, title = sources.of_any_size(named, most, **options), None, label(named)
        params = known.params
    else:
        if settings:
            raise ValueError(f"--set {settings[0]} is for problems that run themselves; leave it out")
        measured = None if problem is None else sources.read_probe(Path(problem))
        constants = known.constants(measured)
        params = known.params if known.params is not None else measured.params if measured else PARAMS
        if theory:
            clock = links.clock(measured.gradient_seconds if measured else GRADIENT)
            return _bounds(constants, target, samples, clock, params, machines, as_json)
        make, seeded, title = sources.surrogate(constants, most), True, "least squares with these constants"
    clock = links.clock(measured.gradient_seconds if measured else GRADIENT)
    task = race.Task(
        *(make, clock, target, asked, params, race.SEEDS if seeded else 1, 60 * trying.minutes, trying.device)
    )
    with _bar() as told:
        found = race.race(task, told)
    if draw is not None:
        pictures.save(curves(found), draw, dpi=120)
    again = None if named is None else _again(task, named, options, most, trying.folder)
    if as_json:
        return print_json(_plain(found, again))
    terminal.note(
        f"{title} to {found.metric} {found.target:.3g}, {params or task.make(1, 0).dim:,} parameters, {links.network}, "
        f"gradient {duration(clock.times.mean)}, up to {asked:,} machine{'s' * (asked > 1)}"
    )
    first, *others = answers.lines(task, found)
    terminal.note(first, "bold")
    for line in others:
        terminal.note(line, "")
    if again is not None and found.best is not None:
        print(f"  again: {again(found.best)}")
        print(f"  on ranks: {found.best.way.python(found.best.lr)}")
    if trying.everything:
        terminal.print_table("all that was tried", [_cells(trial) for trial in found.trials])
    if draw is not None:
        print(f"drawn to {draw}")


def _again(task: Task, problem: str, options: dict[str, Any], pool: int, folder: Path | None) -> Command:
    """A function that gives the command which runs what has raced, with its first seed."""
    from klatsch import problems

    if problems.declared(problem).on_fewer is not None:  # all sizes share the data of the largest
        options = {"pool": pool} | options
    before = ["--problem", problem, *(w for name, value in options.items() for w in ("--set", f"{name}={value}"))]
    after = ["--seeds", "1", *(["--float32"] if task.in_float32(task.make(1, 0)) else [])]
    after += [] if task.device == "cpu" else ["--device", task.device]
    after += [] if folder is None else ["--data", str(folder)]
    return lambda trial: shlex.join(["klatsch", "run", *before, *trial.way.flags(trial.lr, trial.rounds), *after])


def _check(
    known: Known, trying: Trying, named: str | None, theory: bool, samples: float | None, draw: Path | None
) -> None:
    """Refuse options that are wrong, or do not go together."""
    from klatsch.arguments import number as positive

    given = [f"--{name}" for name, value in vars(known).items() if value is not None and name != "params"]
    if named is not None and (given or theory):
        raise ValueError(f"{(given or ['--theory'])[0]} is for constants; a problem runs itself: leave it out")
    positive("--minutes", trying.minutes, lambda v: v > 0, "a positive number of minutes")
    if samples is not None:
        positive("--samples", samples, lambda v: v >= 1, "1 or more")
    if samples is not None and not theory:
        raise ValueError("--samples is for --theory; give a --target")
    measures = {
        "--plot": draw is not None,
        "--all": trying.everything,
        "--minutes": trying.minutes != Trying.minutes,
        "--device": trying.device != Trying.device,
    }
    for flag in [flag for flag, is_given in measures.items() if theory and is_given]:
        raise ValueError(f"{flag} is for what is measured, and --theory measures nothing; leave one of them out")


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None] | None]:
    """A bar on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, completed=share, description=text)


def _bounds(
    constants: Constants,
    target: float | None,
    samples: float | None,
    clock: Clock,
    params: int,
    machines: int | None,
    as_json: bool,
) -> None:
    """Print what the theory promises."""
    from klatsch.planning import bounds
    from klatsch.units import duration

    if (target is None) is (samples is None):
        raise ValueError(
            "--theory takes --samples 1e6 (up to how many machines?) or --target 0.01 (how long?); give one"
        )
    if samples is not None:
        found = bounds.largest(constants, samples, math.inf if machines is None else machines)
        what = f"the most machines with which {samples:,.4g} samples count"
    else:
        assert target is not None
        found, what = (
            bounds.fastest(constants, target, clock, params, machines or MACHINES),
            f"time to an error of {target:.3g}",
        )
    if as_json:
        return print_json({"upper_bounds": [{k: v for k, v in one._asdict().items() if v == v} for one in found]})
    cells = []
    for bound in found:
        cells.append({"rule": bound.rule, "topology": bound.graph, "machines": f"{bound.machines:,}"})
        if target is not None:
            cells[-1] |= {"rounds": f"{bound.rounds:,}", "time": duration(bound.seconds)}
    terminal.print_table(f"{what}: upper bounds by theory, all constants of its rates 1", cells)
    terminal.note("what happens is often far better; give a problem, or no --theory, to measure it")


def _cells(trial: Trial) -> dict[str, str]:
    from klatsch.units import duration

    way, there = trial.way, math.isfinite(trial.rounds)
    graph = "-" if way.machines == 1 else "all-reduce" if way.reduces else way.graph
    return {
        "machines": f"{way.machines:,}",
        "topology": graph + (f"/{way.every}" if way.every > 1 else "") + (f" late {way.late}" if way.late else ""),
        "rule": way.named_rule,
        "wire": way.wire,
        "lr": f"{trial.lr:.2g}",
        "rounds": f"{trial.rounds:,.0f}" if there else f"more than {trial.tried:,}",
        "per round": duration(trial.each),
        "time": duration(trial.seconds) if there else "-",
        "seeds": str(trial.seeds),
    }


def _plain(found: Answer, again: Command | None) -> dict[str, object]:
    """An answer as JSON can hold it: what is not reached is null."""

    def plain(trial: Trial | None) -> dict[str, object] | None:
        if trial is None:
            return None
        way = {**trial.way._asdict(), "options": trial.way.options}
        numbers = asdict(trial) | {"way": way, "seconds": trial.seconds}
        if again is not None and math.isfinite(trial.rounds):
            numbers |= {"command": again(trial), "python": trial.way.python(trial.lr)}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}

    return {
        "metric": found.metric,
        "target": found.target,
        "recommended": plain(found.best),
        "one_machine": plain(found.alone),
        "all_reduce": plain(found.reduced),
        "next": [plain(trial) for trial in found.others],
        "trials": [plain(trial) for trial in found.trials],
        "not_more": found.most,
        "stopped": found.stopped,
        "untried": found.untried,
    }
