"""From SGD with momentum to DATSGD with beta=0.9: which learning rate, with which schedule, momentum and weight decay.

Run: .venv/bin/python benchmarks/switching.py [--data FOLDER] [--seeds 2] [--rounds 1000]

A network with one hidden layer learns 10,000 images of Fashion-MNIST on one machine, where DATSGD with beta=0.9 is
Schedule-Free SGD. Shown is the test accuracy at x, at half time and at the end: mean over seeds. The learning rates of
each line are a grid; the best at the end has a star.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from klatsch.optim import DATSGD, Gossip
from klatsch.problems import fashion_mnist

SGD = torch.optim.SGD
HEAVY: dict[str, Any] = {"momentum": 0.9}
DECAY: dict[str, Any] = {"weight_decay": 5e-4}
FREE: dict[str, Any] = {"beta": 0.9}
# name: optimizer, its options, schedule, learning rates
LINES: dict[str, tuple[Any, dict[str, Any], str, list[float]]] = {
    "SGD, momentum 0.9": (SGD, HEAVY, "constant", [0.003, 0.01, 0.03, 0.1]),
    "SGD, momentum 0.9, cosine": (SGD, HEAVY, "cosine", [0.003, 0.01, 0.03, 0.1]),
    "SGD, momentum 0.9, weight decay": (SGD, HEAVY | DECAY, "constant", [0.003, 0.01, 0.03]),
    "DATSGD, beta 0.9": (DATSGD, FREE, "constant", [0.03, 0.1, 0.3, 1.0, 3.0]),
    "DATSGD, beta 0.9, cosine": (DATSGD, FREE, "cosine", [0.1, 0.3, 1.0, 3.0]),
    "DATSGD, beta 0.9, warmup of 5 %": (DATSGD, FREE, "warmup", [0.1, 0.3, 1.0, 3.0]),
    "DATSGD, beta 0.9, weight decay": (DATSGD, FREE | DECAY, "constant", [0.1, 0.3, 1.0, 3.0]),
    "DATSGD, beta 0.9, momentum 0.9": (DATSGD, FREE | HEAVY, "constant", [0.01, 0.03, 0.1]),
    "DATSGD": (DATSGD, {}, "constant", [0.1, 0.3, 1.0]),
    "DATSGD, fixed(0.9), momentum 0.9": (
        *(DATSGD, HEAVY | {"averaging": "fixed(0.9)"}),
        *("constant", [0.001, 0.003, 0.01, 0.03]),
    ),
}


class Data:
    """Some images to train on, and all test images."""

    def __init__(self, folder: str | None) -> None:
        data = fashion_mnist.load(folder)
        own = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0))[:10_000]
        self.images, self.labels = data.images[own].float() / 255, data.labels[own]
        self.test_images, self.test_labels = data.test_images.float() / 255, data.test_labels

    def accuracy(self, model: nn.Module, optimizer: Any) -> float:
        with torch.no_grad():
            if isinstance(optimizer, Gossip):
                with optimizer.averaged():
                    return self._accuracy(model)
            return self._accuracy(model)

    def _accuracy(self, model: nn.Module) -> float:
        right: Tensor = model(self.test_images).argmax(1) == self.test_labels
        return 100 * float(right.double().mean())


def trained(data: Data, make: Any, options: dict[str, Any], schedule: str, lr: float, rounds: int) -> tuple[float, ...]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = make(model.parameters(), lr, **options)
    schedulers: dict[str, Any] = {
        "cosine": lambda: CosineAnnealingLR(optimizer, rounds),
        "warmup": lambda: LinearLR(optimizer, 0.01, total_iters=rounds // 20),
    }
    scheduler = schedulers[schedule]() if schedule in schedulers else None
    found = []
    for t in range(1, rounds + 1):
        batch = torch.randint(len(data.labels), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if t in (rounds // 2, rounds):
            found.append(data.accuracy(model, optimizer))
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of Fashion-MNIST's four files")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = Data(given.data)
    for name, (make, options, schedule, rates) in LINES.items():
        ends = {}
        for lr in rates:
            runs = []
            for seed in range(given.seeds):
                torch.manual_seed(seed)
                runs.append(trained(data, make, options, schedule, lr, given.rounds))
            ends[lr] = tuple(statistics.mean(column) for column in zip(*runs, strict=True))
        best = max(ends, key=lambda lr: ends[lr][1])
        cells = (f"{lr:g}: {half:.1f} {end:.1f}{'*' if lr == best else ''}" for lr, (half, end) in ends.items())
        print(f"{name:32} {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
