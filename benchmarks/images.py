"""Training M LeNets with their own parameters: the stack against a loop over modules, and against one large batch.

Run: .venv/bin/python benchmarks/images.py [--models 16] [--batch 32] [--threads 2] [--device cuda]

A round is the gradients of all models and a plain step. The ways take turns in one run, so that their ratios can be
compared: (a) a Python loop over M modules, (b) one LeNet with batch M x 32, which is the limit: the same arithmetic
with one set of parameters; the stack as klatsch runs it, and torch.func.vmap. The stack switches torch's oneDNN and
NNPACK convolutions off on a CPU; the others run with them, and once more without them. On a GPU the stack is compiled
and captured, as in `simulate`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import klatsch
from klatsch.problems import ImageClassification, Images, lenet
from klatsch.problems.stacks import Stacked

LR = 0.01


def data(samples: int) -> Images:
    """Noise of the right size: what is in the images does not matter for the time."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, 1, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    return Images(images, labels, images[:100], labels[:100])


def loop(M: int, batch: int, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """(a): one module after the other."""
    models = [lenet().to(images.device) for _ in range(M)]
    optimizers = [torch.optim.SGD(model.parameters(), LR) for model in models]

    def step() -> None:
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[i]), labels[i]).backward()
            optimizer.step()

    return step


def one(M: int, batch: int, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """(b): one module with all images."""
    model = lenet().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    flat, wanted = images.flatten(0, 1), labels.flatten()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(flat), wanted).backward()
        optimizer.step()

    return step


def vmap(M: int, batch: int, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """torch.func, which the stack uses for models that it does not know."""
    stacked = Stacked(lenet().to(images.device))
    stacked.layers = None
    x = stacked.start().expand(M, -1).clone()

    def step() -> None:
        leaf = x.detach().requires_grad_()
        logits = stacked(leaf, images)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch
        x.sub_(torch.autograd.grad(loss, leaf)[0], alpha=LR)

    return step


def stack(M: int, batch: int, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """The gradients of `ImageClassification`, drawing the images included."""
    device = images.device
    problem = ImageClassification(lenet, data(M * 10 * batch), M, alpha=100.0, batch=batch).to(torch.float32, device)
    x = problem.start().expand(M, 1, -1).clone()
    drawn = problem.draw(torch.arange(1, 11))
    clock = iter(range(1 << 62))

    def step() -> None:
        x.sub_(problem.gradient(x, drawn[next(clock) % 10]), alpha=LR)

    return step


WAYS = {"(a) loop over modules": loop, "(b) one LeNet, large batch": one, "vmap": vmap, "stack": stack}


@contextmanager
def plain_convolutions(on: bool) -> Iterator[None]:
    """Without oneDNN and NNPACK."""
    with ExitStack() as both:
        if on:
            both.enter_context(torch.backends.mkldnn.flags(enabled=False))
            both.enter_context(torch.backends.nnpack.flags(enabled=False))
        yield


def rates(M: int, batch: int, device: str, turns: int, off: bool) -> dict[str, float]:
    """Samples per second of every way, as medians of turns."""
    images = torch.randn(M, batch, 1, 28, 28, device=device)
    labels = torch.randint(0, 10, (M, batch), device=device)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with plain_convolutions(off):
        steps = {name: way(M, batch, images, labels) for name, way in WAYS.items()}
        for turn in range(turns + 1):  # the first one warms up
            for name, step in steps.items():
                began = time.perf_counter()
                for _ in range(3):
                    step()
                if device != "cpu":
                    torch.cuda.synchronize()
                if turn:
                    found[name].append(3 * M * batch / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in found.items()}


def captured(M: int, batch: int, rounds: int) -> float:
    """Samples per second of `simulate` on a GPU, with M models as the columns of eight nodes."""
    problem = ImageClassification(lenet, data(8 * 40 * batch), 8, alpha=100.0, batch=batch)
    rule: Any = klatsch.rules.make("dat", lr=[LR] * (M // 8), averaging="fixed(0.9)", momentum=0.9)
    graph = klatsch.topology.ring(8)
    choices: Any = {"record": [1], "dtype": torch.float32, "device": "cuda"}
    begun = klatsch.simulate(problem, rule, graph, 64, **choices)
    ended = klatsch.simulate(problem, rule, graph, 64 + rounds, after=begun, **choices)
    return rounds * M * batch / (ended.seconds - begun.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    where = torch.cuda.get_device_name() if given.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {given.models} models, batch {given.batch}\n")
    for off in (False, True) if given.device == "cpu" else (False,):
        found = rates(given.models, given.batch, given.device, given.turns, off)
        print("oneDNN and NNPACK off" if off else "default")
        limit, slow = found["(b) one LeNet, large batch"], found["(a) loop over modules"]
        for name, rate in found.items():
            print(f"  {name:28} {rate:12,.0f} samples/s  {rate / limit:5.2f} of (b)  {rate / slow:5.2f} times (a)")
    if given.device != "cpu":
        print("\nsimulate, compiled and captured")
        for M in (144, 288, 432, 576, 864):
            print(f"  {M:4} models {captured(M, given.batch, 320):14,.0f} samples/s", flush=True)


if __name__ == "__main__":
    main()
