"""Local steps: accuracy against the bytes that a node sends, for gossip on a ring and for all-reduce on one axis."""

from __future__ import annotations

from collections.abc import Sequence

from klatsch.report import claims, figures
from klatsch.report.claims import LEVEL, Answer, OfRows, asks, at_its_best, family, percent
from klatsch.report.entries import Content, Said, Target, images, said, skewed
from klatsch.study.choices import BESIDE, Row
from klatsch.topology.families import split

BETWEEN = (1, 4, 16, 64)  # H, rounds between two mixes
RING, ALL_REDUCE = "ring", "complete"  # families of graphs, which tell gossip from all-reduce

MOMENTUM, AVERAGED = {"momentum": 0.9}, {"beta": 0.9}  # schedule-free without a momentum: the average is one
DSGD, DILOCO = {"name": "dsgd", **MOMENTUM}, {"name": "diloco", **MOMENTUM, "schedule": "cosine"}
DAT, CORRECTED = {"name": "dat", **AVERAGED}, {"name": "dat-d2", **AVERAGED}


def _ring(between: Sequence[int]) -> list[str]:
    return [f"{RING}/{H}" for H in between]


def _all_reduce(between: Sequence[int]) -> list[str]:
    return [f"{ALL_REDUCE}/{H}" for H in between]


# Wide enough that no chosen learning rate lies at an edge: many local steps on skewed data want small ones, and so do
# DiLoCo's frequent outer steps (H = 4), inside and outside. After an all-reduce in every round (H = 1) there is no
# drift to correct and nothing left for outer steps.
OUTER, INNER = [0.3, 0.7, 1.0], [0.003, 0.01, 0.03, 0.1]
WIDE = (
    {**DSGD, "schedule": ["constant", "cosine"], "lr": [0.003, 0.01, 0.03, 0.1, 0.3]},
    {**DAT, "lr": [0.03, 0.1, 0.3, 1.0, 3.0]},
    {**CORRECTED, "lr": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0], "topologies": _ring(BETWEEN) + _all_reduce(BETWEEN[1:])},
    {**DILOCO, "outer_lr": [0.1, *OUTER], "lr": [0.001, *INNER], "topologies": _all_reduce(BETWEEN[1:2])},
    {**DILOCO, "outer_lr": OUTER, "lr": INNER, "topologies": _all_reduce(BETWEEN[2:])},
)
SCREEN: Content = {"epochs": 20, "seeds": 1}
FEW = BETWEEN[:3]  # H at the quick scale
NARROW = (
    {**DSGD, "schedule": "cosine", "lr": 0.03},
    {**DAT, "lr": 0.3},
    {**CORRECTED, "lr": 0.3, "topologies": _ring(FEW) + _all_reduce(FEW[1:])},
    {**DILOCO, "outer_lr": 0.7, "lr": 0.01, "topologies": _all_reduce(FEW[1:])},
)

NOTES = (
    "On the complete graph dsgd is SGD with an all-reduce in every round (H = 1), or local SGD (H > 1); dat is "
    "Schedule-Free SGD in the same way, and dat-d2 corrects the drift of local steps. dsgd and diloco keep a momentum "
    "on every node, diloco another one for the outer steps.",
    "Bytes are what a node sends over the run in float32, mean over the nodes. On the ring it sends each vector of its "
    "rule to two neighbours: one of dsgd, two of dat and dat-d2. The complete graph counts as a ring all-reduce, "
    "2 (M - 1) / M vectors per node; in every round (H = 1) one vector is enough, the gradient, since these rules "
    "leave all nodes equal there. Time is another matter: a gossiping node waits for two neighbours once, a ring "
    "all-reduce takes 2 (M - 1) messages in turn.",
    "Figure and verdicts take every rule with its best options (schedule, outer learning rate) for what they show. At "
    "equal bytes: for as many bytes as plain gossip (dsgd on the ring) sends with each H, the best run on each side "
    "that sends at most so many.",
    "The last mix lies up to H - 1 rounds before the end, so that nodes are apart there, also with an all-reduce. The "
    "merged model is what one has after one more all-reduce, which is not counted.",
)


