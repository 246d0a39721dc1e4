"""Small GPTs on text that differs between nodes: which gossip Adam, on which networks, over which links.

Three studies of the same runs, which `klatsch reproduce language` does in turn: `language-rules`, `language-links` and
`language-sizes`. All learning rates run in full with two seeds; the best one then with the third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from klatsch.report import figures, link_costs
from klatsch.report.claims import Answer, asks
from klatsch.report.entries import Content, Said, Target, said
from klatsch.study.choices import Row

NEAR, LEVEL = 0.03, 0.01  # bits per byte
ROUNDS = 1024  # at full scale, which sentences need
RING, BASE, ALL_REDUCE = "ring", "base_graph", "complete"
GRAPHS = [RING, BASE]
BETWEEN = (4, 16)  # H, rounds between two mixes
INT8: Content = {"name": RING, "wire": "int8"}

# --- rules -----------------------------------------------------------------------------------------------------------

DECAY, STEADY = {"schedule": "cosine/5%"}, {"schedule": "constant/5%"}  # both warm up
BETA2 = {"beta2": 0.99}  # of a thousand rounds
PLAIN: Content = {"name": "dadam", **BETA2, **DECAY}
FREE: Content = {"name": "dat-adam", **BETA2, **STEADY}  # DATAdamW
FIRST: Content = {"reduced": True}  # gradients are mixed before they are normalised
MIXED: Content = {**PLAIN, **FIRST}  # DAdamW
REDUCED: Content = {**FIRST, "topologies": ALL_REDUCE}  # AdamW and schedule-free AdamW as one usually runs them
CORRECTED: Content = {"name": "d2-adam", **BETA2, **DECAY}
TRACKED: Content = {"name": "gt-adam", **BETA2, **DECAY}
FREE_CORRECTED: Content = {"name": "dat-d2-adam", **BETA2, **STEADY}
FREE_TRACKED: Content = {"name": "dat-gt-adam", **BETA2, **STEADY}
OUTER: Content = {"name": "diloco-adam", **BETA2, **DECAY}
SHARED: Content = {"shared": True}
SGD: Content = {"name": "dsgd", "momentum": 0.9, **DECAY}
FREE_SGD: Content = {"name": "dat", "beta": 0.9, **STEADY}

# What their rows are called.
OF_PLAIN, OF_FREE = "dadam (beta2 0.99, cosine/5%)", "dat-adam (beta2 0.99, constant/5%)"
OF_MIXED = OF_REDUCED = "dadam (beta2 0.99, cosine/5%, reduced True)"
OF_FREE_REDUCED = "dat-adam (beta2 0.99, constant/5%, reduced True)"
OF_SHARED = "dadam (beta2 0.99, cosine/5%, shared True)"
OF_FREE_SHARED = "dat-adam (beta2 0.99, constant/5%, shared True)"
OF_CORRECTED, OF_TRACKED = "d2-adam (beta2 0.99, cosine/5%)", "gt-adam (beta2 0.99, cosine/5%)"
OF_FREE_CORRECTED = "dat-d2-adam (beta2 0.99, constant/5%)"
OF_FREE_TRACKED = "dat-gt-adam (beta2 0.99, constant/5%)"

Grid = float | Sequence[float]


@dataclass(frozen=True)
class Rates:
    """The learning rates that are tried: of AdamW with decay, and schedule-free."""

    plain: Grid
    free: Grid
    plain_low: Grid  # where nodes talk seldom, or track gradients
    free_low: Grid
    free_wide: Grid  # both
    reduced: Grid  # with an all-reduce of gradients
    free_reduced: Grid
    sgd: Grid
    free_sgd: Grid
    outer: Mapping[int, Mapping[float, Grid]]  # of DiLoCo, by H: the outer learning rates, and those of its local steps


def everything(rates: Rates) -> list[Content]:
    """Every combination on the ring, and AdamW with an all-reduce, with and without decay."""
    plain = (PLAIN, {**PLAIN, **SHARED}, {**PLAIN, **STEADY}, CORRECTED)
    free = (FREE, {**FREE, **SHARED}, {**FREE, **DECAY}, FREE_CORRECTED)
    return [
        *({**rule, "lr": rates.plain} for rule in plain),
        {**TRACKED, "lr": rates.plain_low},
        *({**rule, "lr": rates.free} for rule in free),
        {**FREE_TRACKED, "lr": rates.free_low},
        *reduced(rates),
        {**MIXED, "lr": rates.plain},
        {**FREE, **FIRST, "lr": rates.free_low},
        {**SGD, "lr": rates.sgd},
        {**FREE_SGD, "lr": rates.free_sgd},
    ]


def reduced(rates: Rates) -> list[Content]:
    """AdamW with an all-reduce, with decay and schedule-free."""
    return [{**PLAIN, **REDUCED, "lr": rates.reduced}, {**FREE, **REDUCED, "lr": rates.free_reduced}]


def over_links(rates: Rates) -> list[Content]:
    """Rules that speak seldom, or in few bytes; plain gossip and all-reduce beside them."""
    often, seldom = BETWEEN
    frequent, rare = [RING, INT8, f"{RING}/{often}"], [f"{RING}/{seldom}", {**INT8, "every": seldom}]
    return [
        {**PLAIN, "lr": rates.plain, "topologies": [RING, f"{RING}/{often}", f"{ALL_REDUCE}/{often}"]},
        {**PLAIN, "lr": rates.plain_low, "topologies": [f"{RING}/{seldom}", f"{ALL_REDUCE}/{seldom}"]},
        {**MIXED, "lr": rates.plain, "topologies": frequent},
        {**MIXED, "lr": rates.plain_low, "topologies": rare},
        {**FREE, "lr": rates.free, "topologies": frequent},
        {**FREE, "lr": rates.free_low, "topologies": rare},
        *(
            {**OUTER, "outer_lr": outer, "lr": inner, "topologies": f"{ALL_REDUCE}/{H}"}
            for H, grids in rates.outer.items()
            for outer, inner in grids.items()
        ),
        *reduced(rates),
    ]


def by_size(rates: Rates) -> list[Content]:
    """The rules for more machines and another graph."""
    return [
        {**PLAIN, "lr": rates.plain, "topologies": RING},
        {**MIXED, "lr": rates.plain, "topologies": GRAPHS},
        {**FREE, "lr": rates.free, "topologies": RING},
        {**FREE, "lr": rates.free_wide, "topologies": BASE},
        *reduced(rates),
    ]


# --- sizes -----------------------------------------------------------------------------------------------------------

TEXT = {"name": "language", "alpha": 0.1}
QUICK: Content = {  # 0.31 million parameters
    "nodes": 8,
    "steps": 100,
    "seeds": 1,
    "record": 4,
    "problem": {**TEXT, "batch": 4, "context": 64, "width": 88, "depth": 3, "heads": 4, "test": 64},
}
# 3.28 million. The budget is 25 minutes of one H200, on which three processes train 4.2 million bytes per second.
FULL: Content = {
    "nodes": 8,
    "steps": ROUNDS,
    "seeds": 3,
    "screen": {"seeds": 2},  # near the largest rate that works, one seed says little about the others
    "record": 4,
    "problem": {**TEXT, "batch": 8, "width": 256, "depth": 4, "heads": 4, "test": 300, "autocast": True},
}
QUICK_RATES = Rates(
    plain=0.002,
    free=0.005,
    plain_low=0.002,
    free_low=0.005,
    free_wide=0.005,
    reduced=0.002,
    free_reduced=0.005,
    sgd=0.1,
    free_sgd=1.0,
    outer={H: {0.7: 0.001} for H in BETWEEN},
)
FULL_RATES = Rates(
    plain=(0.0015, 0.004, 0.01),
    free=(0.004, 0.01, 0.025),
    plain_low=(0.0006, 0.0015, 0.004),
    free_low=(0.0015, 0.004, 0.01),
    free_wide=(0.0015, 0.004, 0.01, 0.025),
    reduced=(0.0015, 0.0025, 0.004, 0.01),
    free_reduced=(0.0006, 0.0015, 0.004, 0.01),
    sgd=(0.003, 0.01, 0.03),
    free_sgd=(0.1, 0.3, 1.0),
    outer={
        4: {0.03: (0.0015, 0.004, 0.01), 0.1: (0.0015, 0.004, 0.01), 0.3: (0.0006, 0.0015, 0.004)},
        16: {0.3: (0.0006, 0.0015, 0.004), 0.7: (0.0006, 0.0015, 0.004), 1.0: (0.00025, 0.0006, 0.0015)},
    },
)

# --- sentences -------------------------------------------------------------------------------------------------------

Chosen = Callable[[Row], bool]


def on(graph: str, *names: str) -> Chosen:
    """Rows of these rules (all by default) on a graph."""
    return lambda row: row.topology == graph and (not names or row.rule in names)


@asks
def level(rows: Sequence[Row], ours: Chosen, theirs: Chosen, within: float = LEVEL) -> Answer:
    """Whether the best of ours is so near to the best of theirs, or ahead, at every size."""
    texts, met = [], []
    for nodes in sorted({row.nodes for row in rows}):
        here = [[row for row in rows if row.nodes == nodes and chosen(row)] for chosen in (ours, theirs)]
        if not all(here):
            continue
        a, b = (min(some, key=lambda row: row.value) for some in here)
        met.append(a.value <= b.value + within)
        texts.append(f"M = {nodes}: {_told(a)} against {_told(b)}, {a.value - b.value:+.3f}")
    return (all(met) if met else None), "; ".join(texts) or "these were not both run"


@asks
def leads(rows: Sequence[Row], ours: Chosen, theirs: Chosen) -> Answer:
    """Whether ours is ahead of all of theirs, or the ranges of the seeds overlap."""
    mine, others = [row for row in rows if ours(row)], [row for row in rows if theirs(row) and not ours(row)]
    if not mine or not others:
        return None, "these were not both run"
    others.sort(key=lambda row: row.value)
    best = min(mine, key=lambda row: row.value)
    texts = [f"{row.rule} {row.value - best.value:+.3f}" for row in others]
    return all(best.low <= row.high for row in others), f"{_told(best)}; {', '.join(texts)}"


def _told(row: Row) -> str:
    spread = f" ({row.low:.3f} to {row.high:.3f})" if len(row.curves) > 1 else ""
    return f"{row.rule} on {row.topology} {row.value:.3f}{spread}"


def _steady(graph: str) -> Chosen:
    return lambda row: row.topology == graph and "constant" in row.rule


def _adam(graph: str) -> Chosen:
    return lambda row: row.topology == graph and "adam" in row.rule


def _sgd(graph: str) -> Chosen:
    return lambda row: row.topology == graph and "adam" not in row.rule


def _outer(graph: str) -> Chosen:
    return lambda row: row.topology == graph and "diloco" in row.rule


def _near_all_reduce(graph: str) -> list[Said]:
    where = {RING: "the ring", BASE: "the Base-2 graph"}[graph]
    words = f"on {where} is within {NEAR} bits per byte of the same with an all-reduce, or ahead"
    return [
        (f"{name} {words}", level(on(graph, rule), on(ALL_REDUCE, other), NEAR), ROUNDS)
        for name, rule, other in (
            ("AdamW that mixes gradients first", OF_MIXED, OF_REDUCED),
            ("Schedule-free AdamW", OF_FREE, OF_FREE_REDUCED),
        )
    ]


def _no_worse(name: str, ours: str, other: str, plain: str) -> Said:
    claim = f"{name} is level with {other} on the ring, or ahead"
    return claim, level(on(RING, ours), on(RING, plain)), ROUNDS


SOURCE = "the language study"
OF_RULES = said(
    SOURCE,
    *_near_all_reduce(RING),
    (
        "AdamW that mixes gradients first is ahead of every other rule on the ring, within the spread of the seeds",
        leads(on(RING, OF_MIXED), on(RING)),
        ROUNDS,
    ),
    (
        f"Without decay the best rule on the ring is within {NEAR} bits per byte of AdamW with decay there",
        level(_steady(RING), on(RING, OF_PLAIN), NEAR),
        ROUNDS,
    ),
    _no_worse("A shared second moment", OF_SHARED, "each node's own", OF_PLAIN),
    _no_worse("A shared second moment, schedule-free,", OF_FREE_SHARED, "each node's own", OF_FREE),
    _no_worse("AdamW that mixes gradients first", OF_MIXED, "plain AdamW", OF_PLAIN),
    _no_worse("Schedule-free AdamW that mixes gradients first", OF_FREE_REDUCED, "plain", OF_FREE),
    _no_worse("Corrected AdamW (d2-adam)", OF_CORRECTED, "plain AdamW", OF_PLAIN),
    _no_worse("Tracked AdamW (gt-adam)", OF_TRACKED, "plain AdamW", OF_PLAIN),
    _no_worse("Corrected schedule-free AdamW (dat-d2-adam)", OF_FREE_CORRECTED, "plain", OF_FREE),
    _no_worse("Tracked schedule-free AdamW (dat-gt-adam)", OF_FREE_TRACKED, "plain", OF_FREE),
    ("The best SGD is level with the best Adam on the ring", level(_sgd(RING), _adam(RING)), ROUNDS),
)


def _seldom(H: int) -> list[Said]:
    """Gossip in every H-th round."""
    words, ring, reduced = f"in every {H}th round", f"{RING}/{H}", f"{ALL_REDUCE}/{H}"
    return [
        (
            f"Gossip {words} is level with local AdamW with an all-reduce {words}, or ahead",
            level(on(ring), on(reduced, OF_PLAIN)),
            ROUNDS,
        ),
        (f"Gossip {words} is level with DiLoCo {words}, or ahead", level(on(ring), _outer(reduced)), ROUNDS),
        (
            f"Gossip {words} is within {NEAR} bits per byte of gossip in every round",
            level(on(ring), on(RING), NEAR),
            ROUNDS,
        ),
        (
            f"AdamW that mixes gradients first is level with plain AdamW {words}, or ahead",
            level(on(ring, OF_MIXED), on(ring, OF_PLAIN)),
            ROUNDS,
        ),
    ]


def _small(graph: str, small: str, words: str) -> list[Said]:
    return [
        (f"{name} with int8 {words} is level with float32", level(on(small, rule), on(graph, rule)), ROUNDS)
        for name, rule in (("AdamW that mixes gradients first", OF_MIXED), ("Schedule-free AdamW", OF_FREE))
    ]


OF_LINKS = said(
    SOURCE,
    *(sentence for H in BETWEEN for sentence in _seldom(H)),
    *_small(RING, f"{RING} (wire int8)", "in every round"),
    *_small(f"{RING}/{BETWEEN[-1]}", f"{RING}/{BETWEEN[-1]} (wire int8)", f"in every {BETWEEN[-1]}th round"),
)
OF_SIZES = said(SOURCE, *_near_all_reduce(RING), *_near_all_reduce(BASE))

# --- targets ---------------------------------------------------------------------------------------------------------

NOTES = (
    "Bits per byte are those of each node's model on held-out files of every package, mean over the nodes. Nodes have "
    "packages of Python's standard library, split by Dirichlet(0.1); another version of Python has another text.",
    "On the complete graph dadam (reduced) is AdamW with an all-reduce of gradients, dat-adam (reduced) is "
    "schedule-free AdamW, and dadam where nodes talk seldom is local AdamW. All have beta2 0.99, no weight decay, and "
    "a warm-up over 5 % of the rounds.",
    f"Near is within {NEAR} bits per byte, level within {LEVEL}; where a rule has several rows, its best one counts.",
)
STUDY: Content = {"dtype": "float32"}

LANGUAGE_RULES = Target(
    "A language model: bits per byte on held-out text, by rule",
    STUDY,
    {
        "quick": {**QUICK, "topologies": RING, "rules": everything(QUICK_RATES)},
        "paper": {**FULL, "topologies": RING, "rules": everything(FULL_RATES)},
    },
    figures.final_of_rules,
    OF_RULES,
    NOTES,
)
LANGUAGE_LINKS = Target(
    "A language model: bits per byte with local steps and few bytes, against what a node sends",
    STUDY,
    {
        "quick": {**QUICK, "rules": over_links(QUICK_RATES)},
        "paper": {**FULL, "rules": over_links(FULL_RATES)},
    },
    link_costs.against_bytes,
    OF_LINKS,
    NOTES,
)
LANGUAGE_SIZES = Target(
    "A language model: bits per byte with more machines, and on a graph that changes",
    STUDY,
    {
        "quick": {**QUICK, "rules": by_size(QUICK_RATES)},
        "paper": {**FULL, "rules": by_size(FULL_RATES), "nodes": (8, 16)},
    },
    figures.final_of_rules,
    OF_SIZES,
    NOTES,
)
