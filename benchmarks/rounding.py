"""Two kernels that round differently: means over seeds should agree within the spread of the seeds.

Run: .venv/bin/python benchmarks/rounding.py [--device cuda] [--epochs 50] [--nodes 16] [--seeds 3]

The image study trains by one of two kernels: grouped convolutions (on a CPU) or products with banded matrices (on a
GPU). Both compute the same gradients up to rounding, and training is chaotic: after some hundred rounds the weights
have nothing in common. So every rule trains twice with the same seeds, once with each kernel. Learning rates are those
that `klatsch reproduce schedules` chooses on the ring of 16 with alpha = 0.1.
"""

from __future__ import annotations

import argparse
from typing import Any

from klatsch.problems import stacks
from klatsch.study import parse, run_study, workers

RULES: list[dict[str, Any]] = [
    {"name": "dsgd", "momentum": 0.9, "schedule": "cosine", "lr": 0.1},
    {"name": "dat", "beta": 0.9, "lr": 1.0},
    {"name": "dat-d2", "averaging": "fixed(0.99)", "beta": 0.9, "lr": 0.3},
]


def accuracies(options: argparse.Namespace) -> dict[str, list[float]]:
    """The final accuracy of every seed, mean over the nodes, by rule."""
    study = parse(
        {
            "nodes": options.nodes,
            "topologies": "ring",
            "epochs": options.epochs,
            "seeds": options.seeds,
            "record": 1,
            "dtype": "float32",
            "device": options.device,
            "rules": RULES,
            "problem": {"name": "fashion-mnist", "alpha": 0.1},
        }
    )
    found = run_study(study, executor=lambda: workers.threads(1))  # whose threads see the kernel that was chosen
    return {row.rule: row.final[:, row.best].tolist() for row in found.rows}


def main() -> None:
    """Train with both kernels, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    usual = accuracies(options)
    stacks.rows, stacks.grouped = stacks.grouped, stacks.rows
    stacks._compiled.clear()
    other = accuracies(options)
    print(f"{'rule':50} {'mean':>7} {'other':>7} {'differ':>7} {'spread':>7}")
    for rule, values in usual.items():
        means = [sum(each) / len(each) for each in (values, other[rule])]
        spread = max(max(each) - min(each) for each in (values, other[rule]))
        apart = abs(means[0] - means[1])
        verdict = "" if apart <= spread else "   beyond the spread"
        print(f"{rule:50} {means[0]:7.2%} {means[1]:7.2%} {apart:7.2%} {spread:7.2%}{verdict}")


if __name__ == "__main__":
    main()