def _is_gossip(row: Row) -> bool:
    return split(row.topology)[0] == RING


# --- sentences ------------------------------------------------------------------------------------------------------


@asks
def level_at_equal_bytes(rows: Sequence[Row], rules: Sequence[str] = ()) -> Answer:
    """Whether the best gossip is level with, or ahead of, these rules with an all-reduce (all by default)."""
    budgets = {split(row.topology)[1]: row.megabytes for row in rows if _is_gossip(row) and family(row) == "dsgd"}
    texts, met = [], []
    for H, most in sorted(budgets.items()):
        affordable = [row for row in rows if row.megabytes <= most and not row.diverged]
        ring = [row for row in affordable if _is_gossip(row)]
        others = [row for row in affordable if not _is_gossip(row) and (not rules or family(row) in rules)]
        if not ring or not others:
            continue
        ours, theirs = (max(some, key=lambda row: row.value) for some in (ring, others))
        met.append(ours.value >= theirs.value - LEVEL)
        texts.append(f"{most:,.0f} MB (H = {H}): {_told(ours)} against {_told(theirs)}")
    if not met:
        return None, "dsgd on the ring and an all-reduce were not both run"
    return all(met), f"yes in {sum(met)} of {len(met)}: {'; '.join(texts)}"


@asks
def cheap(rows: Sequence[Row], most: int, graph: str) -> Answer:
    """Whether no rule on a family of graphs loses more than LEVEL, or diverges, with up to so many local steps."""
    lines: dict[str, dict[int, Row]] = {}
    for row in at_its_best(rows):
        if split(row.topology)[0] == graph:
            lines.setdefault(family(row), {})[split(row.topology)[1]] = row
    texts, met = [], []
    for rule, points in lines.items():
        if 1 not in points or points[1].diverged:  # nothing to compare with
            continue
        gains = {H: points[H].value - points[1].value for H in sorted(points) if H > 1}  # a diverged run has value 0
        met += [gain >= -LEVEL for H, gain in gains.items() if most >= H]
        course = [f"{'diverged' if points[H].diverged else _change(gain)} for {H}" for H, gain in gains.items()]
        texts.append(", ".join([f"{rule} {percent(points[1])} for H = 1", *course]))
    return (all(met) if met else None), "; ".join(texts) or f"nothing was run on {graph}"


def _change(gain: float) -> str:
    return f"{round(gain, 3) + 0.0:+.1%}"  # adding 0 turns -0 into 0


def _told(row: Row) -> str:
    return f"{row.rule} on {row.topology} {percent(row)}"


def _of_each(claim: str, find: OfRows) -> list[Said]:
    """A sentence on the mean of nodes, on the merged model and on the worst node."""
    others = [(f"{claim}: {words}", claims.shown(which, find)) for which, words in BESIDE.items()]
    return [(f"{claim}: mean of nodes", find), *others]


LOCAL_STEPS = Target(
    "Local steps: test accuracy on Fashion-MNIST against the bytes that a node sends",
    {},
    {
        "quick": {**images(8, topologies=_ring(FEW) + _all_reduce(FEW), epochs=2), "rules": NARROW},
        "paper": {**images(16, [0.1, 10.0], _ring(BETWEEN) + _all_reduce(BETWEEN)), "rules": WIDE, "screen": SCREEN},
    },
    figures.accuracy_against_bytes,
    said(
        "the study of local steps",
        *_of_each(
            "At equal bytes gossip is level with local SGD with all-reduce, or ahead", level_at_equal_bytes(["dsgd"])
        ),
        *_of_each(
            "At equal bytes gossip is level with the best rule with all-reduce, or ahead", level_at_equal_bytes()
        ),
        ("No rule on the ring loses more than a point with H up to 16", cheap(16, RING)),
        ("No rule with all-reduce loses more than a point with H up to 16", cheap(16, ALL_REDUCE)),
    )
    + said(
        "the study of local steps",
        ("With local steps corrections help: dat-d2 is ahead of dat", claims.ahead("dat-d2", "dat")),
        about=lambda row: skewed(row) and split(row.topology)[1] > 1,
    ),
    NOTES,
)
