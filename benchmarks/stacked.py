"""How fast the simulator is: DAT on the paper's least squares, beside a large GEMM and a loop over agents, in one run.

    .venv/bin/python benchmarks/stacked.py

The work of a round is counted as that of its gradients, 2 M C d² operations; the rule, mixing and noise are overhead.
Machines are shared and noisy: every measurement stands between two of the GEMM, and what counts is the ratio.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

import klatsch
from klatsch import native, problems, rules, topology
from klatsch.native import cores

DIM, REPEATS = 50, 5


def gemm_rate() -> float:
    """Operations per second of a large float32 product on all cores."""
    a = torch.randn(2048, 2048)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    began = time.perf_counter()
    for _ in range(8):
        torch.mm(a, a, out=out)
    return 8 * 2 * 2048**3 / (time.perf_counter() - began)


class Agent:
    """One node as simulators of this field usually write it: an object with its vectors and a box of messages."""

    def __init__(self, number: int, H: np.ndarray, h: np.ndarray, weights: dict[int, float]) -> None:
        self.number, self.H, self.h, self.weights = number, H, h, weights
        self.w, self.x = np.zeros(DIM, np.float32), np.zeros(DIM, np.float32)
        self.messages: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.random = np.random.default_rng(number)

    def step(self, lr: float, t: int) -> tuple[np.ndarray, np.ndarray]:
        noise = self.random.standard_normal(DIM, dtype=np.float32) / np.float32(DIM**0.5)
        self.w = self.w - np.float32(lr) * (self.H @ self.x - self.h + noise)
        self.x = self.x + (self.w - self.x) / np.float32(t)
        return self.w, self.x

    def average(self) -> None:
        self.w = sum(self.weights[j] * w for j, (w, _) in self.messages.items())
        self.x = sum(self.weights[j] * x for j, (_, x) in self.messages.items())
        self.messages.clear()


def agents_loop(problem: problems.LeastSquares, graph: klatsch.Topology, rounds: int) -> float:
    """Seconds per round of the loop over agents, for one column."""
    H, rows, scale, _ = problem.to(torch.float32, torch.device("cpu")).quadratic()
    P = graph.matrix(1)
    agents = [
        Agent(
            i, H[i].numpy(), -(scale[0] @ rows[i]).numpy(), {j: np.float32(P[i, j]) for j in [i, *graph.neighbors(i)]}
        )
        for i in range(graph.size)
    ]
    began = time.perf_counter()
    for t in range(1, rounds + 1):
        for agent in agents:
            sent = agent.step(1e-4, t)
            for other in agent.weights:  # a symmetric graph: whom it hears hears it
                agents[other].messages[agent.number] = sent
        for agent in agents:
            agent.average()
    return (time.perf_counter() - began) / rounds


def simulated(
    problem: problems.Problem, graph: klatsch.Topology, columns: int, rounds: int, engine: str, device: str = "cpu"
) -> float:
    """Seconds per round of the simulator."""
    rule = rules.make("dat", np.geomspace(1e-6, 1e-4, columns).tolist())
    result = klatsch.simulate(
        problem, rule, graph, rounds, record=1, dtype=torch.float32, engine=engine, device=device, progress=False
    )
    return result.seconds / rounds


def table() -> None:
    engines = ["torch"] if native.why_not() else ["fused", "torch"]
    print(f"float32, d = {DIM}, ring, DAT; {cores()} cores; median of {REPEATS}, in brackets the smallest and largest")
    head = f"{'M':>5}{'C':>5}  {'engine':8}{'node-steps/s':>14}{'share of the GEMM rate':>26}"
    print(f"{head}{'GF/s':>7}{'x agents':>10}")
    for M in (4, 25, 100):
        problem, graph = problems.LeastSquares(M), topology.ring(M)
        loop = statistics.median(agents_loop(problem, graph, max(3, 4000 // M)) for _ in range(3))
        print(f"{M:>5}{1:>5}  {'agents':8}{M / loop:>14,.0f}{2 * M * DIM**2 / loop / gemm_rate():>14.4f}")
        for C in (1, 7, 28, 168):
            for engine in engines:
                rounds = min(20_000, int((1e9 if engine == "fused" else 2e8) / (M * C * 50 + 5e4)))
                shares, rates, steps = [], [], []
                simulated(problem, graph, C, rounds // 10 + 2, engine)
                for _ in range(REPEATS):
                    before = gemm_rate()
                    seconds = simulated(problem, graph, C, rounds, engine)
                    rates.append((before + gemm_rate()) / 2)
                    steps.append(M * C / seconds)
                    shares.append(2 * DIM**2 * steps[-1] / rates[-1])
                middle = statistics.median(steps)
                share = f"{statistics.median(shares):.3f} ({min(shares):.3f}-{max(shares):.3f})"
                print(
                    f"{M:>5}{C:>5}  {engine:8}{middle:>14,.0f}{share:>26}{statistics.median(rates) / 1e9:>7.0f}"
                    f"{middle * loop / M:>10,.0f}",
                    flush=True,
                )


def logistic() -> None:
    print("\nlogistic regression, 20 parameters, ring, DAT, float32: microseconds of a round, and their ratio")
    print(f"{'M':>5}{'batch':>7}{'C':>5}{'torch':>10}{'fused':>9}{'ratio':>22}")
    for M, batch, C in ((8, 1, 7), (8, 16, 7), (16, 1, 28), (16, 16, 28), (64, 1, 28), (64, 16, 28), (16, 16, 168)):
        problem, graph = problems.LogisticRegression(M, batch=batch), topology.ring(M)
        turns = []
        for _ in range(REPEATS):
            plain = simulated(problem, graph, C, 300, "torch")
            turns.append((plain, simulated(problem, graph, C, 6000, "fused")))
        torch_us, fused_us = (statistics.median(turn) * 1e6 for turn in zip(*turns, strict=True))
        ratios = sorted(plain / fused for plain, fused in turns)
        ratio = f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        print(f"{M:>5}{batch:>7}{C:>5}{torch_us:>10.0f}{fused_us:>9.1f}{ratio:>22}", flush=True)


def growth() -> None:
    print("\nseconds per round on a ring, DAT, float32, 7 columns")
    sizes, found = (100, 300, 1000, 3000, 10_000), []
    for M in sizes:
        problem, graph = problems.LeastSquares(M), topology.ring(M)
        rounds = max(20, 60_000 // M)
        seconds = statistics.median(simulated(problem, graph, 7, rounds, "auto") for _ in range(3))
        found.append(seconds)
        print(f"{M:>7}  {seconds * 1e6:>10,.0f} us  {seconds / M * 1e9:>8,.0f} ns per node", flush=True)
    slope = np.polyfit(np.log(sizes), np.log(found), 1)[0]
    print(f"grows like M^{slope:.2f}")


def gpu() -> None:
    print(f"\n{torch.cuda.get_device_name()}: microseconds per round, DAT on the ring, float32")
    print(f"{'M':>7}{'C':>5}{'torch':>10}{'cuda graph':>12}{'cuda kernel':>13}{'ratio':>8}{'node-steps/s':>16}")
    for M, C in [(M, C) for M in (4, 25, 100) for C in (1, 28, 168)] + [(10_000, 7)]:
        problem, graph = problems.LeastSquares(M), topology.ring(M)
        found = []
        for engine, rounds in (("torch", 2000), ("cuda graph", 8000), ("cuda kernel", 8000)):
            simulated(problem, graph, C, 200, engine, "cuda")
            rounds = rounds if M < 1000 else rounds // 10
            found.append(statistics.median(simulated(problem, graph, C, rounds, engine, "cuda") for _ in range(3)))
        plain, captured, best = found
        ratio = f"{captured / best:>8.1f}{M * C / best:>16,.0f}"
        print(f"{M:>7}{C:>5}{plain * 1e6:>10,.0f}{captured * 1e6:>12,.1f}{best * 1e6:>10,.1f}{ratio}", flush=True)


if __name__ == "__main__":
    reason = native.why_not()
    if reason:
        print(f"without the fused engine: {reason}")
    table()
    if not reason:
        logistic()
    growth()
    if torch.cuda.is_available():
        gpu()
