"""What all ranks must agree on before the first round, over a store, and collectives. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_group, _get_default_store
from torch.distributed.rendezvous import rendezvous

from klatsch.ranks.failures import reason, who
from klatsch.ranks.waiting import values

Group: TypeAlias = "dist.ProcessGroup | None"  # None for all ranks
SHOWN = 140  # characters of a fact in an error
PATIENCE = timedelta(seconds=20)  # for ranks that are about to be refused as well, or still read
MADE: Counter[str] = Counter()  # of everyone, by their ranks
TORCHRUN = "start the script with torchrun --nproc-per-node 4 SCRIPT"


class Everyone:
    """All ranks of a network, and what they tell each other over a store. All of them tell the same things in order.

    The store knows them by their numbers, or by names.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, names: Sequence[str] = ()) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._names, self._by_name = names or range(size), bool(names)
        self._told = 0

    def told(self, value: object) -> list[Any]:
        """What every rank tells: plain data, as JSON."""
        return [json.loads(text) for text in self._gathered(json.dumps(value).encode())]

    def summed(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks of a few numbers on the CPU, the same bits on each."""
        rows = [
            torch.frombuffer(bytearray(row), dtype=numbers.dtype) for row in self._gathered(numbers.numpy().tobytes())
        ]
        return torch.stack(rows).sum(0)

    def _gathered(self, data: bytes) -> list[bytes]:
        self._told += 1
        keys = [f"told/{self._told}/{name}" for name in self._names]
        try:
            self.store.set(keys[self.rank], data)  # type: ignore[arg-type]
            self.store.wait(keys, timedelta(seconds=self.timeout))
            rows = values(self.store, keys)
        except RuntimeError as error:
            raise absent(self.rank, self.size, self.timeout, error) from None
        if not self._by_name:  # a store of their own may lie in the first one, which may be about to end
            with suppress(RuntimeError):
                self.store.set(f"{keys[self.rank]}/read", b"")  # type: ignore[arg-type]
                if self.rank == 0:
                    self.store.wait([f"{key}/read" for key in keys], PATIENCE)
        return [rows[key] for key in keys]


def everyone_of(group: Group, timeout: float) -> Everyone:
    """The ranks of a process group, or those that torchrun has started; in a new part of their store for each call."""
    ranks = ranks_of(group)
    if dist.is_initialized():
        _check_restarts()
        store, rank = _get_default_store(), ranks.index(dist.get_rank())
    else:
        store, rank = _from_environment(timeout), int(os.environ["RANK"])
    name = hashlib.sha256(str(ranks).encode()).hexdigest()[:8]
    MADE[name] += 1
    return Everyone(PrefixStore(f"klatsch/{name}/{MADE[name]}", store), rank, len(ranks), timeout)


def ranks_of(group: Group) -> list[int]:
    """The ranks of a process group; without one, all that torchrun has started."""
    if group is not None or not dist.is_available() or dist.is_initialized():
        return members(group)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(f"there is no network to train in; {TORCHRUN}, or join a crew (klatsch crew join)")
    return [*range(int(os.environ["WORLD_SIZE"]))]


@lru_cache(maxsize=1)
def _from_environment(timeout: float) -> Store:
    """The store of the ranks that were started together; rank 0 keeps it, or torchrun."""
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))[0]
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"cannot meet the other ranks at MASTER_ADDR:MASTER_PORT ({reason(error)})") from None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    # It outlives restarts, with the addresses of dead ranks. Machines may count restarts differently.
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" and (restarts := _restarts()) != "0":
        raise _shared(restarts)
    return PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def absent(rank: int, size: int, timeout: float, error: Exception) -> RuntimeError:
    """Some rank did not come."""
    return RuntimeError(
        f"rank {rank}: not all of the {size} ranks came to the same place within {timeout:g} s ({reason(error)}); make "
        "the optimizer on every rank, in the same order; give a slow start more time with timeout=..."
    )


def members(group: Group) -> list[int]:
    """The ranks of a process group, as the default group counts them."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"there is no process group; call torch.distributed.init_process_group('gloo') first, and {TORCHRUN}"
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
        raise absent(dist.get_rank(), len(ranks), timeout, error) from None


def agree(tell: Callable[[object], list[Any]], facts: Mapping[str, str]) -> None:
    """Check that all ranks have the same facts (texts by name); if not, every rank raises and says who has what."""
    rows = tell(brief(facts))
    for name in dict.fromkeys(name for row in rows for name in row):
        ranks: dict[str, list[int]] = {}  # by text
        for rank, row in enumerate(rows):
            ranks.setdefault(row.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            sides = "; ".join(f"{who(some)} {text}" for text, some in ranks.items())
            raise ValueError(f"the ranks do not agree on the {name}: {sides}; make them the same everywhere")


def brief(facts: Mapping[str, str]) -> dict[str, str]:
    """Texts by name, long ones as their beginnings and hashes."""
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in facts.items() if len(text) > SHOWN}
    return {n: f"{text[:SHOWN]}... ({hashes[n][:16]})" if n in hashes else text for n, text in facts.items()}


def told(group: Group, value: object) -> list[Any]:
    """What every rank tells: plain data, as JSON."""
    data = json.dumps(value).encode()
    longest = max(int(length) for length in gathered(group, torch.tensor([len(data)])))
    rows = gathered(group, torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8))
    return [json.loads(row.numpy().tobytes()) for row in rows]


def gathered(group: Group, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor of the same shape, on the CPU."""
    own = tensor.to(_device(group))
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return [row.cpu() for row in rows]


def summed(group: Group, tensor: Tensor) -> Tensor:
    """The sum over all ranks, on the CPU."""
    total = tensor.detach().to(_device(group), copy=True)
    dist.all_reduce(total, group=group)
    return total.cpu()


def broadcast(group: Group, tensor: Tensor) -> None:
    """Copy the first rank's tensor to every rank, in place."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    dist.broadcast(flat.view(torch.uint8), members(group)[0], group=group)  # as bytes: gloo lacks some dtypes
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.reshape(tensor.shape))


def _device(group: Group) -> str:
    """Where a group's collectives need their tensors: for NCCL on the GPU."""
    return "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"


def _check_restarts() -> None:
    """Refuse restarts that would connect ranks to dead ones.

    If torchrun shares its own store with its workers, the addresses of dead workers stay in it. Restarted workers read
    them inside init_process_group, before klatsch runs, and connect, fail or hang by chance (pytorch/pytorch#135712).
    So the first attempt fails already, before anything is trained.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if _restarts() == "0" or not shared or dist.get_world_size() == 1:
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
    raise _shared(_restarts())


def _restarts() -> str:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")


def _shared(restarts: str) -> ValueError:
    return ValueError(
        f"torchrun may restart ranks ({restarts} times) but keeps the addresses of dead ones in its store, where "
        "restarted ones would find them; start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d "
        "(or --standalone) instead of --master-port, or give init_process_group a store for each attempt (see "
        "docs/cluster.md)"
    )
