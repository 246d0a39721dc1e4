"""What ranks do in the tests: each function runs in every process, after the fork."""

import os

import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch.problems import LeastSquares
from klatsch.topology import lazy, make
from tests.ranks import say

RANK_RULES = {
    "dsgd": ("dsgd", {}),
    "dsgd momentum": ("dsgd", {"momentum": 0.9, "average": "constant"}),
    "dat": ("dat", {}),
    "dat linear momentum": ("dat", {"averaging": "linear", "momentum": 0.5}),
    "dat cta": ("dat", {"order": "cta"}),
    "dat fixed cta": ("dat", {"order": "cta", "averaging": "fixed(0.9)", "momentum": 0.5}),
    "d2": ("d2", {}),
    "gt": ("gt", {}),
    "gt average": ("gt", {"average": "linear"}),
    "sgp": ("sgp", {}),
    "decentlam": ("decentlam", {"momentum": 0.5}),
    "dat-gt": ("dat-gt", {}),
    "dat-d2": ("dat-d2", {}),
    "dat-sgp": ("dat-sgp", {}),
}
RANK_GRAPHS = ("ring", "torus", "one_peer_exponential", "base_graph", "directed_ring")
ROUNDS, LR = 50, 1e-3


def graph_of(rule, name, size):
    graph = make(name, size)
    return lazy(graph) if rule == "d2" and graph.symmetric and graph.period == 1 else graph


def problem_of(size, dim=5):
    return LeastSquares(size, dim=dim, noise=1.0, heterogeneity=1.0, seed=3)


def group():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def train(optimizer, parameter, problem, rank, rounds):
    """Rounds of the problem's own stochastic gradients."""
    for _ in range(rounds):
        t = optimizer.rounds + 1
        parameter.grad = problem.grad(parameter.detach()[None].double(), t, [rank])[0].to(parameter.dtype)
        optimizer.step()


def parity(folder):
    """Every rule on every graph that it is defined on, in one group after the other."""
    rank, size = group()
    found = {}
    for label, (rule, options) in RANK_RULES.items():
        for name in RANK_GRAPHS:
            algorithm, graph = klatsch.algorithms.make(rule, lr=LR, **options), graph_of(rule, name, size)
            try:
                algorithm.check_graph(graph)
            except ValueError:
                continue
            problem = problem_of(size)
            x = nn.Parameter(problem.start().clone())
            optimizer = klatsch.Gossip([x], algorithm, graph)
            train(optimizer, x, problem, rank, ROUNDS)
            found[f"{label} | {name}"] = torch.stack([x.detach(), optimizer.output()[0]])
    torch.save(found, folder / f"parity-{rank}")
    say(folder, f"done-{rank}", os.getpid())


def micro(folder, d, rounds):
    import time

    rank, size = group()
    if rank == 0:
        print(f"-- {size} ranks, {d} numbers")
    x = nn.Parameter(torch.randn(d))
    x.grad = torch.randn(d)
    for label, (rule, options) in {"dsgd": ("dsgd", {}), "dat": ("dat", {}), "cta": ("dat", {"order": "cta"})}.items():
        o = klatsch.Gossip([x], klatsch.algorithms.make(rule, lr=LR, **options), "ring")
        for _ in range(3):
            o.step()
        dist.barrier()
        b = time.perf_counter()
        for _ in range(rounds):
            o.step()
        dist.barrier()
        e = time.perf_counter()
        if rank == 0:
            print(f"{label:6} {1e3 * (e - b) / rounds:.3f} ms, waited {1e3 * o.seconds_waited / (rounds + 3):.3f}")
    # bare
    peers = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    v = torch.randn(d)
    bufs = [torch.empty(d) for _ in peers]
    dist.barrier()
    b = time.perf_counter()
    for _ in range(rounds):
        ws = [dist.irecv(m, p) for m, p in zip(bufs, peers)] + [dist.isend(v, p) for p in peers]
        for w in ws:
            w.wait()
        u = v.clone()
        for m in bufs:
            u.add_(m - v, alpha=1 / 3)
        v = u - 0.001 * x.grad
    dist.barrier()
    e = time.perf_counter()
    if rank == 0:
        print(f"bare   {1e3 * (e - b) / rounds:.3f} ms")
    p = x.detach().clone()
    b = time.perf_counter()
    for _ in range(rounds):
        p.add_(x.grad, alpha=-0.1)
    if rank == 0:
        print(f"sgd    {1e3 * (time.perf_counter() - b) / rounds:.3f} ms")


def prof(folder, d, rounds):
    import cProfile, pstats

    rank, size = group()
    x = nn.Parameter(torch.randn(d))
    x.grad = torch.randn(d)
    o = klatsch.Gossip([x], klatsch.algorithms.make("dsgd", lr=LR), "ring")
    for _ in range(3):
        o.step()
    pr = cProfile.Profile()
    pr.enable()
    for _ in range(rounds):
        o.step()
    pr.disable()
    if rank == 0:
        pstats.Stats(pr).sort_stats("tottime").print_stats(22)
