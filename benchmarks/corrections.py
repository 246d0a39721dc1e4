"""What corrections and a query point between w and x are worth: least squares on a ring, with and without local steps.

Run: .venv/bin/python benchmarks/corrections.py [--seeds 3]

25 nodes, noise 1, heterogeneity 10, 12,000 rounds in float64; squared distance to the optimum as a mean over nodes, at
the best learning rate of the same grid for every rule, by mean over seeds.
"""

from __future__ import annotations

import argparse

import torch

from klatsch import problems, rules, simulate, topology

NODES, ROUNDS = 25, 12_000
GRID = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2]
RUNS = [
    ("dat", {}, 1),
    ("dat", {"beta": 0.9}, 1),
    ("d2", {}, 1),
    ("dat-d2", {}, 1),
    ("dat-d2", {"beta": 0.9}, 1),
    ("dat-gt", {"beta": 0.9}, 1),
    ("dat", {}, 16),
    ("dat", {"beta": 0.9}, 16),
    ("d2", {}, 16),
    ("dat-d2", {}, 16),
    ("dat-d2", {"beta": 0.9}, 16),
]


def errors(name: str, options: dict[str, float], every: int, seed: int) -> torch.Tensor:
    """The final error at every learning rate of the grid."""
    problem = problems.LeastSquares(NODES, noise=1.0, heterogeneity=10.0, seed=seed)
    graph = topology.every(topology.ring(NODES), every)
    result = simulate(problem, rules.make(name, lr=GRID, **options), graph, ROUNDS, record=[ROUNDS], progress=False)
    return result.metrics["distance"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    print(f"{'rule':24} {'graph':8} {'error':>9} {'of seeds':>22} {'lr':>7}")
    for name, options, every in RUNS:
        found = torch.stack([errors(name, options, every, seed) for seed in seeds])
        best = int(found.mean(0).argmin())
        label = name + "".join(f", {option} {value:g}" for option, value in options.items())
        spread = f"{found[:, best].min():.2g} to {found[:, best].max():.2g}"
        graph = "ring" if every == 1 else f"ring/{every}"
        print(f"{label:24} {graph:8} {found.mean(0)[best]:9.2g} {spread:>22} {GRID[best]:7g}", flush=True)


if __name__ == "__main__":
    main()
