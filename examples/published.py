"""Rules from the literature, written as your own: NIDS and ProxSkip. docs/own.md says what a rule may do."""

from dataclasses import dataclass

import numpy as np

from klatsch import topology
from klatsch.rules import Rule


@dataclass(frozen=True)
class NIDS(Rule):
    """NIDS: minimises the mean of f_i(x) + l1 |x|_1, exactly even on heterogeneous data.

        v = 2 w - z - lr g - y;   y <- y - flow(v) / 2;   z <- w - lr g - y;   w <- prox(z)

    Without l1 it is `d2`.

    References:
        Li, Shi and Yan, "A decentralized proximal-gradient method with network independent step-sizes", 2019.
    """

    lr: float
    l1: float = 0.0

    def init(self, x):
        return {"w": x, "z": x, "y": 0 * x}

    def update(self, s, grad, flow, t, lr):
        (f,) = flow(2 * s["w"] - s["z"] - lr * grad - s["y"])
        y = s["y"] - f / 2
        z = s["w"] - lr * grad - y
        return {"w": z.sign() * (z.abs() - lr * self.l1).clamp(min=0.0), "z": z, "y": y}

    def check_graph(self, graph, name=""):
        if graph.changes or not graph.symmetric or graph.every > 1 or graph.late:
            raise ValueError(f"{name or self.name} on {graph.name}: give one symmetric matrix for all rounds")


@dataclass(frozen=True)
class ProxSkip(Rule):
    """Decentralized ProxSkip: gossip in a share p of the rounds, chosen by a coin that all nodes share.

        u = w - lr (g - h);   f = flow(u) / 2;   w <- u + f;   h <- h + p f / lr

    A rule draws nothing itself: the coin is the graph's, as in `coins`. With gossip in every H-th round and p = 1 / H
    it is `d2` on a graph such as ring/H.

    References:
        Mishchenko et al., "ProxSkip: yes! Local gradient steps provably lead to communication acceleration! Finally!",
        2022, with gamma tau = 1/2.
    """

    lr: float
    p: float = 0.2

    def init(self, x):
        return {"w": x, "h": 0 * x}

    def update(self, s, grad, flow, t, lr):
        u = s["w"] - lr * (grad - s["h"])
        (f,) = flow(u)
        return {"w": u + f / 2, "h": s["h"] + self.p / (2 * lr) * f}


def coins(n, p=0.2, rounds=500, seed=0):
    """A ring that gossips in a random share p of the rounds; the draw repeats after `rounds` rounds."""
    ring, alone = topology.ring(n).matrix(1).toarray(), np.eye(n)
    heads = np.random.default_rng(seed).random(rounds) < p
    return topology.from_matrices([ring if head else alone for head in heads], name="coins")
