"""What an optimizer costs on a GPU: its own kernels, and what is left of its messages behind the gradient.

Run: torchrun --nproc-per-node 2 benchmarks/gpu.py [--micro 24] [--kernels] [--trace FILE]
     .venv/bin/python benchmarks/gpu.py --draw FILE docs/images/gpu-step.png

Two ranks over gloo train a GPT of 100 million parameters. Rank 0 is on the GPU, and measured; rank 1 is on the CPU, as
if on another machine, and has no data: it only gossips, so that nothing else uses the GPU. In turns in the same
process, on the same gradients: torch's fused AdamW, and klatsch's optimizers. Own time is the time of all kernels
that a step starts, without copies between the GPU and the machine's memory, which are messages; it is also given in
units of fused AdamW's. A step takes the gradient of --micro batches of 16 windows of 1,024 tokens, in bfloat16; with
--micro 0 there are no whole steps. --kernels also lists the kernels of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import klatsch

WORDS, WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 20480, 768, 12, 12, 1024, 16
ROUNDS = 6  # measured; the first two warm up
OPTIMIZERS: dict[str, Callable[[Any], klatsch.Gossip]] = {
    "GossipSGD": lambda p: klatsch.optim.GossipSGD(p, lr=1e-3),
    "DATSGD, beta 0.9": lambda p: klatsch.optim.DATSGD(p, lr=1e-3, beta=0.9),
    "DATSGD, beta 0.9, cta": lambda p: klatsch.optim.DATSGD(p, lr=1e-3, beta=0.9, order="cta"),
    "DATAdamW": lambda p: klatsch.optim.DATAdamW(p, lr=1e-4),
    "DATAdamW, cta": lambda p: klatsch.optim.DATAdamW(p, lr=1e-4, order="cta"),
    "GossipAdamW": lambda p: klatsch.optim.GossipAdamW(p, lr=1e-4),
    "GossipAdamW, cta": lambda p: klatsch.optim.GossipAdamW(p, lr=1e-4, order="cta"),
    "GossipAdamW, cta, not shared": lambda p: klatsch.optim.GossipAdamW(p, lr=1e-4, order="cta", shared=False),
    "GossipSGD, int8": lambda p: klatsch.optim.GossipSGD(p, lr=1e-3, wire="int8"),
    "DATSGD, beta 0.9, int8": lambda p: klatsch.optim.DATSGD(p, lr=1e-3, beta=0.9, wire="int8"),
    "DATSGD, beta 0.9, bfloat16": lambda p: klatsch.optim.DATSGD(p, lr=1e-3, beta=0.9, wire="bfloat16"),
    "DATSGD, beta 0.9, late": lambda p: klatsch.optim.DATSGD(p, lr=1e-3, beta=0.9, every=2, late=1),
    "DATSGD, beta 0.9, late, int8": lambda p: klatsch.optim.DATSGD(p, lr=1e-3, beta=0.9, every=2, late=1, wire="int8"),
}


class Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], HEADS, WIDTH // HEADS
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """101 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.last = nn.Sequential(*(Block() for _ in range(DEPTH))), nn.LayerNorm(WIDTH)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.last(self.blocks(self.words(tokens[:, :-1]) + self.places.weight)) @ self.words.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradient(model: nn.Module, micro: int) -> None:
    """Add up the gradients of some batches."""
    device = next(model.parameters()).device
    for _ in range(micro):
        tokens = torch.randint(WORDS, (BATCH, CONTEXT + 1), device=device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens) / micro
        loss.backward()


