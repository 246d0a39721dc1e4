"""Training M GPTs with their own parameters: the stack against one GPT on all of their text, and a loop over modules.

Run: .venv/bin/python benchmarks/language.py [--models 8] [--batch 4] [--width 256 --depth 4 --heads 4] [--threads 2]
     .venv/bin/python benchmarks/language.py --device cuda --batch 16 --rounds 20 [--autocast]

A round is the gradients of all models and a plain step. The ways take turns in one run, so that their ratios can be
compared: one GPT with batch M x 4, which is the limit: the same arithmetic with one set of parameters; a Python loop
over M modules; the stack as klatsch runs it. On a GPU each round is captured as a CUDA graph, except that of the loop.
On a CPU, which others may use too, processor time counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from klatsch.problems import Language

LR = 0.01
LIMIT, LOOP, STACK = "one GPT, large batch", "loop over modules", "stack"


class GPT(nn.Module):
    """The model of `Language` as one would write it with torch.nn."""

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.bytes, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(context, width))
        nn.init.normal_(self.bytes.weight, std=0.02)
        sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(*s, bias=False) for s in sizes) for _ in range(depth))

    def loss(self, windows: Tensor) -> Tensor:
        """The mean cross-entropy over windows of T + 1 bytes, (B, T + 1)."""
        given, wanted = windows[:, :-1].long(), windows[:, 1:].long()
        B, T = given.shape
        v = self.bytes(given) + self.places
        for block in self.blocks:
            inner, out, up, down = block.children()
            parts = (p.view(B, T, self.heads, -1).transpose(1, 2) for p in inner(self.norm(v)).chunk(3, dim=-1))
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            v = v + out(mixed.transpose(1, 2).reshape(B, T, -1))
            v = v + down(functional.gelu(up(self.norm(v))))
        said = self.norm(v) @ self.bytes.weight.T
        return functional.cross_entropy(said.flatten(0, 1), wanted.flatten())


def step_of(model: GPT, windows: Tensor, autocast: bool) -> Callable[[], None]:
    """A step of one module."""
    parameters = list(model.parameters())

    def step() -> None:
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = model.loss(windows)
        with torch.no_grad():
            torch._foreach_add_(parameters, torch.autograd.grad(loss, parameters), alpha=-LR)

    return step


def stack_of(problem: Language) -> Callable[[], None]:
    """A step of the stack, with the text of one round."""
    x = problem.start().expand(problem.nodes, 1, -1).clone()
    drawn = problem.draw(torch.tensor([1]))[0]

    def step() -> None:
        x.sub_(problem.gradient(x, drawn), alpha=LR)

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A step as one launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def ways(given: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """The step of each way, on the same text."""
    device = torch.device(given.device)
    size = {"context": given.context, "width": given.width, "depth": given.depth, "heads": given.heads}
    problem = Language(given.models, alpha=100.0, batch=given.batch, autocast=given.autocast, test=1, **size)
    problem = problem.to(torch.float32, device)
    windows = problem.data.learnt[problem.draw(torch.tensor([1]))[0]]  # (M, B, T + 1)
    modules = [step_of(GPT(**size).to(device), own, given.autocast) for own in windows]

    def loop() -> None:
        for step in modules:
            step()

    one, stack = step_of(GPT(**size).to(device), windows.flatten(0, 1), given.autocast), stack_of(problem)
    print(f"{problem.dim:,} parameters each, batch {given.batch}, context {given.context}\n")
    if device.type == "cuda" and not given.launched:
        one, stack = captured(one), captured(stack)
    return {LIMIT: one, LOOP: loop, STACK: stack}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"models": 8, "batch": 4, "context": 256, "width": 256, "depth": 4, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="in a turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", action="store_true", help="products in bfloat16")
    parser.add_argument("--launched", action="store_true", help="without CUDA graphs: large models need none")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    cuda = given.device != "cpu"
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {'bfloat16' if given.autocast else 'float32'}, {given.models} models")
    steps, clock = ways(given), time.perf_counter if cuda else time.process_time
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(given.turns + 1):  # the first one warms up
        for name, step in steps.items():
            began = clock()
            for _ in range(given.rounds):
                step()
            if cuda:
                torch.cuda.synchronize()
            taken = clock() - began
            if turn:
                found[name].append(given.rounds * given.models * given.batch * given.context / taken)
    for name, rates in found.items():
        ratios = [rate / limit for rate, limit in zip(rates, found[LIMIT], strict=True)]
        span = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {name:22} {statistics.median(rates):14,.0f} bytes/s  {statistics.median(ratios):5.2f} of one {span}")


if __name__ == "__main__":
    main()
