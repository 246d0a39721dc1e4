"""What all ranks must agree on before the first round, and collectives over all of them. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_default_store

from klatsch.ranks.failures import reason, who

Group: TypeAlias = "dist.ProcessGroup | None"  # None for all ranks
WIDTH = 160  # bytes per text in an agreement; 16 of them hash the whole text
PATIENCE = timedelta(seconds=20)  # for ranks that are about to be refused as well


def members(group: Group) -> list[int]:
    """The ranks of a process group, as the default group counts them."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "there is no process group; call torch.distributed.init_process_group('gloo') first, and start the script "
            "with torchrun --nproc-per-node 4 SCRIPT"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group; call this on its members only")
    return dist.get_process_group_ranks(group if group is not None else _get_default_group())


def group_of(group: Group, timeout: float) -> dist.ProcessGroup:
    """A gloo process group of the same ranks for klatsch alone, out of the way of other collectives."""
    ranks = members(group)
    _check_restarts()
    try:
        return dist.new_group(  # type: ignore[no-any-return]
            ranks, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=group is not None
        )
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"rank {dist.get_rank()}: not all of the {len(ranks)} ranks came to the same place within {timeout:g} s "
            f"({reason(error)}); make the optimizer on every rank, in the same order; give a slow start more time with "
            "timeout=..."
        ) from None


def leave(own: Group, group: Group) -> None:
    """Close what `group_of(group)` returned, with its connections and threads, unless it is closed already."""
    # Links over NCCL use everybody's group (`own` is None), which must live on. A group of some ranks is named after
    # them, so the next one would find the addresses of this one.
    if group is None and own is not None:
        with suppress(AssertionError, KeyError, RuntimeError, ValueError):
            dist.destroy_process_group(own)


def agree(group: Group, facts: Mapping[str, str]) -> None:
    """Check that all ranks have the same facts (texts by name); if not, every rank raises and says who has what."""
    mine = torch.frombuffer(bytearray(b"".join(_packed(text) for text in facts.values())), dtype=torch.uint8)
    rows = [bytes(row.tolist()) for row in gathered(group, mine)]
    for k, name in enumerate(facts):
        held: dict[bytes, list[int]] = {}
        for rank, row in enumerate(rows):
            held.setdefault(row[k * WIDTH : (k + 1) * WIDTH], []).append(rank)
        if len(held) > 1:
            sides = [f"{who(ranks)} {_text(value)}" for value, ranks in held.items()]
            raise ValueError(f"the ranks do not agree on the {name}: {'; '.join(sides)}; make them the same everywhere")


def gathered(group: Group, mine: Tensor) -> list[Tensor]:
    """Every rank's tensor of the same shape, on the CPU."""
    here = mine.to(_place(group))
    rows = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, here, group=group)
    return [row.cpu() for row in rows]


def summed(group: Group, mine: Tensor) -> Tensor:
    """The sum over all ranks, on the CPU."""
    total = mine.detach().to(_place(group), copy=True)
    dist.all_reduce(total, group=group)
    return total.cpu()


def broadcast(group: Group, tensor: Tensor) -> None:
    """Copy the first rank's tensor to every rank, in place."""
    here = tensor.detach().cpu().contiguous().reshape(-1)
    # As bytes: gloo does not support every dtype.
    dist.broadcast(here.view(torch.uint8), members(group)[0], group=group)
    if here.data_ptr() != tensor.data_ptr():
        tensor.copy_(here.reshape(tensor.shape))


def _place(group: Group) -> str:
    """Where a group's collectives need their tensors: for NCCL on the GPU."""
    return "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"


def _packed(text: str) -> bytes:
    whole = text.encode()
    shown = whole if len(whole) <= WIDTH - 16 else whole[: WIDTH - 19] + b"..."
    return hashlib.sha256(whole).digest()[:16] + shown.ljust(WIDTH - 16, b"\0")


def _text(packed: bytes) -> str:
    return packed[16:].rstrip(b"\0").decode(errors="replace")


# --- restarts by torchrun that cannot work --------------------------------------------------------------------------


def _check_restarts() -> None:
    """Refuse restarts that would connect ranks to dead ones.

    If torchrun shares its own store with its workers, the addresses of dead workers stay in it. Restarted workers read
    them inside init_process_group, before klatsch runs, and connect, fail or hang by chance (pytorch/pytorch#135712).
    So the first attempt fails already, before anything is trained.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts == "0" or not shared or dist.get_world_size() == 1:
        return
    default = store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    # A store made by init_process_group itself has the prefix default_pg; one from the caller does not.
    default.set("klatsch", "is here")
    if not store.check([f"default_pg/{_get_default_group().group_name}//klatsch"]):
        return
    # torchrun restarts refused ranks, and they must not hang on this attempt's addresses.
    with suppress(RuntimeError, ValueError):  # not all ranks gossip, or NCCL's group, which lacks this barrier
        dist.monitored_barrier(timeout=PATIENCE)  # all have read the addresses
        if dist.get_rank() == 0 and hasattr(store, "list_keys"):  # not in every version of torch
            for key in [key for key in store.list_keys() if key.startswith("default_pg/")]:
                store.delete_key(key)
        dist.monitored_barrier(timeout=PATIENCE)  # the first rank that is refused ends all others
    raise ValueError(
        f"torchrun may restart ranks ({restarts} times) but keeps the addresses of dead ones in its store, where "
        "restarted ones would find them; start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d "
        "(or --standalone) instead of --master-port, or give init_process_group a store for each attempt (see "
        "docs/cluster.md)"
    )
