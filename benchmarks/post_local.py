"""Post-local SGD: an all-reduce in every round at first, then in every 16th, for the bytes of local SGD.

Run: KLATSCH_DATA=FOLDER .venv/bin/python benchmarks/post_local.py [--nodes 16] [--bytes 2,4,8] [--jobs 2]

LeNet on Fashion-MNIST with alpha = 0.1 as in the study of bytes: 20 epochs, momentum 0.9, a cosine, float32. Where
local SGD averages in every 2nd, 4th and 8th round, post-local SGD begins with so many rounds of all-reduces that it
sends the same. The learning rate is the better of two by the first seed. Results are kept in a file, so that a run that
was stopped goes on.

References:
    Lin et al., "Don't use large mini-batches, use local SGD", 2020.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean

import torch

from klatsch import problems, rules, simulate

EPOCHS, SELDOM = 20, 16
RATES = 0.03, 0.1
Case = tuple[int, int, float, int]  # nodes, rounds from one all-reduce to the next for the same bytes, lr, seed


def accuracy(case: Case) -> float:
    """Test accuracy in %."""
    torch.set_num_threads(1)
    nodes, between, lr, seed = case
    images = problems.make("fashion-mnist", nodes, alpha=0.1, test=10_000, seed=seed)
    steps = EPOCHS * images.rounds_per_epoch(nodes)
    first = round(steps * (SELDOM / between - 1) / (SELDOM - 1))  # first + (steps - first) / SELDOM = steps / between
    rule = rules.make("dsgd", lr=rules.Decay(lr, "cosine", steps), momentum=0.9)
    crew = [(first + 1, "graph", f"complete/{SELDOM}")]
    result = simulate(images, rule, "complete", steps, [steps], crew=crew, dtype=torch.float32, progress=False)
    return 100 * result.metrics["accuracy"][-1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--bytes", default="2,4,8", help="as an all-reduce in every so many rounds, between 1 and 16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path, default=Path("post-local.json"))
    given = parser.parse_args()
    budgets = [int(number) for number in given.bytes.split(",")]
    known: dict[str, float] = json.loads(given.store.read_text()) if given.store.exists() else {}

    def case(between: int, lr: float, seed: int) -> Case:
        return given.nodes, between, lr, seed

    def run(cases: list[Case]) -> None:
        missing = [each for each in cases if str(each) not in known]
        with ProcessPoolExecutor(given.jobs) as pool:
            for each, result in zip(missing, pool.map(accuracy, missing), strict=True):
                known[str(each)] = result
                given.store.write_text(json.dumps(known, indent=1))

    run([case(between, lr, 0) for between in budgets for lr in RATES])
    best = {between: max(RATES, key=lambda lr: known[str(case(between, lr, 0))]) for between in budgets}
    run([case(between, best[between], seed) for seed in range(1, given.seeds) for between in budgets])
    print("bytes of an all-reduce in every   post-local SGD, %      lr")
    for between, lr in best.items():
        each = [known[str(case(between, lr, seed))] for seed in range(given.seeds)]
        print(f"{between:>31}   {mean(each):.1f} ({min(each):.1f} to {max(each):.1f})   {lr:g}")


if __name__ == "__main__":
    main()
