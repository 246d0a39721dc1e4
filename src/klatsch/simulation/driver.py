"""The loop of every simulation: advance the nodes, measure, show progress, and save to a file that continues it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from klatsch import sealed
from klatsch.arguments import number
from klatsch.extras import VERSION, need
from klatsch.rules import State
from klatsch.sealed import REMEDY, CheckpointError
from klatsch.simulation.record import NODES, Facts, Result, Snapshot, measured
from klatsch.simulation.roster import Roster
from klatsch.simulation.stack import Stack
from klatsch.watch.events import Given, Log, sinks_of

PIECE_SECONDS = 0.2  # how often the bar moves and the clock for checkpoints is looked at
FORMAT = "klatsch simulation 4"  # of checkpoints
LARGEST_SHARE = 0.03  # of the time may go into saving large states
SPEED = 5e8  # bytes per second: what saving is expected to do before the first time

Advance = Callable[[int], object]  # called with the number of rounds just done
Watch = Callable[[int, State, dict[str, Tensor]], object]  # of a round, its state and metrics: whether to stop there


class Run:
    """A run in progress: where it stands, and what was measured at which points."""

    def __init__(
        self,
        nodes: Stack,
        points: list[int],
        steps: int,
        per_node: bool = False,
        watch: Watch | None = None,
        roster: Roster | None = None,
    ) -> None:
        self.nodes, self.points, self.steps, self.per_node, self.watch = nodes, points, steps, per_node, watch
        self.roster, self._shift = roster, 0  # if the crew changes: whose the nodes are
        self.now = Snapshot(nodes.start, torch.full((len(nodes.networks) * nodes.rates.columns, 2), -1))
        self.rows: list[dict[str, Tensor]] = []  # one number per column; `now.points` rows count
        self.size = 64  # rounds per piece, doubled until a piece takes PIECE_SECONDS

    def resume(self, now: Snapshot, metrics: dict[str, Tensor]) -> None:
        """Go on from a snapshot and its metrics, (points, columns) each."""
        self.now, self.rows = now, [{name: v[k] for name, v in metrics.items()} for k in range(now.points)]

    def stand_after(self, rounds: int) -> None:
        """Have the nodes that take part in the last of some rounds."""
        if self.roster is not None and (number := self.roster.number(rounds)) != self._shift:
            self.nodes, self._shift = self.roster.stack(number), number
            self.now = self.now._replace(state=self.nodes.start)

    def _present(self) -> Snapshot:
        """Where the run stands, with the nodes that take part in the next round."""
        now = self.now
        if self.roster is not None and (number := self.roster.number(now.rounds + 1)) != self._shift:
            self.nodes, state = self.roster.changed(number, now.state)
            self._shift, now = number, now._replace(state=state)
        return now

    def go_on(self, after: Result) -> None:
        """Go on from a result; refuse that of another run."""
        if not isinstance(after, Result):
            raise ValueError(f"after is a {type(after).__name__}; give a result of simulate")
        self.stand_after(after.rounds)
        origin = self.nodes.networks[0].origin
        for name in {**after.origin, **origin}:
            if after.origin.get(name) != origin.get(name):
                raise ValueError(f"after is a result of another {name}; give one of the same run")
        if self.steps <= after.rounds:
            done = f"steps = {self.steps}, but {after.rounds} rounds are done"
            raise ValueError(f"{done}; steps counts all rounds, give more")
        if self.per_node != bool(after.per_node):
            done, wanted = ("with", "without") if after.per_node else ("without", "with")
            raise ValueError(f"after was recorded {done} per_node, and this run is {wanted} it; give both the same")
        state = {name: after.state[name].to(new) for name, new in self.now.state.items()}
        now = Snapshot(state, after.diverged_at, after.rounds, after.seconds, len(after.steps))
        self.resume(now, after.metrics | {name + NODES: v for name, v in after.per_node.items()})
        self.points = [*after.steps, *(p for p in self.points if p > after.rounds)]

    @property
    def metrics(self) -> dict[str, Tensor]:
        rows = self.rows[: self.now.points]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}

    @torch.no_grad()
    def drive(self, saver: Saver, tell: Advance) -> None:
        """Finish the run: in large pieces between points; in a single round at each, unless gradients do not matter."""
        brief, changes = self.nodes.brief, [] if self.roster is None else self.roster.shifts[1:]
        stops = sorted({*self.points, self.steps, *(shift.start - 1 for shift in changes)})
        try:
            for point in [p for p in stops if p > self.now.rounds]:
                while (done := self.now.rounds) < point:
                    single = not brief and done == point - 1
                    new, grad = self._advanced(point if single or brief else point - 1, single)
                    measures = new.rounds == point and point in self.points and bool(self.nodes.networks)
                    if measures:
                        self.rows[new.points :] = [self._row(new, grad)]
                        new = new._replace(points=new.points + 1)
                    self.now = new
                    tell(new.rounds - done)
                    saver.perhaps(self)
                    if measures and self.watch is not None:
                        last = {name: v for name, v in self.rows[new.points - 1].items() if NODES not in name}
                        if self.watch(point, dict(new.state), last):
                            return saver.end(self)
        except KeyboardInterrupt:
            saver.now(self)
            raise
        saver.end(self)

    def _advanced(self, until: int, single: bool) -> tuple[Snapshot, Tensor | None]:
        """The next snapshot, and the gradients of its round if it is a single one."""
        began, grad = time.perf_counter(), None
        now = self._present()
        nodes = self.nodes
        goal = min(until, now.rounds + self.size)
        if single:
            state, grad = nodes.one(now.state, goal)
        else:
            state = nodes.advance(now.state, now.rounds, goal)
        if nodes.device.type == "cuda":
            torch.cuda.synchronize(nodes.device)  # the clock must not run ahead of the GPU
        took = time.perf_counter() - began
        if took < PIECE_SECONDS and not single and goal - now.rounds == self.size:
            self.size *= 2
        return Snapshot(state, nodes.beginnings(now, state, goal), goal, now.seconds + took, now.points), grad

    def _row(self, now: Snapshot, grad: Tensor | None) -> dict[str, Tensor]:
        """The metrics of a step, of all columns of all networks."""
        rule, state, networks = self.nodes.rule, now.state, self.nodes.networks  # numbers may differ between these
        points = [rule.output(state), *([] if grad is None else [rule.query(state), rule.iterate(state), grad])]
        each = [
            measured(network.problem, diverged, self.per_node, *(v[network.nodes] for v in points))
            for network, diverged in zip(networks, now.diverged.view(len(networks), -1), strict=True)
        ]
        joined = {name: torch.cat([row[name] for row in each]) for name in each[0]}
        if self.roster is not None:
            joined |= {name: self.roster.by_node(self._shift, v) for name, v in joined.items() if NODES in name}
        return joined

    def results(self) -> list[Result]:
        """The result of each network; `seconds` is the time of all of them."""
        now, metrics, results = self.now, self.metrics, []
        C, outputs = self.nodes.rates.columns, self.nodes.rule.output(now.state)
        by_node = {name.removesuffix(NODES): v for name, v in metrics.items() if NODES in name}
        for k, network in enumerate(self.nodes.networks):
            own, output = slice(k * C, (k + 1) * C), outputs[network.nodes]
            results.append(
                Result(
                    steps=self.points[: now.points],
                    metrics={name: v[:, own] for name, v in metrics.items() if NODES not in name},
                    per_node={name: v if self.roster else v[:, network.nodes] for name, v in by_node.items()},
                    headline=network.problem.headline.metric,
                    large_is_good=network.problem.large_is_good,
                    output=output.masked_fill(now.diverged[own, None].to(output.device), torch.inf),
                    diverged=now.diverged[own],
                    diverged_at=now.diverged_at[own],
                    seconds=now.seconds,
                    engine=self.nodes.name,
                    state=network.part(now.state),
                    rounds=now.rounds,
                    origin=network.origin,
                    members=network.members,
                )
            )
        return results


class Saver:
    """Saves a run to a file, if there is one, at intervals of some seconds; refuses a file with another identity."""

    def __init__(self, path: str | Path | None, every: float, identity: Facts, at_end: bool = True) -> None:
        self.path = None if path is None else Path(path)
        self.every = number("checkpoint_every", every, lambda v: v >= 0, "a number of seconds from 0 up")
        self.identity, self.at_end = identity, at_end
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise ValueError(f"checkpoint = {path}: give the name of a file in a folder that exists")
        self._last, self._rounds = time.monotonic(), -1
        self._took: float | None = None

    def perhaps(self, run: Run) -> None:
        """Save if it is due."""
        took = sum(v.nbytes for v in run.now.state.values()) / SPEED if self._took is None else self._took
        # every = 0 means every time
        if not self.every or time.monotonic() - self._last >= max(self.every, took / LARGEST_SHARE):
            self.now(run)

    def end(self, run: Run) -> None:
        """Save a finished run, if it is wanted."""
        if self.at_end:
            self.now(run)

    def now(self, run: Run) -> None:
        """Save, unless the file is up to date."""
        if self.path is not None and run.now.rounds != self._rounds:
            began, now = time.monotonic(), run.now
            tensors = {f"state.{name}": value for name, value in now.state.items()}
            tensors |= {f"metric.{name}": values for name, values in run.metrics.items()}
            tensors |= {"diverged": now.diverged, "diverged_at": now.diverged_at}
            header = {"format": FORMAT, "rounds": now.rounds, "seconds": now.seconds, "points": now.points}
            sealed.write(self.path, header | {"run": self.identity}, tensors)
            self._last, self._rounds = time.monotonic(), now.rounds
            self._took = self._last - began

    def restore(self, run: Run) -> None:
        """Go on from the file, if there is one."""
        if self.path is None or not self.path.exists():
            return
        header, tensors = sealed.read(self.path, FORMAT)
        wanted, saved = json.loads(json.dumps(self.identity)), header["run"]
        for name in {**wanted, **saved}:
            if wanted.get(name) != saved.get(name):
                raise CheckpointError(
                    f"{self.path} belongs to another run: {name} is {_short(saved.get(name))} there "
                    f"and {_short(wanted.get(name))} here; {REMEDY}"
                )
        run.stand_after(header["rounds"])
        for name, fresh in run.now.state.items():
            if f"state.{name}" not in tensors or fresh.shape != tensors[f"state.{name}"].shape:
                raise CheckpointError(f"{self.path} is damaged: the field {name} of the state does not fit; {REMEDY}")
        state = {name: tensors[f"state.{name}"].to(fresh) for name, fresh in run.now.state.items()}
        metrics = {name.removeprefix("metric."): v for name, v in tensors.items() if name.startswith("metric.")}
        self._rounds = header["rounds"]
        now = Snapshot(state, tensors["diverged_at"], self._rounds, header["seconds"], header["points"])
        run.resume(now, metrics)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."


@contextmanager
def progress_bar(wanted: bool | Advance | None, total: int, done: int, title: str) -> Iterator[Advance]:
    """A function to call with the rounds just done: the user's, one that moves a bar, or one that does nothing."""
    if callable(wanted):
        wanted(done)
        yield wanted
    elif wanted or (wanted is None and sys.stderr.isatty() and find_spec("rich")):
        need("a progress bar", "rich")
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}")
        left = TimeRemainingColumn(compact=True)
        with Progress(*columns, left, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total, completed=done, pace="")

            def tell(rounds: int) -> None:
                bar.advance(task, rounds)
                bar.update(task, pace=f"{bar.tasks[0].speed or 0:,.0f} rounds/s")

            yield tell
    else:
        yield lambda rounds: None


@contextmanager
def logged(log: Given, run: Run) -> Iterator[None]:
    """Tell a log, if one is given, of every step that is recorded inside; a column is a member."""
    if log is None:
        yield
        return
    story, nodes, watch = Log(sinks_of(log)), run.nodes, run.watch
    columns = len(nodes.networks) * nodes.rates.columns
    members = ["network"] if columns == 1 else [f"column {column}" for column in range(columns)]

    def tell(t: int, state: State, metrics: dict[str, Tensor]) -> object:
        for column, member in enumerate(members):
            story.emit("round", member, round=t, **{name: float(v[column]) for name, v in metrics.items()})
        return watch(t, state, metrics) if watch is not None else None

    run.watch, graph = tell, nodes.topologies[0]
    facts = {"rule": nodes.rule.name, "topology": graph.name, "size": graph.size, "version": VERSION}
    for member in members:
        story.emit("start", member, **facts, wire=graph.wire, every=graph.every, late=graph.late)
    try:
        yield
    finally:
        story.close(members[0], round=run.now.rounds)
