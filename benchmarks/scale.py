"""Ten thousand nodes in simulation, and a million on paper.

Run: .venv/bin/python benchmarks/scale.py [--nodes 10000] [--rounds 300]

Least squares (d = 50, float32) with DAT on ring, torus, 1-peer exponential and Base-2 graphs: seconds and memory per
round, each graph in a process of its own so that the memory is its own. Then the theory on the same graphs: the
spectral gap up to a million nodes, and how many machines N samples keep busy.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import time
from pathlib import Path

import torch

from klatsch import problems, rules, simulate, theory, topology

GRAPHS = ("ring", "torus", "one_peer_exponential", "base_graph")


def held() -> float:
    """Memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(name: str, nodes: int, rounds: int, out: mp.Queue) -> None:  # type: ignore[type-arg]
    began = time.perf_counter()
    problem = problems.LeastSquares(nodes, noise=1.0)
    graph = topology.make(name, nodes)
    built = time.perf_counter() - began
    before = held()
    rule = rules.make("dat", lr=1e-3)
    found = simulate(problem, rule, graph, rounds, record=[rounds], dtype=torch.float32, progress=False)
    out.put((built, found.seconds / rounds, before, held(), float(found.metrics["distance"][-1, 0]), found.engine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=300)
    given = parser.parse_args()
    cores = torch.get_num_threads()
    print(f"least squares, d = 50, {given.nodes:,} nodes, {given.rounds} rounds of DAT, float32, {cores} cores")
    print("memory: of the process with the problem, and after the rounds")
    print(
        f"{'graph':22} {'set up, s':>10} {'ms/round':>9} {'ns/node':>8} {'before, MiB':>12} {'after, MiB':>11}  error"
    )
    context = mp.get_context("spawn")
    for name in GRAPHS:
        out = context.Queue()
        process = context.Process(target=run, args=(name, given.nodes, given.rounds, out))
        process.start()
        built, each, before, after, error, engine = out.get()
        process.join()
        print(
            f"{name:22} {built:10.1f} {each * 1e3:9.1f} {each / given.nodes * 1e9:8.0f} {before:12,.0f} {after:11,.0f}"
            f"  {error:.1e}  ({engine})",
            flush=True,
        )
    on_paper()


def on_paper() -> None:
    """The theory on the same graphs."""
    powers = (6, 8, 10, 12, 14)
    print("\nby theory, all constants 1: the largest M with which DAT keeps the statistical rate")
    budgets = "".join(f"{f'N = 1e{k}':>12}" for k in powers)
    print(f"{'graph':22} {'rho(10,000)':>12} {'rho(10^6)':>12}{budgets}")
    constants = theory.Constants(L=1.0, D1=1.0, sigma=1.0, zeta=1.0)
    for name in GRAPHS:
        began = time.perf_counter()
        largest = [theory.largest_machines("dat", 10.0**power, name, constants) for power in powers]
        gaps = [topology.spectral_gap(name, n) for n in (10_000, 1_000_000)]
        took = time.perf_counter() - began
        print(f"{name:22} {gaps[0]:12.3g} {gaps[1]:12.3g}" + "".join(f"{M:12,}" for M in largest) + f"   {took:.1f} s")


if __name__ == "__main__":
    main()
