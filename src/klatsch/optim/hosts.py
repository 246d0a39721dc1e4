"""A node of the network may be a host of several ranks, which train one model together.

With DDP inside a host all of its ranks have the whole model and the same gradients; each trains a slice of the vector,
talks for it with its twins on the neighbouring hosts, and all put the slices together again. With FSDP2 every rank has
pieces of the parameters anyway, and talks for these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.agreement import Group, agree, broadcast, gathered, group_of, summed, told
from klatsch.ranks.failures import reason

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

BLOCK = 256  # slices are multiples of it, so that int8 scales the same blocks as without slices
RECIPE = "see docs/hosts.md"
SAME = f"put DDP around the model, over the ranks of a host, and call that ({RECIPE})"
PATIENCE = 5  # timeouts that a rank waits for others of its host, which wait for their neighbours
DAY = 86400.0  # seconds that it waits for the first one, which may wait for a crew; if that dies, it knows at once


class Host:
    """The ranks of one host; by default this rank alone."""

    def __init__(self, group: Group = None, timeout: float = 0.0, *, sharded: bool = False) -> None:
        self.group, self.sharded = group, sharded  # sharded: each has its pieces; else all have everything
        self.size = 1 if group is None else dist.get_world_size(group)
        self.place = 0 if group is None else dist.get_rank(group)
        self.slices = self.size > 1 and not sharded  # whether vectors are cut into slices
        # For small messages on the CPU.
        self._control = group_of(group, PATIENCE * timeout) if self.size > 1 else None

    def __str__(self) -> str:
        return f"{self.size}, each with its {'pieces' if self.sharded else 'slice'}" if self.size > 1 else "1"

    def together(self, t: int, work: Callable[[], Sequence[float]], width: int) -> list[list[float]]:
        """Do something that may fail, and gather the numbers it returns; if one rank of the host fails, all do."""
        if self.size == 1:
            return [[*work()]]
        numbers, failure = [0.0] * width, None
        try:
            numbers = [*work()]
        except Exception as error:
            failure = error
        row = torch.tensor([float(failure is not None), *numbers], dtype=torch.float64)
        with _answered(failure, f" or late in round {t}"):
            rows = gathered(self._control, row)
        if failure is None and any(row[0] for row in rows):
            failure = RuntimeError(f"another rank of this host has stopped in round {t}; its error says why")
        if failure is not None:
            raise failure
        return [row[1:].tolist() for row in rows]

    @cached_property
    def _first(self) -> Group:
        """For what the first rank finds."""
        return group_of(self.group, DAY)

    def led(self, find: Callable[[], Any], note: Callable[[], Any] = lambda: None) -> tuple[Any, list[Any]]:
        """What the first rank of the host finds, as JSON, and everybody's note; if that fails, it fails on all."""
        if self.size == 1:
            return find(), [note()]
        group, found, failure = self._first, None, None  # they meet before the first one waits
        if self.place == 0:
            try:
                found = find()
            except Exception as error:
                failure = error
        with _answered(failure):
            rows = told(group, [note(), found, failure and reason(failure)])
        if failure is not None:
            raise failure
        if rows[0][2] is not None:
            raise RuntimeError(f"the first rank of this host has stopped: {rows[0][2]}")
        return rows[0][1], [row[0] for row in rows]

    def agree(self, facts: Mapping[str, str]) -> None:
        """Check that all ranks of the host say the same, except about their pieces."""
        if self.size > 1:
            with _answered():
                agree(partial(told, self._control), {n: text for n, text in facts.items() if n != "pieces"})

    def all(self, holds: bool) -> bool:
        """Whether something holds on all ranks of the host."""
        return not float(self.total(torch.tensor([float(not holds)])))

    def cut(self, length: int) -> tuple[int, slice]:
        """The length of a vector whose slices are equally long, with padding, and the slice that this rank trains."""
        if not self.slices:
            return length, slice(0, length)
        part = -(-length // (self.size * BLOCK)) * BLOCK
        return part * self.size, slice(min(self.place * part, length), min((self.place + 1) * part, length))

    def join(self, padded: Tensor) -> None:
        """Put all ranks' slices of a padded vector in their places."""
        if self.slices:
            part = len(padded) // self.size
            own = padded[self.place * part : (self.place + 1) * part].clone()
            with _answered():
                dist.all_gather([*torch.split(padded, part)], own, group=self.group)

    def start(self, tensor: Tensor) -> None:
        """Copy the first rank's tensor to all, if all have everything."""
        if self.slices:
            broadcast(self._control, tensor)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of numbers over the ranks of the host."""
        with _answered():
            return summed(self._control, numbers) if self.size > 1 else numbers


@contextmanager
def _answered(failure: Exception | None = None, how: str = "") -> Iterator[None]:
    """Raise this rank's own failure, or say what is missing, where another rank of the host does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise failure or RuntimeError(
            f"a rank of this host is gone{how} ({reason(error)}); see what ended it"
        ) from None


