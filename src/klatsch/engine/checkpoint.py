"""A run in one file: safetensors with a header and a checksum, written atomically, refused if damaged or foreign."""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klatsch.engine.run import Run, Snapshot
from klatsch.files import write_atomically

FORMAT = "klatsch simulation 1"
REMEDY = "move the file away or choose another checkpoint path"


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or belongs to another run."""


class Saver:
    """Writes a run to a file every so many seconds, or does nothing where no file is wanted.

    Args:
        path: the file, or None.
        every: seconds between two saves.
        identity: what determines the result, as plain data; a run with any other does not go on from this file.

    Raises:
        ValueError: nothing can be written there, which shows before the first round.
    """

    def __init__(self, path: str | Path | None, every: float, identity: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.every, self.identity = every, identity
        if isinstance(every, bool) or not isinstance(every, int | float) or not 0 <= every < math.inf:
            raise ValueError(f"checkpoint_every = {every!r}; give a number of seconds from 0 up")
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise ValueError(f"checkpoint = {path}: give the name of a file in a folder that exists")
        self._last, self._rounds = time.monotonic(), -1

    def perhaps(self, run: Run) -> None:
        """Save if it is time."""
        if time.monotonic() - self._last >= self.every:
            self.now(run)

    def now(self, run: Run) -> None:
        """Save, unless the file holds just this."""
        if self.path is not None and run.now.rounds != self._rounds:
            save(self.path, self.identity, run)
            self._last, self._rounds = time.monotonic(), run.now.rounds

    def restored(self, fresh: Any) -> Run | None:
        """The run in the file, or None if there is no file; `fresh` is a state of the run, for names and shapes."""
        if self.path is None or not self.path.exists():
            return None
        run = load(self.path, self.identity, fresh)
        self._rounds = run.now.rounds
        return run


def save(path: Path, identity: dict[str, Any], run: Run) -> None:
    """Write a run to a file that is whole or absent."""
    from safetensors.torch import save as pack

    now = run.now
    tensors = {f"state.{name}": value for name, value in now.state._asdict().items() if value is not None}
    tensors |= {f"metric.{name}": values for name, values in run.metrics.items()}
    tensors["diverged"] = now.diverged
    # clone: safetensors refuses tensors that share memory, as w and x do at the start
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = {"format": FORMAT, "rounds": now.rounds, "seconds": now.seconds, "points": now.points, "run": identity}
    header["sha256"] = digest(tensors, header)
    try:
        write_atomically(path, pack(tensors, metadata={"klatsch": json.dumps(header)}))
    except OSError as error:
        raise OSError(
            f"cannot write the checkpoint {path}: {error.strerror}; free some space, or choose another place, and run "
            "again: what was finished or saved before is safe"
        ) from None


def load(path: Path, identity: dict[str, Any], fresh: Any) -> Run:
    """Read a run.

    Raises:
        CheckpointError: the file is damaged, or of another run; it says which setting differs. The file stays.
    """
    header, tensors = _read(path)
    here, there = json.loads(json.dumps(identity)), header["run"]
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"{path} belongs to another run: {name} is {_short(there.get(name))} there "
                f"and {_short(here.get(name))} here; {REMEDY}"
            )
    fields = {}
    for name, value in fresh._asdict().items():
        saved = tensors.get(f"state.{name}")
        if getattr(value, "shape", None) != getattr(saved, "shape", None):
            raise CheckpointError(f"{path} is damaged: the field {name} of the state does not fit; {REMEDY}")
        fields[name] = None if saved is None else saved.to(value)
    state, diverged = type(fresh)(**fields), tensors["diverged"].to(torch.bool)
    names = [name for name in tensors if name.startswith("metric.")]
    rows = [{name.removeprefix("metric."): tensors[name][k] for name in names} for k in range(header["points"])]
    return Run(Snapshot(state, diverged, header["rounds"], header["seconds"], header["points"]), rows)


def digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """SHA-256 of tensors on the CPU, by name, and of plain facts."""
    hashed = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        hashed.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        hashed.update(tensors[name].contiguous().numpy().tobytes())
    return hashed.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("klatsch", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint ({error}); {REMEDY}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this version of klatsch; {REMEDY}")
    if header.pop("sha256", None) != digest(tensors, header):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum; {REMEDY}")
    return header, tensors


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
