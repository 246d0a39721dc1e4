"""float32 against float64: the error of every rule after many rounds, by torch, by the kernel and on ranks.

Run: .venv/bin/python benchmarks/precision.py [--rounds 100000] [--engines torch,fused,ranks] [--rules dat,d2]

Least squares with noise and heterogeneity on a ring of 9 (ranks: 3 processes over gloo), the same draws in both. A
ratio of 1 means that rounding does not show beside the noise. The error is that of the best learning rate.

What float32 loses in the end is the average x: it moves by (w - x) / t, and stands still once that is less than half of
its last digit. It shows where errors are small and steps as well: with beta = 0.9 at the smallest learning rate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import klatsch
from klatsch import problems, rules, topology

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.on_ranks import simulate_on_ranks

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (name, {}, "ring") for name in rules.RULES},
    "dat, beta 0.9": ("dat", {"beta": 0.9}, "ring"),
    "dat-gt, beta 0.9": ("dat-gt", {"beta": 0.9}, "ring"),
    "dat-d2, beta 0.9": ("dat-d2", {"beta": 0.9}, "ring"),
    "d2 on ring/16": ("d2", {}, "ring/16"),
    "dat-d2, beta 0.9 on ring/16": ("dat-d2", {"beta": 0.9}, "ring/16"),
}
RATES = (0.01, 0.05, 0.2)  # over L
ENGINES = {"torch": 9, "fused": 9, "ranks": 3}  # with the nodes of their rings


def divides(case: str) -> bool:
    """Whether a rule divides, which the fused kernel cannot."""
    return any(part in case for part in ("sgp", "adam", "muon"))


def errors(case: str, engine: str, rounds: int, dtype: torch.dtype, group: Any = None) -> torch.Tensor:
    """The mean squared distance to the optimum at the end, by column; on ranks, on the first one only."""
    name, options, graph = CASES[case]
    ring = topology.make(graph, ENGINES[engine])
    problem = problems.LeastSquares(ring.size, dim=10, noise=1.0, heterogeneity=3.0)
    rule = rules.make(name, lr=[rate / problem.L / ring.every for rate in RATES], **options)
    if engine == "ranks":
        result = simulate_on_ranks(problem, rule, ring, rounds, [rounds], group=group, dtype=dtype)
    else:
        result = klatsch.simulate(problem, rule, ring, rounds, [rounds], engine=engine, dtype=dtype, progress=False)
    return torch.zeros(0) if result is None else result.metrics["distance"][-1]


def line(case: str, engine: str, rounds: int, group: Any = None) -> str:
    """What to print of a case."""
    exact, rough = (errors(case, engine, rounds, dtype, group) for dtype in (torch.float64, torch.float32))
    if not len(exact):
        return ""
    ratios, best = rough / exact, int(exact.argmin())
    each = " ".join(f"{float(ratio):8.4f}" for ratio in ratios)
    verdict = "" if 1 / 1.1 <= ratios[best] <= 1.1 else "   beyond 1.1 at the best"
    return f"{case:28} {engine:6} {float(exact[best]):10.3e} {each}{verdict}"


def on_a_rank(rank: int, cases: list[str], rounds: int, meeting: str) -> None:
    """All cases on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ENGINES["ranks"])
    for case in cases:
        if text := line(case, "ranks", rounds, dist.group.WORLD):
            print(text, flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print a line per rule and engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rules", default=None, help="only cases that begin so")
    choices = parser.parse_args()
    wanted = tuple(choices.rules.split(",")) if choices.rules else ("",)
    cases = [case for case in CASES if case.startswith(wanted)]
    ratios = " ".join(f"{f'{rate:g}/L':>8}" for rate in RATES)
    print(f"{'rule':28} {'engine':6} {'float64':>10} {ratios}   float32's error over it, {choices.rounds:,} rounds")
    for engine in choices.engines.split(","):
        if engine == "ranks":
            with tempfile.TemporaryDirectory() as folder:
                arguments = (cases, choices.rounds, str(Path(folder) / "meeting"))
                torch.multiprocessing.spawn(on_a_rank, arguments, ENGINES["ranks"])  # type: ignore[attr-defined, no-untyped-call]
            continue
        for case in cases:
            if engine == "fused" and divides(case):
                continue
            print(line(case, engine, choices.rounds), flush=True)


if __name__ == "__main__":
    main()
