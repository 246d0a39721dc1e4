"""Restarts by torchrun that cannot work, refused before there is anything to lose."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(seconds=20)  # with ranks that are on their way to the same refusal


def check_restarts() -> None:
    """See that restarted ranks would not meet dead ones.

    Where torchrun shares its own store with its workers, the addresses of dead workers stay in it. Restarted ones read
    them in init_process_group itself, before klatsch has a say, and by chance of timing connect, fail or hang
    (pytorch/pytorch#135712). So it is said in the first attempt, while nothing has been trained.

    Raises:
        ValueError: torchrun is to restart workers, and shares its store.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts == "0" or not shared or dist.get_world_size() == 1 or _has_own_store():
        return
    _forget_addresses()
    raise ValueError(
        f"torchrun is to restart ranks ({restarts} times) but keeps the addresses of dead ones in its store, where "
        "restarted ones would look for the living; start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and "
        "--rdzv-backend c10d (or --standalone) in place of --master-port, or give init_process_group a store for each "
        "attempt (see docs/cluster.md)"
    )


def _has_own_store() -> bool:
    """Whether the caller gave init_process_group a store; the one that it makes itself has the prefix default_pg."""
    dist.distributed_c10d._get_default_store().set("klatsch", "is here")
    group: Any = dist.group.WORLD
    return not _shared_store().check([f"default_pg/{group.group_name}//klatsch"])


def _forget_addresses() -> None:
    """Take this attempt's addresses out of the store: torchrun starts again what was refused, and it may hang."""
    with suppress(RuntimeError, ValueError):  # not all ranks gossip, or it is NCCL's group, which cannot wait so
        dist.monitored_barrier(timeout=PATIENCE)  # all have read them
        store = _shared_store()
        if dist.get_rank() == 0 and hasattr(store, "list_keys"):
            for key in store.list_keys():
                if key.startswith("default_pg/"):
                    store.delete_key(key)
        dist.monitored_barrier(timeout=PATIENCE)  # the first that is refused ends all others


def _shared_store() -> Any:
    """The store of torchrun itself, below all prefixes."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
