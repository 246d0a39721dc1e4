"""What a rank costs on one machine with many of them: descriptors, threads, and seconds to make an optimizer and train.

Run: .venv/bin/python benchmarks/many_ranks.py [--ranks 64] [--graph base_graph] [--init]

Processes are forked from one that has torch loaded. Shown is what a rank had after the last round, in the median,
beside what it had before it made the optimizer, and the time of the slowest. Rank 0 also keeps the store, with a
connection to each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch._dynamo  # which torch loads with the first optimizer
import torch.distributed as dist
from torch import nn

from klatsch.optim import GossipSGD

ROUNDS = 50


def held() -> list[int]:
    """Descriptors and threads of this process."""
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]


def rank_of(many: int, rank: int, graph: str, init: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(many), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}
    before, began = held(), time.perf_counter()
    if init:
        dist.init_process_group("gloo")
    x = nn.Parameter(torch.ones(10_000))
    optimizer = GossipSGD([x], lr=0.1, topology=graph)
    made = time.perf_counter()
    for _ in range(ROUNDS):
        x.grad = x.detach() - rank
        optimizer.step()
    trained = time.perf_counter()
    figures = [*before, *held(), made - began, trained - made]
    optimizer.finish()
    (folder / str(rank)).write_text(json.dumps(figures))
    while rank == 0 and len(os.listdir(folder)) < many:  # it has the store
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--graph", default="base_graph")
    parser.add_argument("--init", action="store_true", help="with init_process_group, which opens a mesh of its own")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        children = []
        for rank in range(given.ranks):
            if (child := os.fork()) == 0:
                rank_of(given.ranks, rank, given.graph, given.init, Path(folder))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        rows = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    columns = [*zip(*rows, strict=True)]
    descriptors, threads, *after = (statistics.median(column) for column in columns[:4])
    made, trained = map(max, columns[4:])
    print(f"{given.ranks} ranks on {given.graph}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"descriptors {after[0]:g} (before {descriptors:g}), threads {after[1]:g} (before {threads:g})")
    print(f"making the optimizer {made:.1f} s, {ROUNDS} rounds {trained:.1f} s")


if __name__ == "__main__":
    main()
