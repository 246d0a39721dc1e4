"""`klatsch plan PROBLEM`: a race of the problem itself, and its answer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klatsch.cli import terminal
from klatsch.cli.settings import Settings, chosen, parameters_of
from klatsch.own import is_own, label

if TYPE_CHECKING:
    from klatsch.clock import Clock
    from klatsch.planning.race import Answer, Trial


def measured(
    problem: str,
    clock: Clock,
    *,
    network: str,
    target: float | None,
    machines: int,
    params: int | None,
    settings: Settings,
    minutes: float,
    draw: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Race, and print the answer."""
    from klatsch import pictures
    from klatsch.arguments import whole
    from klatsch.planning import answers, race, sources
    from klatsch.planning.curves import measured_curves
    from klatsch.planning.words import duration

    if draw is not None:
        pictures.check_path(draw)
    options: dict[str, Any] = chosen(
        settings, label(problem), {} if is_own(problem) else parameters_of("problem", problem)
    )
    most = 1 << (whole(machines, "machines", 1).bit_length() - 1)  # 1, 2, 4, ... machines
    make, has_seeds = sources.of_any_size(problem, most, **options)
    task = race.Task(make, clock, target, machines, params, race.SEEDS if has_seeds else 1, seconds=60 * minutes)
    with _bar() as told:
        found = race.race(task, told)
    if draw is not None:
        pictures.save(measured_curves(found), draw, dpi=120)
    if as_json:
        return terminal.print_json(_plain(found))
    numbers = params or task.make(1, 0).dim
    terminal.note(
        f"{label(problem)} to {found.metric} {found.target:.3g}, {numbers:,} parameters, {network}, gradient "
        f"{duration(clock.gradient.mean)}, up to {machines:,} machines"  # type: ignore[union-attr]
    )
    first, *others = answers.lines(task, found)
    terminal.note(first, "bold")
    for line in others:
        terminal.note(line, "")
    if everything:
        terminal.print_table("all that was tried", [_cells(trial) for trial in found.trials])
    if draw is not None:
        print(f"drawn to {draw}")


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


def _cells(trial: Trial) -> dict[str, str]:
    from klatsch.planning.words import duration

    way, there = trial.way, math.isfinite(trial.rounds)
    return {
        "machines": f"{way.machines:,}",
        "topology": "all-reduce" if way.reduces and way.machines > 1 else "-" if way.machines == 1 else way.graph,
        "rule": way.rule,
        "wire": way.wire,
        "lr": f"{trial.lr:.2g}",
        "rounds": f"{trial.rounds:,.0f}" if there else f"more than {trial.tried:,}",
        "per round": duration(trial.each),
        "time": duration(trial.seconds) if there else "-",
        "seeds": str(trial.seeds),
    }


def _plain(found: Answer) -> dict[str, object]:
    """An answer as JSON can hold it: what is not reached is null."""

    def plain(trial: Trial | None) -> dict[str, object] | None:
        if trial is None:
            return None
        numbers = asdict(trial) | {"way": trial.way._asdict(), "seconds": trial.seconds}
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
    }
