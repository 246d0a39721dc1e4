"""Step times on ranks: what gossip adds to a local step, with and without a network that is slower than memory.

Run: make bench-ranks, or .venv/bin/python benchmarks/ranks.py [--models lenet,1M,11M] [--ranks 2,4] [--networks ...]

In every run all methods take turns, so their ratios to local SGD without communication (the floor) can be compared:
D-SGD, DAT in both orders and DAT over channels (gossip in every 8th round with int8, and late as well), on a ring; and
what one would use instead: DDP, DDP with torch's fp16 and PowerSGD hooks, and local SGD with an all-reduce of the model
in every 8th step (torch's model averaging). Where only every 8th step speaks, times are those of 8 steps, divided by 8.
A ratio compares times of one turn; the median over the turns is shown. Networks: full loopback speed, and, for root,
every rank in a network namespace of its own behind a `tc tbf` limit in both directions. One thread per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import klatsch

NETWORKS = {"loopback": None, "1gbit": 1e9, "200mbit": 2e8, "50mbit": 5e7}  # bits per second
SLOW = ("200mbit", "50mbit")
H = 8  # steps between two mixes, where there are silent rounds
GOSSIP: dict[str, dict[str, Any]] = {
    "dat atc": {},
    "dat cta": {"order": "cta"},
    "dat/8 int8": {"every": H, "wire": "int8"},
    "dat/8 int8 late": {"every": H, "late": H - 1, "wire": "int8"},
}
OTHERS = ("ddp", "ddp fp16", "ddp powersgd", "local sgd/8")
METHODS = ("local", "dsgd", *GOSSIP, *OTHERS)
SILENT = ("local", "dat/8 int8", "dat/8 int8 late", "local sgd/8")  # most of their steps, or all
MODELS: dict[str, tuple[list[int], int]] = {  # layers (none: the LeNet), batch
    "lenet": ([], 256),
    "1M": ([784, 1024, 256, 10], 4096),
    "11M": ([784, 2816, 2816, 256, 10], 2048),
}
LR = 1e-3
TURNS = 9  # how often methods take turns, unless they need more patience


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    widths = MODELS[name][0]
    if widths:
        layers: list[nn.Module] = [nn.Flatten()]
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


# --- a rank -------------------------------------------------------------------------------------------------------


class Training:
    """A model, and a way to step it."""

    def __init__(self, method: str, name: str) -> None:
        model = model_of(name)
        batch = MODELS[name][1]
        # PowerSGD reduces several times per bucket, and over gloo in another order on every rank: it gets one bucket.
        buckets = {"bucket_cap_mb": 1000} if method == "ddp powersgd" else {}
        ddp = method.startswith("ddp")
        self.model: Any = nn.parallel.DistributedDataParallel(model, **buckets) if ddp else model
        if method == "ddp fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method == "ddp powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.period = H if method in SILENT else 1
        self.averager = PeriodicModelAverager(period=H) if method == "local sgd/8" else None
        self.images, self.labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
        parameters = list(model.parameters())
        self.optimizer: Any = (
            klatsch.optim.DATSGD(parameters, LR, "ring", beta=0.9, **GOSSIP[method])
            if method in GOSSIP
            else klatsch.optim.DSGD(parameters, LR, "ring")
            if method == "dsgd"
            else torch.optim.SGD(parameters, LR)
        )

    def steps(self, count: int) -> float:
        """Seconds per step of so many."""
        began = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()
            if self.averager is not None:
                self.averager.average_parameters(self.model.parameters())
        return (time.perf_counter() - began) / count

    @property
    def waited(self) -> float:
        return self.optimizer.seconds_waited if isinstance(self.optimizer, klatsch.optim.Gossip) else 0.0

    @property
    def bytes_sent(self) -> int:
        return self.optimizer.bytes_sent if isinstance(self.optimizer, klatsch.optim.Gossip) else 0


class Step(NamedTuple):
    """What a step took."""

    seconds: float
    cpu: float  # seconds of processor time
    waited: float  # seconds, for messages


def work(names: list[str], methods: list[str], seconds: float, patience: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    for name in names:
        trainings = {method: Training(method, name) for method in methods}
        turns: list[dict[str, Step]] = []
        sent: dict[str, int] = {}
        times: dict[str, int] = {}
        for turn in range(1 + TURNS):  # the first one warms up
            began = time.perf_counter()
            found: dict[str, Step] = {}
            for method, training in trainings.items():
                dist.barrier()
                # Others had their turn: memory is cold, and a gossip's messages came long ago. Neither is counted.
                took = torch.tensor([training.steps(training.period if not turn or method in GOSSIP else 1)])
                if not turn:
                    dist.all_reduce(took, op=dist.ReduceOp.MAX)
                    fit = min(100, int(seconds / (training.period * float(took))))
                    times[method] = max(2 if training.period == 1 else 1, fit)
                    continue
                waited, cpu, bytes_sent = training.waited, time.process_time(), training.bytes_sent
                count = times[method] * training.period
                step = training.steps(count)
                found[method] = Step(step, (time.process_time() - cpu) / count, (training.waited - waited) / count)
                sent[method] = (training.bytes_sent - bytes_sent) // count
            if turn:
                turns.append(found)
            spent = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn and float(spent) * (turn + 1) > patience:
                break
        if dist.get_rank() == 0:
            row = {
                "model": name,
                "parameters": sum(p.numel() for p in trainings["local"].model.parameters()),
                "turns": len(turns),
                "step": {m: statistics.median(turn[m].seconds for turn in turns) for m in methods},
                "ratio": {m: statistics.median(t[m].seconds / t["local"].seconds for t in turns) for m in methods},
                "cpu": {m: statistics.median(t[m].cpu / t["local"].cpu for t in turns) for m in methods},
                "waited": {m: statistics.mean(turn[m].waited for turn in turns) for m in methods},
                "bytes": sent,
            }
            print(json.dumps(row), flush=True)
        del trainings
    dist.barrier()


# --- networks -----------------------------------------------------------------------------------------------------


@contextmanager
def namespaces(size: int, rate: float | None) -> Iterator[list[str]]:
    """What to put before a command so that rank k runs behind a link of its own; nothing for loopback."""
    if rate is None:
        yield [""] * size
        return
    remove(size)  # what a killed run left behind
    limit = f"tbf rate {rate:.0f}bit burst 300kb latency 200ms"
    try:
        shell("ip link add klatsch type bridge && ip link set klatsch up")
        for k in range(size):
            shell(f"ip netns add klatsch{k} && ip link add klatsch{k} type veth peer name eth0 netns klatsch{k}")
            shell(f"ip link set klatsch{k} master klatsch up && ip -n klatsch{k} link set lo up")
            shell(f"ip -n klatsch{k} addr add 10.77.0.{k + 1}/24 dev eth0 && ip -n klatsch{k} link set eth0 up")
            shell(f"tc -n klatsch{k} qdisc add dev eth0 root {limit} && tc qdisc add dev klatsch{k} root {limit}")
        yield [f"ip netns exec klatsch{k}" for k in range(size)]
    finally:
        remove(size)


def remove(size: int) -> None:
    for k in range(size):
        shell(f"ip link del klatsch{k}; ip netns del klatsch{k}", check=False)  # a link may outlive its namespace
    shell("ip link del klatsch", check=False)


def shell(command: str, check: bool = True) -> None:
    subprocess.run(command, shell=True, check=check, capture_output=not check)


def rows_of(
    size: int, network: str, names: list[str], methods: list[str], seconds: float, patience: float
) -> Iterator[dict[str, Any]]:
    rate = NETWORKS[network]
    with namespaces(size, rate) as prefixes:
        environment = os.environ | {"WORLD_SIZE": str(size), "MASTER_PORT": "29577", "OMP_NUM_THREADS": "1"}
        # Else glibc gives memory back and takes it again in some steps, a third of a LeNet's step, in turns of its own.
        environment |= {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
        environment |= {"MASTER_ADDR": "127.0.0.1"} if rate is None else {"MASTER_ADDR": "10.77.0.1"}
        environment |= {} if rate is None else {"GLOO_SOCKET_IFNAME": "eth0"}
        command = [sys.executable, __file__, "--worker", "--models", ",".join(names), "--methods", ",".join(methods)]
        command += ["--seconds", str(seconds), "--patience", str(patience)]
        ranks = [
            subprocess.Popen(
                [*prefix.split(), *command],
                env=environment | {"RANK": str(k)},
                stdout=None if k else subprocess.PIPE,
                stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
                text=True,
            )
            for k, prefix in enumerate(prefixes)
        ]
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                yield json.loads(line)
            if any(rank.wait() for rank in ranks):
                sys.exit(f"a rank failed on {network}; VERBOSE=1 shows why")
        finally:
            for rank in ranks:
                rank.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS), help="local, the floor, is always one of them")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--seconds", type=float, default=0.5, help="per method and turn, about")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for all turns of a model, about")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    names = given.models.split(",")
    if unknown := set(given.methods.split(",")) - set(METHODS):
        parser.error(f"--methods has {', '.join(sorted(unknown))}; give some of {', '.join(METHODS)}")
    methods = ["local", *(m for m in METHODS[1:] if m in given.methods.split(","))]
    if given.worker:
        work(names, methods, given.seconds, given.patience)
        return
    networks = given.networks.split(",")
    if os.geteuid() != 0 and networks != ["loopback"]:
        print("limited networks need root (ip netns, tc): loopback only\n")
        networks = ["loopback"]
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}; batches {', '.join(f'{n} {MODELS[n][1]}' for n in names)}"
    )
    print("local: milliseconds of a step of local SGD; then, by method, how many times longer a step takes, the same")
    print("of processor time, megabytes that a rank sends per step, and milliseconds that it waits for messages\n")
    everything = []
    for network in networks:
        for size in map(int, given.ranks.split(",")):
            for row in rows_of(size, network, names, methods, given.seconds, given.patience):
                everything.append({"network": network, "ranks": size, **row})
                print_row(network, size, row)
    print_goals(everything)
    if given.json is not None:
        given.json.write_text(json.dumps(everything, indent=1))


def print_goals(rows: list[dict[str, Any]]) -> None:
    """In how many rows on slow networks each goal is met."""
    plain, late = "dat/8 int8", "dat/8 int8 late"
    asked = [row for row in rows if row["ranks"] == 4 and row["network"] in SLOW and row["model"] != "lenet"]
    asked = [row for row in asked if {plain, late, *OTHERS} <= row["ratio"].keys()]
    goals = {
        f"{method} within {most:.2f} of local SGD at 200 Mbit/s": [
            row["ratio"][method] <= most for row in asked if row["network"] == "200mbit"
        ]
        for method, most in ((plain, 1.15), (late, 1.10))
    }
    goals |= {
        f"{method} ahead of {other}": [row["ratio"][method] < row["ratio"][other] for row in asked]
        for other in OTHERS
        for method in (plain, late)
    }
    print("\nFour ranks at 200 and 50 Mbit/s, 1M and 11M:")
    for goal, met in goals.items():
        print(f"  {goal:56} in {sum(met)} of {len(met)} rows")


def print_row(network: str, size: int, row: dict[str, Any]) -> None:
    model = f"{row['model']} ({row['parameters']:,} parameters)"
    print(f"{network}, {size} ranks, {model}: local {row['step']['local'] * 1e3:.1f} ms, turns: {row['turns']}")
    for method in list(row["ratio"])[1:]:
        sent = f"{row['bytes'][method] / 1e6:8.2f} MB  waited {row['waited'][method] * 1e3:8.1f} ms"
        print(
            f"  {method:16} {row['ratio'][method]:6.2f}  cpu {row['cpu'][method]:6.2f}"
            + (f"  {sent}" if method not in OTHERS else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
