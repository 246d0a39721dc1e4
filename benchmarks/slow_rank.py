"""One rank of four takes five times as long for a gradient: how long the others wait for it, and what becomes of it.

Run: .venv/bin/python benchmarks/slow_rank.py [--rounds 400] [--gradient 0.02] [--alpha 10]

DAT on a ring trains a network with one hidden layer on Fashion-MNIST. Gradients take as long as sleeps say, so the
number of cores hardly counts. Waiting is the mean of the fast ranks, accuracy the mean of all ranks' models at x.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch.problems import dirichlet, fashion_mnist

SLOW, TIMES = 1, 5  # which rank, and how many times as long its gradients take
CHANNELS: dict[str, dict[str, Any]] = {
    "every=8": {"every": 8},
    "every=8, late=7": {"every": 8, "late": 7},
    "every=8, late=7, catch_up": {"every": 8, "late": 7, "catch_up": True},
    "late=7": {"late": 7},
    "late=7, catch_up": {"late": 7, "catch_up": True},
}


def trained(seed: int, channel: dict[str, Any], given: argparse.Namespace) -> list[float]:
    """Accuracy, seconds, seconds waited, and gradients taken, of this rank."""
    data, rank = fashion_mnist.load(None), dist.get_rank()
    own = torch.from_numpy(dirichlet(data.labels, dist.get_world_size(), given.alpha, seed)[rank])
    images, labels = data.images[own].flatten(1) / 255, data.labels[own]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = klatsch.optim.DATSGD(model.parameters(), given.lr, "ring", beta=0.9, **channel)
    draws = torch.Generator().manual_seed(seed * 100 + rank)
    dist.barrier()
    began, taken = time.perf_counter(), 0
    while optimizer.rounds < given.rounds:
        batch = torch.randint(len(labels), (32,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        time.sleep(given.gradient * (TIMES if rank == SLOW else 1))
        optimizer.step()
        taken += 1
    seconds, waited = time.perf_counter() - began, optimizer.seconds_waited
    optimizer.finish()
    with torch.no_grad(), optimizer.averaged():
        right = model(data.test_images.flatten(1) / 255).argmax(1) == data.test_labels
    return [100 * float(right.float().mean()), seconds, waited, float(taken)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--gradient", type=float, default=0.02, help="seconds that a gradient of the others takes")
    parser.add_argument("--alpha", type=float, default=10.0, help="0.1: few classes per rank; 10: all alike")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--channels", default=";".join(CHANNELS), help="separated by ;")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(subprocess.call([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", *sys.argv]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in given.channels.split(";"):
        rows = []
        for seed in range(given.seeds):
            found = trained(seed, CHANNELS[name], given)
            every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, found)
            rows.append(every)
        numbers = torch.tensor(rows)  # seeds, ranks, what
        fast = [rank for rank in range(numbers.shape[1]) if rank != SLOW]
        accuracy = numbers[:, :, 0].mean(1)
        if dist.get_rank() == 0:
            print(
                f"{name:28} {numbers[:, fast, 1].mean():6.1f} s, waited {numbers[:, fast, 2].mean():6.2f} s, "
                f"accuracy {accuracy.mean():.1f} ({accuracy.min():.1f} to {accuracy.max():.1f}), "
                f"gradients of the slow rank {numbers[:, SLOW, 3].mean():.0f} of {given.rounds}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