def groups_of(mesh: DeviceMesh | None, group: Group) -> tuple[Group, Group]:
    """The ranks that hold this rank's place on every host, and the ranks of its host.

    Args:
        mesh: of two dimensions, hosts and the GPUs of one; or the first of them, mesh["host"].
        group: instead of a mesh; a host is then a rank.
    """
    if mesh is None:
        return group, None
    if group is not None:
        raise ValueError("both mesh and group are given; give one of them")
    if not hasattr(mesh, "get_group"):
        raise ValueError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh of (hosts, GPUs of a host) ({RECIPE})")
    if mesh.ndim == 1 and not hasattr(mesh, "_get_root_mesh"):
        raise ValueError("this version of torch does not tell of which mesh this is a part; give the whole mesh")
    whole = mesh._get_root_mesh() if mesh.ndim == 1 else mesh
    if mesh.ndim > 2 or whole.ndim > 2:
        names = whole.mesh_dim_names or f"{whole.ndim} dimensions"
        raise ValueError(f"mesh is of {names}; give one of two, hosts and the GPUs of a host ({RECIPE})")
    if mesh.ndim == 2:
        return mesh.get_group(0), mesh.get_group(1)
    if whole.ndim == 1:
        return mesh.get_group(), None
    inside = [name for name in whole.mesh_dim_names or () if name not in (mesh.mesh_dim_names or ())]
    return mesh.get_group(), whole.get_group(inside[0])


def inside_of(mesh: DeviceMesh | None) -> Group:
    """The ranks of this host, where nodes of the network are the members of a crew."""
    if mesh is None:
        return None
    group, inside = groups_of(mesh, None)
    if inside is not None:
        raise ValueError(f"mesh has hosts, and a crew knows its own; give the mesh of this host's ranks ({RECIPE})")
    return group


def members_here(inside: Group) -> list[int]:
    """In a crew, the ranks that were started together and are members: without a host, each for itself."""
    if not dist.is_initialized():
        return [0]
    return [*range(dist.get_world_size())] if inside is None else [dist.get_rank()]


def host_of(parameters: Sequence[Tensor], ranks: Sequence[int], inside: Group, timeout: float) -> Host:
    """The host of this rank, whose parameters are gossiped with these ranks; refuse shards that cannot be."""
    pieces = [sharded for p in parameters if (sharded := _sharded(p)) is not None]
    if not pieces:
        return Host(inside, timeout)
    if len(pieces) < len(parameters):
        some = f"{len(pieces)} of {len(parameters)} parameters are DTensors"
        raise ValueError(f"{some}; shard the whole model, fully_shard(model) ({RECIPE})")
    mesh = pieces[0].device_mesh
    if any(p.device_mesh != mesh or len(p.placements) > 1 or not p.placements[0].is_shard() for p in pieces):
        raise ValueError(
            "parameters are DTensors of tensor parallelism, or of several meshes; gossip trains what fully_shard "
            f"(FSDP2) cuts into pieces over one dimension, the GPUs of a host ({RECIPE})"
        )
    group = mesh.get_group()
    if len(set(ranks).intersection(dist.get_process_group_ranks(group))) > 1:
        raise ValueError(
            "fully_shard (FSDP2) has cut the model into pieces over ranks that gossip, and averages their gradients; "
            "shard it over the GPUs of a host, and gossip between hosts: mesh=mesh['host'], in a crew the mesh of this "
            f"host ({RECIPE})"
        )
    return Host(group, timeout, sharded=True)


def piece(tensor: Tensor) -> Tensor:
    """The piece of a DTensor on this rank; any other tensor as it is."""
    sharded = _sharded(tensor)
    return tensor if sharded is None else sharded._local_tensor


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """A piece on this rank as a DTensor like another; as it is where that is none."""
    if (sharded := _sharded(tensor)) is None:
        return local
    mesh, placements, shape, stride = sharded.device_mesh, sharded.placements, sharded.shape, sharded.stride()
    return type(sharded).from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def cut_along(tensor: Tensor) -> int | None:
    """The axis along which a tensor is cut into pieces; None if it is whole."""
    sharded = _sharded(tensor)
    return None if sharded is None else int(sharded.placements[0].dim)  # type: ignore[attr-defined]


def _sharded(tensor: Tensor) -> DTensor | None:
    module = sys.modules.get("torch.distributed.tensor")  # without it, which takes a while to import, there are none
    is_one = module is not None and isinstance(tensor, vars(module)["DTensor"])
    return cast("DTensor", tensor) if is_one else None
