"""The clock against real ranks whose gradients are sleeps, behind links that `tc tbf` limits.

Run: .venv/bin/python benchmarks/clock.py [--steps 48] [--rows 1,2,3]

Every rank sleeps as long as the clock has drawn for it, so what is measured is who waits for whom and for how long, and
not how ranks share two cores. An all-reduce is torch's: DDP in every round, with a third of the gradient's time in the
forward pass and the rest layer by layer in the backward pass; or of the model in every H-th round. Latency and handling
are those of `costs.py`, measured on processes of one machine; longer latencies are not made here. For root; each rank
is in a network namespace of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import klatsch
from costs import BANDWIDTH, CORES, HANDLING, LATENCY
from klatsch.clock import Clock, Links
from ranks import NETWORKS, namespaces

WARM = 5  # steps before the clock starts
LAYERS = 10  # of the model that DDP trains
DAT, INT8 = {"name": "dat"}, {"every": 8, "wire": "int8"}
LOCAL = {"name": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}  # local SGD
M1, M11 = 1_000_000, 11_000_000
ROWS: list[tuple[int, str, str, dict[str, Any], str, dict[str, Any], int]] = [  # ranks, network, gradient, ...
    (2, "200mbit", "0.05", {"name": "dsgd"}, "ring", {}, M1),
    (2, "200mbit", "exponential(0.1)", DAT | {"order": "cta"}, "ring", {}, M1),
    (2, "50mbit", "lognormal(0.05, 0.5)", DAT, "ring", INT8, M1),
    (4, "1gbit", "0.05,0.05,0.05,0.3", {"name": "dsgd"}, "ring", {}, M1),
    (4, "1gbit", "slow(0.05, 10, 0.05)", DAT, "ring", {}, M1),
    (4, "200mbit", "exponential(0.2)", {"name": "dsgd"}, "ring", {}, M1),
    (4, "200mbit", "lognormal(0.2, 1)", DAT | {"order": "cta"}, "ring", {}, M1),
    (4, "200mbit", "exponential(0.1)", DAT, "ring", INT8 | {"late": 7}, M1),
    (4, "50mbit", "slow(0.1, 5, 0.1)", DAT, "ring", INT8, M1),
    (4, "50mbit", "lognormal(0.1, 0.5)", DAT, "ring", {"every": 4, "late": 3, "wire": "bfloat16"}, M1),
    *(
        (ranks, "200mbit", "slow(0.2, 5, 0.1)", rule, graph, channel, params)
        for params, ranks in ((M1, 4), (M1, 8), (M11, 4), (M11, 8))
        for rule, graph, channel in (
            ({"name": "dsgd"}, "complete", {}),
            (LOCAL, "complete", {"every": 8}),
            ({"name": "diloco"}, "complete", {"every": 16}),
            (DAT, "one_peer_exponential", {}),
            (DAT, "one_peer_exponential", INT8),
            (DAT, "ring", INT8 | {"late": 7}),
        )
    ),
]


def setting(row: int) -> tuple[Clock, Any, Any]:
    """The clock, the rule and the graph of a row."""
    ranks, network, gradient, rule, graph, channel, _ = ROWS[row]
    clock = Clock(gradient, Links(BANDWIDTH[network], LATENCY), HANDLING * max(1.0, ranks / CORES))
    return clock, klatsch.rules.make(lr=1e-6, **rule), klatsch.topology.make(graph, ranks, **channel)


class Layer(torch.autograd.Function):
    """A layer that takes its time, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weights: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.length = seconds, len(weights)
        time.sleep(seconds / 3)
        return inputs + 0 * weights[0]

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return above[0], torch.ones(ctx.length), None


class Sleeper(nn.Module):
    """A model whose gradient is a sleep."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(params // LAYERS)) for _ in range(LAYERS)])

    def forward(self, seconds: float) -> Tensor:
        total = torch.zeros((), requires_grad=True)
        for weights in self.layers:
            total = Layer.apply(total, weights, seconds / LAYERS)
        return total


def gossiping(rule: Any, graph: Any, params: int) -> tuple[Callable[[float], None], Callable[[], None]]:
    """A step of a gradient's seconds, and what ends all messages that are on the way."""
    vector = nn.Parameter(torch.zeros(params))
    optimizer = klatsch.Gossip([vector], rule, graph)
    vector.grad = torch.randn(params)

    def step(seconds: float) -> None:
        time.sleep(seconds)
        optimizer.step()

    return step, optimizer.drain


def reducing(every: int, params: int) -> tuple[Callable[[float], None], Callable[[], None]]:
    """The same with torch's all-reduce: of gradients by DDP, or of the model in every H-th step."""
    model, vector, steps = Sleeper(params), torch.zeros(params), count(1)
    ddp = nn.parallel.DistributedDataParallel(model) if every == 1 else None

    def step(seconds: float) -> None:
        if ddp is not None:
            ddp(seconds).backward()
            return
        time.sleep(seconds)
        if next(steps) % every == 0:
            dist.all_reduce(vector)

    return step, lambda: None


def work(row: int, steps: int) -> None:
    """One rank: train on sleeps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (clock, rule, graph), params = setting(row), ROWS[row][-1]
    drawn = clock.times.draw(steps, graph.size, np.random.default_rng(clock.seed))[:, dist.get_rank()]
    step, drain = reducing(graph.every, params) if graph.all_reduce else gossiping(rule, graph, params)
    for _ in range((WARM if params == M1 else 1) * graph.every):
        step(0.0)
    drain()
    dist.barrier()
    began = time.perf_counter()
    for seconds in drawn:
        step(seconds)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(float(took)), flush=True)
    dist.barrier()


def measured(row: int, steps: int) -> float:
    """Seconds of all steps."""
    size, network, *_ = ROWS[row]
    with namespaces(size, NETWORKS[network]) as prefixes:
        environment = os.environ | {"WORLD_SIZE": str(size), "MASTER_PORT": "29579", "MASTER_ADDR": "10.77.0.1"}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        command = [sys.executable, __file__, "--row", str(row), "--steps", str(steps)]
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
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rows", default="", metavar="K,K", help="only these, counted from 1")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        work(given.row, given.steps)
        return
    if os.geteuid() != 0:
        print("limited networks need root (ip netns, tc): nothing to measure")
        return
    print("milliseconds per step, measured and by the clock\n")
    rows, good = [int(k) - 1 for k in given.rows.split(",") if k] or [*range(len(ROWS))], 0
    for k in rows:
        ranks, network, gradient, rule, name, channel, params = ROWS[k]
        clock, made, graph = setting(k)
        took, told = measured(k, given.steps), clock.seconds(made, graph, params, [given.steps])[0]
        good += abs(told / took - 1) <= 0.15
        method = (
            ({1: "ddp", 8: "local sgd"}.get(graph.every, "diloco"),) if graph.all_reduce else (*rule.values(), name)
        )
        what = " ".join(map(str, [*method, *(f"{option}={value}" for option, value in channel.items())]))
        times = f"{took / given.steps * 1e3:7.1f} {told / given.steps * 1e3:7.1f}   {told / took:.2f}"
        print(f"{ranks} ranks, {params // M1:2}M, {network:8} {gradient:21} {what:46} {times}", flush=True)
    print(f"\nwithin 15 %: {good} of {len(rows)}")


if __name__ == "__main__":
    main()
