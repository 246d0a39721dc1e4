"""Studies on real ranks: rank 0 drives and writes the store as ever, and hands every batch to all the others.

Batches travel as JSON; nothing is pickled. A network of M nodes runs on the first M ranks.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from klatsch import own
from klatsch.ranks.agreement import broadcast
from klatsch.ranks.failures import reason
from klatsch.simulation import Result
from klatsch.study.batches import Batch, Finished, finished, parts
from klatsch.study.cases import Case
from klatsch.study.rank_runs import simulate_on_ranks
from klatsch.study.workers import Open, Workers

PATIENCE = timedelta(days=30)  # ranks that a small network leaves idle wait for the next batch


def join() -> int:
    """Join the other ranks that torchrun has started; returns the rank of this one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--engine ranks needs several processes; start it with "
            "torchrun --nproc-per-node 4 -m klatsch run STUDY.toml --engine ranks"
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
    if dist.get_rank() == 0:
        atexit.register(_dismiss)  # also after an error: the others are waiting for batches
    return dist.get_rank()


def ranks_for(nodes: Sequence[int], *others: object) -> Open:
    """What runs a study with networks of these sizes; `others` are further workers asked for, which are refused."""
    if any(other is not None for other in others):
        raise ValueError("--engine ranks has its own workers, the ranks; leave --workers and --dask out")
    if max(nodes) > dist.get_world_size():
        raise ValueError(
            f"the study has networks of {max(nodes)} nodes, but there are {dist.get_world_size()} ranks; start as many "
            f"(torchrun --nproc-per-node {max(nodes)}), or leave the larger networks out"
        )
    return ranks


@contextmanager
def ranks() -> Iterator[Workers]:
    """On rank 0: all ranks as workers that do one batch at a time, together."""
    with ThreadPoolExecutor(1) as executor:  # so that a batch is stored while the next one runs
        try:
            yield Workers(executor, hand_out, 1, shares_files=False, losses=())
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


_failures: list[str] = []


def hand_out(batch: Batch, _: Path | None = None) -> Finished:
    """On rank 0: have all ranks do a batch, unless a rank is gone."""
    if not _failures:
        try:
            _shared(json.dumps(asdict(batch)))
            results = run_together(batch)
            return finished(batch, results, sum(result.seconds for result in results))
        except RuntimeError as error:
            _failures.append(reason(error))
    raise ValueError(f"{_failures[0]}; what was stored is safe, start again to go on")


def serve() -> None:
    """On all other ranks: do the batches that rank 0 hands out, until it has no more."""
    try:
        while text := _shared():
            facts = json.loads(text)
            networks = tuple(tuple(Case(**case) for case in network) for network in facts["networks"])
            run_together(Batch(networks, facts["device"]))
    except RuntimeError as error:
        raise ValueError(reason(error)) from None
    finally:
        dist.destroy_process_group()  # left to the end of the process, its threads may be torn down before it


def run_together(batch: Batch) -> list[Result]:
    """The part of this rank in a batch; only rank 0 knows the results."""
    torch.set_num_threads(1)
    made, results = parts(batch), []
    for problem, graph in zip(made.problems, made.graphs, strict=True):
        group, where = _first_ranks(graph.size), {"device": _device(batch.device), **made.choices}
        if dist.get_rank() < graph.size:
            with own.explained(*batch.names):
                results.append(simulate_on_ranks(problem, made.rule, graph, made.steps, group=group, **where))
    return [result for result in results if result is not None]


def _device(name: str) -> torch.device:
    """Where this rank computes: ranks of one machine share its GPUs out."""
    device = torch.device(name)
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device  # which `simulate_on_ranks` refuses where it is not there
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


@cache
def _first_ranks(size: int) -> dist.ProcessGroup:
    """The group of the first ranks; all ranks must ask for it together."""
    group: dist.ProcessGroup = dist.new_group(list(range(size)), timeout=PATIENCE, backend="gloo")
    return group


def _shared(text: str = "") -> str:
    """The text of rank 0, on all ranks."""
    message = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
    length = torch.tensor([len(message)])
    broadcast(dist.group.WORLD, length)
    if dist.get_rank() != 0:
        message = torch.zeros(int(length), dtype=torch.uint8)
    broadcast(dist.group.WORLD, message)
    return bytes(message.tolist()).decode().strip()


def _dismiss() -> None:
    with suppress(RuntimeError):  # they are gone already
        _shared()
    dist.destroy_process_group()
