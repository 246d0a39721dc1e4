"""The state of a run in one file: safetensors with a JSON header, written atomically, refused if damaged or foreign."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klatsch.files import write_atomically

FORMAT = "klatsch simulation 1"
REMEDY = "move the file away or choose another checkpoint path"


@dataclass
class Snapshot:
    """A run after `rounds` rounds."""

    state: Any  # the rule's NamedTuple
    diverged: Tensor  # (C,), bool
    rounds: int = 0
    seconds: float = 0.0
    piece: int = 64  # rounds to run at a time, until the bar moves or the clock is looked at; found as the run goes
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)  # one (C,) per point so far


class Saver:
    """Writes a run to a file every so many seconds, or does nothing where no file is wanted.

    Args:
        path: the file, or None.
        run: what determines the result, as plain data; a run with any other value does not go on from this file.
        every: seconds between two saves.
    """

    def __init__(self, path: Path | None, run: dict[str, Any], every: float) -> None:
        self.path, self.run, self.every = path, run, every
        self._last = time.monotonic()

    def perhaps(self, snapshot: Snapshot) -> None:
        """Save if it is time."""
        if self.path is not None and time.monotonic() - self._last >= self.every:
            self.now(snapshot)

    def now(self, snapshot: Snapshot) -> None:
        """Save."""
        if self.path is not None:
            save(self.path, self.run, snapshot)
            self._last = time.monotonic()


def save(path: Path, run: dict[str, Any], snapshot: Snapshot) -> None:
    """Write a snapshot to a file that is whole or absent."""
    from safetensors.torch import save as pack

    tensors = {f"state.{name}": value for name, value in snapshot.state._asdict().items() if value is not None}
    tensors |= {f"metric.{name}": torch.stack(values) for name, values in snapshot.metrics.items()}
    tensors["diverged"] = snapshot.diverged
    header = {"format": FORMAT, "rounds": snapshot.rounds, "seconds": snapshot.seconds, "run": run}
    # clone: safetensors refuses tensors that share memory, as w and x do at the start
    packed = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_atomically(path, pack(packed, metadata={"klatsch": json.dumps(header)}))


def load(path: Path, run: dict[str, Any], fresh: Any) -> Snapshot | None:
    """Read a snapshot of this very run, or None if there is no file.

    Args:
        path: the file.
        run: what determines the result, as plain data.
        fresh: a state of the run, which says what fields there are, of which shape, dtype and device.

    Raises:
        ValueError: the file is damaged, or of another run; it says which setting differs, and leaves the file alone.
    """
    if not path.exists():
        return None
    header, tensors = _read(path)
    here = json.loads(json.dumps(run))
    there = header["run"]
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"{path} belongs to another run: {name} is {_short(there.get(name))} there "
                f"and {_short(here.get(name))} here; {REMEDY}"
            )
    fields = {}
    for name, value in fresh._asdict().items():
        saved = tensors.get(f"state.{name}")
        if getattr(value, "shape", None) != getattr(saved, "shape", None):
            raise ValueError(f"{path} is damaged: the field {name} of the state does not fit; {REMEDY}")
        fields[name] = None if saved is None else saved.to(value)
    metrics = {key.removeprefix("metric."): list(v) for key, v in tensors.items() if key.startswith("metric.")}
    return Snapshot(
        type(fresh)(**fields), tensors["diverged"].to(torch.bool), header["rounds"], header["seconds"], metrics=metrics
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("klatsch", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or no checkpoint ({error}); {REMEDY}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this version of klatsch; {REMEDY}")
    return header, tensors


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
