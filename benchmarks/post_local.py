"""Post-local SGD: an all-reduce in every round at first, then in every 16th, for the bytes of local SGD.

Run: KLATSCH_DATA=FOLDER .venv/bin/python benchmarks/post_local.py [--nodes 16,64] [--alpha 0.1,1,10] [--bytes 2,4,8]
     [--device cuda] [--jobs 2]

LeNet on Fashion-MNIST as in the studies of bytes: 20 epochs, momentum 0.9, a cosine, float32. Where local SGD averages
in every 2nd, 4th and 8th round, post-local SGD begins with so many rounds of all-reduces that it sends the same. The
learning rate is the better of two, by the mean of all seeds. Results are kept in a file, so that a run that was stopped
goes on.

References:
    Lin et al., "Don't use large mini-batches, use local SGD", 2020.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch

from klatsch import problems, rules, simulate

EPOCHS, SELDOM = 20, 16
RATES = 0.03, 0.1
Case = tuple[
    str, int, float, int, float, int
]  # device, nodes, alpha, bytes as an all-reduce in every .. round, lr, seed


def accuracy(case: Case) -> float:
    """Test accuracy in %."""
    torch.set_num_threads(1)
    device, nodes, alpha, between, lr, seed = case
    images = problems.make("fashion-mnist", nodes, alpha=alpha, test=10_000, seed=seed)
    steps = EPOCHS * images.rounds_per_epoch(nodes)
    first = round(steps * (SELDOM / between - 1) / (SELDOM - 1))  # first + (steps - first) / SELDOM = steps / between
    rule = rules.make("dsgd", lr=rules.Decay(lr, "cosine", steps), momentum=0.9)
    options = {"crew": [(first + 1, "graph", f"complete/{SELDOM}")], "dtype": torch.float32, "device": device}
    result = simulate(images, rule, "complete", steps, [steps], progress=False, **options)  # type: ignore[arg-type]
    return 100 * result.metrics["accuracy"][-1].item()


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=numbers, default="16")
    parser.add_argument("--alpha", type=numbers, default="0.1")
    parser.add_argument(
        "--bytes", type=numbers, default="2,4,8", help="as an all-reduce in every so many rounds, 1 to 16"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path, default=Path("post-local.json"))
    given = parser.parse_args()
    known: dict[str, float] = json.loads(given.store.read_text()) if given.store.exists() else {}
    settings = [
        (int(nodes), alpha, between) for nodes, alpha, between in product(given.nodes, given.alpha, given.bytes)
    ]

    def cases(setting: tuple[int, float, float], lr: float) -> list[Case]:
        return [(given.device, *setting, lr, seed) for seed in range(given.seeds)]

    missing = [case for setting in settings for lr in RATES for case in cases(setting, lr) if str(case) not in known]
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for case, result in zip(missing, pool.map(accuracy, missing), strict=True):
            known[str(case)] = result
            given.store.write_text(json.dumps(known, indent=1))

    print("nodes   alpha   bytes of an all-reduce in every   post-local SGD, %      lr")
    for setting in settings:
        found = {lr: [known[str(case)] for case in cases(setting, lr)] for lr in RATES}
        lr = max(found, key=lambda lr: mean(found[lr]))
        spread = f"{mean(found[lr]):.1f} ({min(found[lr]):.1f} to {max(found[lr]):.1f})"
        print(f"{setting[0]:>5}   {setting[1]:>5g}   {setting[2]:>31g}   {spread}   {lr:g}")


if __name__ == "__main__":
    main()
