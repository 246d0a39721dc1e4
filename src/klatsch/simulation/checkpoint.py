"""Checkpoints of simulations: `Saver` writes a run as it goes and restores it; `sealed.py` is their format."""

from __future__ import annotations

import json
import time
from pathlib import Path

from klatsch import sealed
from klatsch.arguments import number
from klatsch.rules import State
from klatsch.sealed import REMEDY, CheckpointError
from klatsch.simulation.driver import Run, Snapshot
from klatsch.simulation.record import Facts

FORMAT = "klatsch simulation 3"
LARGEST_SHARE = 0.03  # of the time may go into saving large states
SPEED = 5e8  # bytes per second: what saving is expected to do before the first time


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

    def restored(self, fresh: State) -> Run | None:
        """The run in the file, if there is one; `fresh` is a state with the right names and shapes."""
        if self.path is None or not self.path.exists():
            return None
        header, tensors = sealed.read(self.path, FORMAT)
        here, there = json.loads(json.dumps(self.identity)), header["run"]
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                raise CheckpointError(
                    f"{self.path} belongs to another run: {name} is {_short(there.get(name))} there "
                    f"and {_short(here.get(name))} here; {REMEDY}"
                )
        for name, value in fresh.items():
            saved = tensors.get(f"state.{name}")
            if saved is None or value.shape != saved.shape:
                raise CheckpointError(f"{self.path} is damaged: the field {name} of the state does not fit; {REMEDY}")
        state = {name: tensors[f"state.{name}"].to(value) for name, value in fresh.items()}
        metrics = {name.removeprefix("metric."): v for name, v in tensors.items() if name.startswith("metric.")}
        self._rounds = header["rounds"]
        now = Snapshot(state, tensors["diverged_at"], self._rounds, header["seconds"], header["points"])
        return Run.resumed(now, metrics)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
