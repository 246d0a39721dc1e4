"""Rounds between GPUs: over NCCL in pairs, and over gloo through pinned memory, in turns.

Run: torchrun --nproc-per-node 2 benchmarks/lanes.py [--millions 25] [--turns 5]

Every rank has a GPU of its own, if there are as many; on a machine with one, NCCL is told that each rank is on another
machine, and connects them over sockets of the loopback interface, as gloo does. A round of plain gossip on a ring, with
gradients of zero: what is timed is the step, until the GPU is done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

import klatsch
from klatsch.ranks import links

ROUNDS = 10  # of a turn, after two that warm up


def seconds_of_a_round(vector: torch.Tensor) -> tuple[float, bool]:
    """Seconds, and whether NCCL was used."""
    optimizer = klatsch.Gossip([vector], klatsch.rules.make("dsgd", lr=0.1), "ring", on_failure="continue")
    vector.grad = torch.zeros_like(vector)
    for k in range(2 + ROUNDS):
        if k == 2:
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
        optimizer.step()
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / ROUNDS
    over_nccl = any(optimizer._links.lanes.values())
    optimizer.finish()
    return each, over_nccl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=25.0, help="of parameters")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, several = dist.get_rank(), torch.cuda.device_count() >= dist.get_world_size()
    torch.cuda.set_device(rank if several else 0)
    if not several:
        os.environ |= {"NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    vector = torch.nn.Parameter(torch.ones(round(given.millions * 1e6), device="cuda"))
    times: dict[str, list[float]] = {"gloo": [], "NCCL": []}
    for _ in range(given.turns):
        for name, own in (("gloo", ""), ("NCCL", f"here/{rank}")):
            links.gpu_of = lambda device, own=own: own
            each, over_nccl = seconds_of_a_round(vector)
            assert over_nccl == (name == "NCCL"), "NCCL does not connect"
            times[name].append(each)
    if rank == 0:
        size, where = dist.get_world_size(), "GPUs of their own" if several else "one GPU, over loopback"
        print(f"{size} ranks on {where}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
        for name, each in times.items():
            median, rate = statistics.median(each), vector.nbytes / statistics.median(each) / 1e9
            print(f"{name}: {median * 1e3:6.1f} ms ({min(each) * 1e3:.1f} to {max(each) * 1e3:.1f}), {rate:.2f} GB/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
