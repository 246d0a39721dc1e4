"""Two hosts of two ranks, and who talks for a host.

Run: .venv/bin/python benchmarks/hosts.py [--models 1M,11M] [--networks loopback,1gbit,200mbit]

In every run all methods take turns, so their ratios to DDP inside a host without gossip (the floor) can be compared.
DAT between hosts, where every rank of a host talks for a slice of the vector (mesh=), every rank for all of it
(group=), or the first rank for all while the second waits for a broadcast; and FSDP2 inside, where every rank talks for
its pieces. A ratio compares times of one turn; the median over the turns is shown. For root, each host is a network
namespace behind a `tc tbf` limit in both directions. One thread per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import klatsch
from klatsch.optim.hosts import Host
from klatsch.optim.share import Share
from ranks import LR, MODELS, NETWORKS, model_of, namespaces

METHODS = ("no gossip", "slices", "all by each", "fsdp2", "all by one")  # the last one has more groups on some ranks
HOSTS, INSIDE, TURNS = 2, 2, 7


class Training:
    """A model, and a way to step it."""

    def __init__(self, method: str, name: str, mesh: DeviceMesh) -> None:
        model, inside, across = model_of(name), mesh.get_group("gpu"), mesh.get_group("host")
        self.model: Any = (
            fully_shard(model, mesh=mesh["gpu"])
            if method == "fsdp2"
            else nn.parallel.DistributedDataParallel(model, process_group=inside)
        )
        parameters, batch = list(model.parameters()), MODELS[name][1] // 4
        self.images, self.labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
        self.optimizer: Any = None
        self.flat, self.inside = None, inside
        if method == "no gossip":
            self.optimizer = torch.optim.SGD(parameters, LR)
        elif method in ("slices", "fsdp2"):
            self.optimizer = klatsch.optim.DATSGD(parameters, LR, beta=0.9, mesh=mesh["host"])
        elif method == "all by each":
            self.optimizer = klatsch.optim.DATSGD(parameters, LR, beta=0.9, group=across)
        else:
            if mesh.get_local_rank("gpu") == 0:
                self.optimizer = klatsch.optim.DATSGD(parameters, LR, beta=0.9, group=across)
            self.flat = self.optimizer.shares[0] if self.optimizer else Share(parameters, {}, Host(), lambda: None)

    def steps(self, count: int) -> float:
        """Seconds per step of so many."""
        began = time.perf_counter()
        for _ in range(count):
            (self.optimizer or self.model).zero_grad()
            nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
            if self.optimizer is not None:
                self.optimizer.step()
            if self.flat is not None:
                dist.broadcast(self.flat.values, group_src=0, group=self.inside)
                self.flat.accept()
        return (time.perf_counter() - began) / count


def work(names: list[str], seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (HOSTS, INSIDE), mesh_dim_names=("host", "gpu"))
    for name in names:
        trainings = {method: Training(method, name, mesh) for method in METHODS}
        turns: list[dict[str, float]] = []
        for turn in range(1 + TURNS):  # the first one warms up
            found = {}
            for method, training in trainings.items():
                dist.barrier()
                took = torch.tensor([training.steps(1)])
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                found[method] = training.steps(max(2, min(50, int(seconds / float(took)))))
            turns += [found] if turn else []
        sent = {
            m: getattr(t.optimizer, "bytes_sent", 0) / t.optimizer.rounds
            for m, t in trainings.items()
            if m != "no gossip" and t.optimizer
        }
        if dist.get_rank() == 0:
            step = {m: statistics.median(turn[m] for turn in turns) for m in METHODS}
            ratio = {m: statistics.median(turn[m] / turn["no gossip"] for turn in turns) for m in METHODS}
            print(json.dumps({"model": name, "step": step, "ratio": ratio, "sent": sent}), flush=True)
    dist.barrier()


def rows_of(network: str, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """The rows of one network; the ranks of a host share its namespace."""
    rate = NETWORKS[network]
    with namespaces(HOSTS, rate) as prefixes:
        where = (
            {"MASTER_ADDR": "127.0.0.1"} if rate is None else {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        )
        environment = (
            os.environ | where | {"WORLD_SIZE": str(HOSTS * INSIDE), "MASTER_PORT": "29578", "OMP_NUM_THREADS": "1"}
        )
        command = [sys.executable, __file__, "--worker", "--models", ",".join(names), "--seconds", str(seconds)]
        ranks = [
            subprocess.Popen(
                [*prefixes[k // INSIDE].split(), *command],
                env=environment | {"RANK": str(k)},
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
                text=True,
            )
            for k in range(HOSTS * INSIDE)
        ]
        try:
            told = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            sys.exit(f"a rank failed on {network}; VERBOSE=1 shows why")
        return [json.loads(line) for line in told[0].splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1M,11M")
    parser.add_argument("--networks", default="loopback,1gbit,200mbit")
    parser.add_argument("--seconds", type=float, default=0.5, help="per method and turn, about")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names, networks = given.models.split(","), given.networks.split(",")
    if given.worker:
        work(names, given.seconds)
        return
    if os.geteuid() != 0 and networks != ["loopback"]:
        print("limited networks need root (ip netns, tc): loopback only\n")
        networks = ["loopback"]
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}; how many times longer a step takes than without gossip\n"
    )
    for network in networks:
        for row in rows_of(network, names, given.seconds):
            print(f"{network}, {row['model']}: {row['step']['no gossip'] * 1e3:.1f} ms without gossip")
            for method in METHODS[1:]:
                print(
                    f"  {method:12} {row['ratio'][method]:6.2f}  {row['sent'][method] / 1e6:7.2f} MB per rank and step",
                    flush=True,
                )


if __name__ == "__main__":
    main()
