"""What the update rules computed while each was written by hand: the numbers that rules made of parts must reproduce.

`fixtures/numbers_before.safetensors` holds, for every case of `CASES`, the state of all nodes after 200 rounds in
float64, as (nodes, columns, parameters):

    "dat averaging=linear order=cta momentum=0.9 | ring | output"     what the rule gives out
    "dat averaging=linear order=cta momentum=0.9 | ring | iterate"    w, for push-sum rules divided by the weight

It was made by klatsch 0.2.0.dev0 as of commit e772e06, whose nine rules were still the hand-written ones of 0.1.0, on
x86-64 with torch 2.13.0 and `simulate(..., engine="torch")`. Nothing here can make it again, and nothing should: it is
there to compare with. A plain loop with dense products gave the same to 1e-12 of an entry's largest number.

A rule of `CASES` is a name that `make` takes, except that there were two kinds of D2, which the graph decided:

    "d2"              D2 with the lazy matrix (I + P) / 2 in place of P: it ran on `topology.lazy(graph)`
    "d2 published"    D2 with P itself, as in the paper of Tang et al.; both graphs have eigenvalues above -1/3
"""

from pathlib import Path

import numpy as np

from klatsch import problems, rules
from klatsch import topology as tp

FILE = Path(__file__).parents[1] / "fixtures" / "numbers_before.safetensors"
ROUNDS = 200


def pushing_ring(n=8):
    """A directed ring on which odd nodes also send two ahead: its columns sum to 1, its rows do not."""
    out = np.zeros((n, n))
    for j in range(n):
        out[[j, (j + 1) % n, *([(j + 2) % n] if j % 2 else [])], j] = 1
    return tp.from_matrices(out / out.sum(axis=0), stochastic="columns", name="pushing ring")


GRAPHS = {
    "ring": tp.ring(9),
    "torus": tp.torus(rows=3, cols=3),
    "exponential": tp.exponential(8),
    "base graph": tp.base_graph(9, k=2),
    "directed ring": tp.directed_ring(9),
    "pushing ring": pushing_ring(),
}
SYMMETRIC = ("ring", "torus")  # and the same in every round
DOUBLY = (*SYMMETRIC, "exponential", "base graph", "directed ring")

VARIANTS = [  # rule, options, the graphs that it accepts
    ("dsgd", {}, DOUBLY),
    ("dsgd", {"momentum": 0.9}, DOUBLY),
    ("dsgd", {"average": "constant"}, DOUBLY),
    *(
        ("dat", {"averaging": averaging, "order": order, **momentum}, DOUBLY)
        for averaging in ("constant", "linear", "fixed(0.9)")
        for order in ("atc", "cta")
        for momentum in ({}, {"momentum": 0.9})
    ),
    ("d2", {}, SYMMETRIC),
    ("d2 published", {}, SYMMETRIC),
    ("gt", {}, DOUBLY),
    ("gt", {"average": "linear"}, DOUBLY),
    ("sgp", {}, tuple(GRAPHS)),
    ("decentlam", {"momentum": 0.9}, SYMMETRIC),
    ("decentlam", {"momentum": 0.5}, SYMMETRIC),
    ("dat-gt", {"averaging": "constant"}, DOUBLY),
    ("dat-gt", {"averaging": "linear"}, DOUBLY),
    ("dat-d2", {"averaging": "constant"}, SYMMETRIC),
    ("dat-d2", {"averaging": "fixed(0.9)"}, SYMMETRIC),
    ("dat-sgp", {"averaging": "constant"}, tuple(GRAPHS)),
]
SCHEDULED = [  # the variants that also run with a learning rate that falls: every rule, and momentum
    ("dsgd", {}),
    ("dsgd", {"momentum": 0.9}),
    ("dat", {"averaging": "constant", "order": "atc"}),
    ("dat", {"averaging": "linear", "order": "cta", "momentum": 0.9}),
    ("d2", {}),
    ("d2 published", {}),
    ("gt", {}),
    ("sgp", {}),
    ("decentlam", {"momentum": 0.9}),
    ("dat-gt", {"averaging": "linear"}),
    ("dat-d2", {"averaging": "constant"}),
    ("dat-sgp", {"averaging": "constant"}),
]


def rates(rule, options):
    """The learning rates of a variant, all stable: one for each of two columns, and one that falls, for one column."""
    largest = 5e-3
    if options.get("averaging") == "linear":
        largest /= 10  # the steps grow
    if (rule, options.get("momentum")) == ("dat", 0.9) or (rule, options.get("averaging")) == ("dat-gt", "linear"):
        largest /= 10
    return [largest / 5, largest], lambda t: largest / (1 + t / 100)


CASES = [  # rule, options, graph
    (rule, {**options, "lr": lr}, graph)
    for rule, options, graphs in VARIANTS
    for lr in rates(rule, options)[: 2 if (rule, options) in SCHEDULED else 1]
    for graph in graphs
]


def title(rule, options, graph):
    """The name of a case: it tells of the learning rate only where that falls."""
    told = {key: value for key, value in options.items() if key != "lr"}
    told |= {"lr": "schedule"} if callable(options["lr"]) else {}
    return " ".join([rule, *(f"{key}={value}" for key, value in told.items())]) + f" | {graph}"


def problem(graph):
    """The data, for as many nodes as a graph has."""
    return problems.LeastSquares(graph.size, dim=6, noise=1.0, heterogeneity=1.0, seed=0)


def numbers(case, simulate, **choices):
    """Both entries of a case by name, as the rules of today compute them; nothing where `simulate` gives nothing."""
    rule, options, graph = case
    made = rules.make("d2", lazy=False, **options) if rule == "d2 published" else rules.make(rule, **options)
    result = simulate(problem(GRAPHS[graph]), made, GRAPHS[graph], ROUNDS, [ROUNDS], **choices)
    if result is None:
        return {}
    found = {"output": result.output, "iterate": made.iterate(result.state)}
    return {f"{title(*case)} | {part}": value for part, value in found.items()}
