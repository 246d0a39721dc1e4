"""What it costs to look whether numbers are finite: the gradient before a step, and every message that comes.

Run: .venv/bin/python benchmarks/guards.py [--models lenet,1M,11M] [--ranks 2]

The time of the checks is measured inside the steps that they are part of, so both are of the same run. One thread per
rank, loopback, DAT on a ring in both orders.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from klatsch.optim import share
from klatsch.ranks import node
from ranks import MODELS, Training

PORT = "29578"


def work(names: list[str], seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spent = {"gradient": 0.0, "messages": 0.0}
    check = node.is_sound

    def timed(kind: str) -> object:
        def is_sound(v: torch.Tensor) -> bool:
            began = time.perf_counter()
            sound = check(v)
            spent[kind] += time.perf_counter() - began
            return sound

        return is_sound

    share.is_sound, node.is_sound = timed("gradient"), timed("messages")  # type: ignore[assignment, attr-defined]
    for name in names:
        for order in ("atc", "cta"):
            training = Training(f"dat {order}", name)
            training.step()
            took = torch.tensor([training.step()])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            rows = []
            for _ in range(max(5, min(200, int(seconds / float(took))))):
                spent.update(gradient=0.0, messages=0.0)
                rows.append((training.step(), spent["gradient"], spent["messages"]))
            if dist.get_rank() == 0:
                step, *checks = (statistics.median(column) for column in zip(*rows, strict=True))
                parameters = sum(p.numel() for p in training.model.parameters())
                print(json.dumps([name, order, parameters, step, *checks]), flush=True)
            dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="per model and order, about")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.models.split(","), given.seconds)
        return
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {given.ranks} ranks")
    print("milliseconds of a step and of its checks, with their share of it\n")
    print(f"{'model':6} {'parameters':>10}  order |    step | gradient          | messages")
    environment = os.environ | {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    command = [sys.executable, __file__, "--worker", "--models", given.models, "--seconds", str(given.seconds)]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(k)}, stdout=None if k else subprocess.PIPE, text=True)
        for k in range(given.ranks)
    ]
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        name, order, parameters, step, *checks = json.loads(line)
        shares = " | ".join(f"{1e3 * seconds:8.3f} ({seconds / step:6.2%})" for seconds in checks)
        print(f"{name:6} {parameters:10,}  {order:5} | {1e3 * step:7.1f} | {shares}", flush=True)
    if any(rank.wait() for rank in ranks):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main()
