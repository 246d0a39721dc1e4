"""Checkpoints of a network: every rank writes its own files, and all resume from the newest round that they share.

A file holds the state after a whole round, and the messages of the next one are sent again, so none is lost. A rank
that has done t rounds knows, through its neighbours and theirs, that all others have done t - lag of them. So it knows
which rounds all have saved, and keeps two of those, in case a file is damaged or missing somewhere. Ranks that have
left or are lost do not count; `klatsch.ranks.saved` says which rounds are complete without them.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor, nn

from klatsch import sealed
from klatsch.arguments import whole
from klatsch.files import folder_for
from klatsch.optim import groups
from klatsch.optim.gossip import Gossip
from klatsch.optim.hosts import cut_along, piece
from klatsch.optim.post import DTYPES, Post, packed, unpacked
from klatsch.ranks import saved
from klatsch.ranks.agreement import told
from klatsch.ranks.failures import NonFiniteError, shown, warn
from klatsch.ranks.message import is_sound
from klatsch.ranks.saved import FORMAT, Round, SavedFile, Seen, Training
from klatsch.sealed import REMEDY, CheckpointError
from klatsch.wire.rehearsal import FEW, Rehearsal

FORGED = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
CONTENT = ("vectors", "groups", "scales", "memories", "counted", "others", "generators")
AVERAGED = ("vectors.", "groups.", "others.")  # tensors that a fresh rank gets the means of
Read = tuple[Path, dict[str, Any], dict[str, Tensor]]  # a file, its header and its tensors
OUT_OF_SIGHT = 1 << 40  # what it costs to give a rank a file that it does not see: more than all other choices together


class Choice(NamedTuple):
    """Where to go on from, the same on all ranks."""

    round: Round
    takes: list[int | None]  # by node: the node whose file it takes, or None where it starts afresh
    unbroken: bool  # every node takes its own file, and all of them still heard each other


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

    Ranks that have left or were lost (on_failure="continue") are not needed. Start as many ranks as are left, or as
    many as before: those without a file begin from the mean of the others. What the ranks that are gone held of a
    rule's sums is written off, so that these stay zero over the network. Files of rounds are for `klatsch checkpoint`.

    In a crew that changes (docs/crew.md), any number of members goes on from a folder: those for whom there are files
    from these, and the others as newcomers. Who joins a crew that trains has its state, and only begins to save.

    Args:
        folder: where the files go; shared by all ranks, or one on each machine. It is made if it does not exist.
        every: rounds between two checkpoints.
        keep: checkpoints to keep, besides those that some ranks may not have yet. With two, a file that is damaged or
            missing on one rank costs `every` rounds, not the training.
        fresh: let ranks whose files are missing begin from the mean of the others, even if they were not lost: for a
            new machine with an empty disk.
    """

    def __init__(self, folder: str | Path, every: int = 100, keep: int = 2, fresh: bool = False) -> None:
        self.every, self.keep, self.fresh = whole(every, "every", 1), whole(keep, "keep", 2), fresh
        self.folder = folder_for("checkpoints", folder)
        self._optimizer: Gossip | None = None
        self._others: dict[str, Any] = {}
        self._training: Training = ()
        self._began = 0
        self._former: list[Path] = []  # files of the crew before, to be removed once they are not needed
        self._epoch = 0  # of a crew that changes, in the last file

    def resume(self, optimizer: Gossip, **others: object) -> int:
        """Go on from the newest round that all ranks have; all ranks must call it together.

        Topology, `every`, `late` and `wire` of the optimizer may differ from those of the checkpoint.

        Args:
            optimizer: an optimizer of klatsch.
            others: what else has a state_dict(): the model (for buffers, and for the names of its parameters), a
                scheduler, a GradScaler.

        Returns:
            The rounds done; 0 where there is no checkpoint yet.
        """
        if not isinstance(optimizer, Gossip):
            raise ValueError(f"optimizer is a {type(optimizer).__name__}; give one of klatsch, such as optim.GossipSGD")
        if optimizer is not self._optimizer:  # without gradients, too, since other ranks still train and save
            optimizer.idle_hooks.append(WeakMethod(self.step))
        self._optimizer, self._others = optimizer, others
        for path in self.folder.glob(f".{self._file(0).name.partition('-')[0]}-*.safetensors.*"):
            path.unlink(missing_ok=True)  # half written when it was killed
        files = {file.seen: file for file in saved.files(self.folder) if file.place == optimizer.host.place}
        if optimizer.post is not None:
            return self._resume_in_crew(optimizer.post, files)
        choice, read, drawn = self._opened(files)
        if choice is None:
            self._training, self._began = (drawn,), 0
            self.save()
            self._told("")  # from now on, a rank without files has lost them
            return 0
        began = self._began = choice.round.rounds
        self._training = choice.round.training
        if not choice.unbroken:
            self._training = (*self._training, drawn)
            read = self._carried_over(choice, read)
        assert read is not None
        self._load(read, anew=not choice.unbroken)
        self._put_in_order(files, choice.unbroken)
        return began

    def _resume_in_crew(self, post: Post, files: dict[Seen, SavedFile]) -> int:
        """Go on from files if nobody has begun a round; else this member has what the others hold."""
        optimizer, unbroken, drawn = self._trained, False, secrets.token_hex(8)
        choice: Choice | None = None
        while optimizer.rounds == 0 and not post.left:
            try:
                choice, read, drawn = self._opened(files)
            except RuntimeError:
                if not optimizer.host.all(any(map(post.crew.is_out, post.epoch.members))):
                    raise
                optimizer.go_on(None, 0, 0, 0, anew=True)  # and look again, without members that have died
                continue
            if choice is None:
                break
            post.training = (*choice.round.training, *(() if choice.unbroken else (drawn,)))
            if read is None:
                optimizer.go_on(None, 0, 0, 0, anew=True)
                break
            content = self._content(*read[1:])
            self._load_others(read[0], content)  # with frozen parameters, which newcomers get
            rounds, size = choice.round.rounds, choice.round.size if choice.unbroken else 0
            anew = read[1]["topology"] != self._topology
            unbroken = optimizer.go_on(content, rounds, read[1]["rank"], size, anew)
            self._set_generators(read[0], content)
            break
        self._training, self._began = post.training or (drawn,), optimizer.rounds
        post.training, self._epoch = self._training, post.epoch.number
        self._put_in_order(files, unbroken)
        if choice is None:
            self.step()  # as the others do, who were here in the round before
        return self._began

    def _put_in_order(self, files: dict[Seen, SavedFile], unbroken: bool) -> None:
        """Remove files of rounds that are trained again, and note those of the crew before."""
        began, nodes = self._began, self._trained.topology.size
        own = {self._file(seen.rounds) for seen in files}
        for seen, file in files.items():
            if seen.rounds > began and file.path in own:  # these rounds are trained again
                with suppress(IsADirectoryError):
                    file.path.unlink(missing_ok=True)
        self._former = [
            file.path
            for seen, file in files.items()
            if not unbroken and seen.training[:1] == self._training[:1] and file.path not in own
            # Ranks that were started may write their newer ones again.
            if seen.rounds <= began or seen.rank >= nodes
        ]

    def step(self) -> None:
        """Save if it is time; call it after every step of the optimizer and the scheduler."""
        post = self._trained.post
        if self._trained.rounds % self.every == 0 and not (post and post.left):
            self.save()

    def save(self) -> Path:
        """Save now; all ranks must do so after the same round.

        Raises:
            NonFiniteError: the state is not finite. Nothing is written, and the older files stay.
        """
        optimizer, rounds = self._trained, self._trained.rounds
        if optimizer.post is not None:
            self._follow(optimizer.post)
        content = optimizer.content()
        if not _is_finite(v for fields in content["vectors"] for v in fields.values()):
            remedy = f"not saved; resume from the files of before in {self.folder}, with a smaller learning rate"
            raise NonFiniteError(optimizer.rank, rounds, "the state is not finite", remedy)
        if not optimizer.topology.late:  # what is late is in the file, and would keep this rank waiting
            optimizer.drain()
        content["others"] = {name: _state(name, other, optimizer) for name, other in self._others.items()}
        content["generators"] = get_generators(optimizer.device)
        tensors: dict[str, Tensor] = {}
        path, header = self._file(rounds), {kind: packed(part, tensors, kind) for kind, part in content.items()}
        header |= {"format": FORMAT, "training": self._training, "rounds": rounds, "crew": optimizer.crew}
        header |= {"rank": optimizer.rank, "size": optimizer.topology.size, "topology": self._topology}
        header |= {"place": optimizer.host.place, "places": optimizer.host.size}
        header |= {"run": self._identity(), "export": self._export(tensors)}
        sealed.write(path, header, tensors)
        optimizer.tell("checkpoint", path=str(path))
        # A rank that has begun round r + 1 has saved round r.
        own = {int(match[3]): path for path, match in saved.named(self.folder) if path == self._file(int(match[3]))}
        had_by_all = [r for r in sorted(own) if r < rounds - optimizer.lag]
        obsolete = [own[r] for r in had_by_all[: -self.keep]]
        if sum(r > self._began for r in had_by_all) >= self.keep:
            obsolete, self._former = obsolete + self._former, []
        for old in obsolete:
            old.unlink(missing_ok=True)
        return path

    def _follow(self, post: Post) -> None:
        """Note files of the epoch before, where nodes had other numbers, if the crew has changed."""
        if post.left:
            raise ValueError("this member has left the crew, which saves without it; save before optimizer.leave()")
        if post.epoch.number > self._epoch:
            self._epoch, self._began = post.epoch.number, post.epoch.start - 1
            earlier = [path for path, match in saved.named(self.folder) if int(match[3]) < self._began]
            self._former = [*dict.fromkeys([*self._former, *earlier])]

    @property
    def _trained(self) -> Gossip:
        if self._optimizer is None:
            raise ValueError("nothing to save yet; call resume(optimizer, model=..., scheduler=...) before training")
        return self._optimizer

    @property
    def _topology(self) -> str:
        return f"{self._trained.topology.name} {self._trained.topology.fingerprint}"

    def _file(self, rounds: int) -> Path:
        """The file of this rank after some rounds."""
        optimizer = self._trained
        place = optimizer.host.place if optimizer.host.size > 1 else None
        return self.folder / saved.name(optimizer.rank, place, rounds)

    def _identity(self) -> dict[str, object]:
        """What a checkpoint and the training that resumes from it must share."""
        optimizer = self._trained
        return {
            "ranks of a host": optimizer.host.size,
            "rule": optimizer.given.name,
            "settings of the rule": {k: v for k, v in groups.settings_of(optimizer.given).items() if k != "lr"},
            "groups of parameters": [len(group["params"]) for group in optimizer.param_groups],
            "parameters": [[list(p.shape), str(p.dtype)] for p in groups.parameters_of(optimizer.param_groups)],
            "others": sorted(self._others),
        }

    def _export(self, tensors: dict[str, Tensor]) -> dict[str, object]:
        """What an export needs to know: by trained parameter its names, the tensor with x, and where it lies in it."""
        optimizer, parameters = self._trained, groups.parameters_of(self._trained.param_groups)
        models = {name: other for name, other in self._others.items() if isinstance(other, nn.Module)}
        before = {name: f"{name}." if len(models) > 1 else "" for name in models}
        known: dict[int, list[str]] = {}
        for model, module in models.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                known.setdefault(id(parameter), []).append(before[model] + name)
                parameters.append(parameter)
        for place, given in groups.names(optimizer.param_groups).items():
            known.setdefault(place, [str(given)])
        trained = []
        for k, share in enumerate(optimizer.shares):
            x = share.rule.output(share.node.state)
            source = next((f"vectors.{k}.{name}" for name, v in share.node.state.items() if v is x), f"output.{k}")
            tensors[source] = x
            for p, view in zip(share.parameters, share.layout, strict=True):
                trained.append({"names": known[id(p)], "tensor": source, "dtype": str(p.dtype), "view": view})
        cut = {name: axis for p in parameters if (axis := cut_along(p)) is not None for name in known[id(p)]}
        return {"trained": trained, "models": before, "cut": cut}  # cut by FSDP2, into pieces

    # --- which files -------------------------------------------------------------------------------------------

    def _told(self, value: object) -> list[Any]:
        """What all ranks have to tell, as plain data, host by host."""
        host, rows, failure = self._trained.host, [], None
        inside = told(host.group, value) if host.size > 1 else [value]
        try:
            rows = self._trained.everyone.told(inside)
        except RuntimeError as error:
            failure = error
        if failure is not None or not host.all(failure is None):
            raise failure or RuntimeError("another rank of this host has not heard all others")
        return [row for each in rows for row in each]

    def _opened(self, files: dict[Seen, SavedFile]) -> tuple[Choice | None, Read | None, str]:
        """Where to go on from, this rank's file there, once all have read a sound one, and a name for another crew."""
        optimizer, places = self._trained, self._trained.host.size
        for seen, file in files.items():
            if seen.trouble and seen.rank % optimizer.topology.size == optimizer.rank:
                warn(file.error)
        while True:
            rows = [
                {Seen(rank, rounds, (*training,), (*crew,), *rest) for rank, rounds, training, crew, *rest in row}
                for row in self._told([*files])
            ]
            choice = self._choice([rows[k : k + places] for k in range(0, len(rows), places)])
            read, failed = None, False
            if choice is not None and (taken := choice.takes[optimizer.rank]) is not None:
                where = (taken, choice.round.rounds, choice.round.training)
                seen, file = next((seen, file) for seen, file in files.items() if seen[:3] == where)
                try:
                    read = self._read(file.path)
                except CheckpointError as error:
                    warn(f"{error}")
                    files[seen._replace(trouble=error.trouble)], failed = files.pop(seen), True
            if not any(self._told(failed)):
                return choice, read, str(self._told(secrets.token_hex(8))[0])

    def _choice(self, by_node: list[list[set[Seen]]]) -> Choice | None:
        """Where to go on from, by what the ranks of every node see; None if no rank has anything yet."""
        crew = self._trained.post is not None
        fresh = self.fresh or crew
        started, everything = len(by_node), {seen for ranks in by_node for rows in ranks for seen in rows}
        if not any(seen.rounds for seen in everything):  # none, or round 0 alone
            return None
        sees = [set.intersection(*ranks) for ranks in by_node]
        rounds = saved.rounds_of(set.union(*sees))
        enough = [each for each in rounds if each.lacks(started) <= 0]
        if len({each.training[0] for each in enough}) > 1:
            raise ValueError(
                f"{self.folder} holds checkpoints of several trainings; move those of the others away, or choose "
                "another folder"
            )
        for each in [*enough, *(rounds if fresh else ())]:
            takes = _takes(each, sees)
            if sum(taken is not None for taken in takes) >= (1 if fresh else min(len(each.crew), started)):
                return _chosen(each, takes, everything, crew)
        listed = saved.inventory(everything, range(started), rounds[0].training if rounds else ())
        raise ValueError(
            f"the ranks have no checkpoint in common in {self.folder}: {listed}; use a folder that outlives the "
            "machine, bring back a copy, start only as many ranks as have files, let the others begin from their mean "
            "(Checkpointer(..., fresh=True)), or empty it on all machines to start anew"
        )

    # --- what is in them ---------------------------------------------------------------------------------------

    def _read(self, path: Path) -> Read:
        """The content of a file that fits this training and can be loaded."""
        header, tensors = sealed.read(path, FORMAT)
        if difference := groups.difference(header["run"], json.loads(json.dumps(self._identity()))):
            raise ValueError(
                f"the checkpoints in {self.folder} are of another training: {difference}; make it the same, or choose "
                "another folder"
            )
        try:
            vectors = self._content(header, tensors)["vectors"]
        except FORGED as error:
            raise CheckpointError(f"{path} does not hold what a checkpoint holds ({_line(error)}); {REMEDY}") from None
        if not _is_finite(v for fields in vectors for v in fields.values()):
            raise CheckpointError(f"{path} holds a state that is not finite")
        return path, header, tensors

    def _content(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """All that `save` packed; any error says that something is missing."""
        content = {kind: unpacked(header[kind], tensors) for kind in CONTENT}
        self._trained.check_content(content)
        if content["others"].keys() != self._others.keys():
            raise ValueError("the states of the others are missing")
        if not {"torch", "python", "numpy"} <= content["generators"].keys():
            raise ValueError("random generators are missing")
        return content

    def _carried_over(self, choice: Choice, read: Read | None) -> Read:
        """What this rank goes on with in another crew: sums of flows are zero again, and a fresh rank gets means.

        They are means over the ranks that have a file, of all that is no random generator and no channel.
        """
        optimizer, fresh = self._trained, read is None
        path, header, tensors = read or (self.folder, {}, {})
        lists = {name: [list(v.shape), str(v.dtype)] for name, v in tensors.items() if name.startswith(AVERAGED)}
        told = self._told(None if fresh else [header, lists])[optimizer.host.place :: optimizer.host.size]
        header, lists = next(each for each in told if each is not None) if fresh else (header, lists)
        complete = all(taken is not None for taken in choice.takes)
        sums = {entry.field for entry in Rehearsal(optimizer.rule, torch.zeros(FEW)).sums}
        with optimizer.together("resume()") as mean_of:
            have_files = mean_of(torch.tensor([float(not fresh)], dtype=torch.float64))
            for name, (shape, dtype) in sorted(lists.items()):
                is_sum = name.startswith("vectors.") and name.split(".", 2)[2] in sums
                if complete and not is_sum:  # nobody needs the mean
                    continue
                own = torch.zeros(shape, dtype=DTYPES[dtype]) if fresh else tensors[name]
                mean = (mean_of(own.reshape(-1).double()) / have_files).reshape(shape)
                mean = mean if own.is_floating_point() else mean.round()
                if fresh:
                    tensors[name] = own if is_sum else mean.to(own.dtype)
                elif is_sum:
                    tensors[name] = (own - mean).to(own.dtype)
        if fresh:
            empty = {"memories": [{}] * len(optimizer.shares), "counted": [0, 0.0, 0, 0]}
            begins = empty | {"generators": get_generators(optimizer.device)}
            header = header | {kind: packed(part, tensors, kind) for kind, part in begins.items()}
        return path, header, tensors

    def _load(self, read: Read, anew: bool) -> None:
        """Go on from what was read; where the crew or the graph is another one, channels begin anew."""
        optimizer, (path, header, tensors) = self._trained, read
        content = self._content(header, tensors)
        try:
            optimizer.load_content(content, header["rounds"], anew or header["topology"] != self._topology)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be loaded ({_line(error)}); {REMEDY}") from None
        self._load_others(path, content)
        self._set_generators(path, content)

    def _load_others(self, path: Path, content: dict[str, Any]) -> None:
        optimizer = self._trained
        for name, state in content["others"].items():
            other = self._others[name]
            if isinstance(other, nn.Module) and (lacking := set(_state(name, other, optimizer)) ^ set(state)):
                raise ValueError(f"{name} has other buffers than its checkpoint: {', '.join(sorted(lacking))}")
            try:
                if isinstance(other, nn.Module):
                    _load_module(other, state, optimizer)
                else:
                    other.load_state_dict(state)
            except Exception as error:  # it is the user's, and may do anything
                what = f"{name} cannot load its state from {path}"
                raise CheckpointError(f"{what} ({type(error).__name__}: {_line(error)}); {REMEDY}") from None

    def _set_generators(self, path: Path, content: dict[str, Any]) -> None:
        try:
            set_generators(content["generators"], self._trained.device)
        except FORGED as error:
            raise CheckpointError(f"{path} holds no random generators ({_line(error)}); {REMEDY}") from None


def _takes(each: Round, sees: Sequence[set[Seen]]) -> list[int | None]:
    """By node, the node whose file it takes: its own if it can, and the crew's rather than those of others."""
    from scipy.optimize import linear_sum_assignment

    held = sorted(each.held)
    visible = [{seen.rank for seen in rows if (seen.training, seen.rounds) == each[:2]} for rows in sees]
    costs = [
        [OUT_OF_SIGHT if o not in visible[n] else (o != n) + len(sees) * (o not in each.crew) for o in held]
        for n in range(len(sees))
    ]
    takes: list[int | None] = [None] * len(sees)
    for n, column in zip(*linear_sum_assignment(costs), strict=True):
        if held[column] in visible[n]:
            takes[n] = held[column]
    return takes


def _chosen(each: Round, takes: list[int | None], everything: set[Seen], crew: bool) -> Choice:
    """The choice of a round, in words if it is not what was expected; in a crew, files say who is which node."""
    everyone = list(range(each.size))
    in_order = sorted(takes, key=lambda taken: each.size if taken is None else taken) if crew else takes
    crews = [sorted(seen.crew) for seen in everything if (seen.training, seen.rounds) == each[:2]]
    unbroken = in_order == everyone and all(crew == everyone for crew in crews)
    if not unbroken:
        fresh = [rank for rank, taken in enumerate(in_order) if taken is None]
        gone = sorted({*everyone} - {*takes})
        told = [f"what {shown(gone)} held is written off"] if gone else []
        told += [f"rank {n} takes the file of rank {o}" for n, o in enumerate(in_order) if o not in (n, None)]
        if fresh:
            source = "a neighbour" if crew else "the mean of the others"
            told.append(f"{shown(fresh)} start{'s' * (len(fresh) == 1)} from {source}")
        details = ", ".join(told) or "some of them had lost each other"
        warn(f"going on from round {each.rounds} with {len(takes)} ranks: {details}; channels begin anew")
    elif any(seen.trouble or seen.rounds > each.rounds for seen in everything):
        warn(f"going on from round {each.rounds}: {saved.inventory(everything, everyone, each.training)}")
    return Choice(each, takes, unbroken)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _is_finite(tensors: Iterable[Tensor]) -> bool:
    return all(is_sound(v.reshape(-1)) for v in tensors)


def _state(name: str, other: Any, optimizer: Gossip) -> Any:
    """The state of one of the others; of a model, only what the optimizer does not save."""
    if not all(hasattr(other, method) for method in ("state_dict", "load_state_dict")):
        raise ValueError(f"{name} is a {type(other).__name__} without state_dict(); leave it out, or give it one")
    with optimizer.watch.paused():
        state = other.state_dict()
    if isinstance(other, nn.Module):
        others = {key: v for key, v in state.items() if not (isinstance(v, Tensor) and optimizer.owns(v))}
        return {key: piece(v) if isinstance(v, Tensor) else v for key, v in others.items()}
    return state


def _load_module(module: nn.Module, state: dict[str, Any], optimizer: Gossip) -> None:
    """Load what `_state` gave: buffers and frozen parameters, since the others are the optimizer's."""
    with optimizer.watch.paused(), torch.no_grad():
        cut = {key: piece(v) for key, v in module.state_dict().items() if isinstance(v, Tensor) and piece(v) is not v}
        for key in cut.keys() & state.keys():
            cut[key].copy_(state[key])
    module.load_state_dict({key: v for key, v in state.items() if key not in cut}, strict=False)


def get_generators(device: torch.device) -> dict[str, object]:
    """The states of the random generators that scripts draw from."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generators(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators back into these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# --- a model from checkpoints, without the script that trained it ----------------------------------------------------


def merged_of(files: Sequence[SavedFile], best: Round) -> dict[str, Tensor]:
    """The model of the whole network after a round: the mean over its ranks of x and of floating-point buffers.

    What is no floating-point number, such as a count of batches, is the first rank's. One rank is read at a time.
    """
    ranks = sorted(best.crew & best.held)
    total: dict[str, Tensor] = {}
    for rank in ranks:
        parts = [file for file in files if file.seen[:3] == (rank, best.rounds, best.training)]
        path = parts[0].path
        if len(parts) != parts[0].header["places"]:
            raise CheckpointError(f"{path.parent} lacks files of rank {rank}: one for each GPU of its host")
        try:
            model = _model_of([sealed.read(file.path, saved.FORMAT) for file in parts])
            if total and total.keys() != model.keys():
                raise KeyError("its parameters have other names than those of the rank before")
            for name, v in model.items():
                share = v.double() / len(ranks) if v.is_floating_point() else v
                total[name] = total[name] + share if name in total and v.is_floating_point() else share
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{path} does not hold what a checkpoint holds ({error}); {REMEDY}") from None
    return {name: v.to(model[name].dtype) for name, v in total.items()}


def _model_of(parts: list[tuple[dict[str, Any], dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The parameters and buffers of one node, whose ranks have one part each."""
    header, tensors = parts[0]
    models, cut = header["export"]["models"], header["export"]["cut"]
    if not cut:  # with DDP every rank trains a slice of the whole
        sources = {place["tensor"] for place in header["export"]["trained"]}
        parts = [(header, tensors | {name: torch.cat([each[name] for _, each in parts]) for name in sources})]
    pieces = []
    for header, tensors in parts:
        others = unpacked(header["others"], tensors)  # buffers and frozen parameters
        named = {before + key: v for model, before in models.items() for key, v in others[model].items()}
        named = {name: v for name, v in named.items() if isinstance(v, Tensor)}
        for place in header["export"]["trained"]:
            vector = tensors[place["tensor"]]
            view = vector.as_strided(*place["view"])
            if view.numel() > vector.numel():
                raise IndexError("a parameter is larger than the vector that holds it")
            named |= dict.fromkeys(place["names"], view.to(DTYPES[place["dtype"]]))
        pieces.append(named)
    return {
        name: torch.cat([named[name] for named in pieces], cut[name]) if name in cut else v.contiguous()
        for name, v in pieces[0].items()
    }
