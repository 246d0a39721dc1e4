"""What all ranks must agree on before the first round, and numbers that all of them need; no pickle is ever loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.restarts import check_restarts
from klatsch.ranks.waiting import reason

WIDTH = 160  # bytes of a text in an agreement, of which 16 are a hash of the whole


def members(group: Any) -> list[int]:
    """The ranks of a process group, as the default group counts them.

    Raises:
        ValueError: there is no process group, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "there is no process group; call torch.distributed.init_process_group('gloo') first, and start the script "
            "with torchrun --nproc-per-node 4 SCRIPT"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group it was given; call this on members only")
    return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def group_of(group: Any, timeout: float) -> Any:
    """A gloo process group of the same ranks, for klatsch alone: what others do on theirs does not get in the way.

    Raises:
        RuntimeError: not all ranks came.
        ValueError: there is none to be had; with the remedy.
    """
    ranks = members(group)
    check_restarts()
    try:
        return dist.new_group(
            ranks, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=group is not None
        )
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"rank {dist.get_rank()}: not all of the {len(ranks)} ranks came to the same place within {timeout:g} s "
            f"({reason(error)}); every rank must make the optimizer, and in the same order; give a slow start more "
            "time with timeout=..."
        ) from None


def leave(own: Any, group: Any) -> None:
    """Give up a group of `group_of(group)`, with its connections and threads; nothing if that was done already."""
    # None as a group of its own is NCCL's, which uses everybody's: to leave that would be to end it.
    if (
        group is None and own is not None
    ):  # groups of some ranks are named after them, and the next one would find the last one's addresses
        with suppress(AssertionError, KeyError, RuntimeError, ValueError):
            dist.destroy_process_group(own)


def agree(group: Any, facts: Mapping[str, str]) -> None:
    """Check that all ranks have the same facts.

    Args:
        group: of `group_of`.
        facts: texts by name; the names must be the same everywhere.

    Raises:
        ValueError: on every rank, with the first fact that differs, the ranks and their values.
    """
    mine = torch.frombuffer(bytearray(b"".join(_packed(text) for text in facts.values())), dtype=torch.uint8)
    rows = gathered(group, mine)
    for k, name in enumerate(facts):
        held: dict[bytes, list[int]] = {}
        for rank, row in enumerate(rows):
            held.setdefault(bytes(row[k * WIDTH : (k + 1) * WIDTH].tolist()), []).append(rank)
        if len(held) > 1:
            sides = [f"{who(ranks)} {_text(value)}" for value, ranks in held.items()]
            raise ValueError(f"the ranks do not agree on the {name}: {'; '.join(sides)}; make them the same everywhere")


def gathered(group: Any, mine: Tensor) -> list[Tensor]:
    """Every rank's tensor of the same shape, on the CPU."""
    here = mine.to(_place(group))
    rows = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, here, group=group)
    return [row.cpu() for row in rows]


def summed(group: Any, mine: Tensor) -> Tensor:
    """The sum over all ranks, on the CPU."""
    total = mine.detach().to(_place(group), copy=True)
    dist.all_reduce(total, group=group)
    return total.cpu()


def broadcast(group: Any, tensor: Tensor, source: int = 0) -> None:
    """Give every rank what the rank `source` of the group has, in place."""
    here = tensor.detach().cpu().contiguous().reshape(-1)
    # As bytes: gloo does not know every dtype.
    dist.broadcast(here.view(torch.uint8), dist.get_process_group_ranks(group)[source], group=group)
    if here.data_ptr() != tensor.data_ptr():
        tensor.copy_(here.reshape(tensor.shape))


def _place(group: Any) -> str:
    """Where tensors must be for a collective of a group; NCCL knows nothing but GPUs."""
    return "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"


def _packed(text: str) -> bytes:
    whole = text.encode()
    shown = whole if len(whole) <= WIDTH - 16 else whole[: WIDTH - 19] + b"..."
    return hashlib.sha256(whole).digest()[:16] + shown.ljust(WIDTH - 16, b"\0")


def _text(packed: bytes) -> str:
    return packed[16:].rstrip(b"\0").decode(errors="replace")


def who(ranks: list[int]) -> str:
    """Ranks as the subject of a sentence, which goes on with what they have."""
    return f"{shown(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def shown(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