def profiled(work: Callable[[], object], file: str) -> list[dict[str, Any]]:
    """What torch.profiler sees on the GPU. With ProfilerActivity.CPU it crashes where other threads work."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    found.export_chrome_trace(file)
    with open(file) as opened:
        events = json.load(opened)["traceEvents"]
    os.remove(file)
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")]


def own_kernels(step: Callable[[], object]) -> list[tuple[str, float]]:
    """The kernels that a step starts, in order: names and microseconds."""
    events = [e for e in profiled(step, f"{tempfile.gettempdir()}/klatsch-gpu.json") if e["cat"] == "kernel"]
    return [(e["name"], e["dur"]) for e in sorted(events, key=lambda e: e["ts"])]


def steps_of(model: nn.Module, optimizer: Any, rank: int, micro: int, lists: bool) -> dict[str, float]:
    """Milliseconds of a step's kernels, and seconds of whole steps; rank 1 takes part without data.

    Where nodes talk in every other round only, it is the mean of two rounds.
    """
    found: dict[str, float] = {"seconds": 0.0, "waited": 0.0}
    kernels = []
    for _ in range(ROUNDS):
        if rank == 0:
            kernels.append(own_kernels(optimizer.step))
        else:
            optimizer.step()
    if rank == 0:
        own = [sum(time for _, time in step) / 1e3 for step in kernels[2:]]
        found["kernels"] = statistics.median([(a + b) / 2 for a, b in pairwise(own)])
        found["count"] = statistics.mean(map(len, kernels[2:]))
        for name, took in kernels[-1] + kernels[-2] if lists else ():
            if took > 10.0:  # the others read single numbers
                print(f"    {name[:70]:72}{took:9.1f} us")
    if not micro:
        return found
    for k in range(ROUNDS):
        if rank == 0:
            if k == 2:
                torch.cuda.synchronize()
                began, before = time.perf_counter(), getattr(optimizer, "seconds_waited", 0.0)
            gradient(model, micro)
        optimizer.step()
        if rank == 0:
            optimizer.zero_grad()
    if rank == 0:
        torch.cuda.synchronize()
        found["seconds"] = (time.perf_counter() - began) / (ROUNDS - 2)
        found["waited"] = (getattr(optimizer, "seconds_waited", 0.0) - before) / (ROUNDS - 2)
    return found


def traced(model: nn.Module, optimizer: Any, micro: int, file: str) -> None:
    """Two steps as torch.profiler sees them, in milliseconds."""

    def steps() -> None:
        for _ in range(2):
            gradient(model, micro)
            optimizer.step()
            optimizer.zero_grad()

    events = profiled(steps, file + ".whole")
    first = min(e["ts"] for e in events)
    kept = [
        {"name": e["name"][:60], "kind": e["cat"], "at": (e["ts"] - first) / 1e3, "ms": e["dur"] / 1e3} for e in events
    ]
    with open(file, "w") as opened:
        json.dump(kept, opened)


def draw(file: str, picture: str) -> None:
    """A trace as a picture: what the GPU and its copies did while two steps passed."""
    from matplotlib.figure import Figure

    from klatsch import pictures

    with open(file) as opened:
        events = json.load(opened)
    rows: dict[str, list[tuple[float, float]]] = {"messages to the GPU": [], "messages from the GPU": []}
    rows |= {"optimizer": [], "gradient": []}
    for e in events:
        if e["kind"] == "gpu_memcpy" and e["ms"] > 1.0:
            rows[f"messages {'from' if 'DtoH' in e['name'] else 'to'} the GPU"].append((e["at"], e["ms"]))
        elif e["kind"] == "kernel":
            rows["optimizer" if e["name"].startswith("update") else "gradient"].append((e["at"], e["ms"]))
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    step = rows["optimizer"][0][0]
    for axis, title, ends in zip(axes, ("two steps", "around the first"), (None, (step - 5, step + 20)), strict=True):
        for k, bars in enumerate(rows.values()):
            axis.broken_barh(
                bars, (k - 0.35, 0.7), color=f"C{k}", linewidth=0.6 if ends is None else 0.0, edgecolor=f"C{k}"
            )
        axis.set_xlim(ends)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("milliseconds")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), list(rows))
    pictures.save(figure, Path(picture), dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro", type=int, default=24, help="batches per gradient")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of two steps")
    parser.add_argument("--trace", help="a file for what torch.profiler sees of two steps of DATSGD, cta")
    parser.add_argument("--draw", nargs=2, metavar=("TRACE", "PICTURE"))
    given = parser.parse_args()
    if given.draw:
        draw(*given.draw)
        return
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = "cuda" if rank == 0 else "cpu"
    torch.manual_seed(0)
    model = GPT().to(device)
    if rank == 0:
        gradient(model, 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        gradient(model, given.micro)
        torch.cuda.synchronize()
        alone = time.perf_counter() - began
        numbers = sum(p.numel() for p in model.parameters())
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {numbers / 1e6:.0f} M parameters")
        print(f"gradient of {given.micro} batches alone: {alone * 1e3:.0f} ms")
        fused = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        base = steps_of(model, fused, rank, given.micro, given.kernels)
        print(f"{'':28}{'kernels':>8}{'own ms':>9}{'x AdamW':>9}{'step ms':>9}{'waited ms':>11}")
        print(
            f"{'fused AdamW':28}{base['count']:8.0f}{base['kernels']:9.2f}{1:9.2f}{base['seconds'] * 1e3:9.0f}",
            flush=True,
        )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for name, make in OPTIMIZERS.items():
        optimizer = make(model.parameters())
        found = steps_of(model, optimizer, rank, given.micro, given.kernels)
        if rank == 0:
            own, ratio = found["kernels"], found["kernels"] / base["kernels"]
            whole, waited = found["seconds"] * 1e3, found["waited"] * 1e3
            print(f"{name:28}{found['count']:8.0f}{own:9.2f}{ratio:9.2f}{whole:9.0f}{waited:11.1f}", flush=True)
        if given.trace and name == "DATSGD, beta 0.9, cta":
            if rank == 0:
                traced(model, optimizer, given.micro, given.trace)
            else:
                optimizer.step()
                optimizer.step()
        optimizer.finish()
        del optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
