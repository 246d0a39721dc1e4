"""Checkpoints of a network: every rank writes its own files, and all resume from the newest round that all have.

A file holds the state after a whole round, and the messages of the next one are sent again, so none is lost. A rank
that has done t rounds knows, through its neighbours and theirs, that all others have done t - lag of them. So it knows
which rounds all have saved, and keeps two of those, in case a file is damaged or missing somewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from klatsch import sealed
from klatsch.arguments import whole
from klatsch.optim.gossip import Gossip
from klatsch.optim.groups import parameters_of, settings_of
from klatsch.optim.hosts import piece
from klatsch.optim.state import different, generators, packed, set_generators, unpacked
from klatsch.ranks.agreement import gathered
from klatsch.ranks.failures import NonFiniteError, warn, who
from klatsch.ranks.membership import lag
from klatsch.ranks.message import is_sound
from klatsch.sealed import OLDER, CheckpointError, OldCheckpointError

FORMAT = "klatsch ranks 2"
DAMAGED, OLD = 0, -1  # instead of the number of ranks that a file was written for


class Checkpointer:
    """Saves a training on all ranks after every few rounds, and resumes it.

        checkpointer = klatsch.Checkpointer("checkpoints", every=100)
        done = checkpointer.resume(optimizer, model=model, scheduler=scheduler)    # 0 the first time
        for t in range(done, steps):
            ...
            optimizer.step()
            scheduler.step()
            checkpointer.step()
        checkpointer.save()

    With `torchrun --max-restarts` (and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, see docs/cluster.md), all ranks return to
    the last checkpoint when one is killed. On the CPU the result is that of a run without interruption, bit for bit, if
    the data are a function of the round, or drawn from the generators of torch, NumPy or Python, which are saved.

    Args:
        folder: where the files go; shared by all ranks, or one on each machine. It is made if it does not exist.
        every: rounds between two checkpoints.
        keep: checkpoints to keep, besides those that some ranks may not have yet. With two, a file that is damaged or
            missing on one rank costs `every` rounds, not the training.
    """

    def __init__(self, folder: str | Path, every: int = 100, keep: int = 2) -> None:
        self.folder, self.every, self.keep = Path(folder), whole(every, "every", 1), whole(keep, "keep", 2)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot use {folder} for checkpoints: {error.strerror}; choose another folder") from None
        self._optimizer: Gossip | None = None
        self._others: dict[str, Any] = {}
        self._lag = 0

    def resume(self, optimizer: Gossip, **others: object) -> int:
        """Go on from the newest round that all ranks have; all ranks must call it together.

        Args:
            optimizer: an optimizer of klatsch.
            others: what else has a state_dict(): the model (for buffers), a scheduler, a GradScaler.

        Returns:
            The rounds done; 0 where there is no checkpoint yet.
        """
        if not isinstance(optimizer, Gossip):
            raise ValueError(f"optimizer is a {type(optimizer).__name__}; give one of klatsch, such as optim.DATSGD")
        if optimizer is not self._optimizer:  # without gradients, too, since other ranks still train and save
            optimizer.idle_hooks.append(WeakMethod(self.step))
        self._optimizer, self._others = optimizer, others
        self._lag = lag(optimizer.topology) + (optimizer.host.size > 1)  # ranks of a host wait for each other
        for path in self.folder.glob(f".{self._name}-*.safetensors.*"):
            path.unlink(missing_ok=True)  # half written when it was killed
        common = self._common(self._looked_through())
        if common is None:
            self.save()
            self._everybody(torch.zeros(1))  # from now on, a rank without files has lost them
            return 0
        self._load(*sealed.read(self._files()[common], FORMAT))
        for rounds, path in self._files().items():
            if rounds > common:  # these rounds are trained again
                path.unlink()
        return common

    def step(self) -> None:
        """Save if it is time; call it after every step of the optimizer and the scheduler."""
        if self._trained.rounds % self.every == 0:
            self.save()

    def save(self) -> Path:
        """Save now; all ranks must do so after the same round.

        Raises:
            NonFiniteError: the state is not finite. Nothing is written, and the older files stay.
        """
        optimizer, rounds = self._trained, self._trained.rounds
        tensors = {f"state.{k}.{name}": v for k, fields in enumerate(optimizer.vectors()) for name, v in fields.items()}
        if not _is_finite(tensors.values()):
            remedy = f"not saved; resume from the files of before in {self.folder}, with a smaller learning rate"
            raise NonFiniteError(optimizer.rank, rounds, "the state is not finite", remedy)
        optimizer.drain()
        groups = [{name: v for name, v in g.items() if name != "params"} for g in optimizer.param_groups]
        others = {name: _state(name, other, optimizer) for name, other in self._others.items()}
        header = {
            "format": FORMAT,
            "run": self._identity(),
            "rounds": rounds,
            "counted": [optimizer.bytes_sent, optimizer.seconds_waited, optimizer.skipped],
            "channel": packed(optimizer.memories(), tensors, "channel"),
            "groups": packed(groups, tensors, "groups"),
            "others": packed(others, tensors, "others"),
            "generators": packed(generators(optimizer.device), tensors, "generators"),
        }
        path = self.folder / f"{self._name}-round{rounds:010d}.safetensors"
        sealed.write(path, header, tensors)
        # A rank that has begun round r + 1 has saved round r.
        had_by_all = [path for r, path in self._files().items() if r < rounds - self._lag]
        for old in had_by_all[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    @property
    def _trained(self) -> Gossip:
        if self._optimizer is None:
            raise ValueError("nothing to save yet; call resume(optimizer, model=..., scheduler=...) before training")
        return self._optimizer

    @property
    def _name(self) -> str:
        """What the names of this rank's files begin with."""
        optimizer = self._trained
        return f"rank{optimizer.rank:05d}" + (f".{optimizer.host.place}" if optimizer.host.size > 1 else "")

    def _everybody(self, mine: Tensor) -> list[Tensor]:
        """The tensors of all ranks, host by host."""
        optimizer, host = self._trained, self._trained.host
        here = gathered(host.group, mine) if host.size > 1 else [mine.cpu()]
        return [row for rows in gathered(optimizer.group, torch.stack(here)) for row in rows]

    def _identity(self) -> dict[str, object]:
        """What a checkpoint and the training that resumes from it must share."""
        optimizer = self._trained
        host = optimizer.host
        return {
            "rank": optimizer.rank * host.size + host.place,
            "number of ranks": optimizer.topology.size * host.size,
            "ranks of a host": host.size,
            "topology": f"{optimizer.topology.name} {optimizer.topology.fingerprint[:16]}",
            "rule": optimizer.rule.name,
            "settings of the rule": {k: v for k, v in settings_of(optimizer.rule).items() if k != "lr"},
            "groups of parameters": [len(group["params"]) for group in optimizer.param_groups],
            "parameters": [[list(p.shape), str(p.dtype)] for p in parameters_of(optimizer.param_groups)],
            "others": sorted(self._others),
        }

    def _files(self) -> dict[int, Path]:
        """The files of this rank by round, oldest first."""
        pattern = re.compile(rf"{re.escape(self._name)}-round(\d+)\.safetensors")
        matches = (pattern.fullmatch(path.name) for path in self.folder.iterdir())
        return dict(sorted((int(match[1]), self.folder / match[0]) for match in matches if match))

    def _looked_through(self) -> dict[int, int]:
        """The files of this rank by round: the number of ranks in their training, or DAMAGED or OLD."""
        found = {}
        for rounds, path in self._files().items():
            try:
                header, tensors = sealed.read(path, FORMAT)
                if not _is_finite(v for name, v in tensors.items() if name.startswith("state.")):
                    raise CheckpointError(f"{path} holds a state that is not finite")
                found[rounds] = int(header["run"]["number of ranks"])
            except OldCheckpointError:
                found[rounds] = OLD
            except CheckpointError as error:
                warn(f"{error}")
                found[rounds] = DAMAGED
        return found

    def _common(self, mine: dict[int, int]) -> int | None:
        """The newest round that all ranks have; None if no rank has any yet."""
        most = max(int(count) for count in self._everybody(torch.tensor([len(mine)])))
        row = torch.tensor([*mine.items(), *[(-1, -1)] * (most - len(mine))], dtype=torch.int64).reshape(-1, 2)
        rows = [{r: size for r, size in theirs.tolist() if r >= 0} for theirs in self._everybody(row)]
        sizes = {size for theirs in rows for size in theirs.values()}
        if OLD in sizes:
            raise ValueError(
                f"the checkpoints in {self.folder} were written by klatsch {OLDER['klatsch ranks 1']}; that version "
                "reads them. Go on with it, or choose another folder"
            )
        if others := sizes - {DAMAGED, len(rows)}:
            raise self._of_another("number of ranks", others.pop(), len(rows))
        if not any(theirs.keys() - {0} for theirs in rows):  # none, or round 0 alone
            return None
        common: set[int] = set.intersection(*({r for r, size in theirs.items() if size != DAMAGED} for theirs in rows))
        if not common:
            raise ValueError(
                f"the ranks have no checkpoint in common in {self.folder}: {_inventory(rows)}; use a folder that "
                "outlives the machine, bring back a copy, or empty it on all machines to start anew"
            )
        if DAMAGED in sizes:
            warn(f"going on from round {max(common)}: {_inventory(rows)}")
        return max(common)

    def _load(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        optimizer = self._trained
        for name, value in self._identity().items():
            there = header["run"].get(name)
            if there != json.loads(json.dumps(value)):
                if isinstance(there, dict) and isinstance(value, dict):
                    raise self._of_another(name, *different(there, value))
                raise self._of_another(name, there, value)
        vectors = [
            {path.removeprefix(f"state.{k}."): v for path, v in tensors.items() if path.startswith(f"state.{k}.")}
            for k in range(len(optimizer.vectors()))
        ]
        for group, saved in zip(optimizer.param_groups, unpacked(header["groups"], tensors), strict=True):
            group.update(saved)
        memories = unpacked(header["channel"], tensors) if "channel" in header else None
        optimizer.load_vectors(vectors, header["rounds"], memories)
        optimizer.count_from(*header["counted"])
        for name, state in unpacked(header["others"], tensors).items():
            other = self._others[name]
            if isinstance(other, nn.Module):
                if lacking := set(_state(name, other, optimizer)) ^ set(state):
                    raise ValueError(f"{name} has other buffers than its checkpoint: {', '.join(sorted(lacking))}")
                _load_module(other, state, optimizer)
            else:
                other.load_state_dict(state)
        set_generators(unpacked(header["generators"], tensors), optimizer.device)

    def _of_another(self, name: str, there: object, here: object) -> ValueError:
        return ValueError(
            f"the checkpoints in {self.folder} are of another training: {name} is {there!s:.200} there and "
            f"{here!s:.200} here; make it the same, or choose another folder"
        )


def _is_finite(tensors: Iterable[Tensor]) -> bool:
    return all(is_sound(v.reshape(-1)) for v in tensors)


def _inventory(rows: list[dict[int, int]]) -> str:
    """Which ranks have which rounds."""
    held: dict[str, list[int]] = {}
    for rank, theirs in enumerate(rows):
        listed = ", ".join(f"{r}{' (damaged)' if size == DAMAGED else ''}" for r, size in theirs.items())
        held.setdefault(f"round {listed}" if theirs else "none", []).append(rank)
    return "; ".join(f"{who(ranks)} {what}" for what, ranks in held.items())


def _state(name: str, other: Any, optimizer: Gossip) -> Any:
    """The state of one of the others; of a model, only what the optimizer does not save."""
    if not all(hasattr(other, method) for method in ("state_dict", "load_state_dict")):
        raise ValueError(f"{name} is a {type(other).__name__} without state_dict(); leave it out, or give it one")
    with optimizer.unwatched():
        state = other.state_dict()
    if isinstance(other, nn.Module):
        others = {key: v for key, v in state.items() if not (isinstance(v, Tensor) and optimizer.owns(v))}
        return {key: piece(v) if isinstance(v, Tensor) else v for key, v in others.items()}
    return state


def _load_module(module: nn.Module, state: dict[str, Any], optimizer: Gossip) -> None:
    """Load what `_state` gave: buffers and frozen parameters, since the others are the optimizer's."""
    with optimizer.unwatched(), torch.no_grad():
        cut = {key: piece(v) for key, v in module.state_dict().items() if isinstance(v, Tensor) and piece(v) is not v}
        for key in cut.keys() & state.keys():
            cut[key].copy_(state[key])
    module.load_state_dict({key: v for key, v in state.items() if key not in cut}, strict=False)
