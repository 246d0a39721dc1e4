"""What ranks do in the tests of channels: each function runs in every process, after the fork."""

import os
import re
from contextlib import suppress
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch import topology as tp
from klatsch.optim import gossip
from klatsch.ranks import links, node
from tests.support import signs
from tests.support.on_ranks import simulate_on_ranks
from tests.support.processes import say
from tests.support.rank_scenarios import LR, RANK_RULES, group, train

SIZE = 4


class Pulls(klatsch.problems.Problem):
    """Every node is pulled to a point of its own, from round to round less; no draws, which take longer than rounds."""

    nodes, dim = SIZE, 260  # more than a block of 256 numbers with one scale

    def __init__(self):
        self.points = torch.randn(SIZE, self.dim, generator=torch.Generator().manual_seed(0)).double()

    def start(self):
        return torch.linspace(-1.0, 1.0, self.dim, dtype=torch.float64)

    def grad(self, x, t, nodes=None):
        points = self.points[list(range(SIZE) if nodes is None else nodes)]
        return (1 + 1 / t) * (x - (points[:, None] if x.ndim == 3 else points))

    def metrics(self, x):
        return {"size": x.square().sum(-1).mean(0)}


PROBLEM = Pulls()
ROUNDS = 8  # those 4 rounds late arrive, also with gossip in every 4th round only
LABELS = [*(name for name in klatsch.rules.RULES if not re.search("adam|muon", name)), "dat beta", "dat-d2 beta"]
LABELS += ["dat-adam v decay", "gt-adam", "dsgd shared"]
TRAVELS = [
    {"every": every, "late": late, "wire": wire}
    for every in (1, 4)
    for late in (0, 1, 4)
    for wire in ("float32", "bfloat16", "int8", "int4", "topk(0.1)")
]
CHANGING, ROUGH = ("one_peer_exponential", "base_graph"), "bfloat16"


@cache
def graphs():
    """The graphs over all channels that are defined on them."""
    ring = [tp.make("ring", SIZE, **travel) for travel in TRAVELS]
    complete = [tp.make("complete", SIZE, **travel) for travel in TRAVELS if travel["late"] == 4]  # one neighbour more
    changing = [tp.make(name, SIZE, **travel) for name in CHANGING for travel in TRAVELS if travel["wire"] != "float32"]
    lossy = [tp.make("ring", SIZE, loss=0.3, **travel) for travel in ({}, {"every": 2, "late": 1, "wire": ROUGH})]
    return [*ring, *complete, *changing, *lossy, tp.make("complete", SIZE, loss=0.7)]


def cases(labels=LABELS):
    """Rules over channels, on the graphs where both are defined: every rule over a ninth of them, each another one."""
    for label in labels:
        rule, options = RANK_RULES[label]
        made = klatsch.rules.make(rule, lr=LR, **options)
        defined = []
        for graph in graphs():
            with suppress(ValueError):
                made.check_graph(graph)
                defined.append(graph)
        for graph in defined[LABELS.index(label) % min(9, len(defined)) :: 9]:
            yield f"{label} | {graph.name}", made, graph


def channels(folder):
    """Every case as a study runs it: one network after the other over the same group."""
    rank, _ = group()
    found = {}
    for name, rule, graph in cases():
        result = simulate_on_ranks(PROBLEM, rule, graph, ROUNDS, record=[ROUNDS], group=dist.group.WORLD)
        if rank == 0:
            found[name] = result.output
    if rank == 0:
        torch.save(found, folder / "channels")


def channelled_optimizers(folder, device="cpu", batched=False):
    """As optimizers, in slices; some saved on their way and loaded into others.

    Batched: over the links of NCCL, which know no tags and rely on the order of messages. gloo stands in for NCCL,
    which takes one process per GPU.
    """
    rank, _ = group()
    node.BLOCK["cpu"] = 256  # two slices
    links.PIECE = 300  # bytes: several pieces per message, the last one shorter
    if batched:
        torch.cuda.current_device, torch.cuda.synchronize = lambda: 0, lambda device: None
        gossip.open_links = lambda group, own, *options: links.NcclLinks(group, own, *options[:3])
    found = {}
    for label, travel in (
        ("dat", {"late": 4, "wire": "int8"}),
        ("dat cta", {"wire": "int8"}),
        ("gt", {"every": 2, "late": 3, "wire": "int8"}),
        ("gt", {"wire": "int8"}),
        ("gt", {"wire": "int4"}),
        ("dsgd", {"late": 3, "wire": "int8", "topology": "one_peer_exponential"}),
        ("dat-d2 beta", {"every": 4, "late": 3, "wire": "bfloat16"}),
        ("dsgd", {"late": 1}),
        ("dat", {"wire": "topk(0.01)", "topology": "one_peer_exponential"}),
        ("gt", {"late": 1, "wire": signs.WIRE}),
    ):
        rule, options = RANK_RULES[label]

        def make(rule=rule, options=options, travel=travel):
            x = nn.Parameter(PROBLEM.start().to(device, copy=True))
            return x, klatsch.Gossip([x], klatsch.rules.make(rule, lr=LR, **options), **{"topology": "ring"} | travel)

        x, optimizer = make()
        train(optimizer, x, PROBLEM, rank, ROUNDS // 2)
        saved = optimizer.state_dict()
        train(optimizer, x, PROBLEM, rank, ROUNDS - ROUNDS // 2)
        y, again = make()
        again.load_state_dict(saved)
        train(again, y, PROBLEM, rank, ROUNDS - ROUNDS // 2)
        name = f"{label} | {optimizer.topology.name}"
        found[name] = {"x": x.detach().cpu(), "again": y.detach().cpu(), "bytes": optimizer.bytes_sent}
        found[name]["copies"] = len(optimizer.shares[0].node.memory.get("held", {}))
    torch.save(found, folder / f"optimizers-{rank}")
    say(folder, f"done-{rank}", os.getpid())


def estimates(folder, cases, dims):
    """Ranks that start at random points and do not move: their consensus, and its estimate after the first mix."""
    rank, _ = group()
    found = {}
    for dim in dims:
        for name, (rule, graph, travel) in cases.items():
            x = nn.Parameter(torch.randn(dim, generator=torch.Generator().manual_seed(rank)))
            made = klatsch.rules.make(rule, lr=1e-9)
            optimizer = klatsch.Gossip([x], made, graph, start_equal=False, **travel)
            before, exact, sent = optimizer.consensus(estimate=True), optimizer.consensus(), optimizer.bytes_sent
            for _ in range(1 + travel.get("late", 0)):
                x.grad = torch.zeros(dim)
                optimizer.step()
            between = optimizer.bytes_sent
            estimate = optimizer.consensus(estimate=True)
            assert optimizer.bytes_sent == between > sent
            found[f"{name} {dim}"] = [before, exact, estimate]
    torch.save(found, folder / f"estimates-{rank}")
