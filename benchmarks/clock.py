"""The clock against real ranks whose gradients are sleeps, behind links that `tc tbf` limits.

Run: .venv/bin/python benchmarks/clock.py [--params 1000000] [--steps 60]

Every rank sleeps as long as the clock has drawn for it, so what is measured is who waits for whom and for how long, and
not how ranks share two cores. Latency and handling are those of `costs.py`, measured on processes of one machine. For
root; each rank is in a network namespace of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import klatsch
from costs import BANDWIDTH, CORES, HANDLING, LATENCY
from klatsch.clock import Clock, Links
from ranks import NETWORKS, namespaces

WARM = 5  # steps before the clock starts
ROWS = [  # ranks, network, gradient, rule, channel
    (2, "200mbit", "0.05", {"name": "dsgd"}, {}),
    (2, "200mbit", "exponential(0.1)", {"name": "dat", "order": "cta"}, {}),
    (2, "50mbit", "lognormal(0.05, 0.5)", {"name": "dat"}, {"every": 8, "wire": "int8"}),
    (4, "1gbit", "0.05,0.05,0.05,0.3", {"name": "dsgd"}, {}),
    (4, "1gbit", "slow(0.05, 10, 0.05)", {"name": "dat"}, {}),
    (4, "200mbit", "exponential(0.2)", {"name": "dsgd"}, {}),
    (4, "200mbit", "lognormal(0.2, 1)", {"name": "dat", "order": "cta"}, {}),
    (4, "200mbit", "exponential(0.1)", {"name": "dat"}, {"every": 8, "late": 7, "wire": "int8"}),
    (4, "50mbit", "slow(0.1, 5, 0.1)", {"name": "dat"}, {"every": 8, "wire": "int8"}),
    (4, "50mbit", "lognormal(0.1, 0.5)", {"name": "dat"}, {"every": 4, "late": 3, "wire": "bfloat16"}),
]


def setting(row: int) -> tuple[Clock, Any, Any]:
    """The clock, the rule and the graph of a row."""
    ranks, network, gradient, rule, channel = ROWS[row]
    clock = Clock(gradient, Links(BANDWIDTH[network], LATENCY), HANDLING * max(1.0, ranks / CORES))
    return clock, klatsch.rules.make(lr=1e-6, **rule), klatsch.topology.make("ring", ranks, **channel)


def work(row: int, params: int, steps: int) -> None:
    """One rank: train on sleeps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock, rule, graph = setting(row)
    drawn = clock.times.draw(steps, graph.size, np.random.default_rng(clock.seed))[:, dist.get_rank()]
    vector = torch.nn.Parameter(torch.zeros(params))
    optimizer = klatsch.Gossip([vector], rule, graph)
    vector.grad = torch.randn(params)
    for _ in range(WARM * graph.every):
        optimizer.step()
    optimizer.drain()
    dist.barrier()
    began = time.perf_counter()
    for seconds in drawn:
        time.sleep(seconds)
        optimizer.step()
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(float(took)), flush=True)
    dist.barrier()


def measured(row: int, params: int, steps: int) -> float:
    """Seconds of all steps."""
    size, network, *_ = ROWS[row]
    with namespaces(size, NETWORKS[network]) as prefixes:
        environment = os.environ | {"WORLD_SIZE": str(size), "MASTER_PORT": "29579", "MASTER_ADDR": "10.77.0.1"}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        command = [sys.executable, __file__, "--row", str(row), "--params", str(params), "--steps", str(steps)]
        ranks = [
            subprocess.Popen(
                [*prefixes[k].split(), *command],
                env=environment | {"RANK": str(k)},
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
                text=True,
            )
            for k in range(size)
        ]
        told = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit(f"a rank of row {row + 1} failed; VERBOSE=1 shows why")
        return float(json.loads(told[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        work(given.row, given.params, given.steps)
        return
    if os.geteuid() != 0:
        print("limited networks need root (ip netns, tc): nothing to measure")
        return
    print("milliseconds per step, measured and by the clock\n")
    good = 0
    for k, (ranks, network, gradient, rule, channel) in enumerate(ROWS):
        clock, made, graph = setting(k)
        took, told = measured(k, given.params, given.steps), clock.seconds(made, graph, given.params, [given.steps])[0]
        good += abs(told / took - 1) <= 0.15
        what = " ".join(map(str, [*rule.values(), *(f"{name}={value}" for name, value in channel.items())]))
        times = f"{took / given.steps * 1e3:7.1f} {told / given.steps * 1e3:7.1f}   {told / took:.2f}"
        print(f"{ranks} ranks, {network:8} {gradient:21} {what:30} {times}", flush=True)
    print(f"\nwithin 15 %: {good} of {len(ROWS)}")


if __name__ == "__main__":
    main()
