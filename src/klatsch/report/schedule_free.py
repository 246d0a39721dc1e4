"""Schedules, averages and corrections on images: `klatsch reproduce averages`, `schedules` and `orders`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from klatsch.report import claims, figures
from klatsch.report.claims import LEVEL, Answer, OfRows, Sentence, asks, has_no_decay, percent
from klatsch.report.entries import ALPHA_MIDDLE, Content, Said, Sentences, Target, images, said, skewed
from klatsch.study.choices import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOTH = ("constant", "cosine")
ALPHAS = [0.1, 1.0, 10.0]
RING, TORUS, BASE, ALL_REDUCE = "ring", "torus", "base_graph", "complete"
# Learning rates about a factor of 3 apart. A momentum of 0.9 makes steps ten times as long. Some rules want one that is
# smaller still where nothing decays.
PLAIN_RATES = (0.03, 0.1, 0.3, 1.0)
MOMENTUM_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
PAPER_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
ANYTIME_RATES = (0.1, 0.3, 1.0, 3.0)
SMALLER_RATES = (0.03, *ANYTIME_RATES)

DSGD: Content = {"name": "dsgd", "momentum": 0.9, "lr": (0.003, *MOMENTUM_RATES)}
PAPER: Content = {"name": "dat", "averaging": "fixed(0.9)", "momentum": 0.9, "lr": PAPER_RATES}  # as in Section 5.2
D2: Content = {"name": "d2", "lr": (0.01, *PLAIN_RATES)}
GT: Content = {"name": "gt", "lr": (0.01, *PLAIN_RATES)}
QG: Content = {"name": "qg", "lr": MOMENTUM_RATES}


def anytime(
    name: str, averaging: object, beta: object, schedule: object = BOTH, lr: Sequence[float] = ANYTIME_RATES
) -> Content:
    """A rule with an anytime average, by its weights and its query point."""
    return {"name": name, "averaging": averaging, "beta": beta, "lr": lr, "schedule": schedule}


# What rows of these rules are called.
OF_DSGD, OF_PAPER = "dsgd (momentum 0.9)", "dat (averaging fixed(0.9), momentum 0.9)"
OF_DAT = "dat (averaging constant, beta 0.9)"
OF_DAT_D2 = "dat-d2 (averaging fixed(0.99), beta 0.9)"


def decayed(rule: str) -> str:
    """What a rule is called with a learning rate that decays along a cosine."""
    return f"{rule[:-1]}, cosine)" if rule.endswith(")") else f"{rule} (cosine)"


# --- averages: which weights, and which point between w and x? ------------------------------------------------------

WEIGHTS, BETAS = ("constant", "fixed(0.9)", "fixed(0.99)"), (1.0, 0.9, 0.7)
CANDIDATES = tuple(
    anytime(name, WEIGHTS, BETAS, schedule, lr)
    for name in ("dat", "dat-d2", "dat-gt")
    for schedule, lr in (("constant", SMALLER_RATES), ("cosine", ANYTIME_RATES))
)
WITHOUT_MOMENTUM: Content = {"name": "dsgd", "lr": PLAIN_RATES}
SHORT: Content = {"epochs": 20, "seeds": 1, "record": 2}  # half time and end

# --- schedules: the best of them, and what a user would pick instead ------------------------------------------------

SCHEDULE_FREE = anytime("dat", "constant", 0.9)
ON_ALL_GRAPHS: tuple[Content, ...] = (
    *(DSGD, PAPER, D2, QG, SCHEDULE_FREE),
    anytime("dat-d2", ("constant", "fixed(0.99)"), 0.9, "constant"),
    anytime("dat-gt", "fixed(0.99)", 0.7, "constant", SMALLER_RATES),
)
ON_THE_RING: tuple[Content, ...] = (
    GT,
    anytime("dat-d2", "fixed(0.9)", 1.0, "cosine"),
    anytime("dat-gt", "fixed(0.9)", 0.9, "cosine"),
)
LARGER_TORUS: Content = {"name": TORUS, "nodes": (16, 64)}  # one of 8 has a side of two, which cannot form a ring
COMPARED = (
    *({**rule, "topologies": (RING, LARGER_TORUS, BASE)} for rule in ON_ALL_GRAPHS),
    *ON_THE_RING,
    *({**rule, "topologies": ALL_REDUCE} for rule in (DSGD, SCHEDULE_FREE)),
)
FEW: tuple[Content, ...] = (  # at the quick scale
    {**DSGD, "lr": (0.03, 0.1)},
    {**anytime("dat", "constant", 0.9, "constant"), "lr": (0.3, 1.0)},
    {**anytime("dat-d2", "fixed(0.99)", 0.9, "constant"), "lr": (0.3, 1.0)},
    {**DSGD, "lr": 0.1, "schedule": "cosine", "topologies": ALL_REDUCE},
)
NOTES = (
    "Every rule has a constant learning rate, or one that falls to 0 along a cosine, which has to know the end in "
    "advance. dsgd on the complete graph is SGD with momentum and an all-reduce in every round, dat there is "
    "Schedule-Free SGD with an all-reduce.",
    "The finalists among weights and query points are the best of `klatsch reproduce averages`. dat with fixed(0.9) "
    "and a momentum is the paper's; d2 and dat-d2 are not defined on the Base-2 graph, which changes every round.",
    "Half time is what one has after half of the epochs of the same runs: a cosine that aims at the end is still at "
    "half of its learning rate there.",
)


# --- orders: what does mixing before the step cost? ------------------------------------------------------------------

IN_BOTH_ORDERS: tuple[Content, ...] = (
    {**DSGD, "schedule": "cosine"},
    {**PAPER, "schedule": "constant"},
    anytime("dat", "constant", 0.9, "constant"),
)
BOTH_ORDERS = {"order": ("atc", "cta")}

# --- sentences ------------------------------------------------------------------------------------------------------


@asks
def ahead(rows: Sequence[Row], one: str, other: str, share: float = 1.0, or_level: bool = False) -> Answer:
    """Whether a rule is ahead of another, or at least level, on every graph that gossips and at every size."""
    found = {(row.rule, row.topology, row.nodes): row.stopped(share) for row in rows if row.topology != ALL_REDUCE}
    pairs = [(a, found[other, t, M]) for (rule, t, M), a in found.items() if rule == one and (other, t, M) in found]
    if not pairs:
        return None, f"{one} and {other} were not run on the same graph"
    if or_level:
        met = [a.value >= b.value - LEVEL for a, b in pairs]
    else:
        met = [a.value > b.value + LEVEL and a.low > b.high for a, b in pairs]
    texts = [f"{a.topology}, M = {a.nodes}: {percent(a)} against {percent(b)}" for a, b in pairs]
    return all(met), f"yes in {sum(met)} of {len(met)}: {'; '.join(texts)}"


@asks
def near_all_reduce(rows: Sequence[Row], points: float, graph: str) -> Answer:
    """Whether the best rule on a graph is this near to the best of SGD with momentum, decay and an all-reduce."""
    texts, met = [], []
    for M in sorted({row.nodes for row in rows}):
        mine = [row for row in rows if (row.topology, row.nodes) == (graph, M)]
        server = [row for row in rows if (row.topology, row.nodes, row.rule) == (ALL_REDUCE, M, decayed(OF_DSGD))]
        if not mine or not server:
            continue
        best, free = max(mine, key=_value), max(filter(has_no_decay, mine), key=_value)
        met.append(best.value >= server[0].value - points)
        texts.append(
            f"M = {M}: {best.rule} {percent(best)}, without decay {free.rule} {percent(free)}, all-reduce "
            f"{percent(server[0])}"
        )
    return (all(met) if met else None), "; ".join(texts) or f"nothing was run on {graph} and {ALL_REDUCE}"


@asks
def needs_no_decay(rows: Sequence[Row], graph: str, share: float) -> Answer:
    """Whether the best rule without decay is level with the best one with decay, or ahead."""
    texts, met = [], []
    for M in sorted({row.nodes for row in rows}):
        mine = [row.stopped(share) for row in rows if (row.topology, row.nodes) == (graph, M)]
        free, with_decay = ([row for row in mine if has_no_decay(row) is kind] for kind in (True, False))
        if not free or not with_decay:
            continue
        a, b = max(free, key=_value), max(with_decay, key=_value)
        met.append(a.value >= b.value - LEVEL)
        texts.append(f"M = {M}: {a.rule} {percent(a)} against {b.rule} {percent(b)}")
    return (all(met) if met else None), "; ".join(texts) or f"nothing was run on {graph}"


@asks
def merging_changes_little(rows: Sequence[Row], about: Callable[[Row], bool]) -> Answer:
    """Whether the merged model is within LEVEL of the mean of nodes for some rules; the figures are of all rules."""
    gains: dict[str, list[tuple[Row, float]]] = {}
    for row in rows:
        if row.merged is not None and not row.diverged and row.topology != ALL_REDUCE:
            gains.setdefault(row.rule, []).append((row, row.beside("merged") - row.value))
    if not gains:
        return None, "was not measured"
    met = [gain <= LEVEL for mine in gains.values() for row, gain in mine if about(row)]
    middle = {rule: median(gain for _, gain in mine) for rule, mine in gains.items()}
    texts = [f"{rule} {gain:+.1%}" for rule, gain in sorted(middle.items(), key=lambda item: -item[1])]
    return (all(met) if met else None), f"yes in {sum(met)} of {len(met)}; in the middle: {', '.join(texts)}"


@asks
def level_with_the_best(rows: Sequence[Row], rule: str) -> Answer:
    """Whether a choice of weights and beta is level with the best of its rule and schedule."""
    name, no_decay = rule.partition(" ")[0], "cosine" not in rule
    rivals = [row for row in rows if row.rule.startswith(f"{name} (averaging") and has_no_decay(row) is no_decay]
    mine = [row for row in rivals if row.rule == rule]
    if not mine:
        return None, f"{rule} was not run"
    best = max(rivals, key=_value)
    return mine[0].value >= best.value - LEVEL, f"{percent(mine[0])}, the best is {best.rule} {percent(best)}"


def _value(row: Row) -> float:
    return row.value


def _settles(row: Row) -> bool:
    """Whether its iterates or its average settle: by decay, or by an average that a query point follows."""
    return not has_no_decay(row) or row.rule.startswith(("dat (averaging constant", "dat-d2 (averaging"))


def _worst(claim: str, find: OfRows) -> tuple[Said, Said]:
    return (f"{claim}, mean of nodes", find), (f"{claim}, worst node", claims.shown("worst", find))


OURS, FIGURE_2 = "the study of schedules", "Section 5.2, figure 2, and what a schedule changes"
AHEAD_OF = (  # (1), what figure 2 says, first as it is, then with decay for the baseline, then for both
    ("DAT as in the paper is ahead of {}", OF_PAPER, lambda base: base),
    ("DAT as in the paper is ahead of {} with decay", OF_PAPER, decayed),
    ("DAT as in the paper with decay is ahead of {} with decay", decayed(OF_PAPER), decayed),
)
BASELINES = (("D-SGD", OF_DSGD), ("D2", "d2"))


def _figure_2() -> Sentences:
    first = [
        (f"Under heterogeneous data {claim.format(name)}", ahead(ours, of(base)))
        for claim, ours, of in AHEAD_OF
        for name, base in BASELINES
    ]
    second = [
        (f"Under homogeneous data {name}{' with decay' * (of is decayed)} is ahead of DAT as in the paper", find)
        for of in (str, decayed)
        for name, base in BASELINES
        for find in [ahead(of(base), OF_PAPER)]
    ]
    return said(FIGURE_2, *first, about=skewed) + said(
        FIGURE_2, *second, about=lambda row: bool(row.setting["alpha"] > ALPHA_MIDDLE)
    )


def _with_beta(words: str, share: float, or_level: bool) -> Said:
    return f"dat with beta 0.9 and no decay {words}", ahead(OF_DAT, decayed(OF_DSGD), share, or_level)


FROM_THE_BEST = tuple(
    Sentence(f"{rule} is level with the best of its weights and query points", level_with_the_best(rule), OURS)
    for rule in (
        *(OF_DAT, decayed(OF_DAT), OF_DAT_D2, "dat-d2 (averaging fixed(0.9), beta 1, cosine)"),
        *("dat-gt (averaging fixed(0.99), beta 0.7)", "dat-gt (averaging fixed(0.9), beta 0.9, cosine)"),
    )
)
AVERAGES = Target(
    "Averages: which weights, and which query point between w and x, on the ring",
    {"schedule": BOTH, "rules": (WITHOUT_MOMENTUM, DSGD, PAPER, D2, GT, QG, *CANDIDATES)},
    {
        "quick": {
            **images(8, epochs=2),
            "rules": {**anytime("dat", WEIGHTS, BETAS, "constant"), "lr": 0.3},
            "schedule": "constant",
        },
        "paper": {**images(16, ALPHAS), **SHORT},
    },
    figures.final_of_rules,
    FROM_THE_BEST,
    ("One seed and 20 epochs: these runs choose what `klatsch reproduce schedules` confirms with three seeds and 50.",),
)

DRAWN = (OF_DSGD, decayed(OF_DSGD), OF_PAPER, decayed("qg"), OF_DAT, OF_DAT_D2)


def _courses(rows: Sequence[Row], title: str) -> Figure:
    """The course of a few rules on the ring, and of all-reduce."""
    chosen = [row for row in rows if row.topology == RING and row.rule in DRAWN]
    server = [row for row in rows if row.topology == ALL_REDUCE and row.rule in (decayed(OF_DSGD), OF_DAT)]
    return figures.accuracy_of_schedules([*chosen, *server] or rows, title)


def _on_the_ring(rows: Sequence[Row], title: str) -> Figure:
    return figures.final_of_rules([row for row in rows if row.topology in (RING, ALL_REDUCE)] or rows, title)


SCHEDULES = Target(
    "Schedules: decay, averages and corrections on Fashion-MNIST",
    {"schedule": BOTH, "leave_out": True},  # D2 is not defined on graphs that change
    {
        "quick": {
            **images(8, epochs=2),
            "rules": FEW,
            "screen": {"epochs": 1, "record": 1},
        },
        "paper": {
            **images((8, 16, 64), ALPHAS),
            "rules": COMPARED,
            "screen": SHORT,
            "record": 6,
        },
    },
    _courses,
    _figure_2()
    + said(
        OURS,
        _with_beta("is ahead of D-SGD with decay at half time, under heterogeneous data", 0.5, or_level=False),
        about=skewed,
    )
    + said(
        OURS,
        _with_beta("is level with D-SGD with decay, or ahead, at half time", 0.5, or_level=True),
        _with_beta("is level with D-SGD with decay, or ahead, at the end", 1.0, or_level=True),
        *_worst(
            "The best rule on the ring is within 1.5 points of all-reduce with decay",
            near_all_reduce(0.015, RING),
        ),
        ("On the ring the best rule without decay is level with the best one with decay", needs_no_decay(RING, 1.0)),
        ("The same at half time", needs_no_decay(RING, 0.5)),
        (
            "Merging changes little for rules that settle: with decay, or with an average",
            merging_changes_little(_settles),
        ),
    ),
    NOTES,
    {"rules": _on_the_ring},
)


def _cta_is_level(rule: str) -> Said:
    atc, cta = (f"{rule[:-1]}, {order})" for order in BOTH_ORDERS["order"])
    return f"{rule} in the order cta is level with atc, or ahead", ahead(cta, atc, or_level=True)


ORDERS = Target(
    "Orders: mixing after the step (atc) or before it (cta), on the ring",
    {},
    {
        "quick": {**images(8, epochs=2), "rules": {**IN_BOTH_ORDERS[-1], "lr": 0.3, **BOTH_ORDERS}},
        "paper": {
            **images(16, [0.1, 10.0]),
            "rules": [{**rule, **BOTH_ORDERS} for rule in IN_BOTH_ORDERS],
            "screen": SHORT,
        },
    },
    figures.accuracy_of_schedules,
    said(OURS, *map(_cta_is_level, (decayed(OF_DSGD), OF_PAPER, OF_DAT))),
    (
        "A rank that mixes before its step (cta) sends all it has before it computes its gradient, so that messages "
        "travel meanwhile. In the order atc the iterate leaves after the gradient, and the neighbours wait for it.",
    ),
)
