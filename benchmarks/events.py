"""What a log costs: steps of a model with a million parameters, with and without `log=FOLDER`, side by side.

Run: .venv/bin/python benchmarks/events.py [--parameters 1000000] [--turns 40] [--ranks 2]

Two optimizers in every rank take turns of about a second, one with a log; a ratio compares two turns that follow each
other, and the median over them is shown, with its quartiles. Gradients are given, so that a step is short: gossip
alone. Processor time is that of the whole process, with the thread that writes. Since turns scatter by more than a log
costs, the processor time that steps spend on events, and the thread on writing them, is measured as well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps

import torch
import torch.distributed as dist

import klatsch
from klatsch.optim.gossip import Gossip
from klatsch.watch.events import Lines, read

PORT = "29583"
SECONDS = 1.0  # of a turn


def timed(kind: type, name: str, clock: Callable[[], float], spent: dict[str, float]) -> None:
    """Add up the time of a method."""
    method = getattr(kind, name)

    @wraps(method)
    def measured(*args: object, **options: object) -> object:
        began = clock()
        try:
            return method(*args, **options)
        finally:
            spent[name] += clock() - began

    spent[name] = 0.0
    setattr(kind, name, measured)


def work(parameters: int, turns: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spent: dict[str, float] = {}
    for name in ("log", "_tell_round"):
        timed(Gossip, name, time.thread_time, spent)
    timed(Lines, "__call__", time.thread_time, spent)
    trainings = []
    for log in (None, folder):
        x = torch.nn.Parameter(torch.ones(parameters))
        trainings.append((x, klatsch.optim.GossipSGD([x], 1e-3, "ring", log=[] if log is None else log)))
    gradient, loss = torch.randn(parameters), torch.tensor(1.0)

    def turn(which: int, steps: int) -> tuple[float, float]:
        dist.barrier()
        x, optimizer = trainings[which]
        began = time.perf_counter(), time.process_time()
        for _ in range(steps):
            x.grad.copy_(gradient) if x.grad is not None else setattr(x, "grad", gradient.clone())
            optimizer.log(loss=loss)
            optimizer.step()
        return (time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps

    took = torch.tensor([max(turn(0, 20)[0], turn(1, 20)[0])])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    steps = max(10, int(SECONDS / float(took)))
    spent.update(dict.fromkeys(spent, 0.0))
    rows = [turn(which, steps) for _ in range(turns) for which in (0, 1)]
    if dist.get_rank() == 0:
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        ratios = [[logged[k] / plain[k] for plain, logged in pairs] for k in (0, 1)]
        wholes = [sum(logged[k] for _, logged in pairs) * steps for k in (0, 1)]
        facts = {name: [seconds / whole for whole in wholes] for name, seconds in spent.items()}
        step = statistics.median(plain[0] for plain, _ in pairs)
        print(json.dumps([step, *map(statistics.quantiles, ratios), facts, steps * turns]), flush=True)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(given.parameters, given.turns, given.worker)
    folder = tempfile.mkdtemp()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "WORLD_SIZE": str(given.ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", folder]
    ranks = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(given.ranks)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    step, wall, processor, facts, steps = json.loads(outputs[0])
    events = sum(event["event"] == "round" for event in read(folder)) / given.ranks
    shutil.rmtree(folder)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {given.ranks} ranks, {given.parameters:,} parameters")
    print(f"a step takes {1000 * step:.2f} ms; {steps:,} of them with a log, of which {events:.0f} were told\n")
    print("with a log, of without:  median (quartiles)")
    for name, (low, middle, high) in (("wall", wall), ("processor", processor)):
        print(f"  {name:<10} {middle:.4f} ({low:.4f} to {high:.4f})")
    print("\nshare of the time of steps with a log:  wall  processor")
    for text, name in (
        ("in steps, on events", "_tell_round"),
        ("in steps, on log(loss=)", "log"),
        ("in the thread, writing", "__call__"),
    ):
        print(f"  {text:<34} {facts[name][0]:.3%}     {facts[name][1]:.3%}")


if __name__ == "__main__":
    main()
