"""Slow networks: what few bytes, late messages and local steps cost, and what they save, as channels of a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from klatsch.report import link_costs
from klatsch.report.claims import FLAT, LEVEL, Answer, OfRows, Sentence, asks, clearly_above, factor
from klatsch.report.entries import Content, Draw, Said, Sentences, Target, images, said
from klatsch.report.link_costs import GRADIENT, LINKS, Cost, at_server, channel, megabytes, seconds_on
from klatsch.study.cases import Channel
from klatsch.study.choices import Row
from klatsch.topology.channel import WIRES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

H = 8  # rounds between two mixes of a channel that speaks seldom
PLAIN = Channel(1, 0, "float32")
FLOAT, SHORT, INT8 = WIRES
HALF_A_POINT = 0.005  # of accuracy


def ring(wires: Sequence[str], *ways: tuple[int, int]) -> list[Content]:
    """Rings with these encodings, and these (every, late)."""
    return [{"name": "ring", "every": every, "late": late, "wire": list(wires)} for every, late in ways]


def all_reduce(*between: int) -> list[Content]:
    """Complete graphs with these H."""
    return [{"name": "complete", "every": every} for every in between]


EVERY_ROUND, ONE_LATE, SELDOM, SELDOM_AND_LATE = (1, 0), (1, 1), (H, 0), (H, H - 1)
ALL = ring(WIRES, EVERY_ROUND, ONE_LATE, SELDOM, SELDOM_AND_LATE)
SOME = [*ring(WIRES, EVERY_ROUND), *ring((FLOAT, INT8), SELDOM), *ring((INT8,), SELDOM_AND_LATE)]

# --- images: 25 epochs, so that 82 rows of three seeds take 500 million samples ---------------------------------------

BETA, MOMENTUM = {"beta": 0.9}, {"momentum": 0.9}
DAT_RATES, D2_RATES, SGD_RATES = (0.1, 0.3, 1.0, 3.0), (0.03, 0.1, 0.3, 1.0), (0.01, 0.03, 0.1, 0.3)
DAT: Content = {"name": "dat", **BETA, "lr": DAT_RATES}
DAT_D2: Content = {"name": "dat-d2", **BETA, "lr": D2_RATES}
DSGD: Content = {"name": "dsgd", **MOMENTUM, "lr": SGD_RATES}
COSINE: Content = {"schedule": "cosine"}
COMPARED = (
    DAT,  # with all channels
    DAT_D2,
    {**DAT_D2, **COSINE, "topologies": SOME},
    {**DSGD, "topologies": ring(WIRES, EVERY_ROUND)},
    {**DSGD, **COSINE, "topologies": [*SOME, *all_reduce(1, H)]},
)
QUICK = (
    {**DAT, "lr": 0.3},
    {**DAT_D2, "lr": 0.3},
    {**DSGD, **COSINE, "lr": 0.03, "topologies": [*SOME, *all_reduce(1, H)]},
)
OF_IMAGES = (
    *("dat (beta 0.9)", "dat-d2 (beta 0.9)"),  # with all channels
    *("dat-d2 (beta 0.9, cosine)", "dsgd (momentum 0.9, cosine)"),  # with some
    "dsgd (momentum 0.9)",  # in every round, without delay
)
SCREEN: Content = {"epochs": 6, "seeds": 1, "record": 1}

# --- least squares ---------------------------------------------------------------------------------------------------

ROUNDS = 10_000  # local steps on 25 nodes need that many to settle
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SMALLER_RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)  # of plain gossip, which rests apart
SQUARES: Content = {
    "problem": {"name": "least-squares", "noise": 1.0, "heterogeneity": 10.0},
    "nodes": 25,
    "rules": (
        {"name": "dat", "beta": [1.0, 0.9], "lr": RATES, "topologies": ALL},
        {"name": "dat-d2", "beta": [1.0, 0.9], "lr": RATES, "topologies": ALL},
        {"name": "dsgd", "lr": SMALLER_RATES, "topologies": [*ALL, *all_reduce(1, H)]},
    ),
}
OF_SQUARES = ("dat (beta 1)", "dat (beta 0.9)", "dat-d2 (beta 1)", "dat-d2 (beta 0.9)", "dsgd")

# --- sentences -------------------------------------------------------------------------------------------------------


def pairs(rows: Sequence[Row], option: str) -> list[tuple[Row, Row]]:
    """Every row with the one whose channel differs in this option alone, and has it as usual."""
    usual = {option: PLAIN._asdict()[option]}
    found = {(row.rule, at_server(row), channel(row)): row for row in rows}
    others = [(row, found.get((rule, server, by._replace(**usual)))) for (rule, server, by), row in found.items()]
    return [(row, other) for row, other in others if other is not None and other is not row]


def loss(row: Row, other: Row) -> float:
    """What a row loses to another: points of accuracy, or a share of the other's error."""
    return other.value - row.value if row.largest else row.value / other.value - 1


@asks
def costs(rows: Sequence[Row], most: float, option: str) -> Answer:
    """Whether rows with an option of a channel lose at most so much to those without."""
    found = [(row, other) for row, other in pairs(rows, option) if not other.diverged]
    met = [loss(row, other) <= most for row, other in found]
    texts = [
        f"{link_costs.told(channel(row))}: {_shown(row)} against {_shown(other)}, {_change(row, other)}"
        for row, other in found
    ]
    return (all(met) if met else None), f"in {sum(met)} of {len(met)}: {'; '.join(texts)}" if met else "was not run"


def int8_on_average(rows: Sequence[Row]) -> Answer:
    """What int8 costs in accuracy, in the mean over all rules and channels."""
    losses = [loss(row, other) for row, other in pairs(rows, "wire") if channel(row).wire == INT8]
    if not losses:
        return None, "was not run"
    mean = sum(losses) / len(losses)
    middle, worst, best = (f"{-100 * lost:+.2f}" for lost in (mean, max(losses), min(losses)))
    return mean <= HALF_A_POINT, f"{middle} points in the mean of {len(losses)}, from {worst} to {best}"


@asks
def best_at_equal(rows: Sequence[Row], cost: Cost, unit: str, ours: Callable[[Row], bool]) -> Answer:
    """Whether one of ours is the best, or level with it, for every budget: what the cheapest run costs, then doubled.

    A run that costs more than a budget counts with what it had when it was used up.
    """
    if not any(map(ours, rows)):
        return None, "was not run"
    whole = [cost(row) for row in rows]
    budgets = [min(whole)]
    while budgets[-1] < max(whole):
        budgets.append(2 * budgets[-1])
    winners: dict[str, str] = {}  # with the smallest budget for which each is the best
    met = []
    for budget in budgets:
        parts = [within(row, budget / total) for row, total in zip(rows, whole, strict=True)]
        reached = [row for row in parts if row is not None]
        best = min(reached, key=lambda row: -row.value if row.largest else row.value)
        met.append(any(map(ours, [row for row in reached if _is_level(row, best)])))
        winners.setdefault(f"{best.rule} on {best.topology} {_shown(best)}", f"from {factor(budget)} {unit}")
    texts = [f"{since} {winner}" for winner, since in winners.items()]
    return all(met), f"at {sum(met)} of {len(met)} budgets; the best is {', '.join(texts)}"


def within(row: Row, share: float) -> Row | None:
    """A row as if its runs had been stopped after a share of the rounds, at the last recorded one; None before any."""
    done = [step for step in row.steps if 0 < step <= share * row.steps[-1] * (1 + 1e-9)]
    return row.stopped(done[-1] / row.steps[-1]) if done else None


def _is_level(row: Row, best: Row) -> bool:
    return row.value >= best.value - LEVEL if row.largest else not clearly_above(row, best)


def _shown(row: Row) -> str:
    """Its value, with the range of its seeds."""
    if row.diverged:
        return "diverged"
    value, low, high = (f"{v:.1%}" if row.largest else f"{v:.3g}" for v in (row.value, row.low, row.high))
    return f"{value} ({low} to {high})" if len(row.curves) > 1 else value


def _change(row: Row, other: Row) -> str:
    if row.diverged:
        return "lost"
    lost = loss(row, other)
    if row.largest:
        return f"{round(-100 * lost, 2) + 0.0:+.2f} points"  # adding 0 turns -0 into 0
    return f"{round(lost, 3) + 0.0:+.1%}" if lost < 1 else f"{factor(1 + lost)} times"


# --- targets ---------------------------------------------------------------------------------------------------------

SOURCE = "the study of slow networks"


def _of_each(
    claim: str, rules: Sequence[str], find: OfRows, about: Callable[[Channel], bool], rounds: int = 1
) -> Sentences:
    """A sentence on the gossip of each rule over these channels."""

    def mine(rule: str, row: Row) -> bool:
        return row.rule == rule and not at_server(row) and about(channel(row))

    return tuple(Sentence(claim.format(rule), find, SOURCE, rounds, partial(mine, rule)) for rule in rules)


def _small(row: Row) -> bool:
    return channel(row).wire == INT8


def _small_and_seldom(row: Row) -> bool:
    return _small(row) and channel(row).every == H


def _has_a_course(row: Row) -> bool:
    """Whether its course is drawn: `dat`, whose seeds agree, over channels with one option more each; all-reduce."""
    path = (PLAIN, PLAIN._replace(wire=INT8), Channel(H, 0, INT8), Channel(H, H - 1, INT8))
    return at_server(row) or (row.rule == "dat (beta 0.9)" and channel(row) in path)


def _course(rows: Sequence[Row], title: str) -> Figure:
    return link_costs.course(list(filter(_has_a_course, rows)) or rows, title, LINKS)


def _against_seconds(link: str) -> Draw:
    cost = seconds_on(LINKS[link])
    return lambda rows, title: link_costs.final_against(rows, f"{title}; {link}", cost, "seconds of the run")


def _encodings(rules: Sequence[str], words: str, most: float) -> Sentences:
    """What int8 and bfloat16 may cost each rule."""

    def about(wire: str, by: Channel) -> bool:
        return by.wire in (wire, FLOAT)

    return tuple(
        sentence
        for wire in (INT8, SHORT)
        for sentence in _of_each(
            f"{{}} with {wire} is within {words} of float32", rules, costs(most, "wire"), partial(about, wire)
        )
    )


def _ways(seldom: Sequence[str], often: Sequence[str], words: str, most: float, rounds: int = 1) -> Sentences:
    """What local steps may cost, and late messages with and without them; int8 and float32 say enough."""

    def among(option: str, **same: int) -> tuple[OfRows, Callable[[Channel], bool]]:
        return costs(most, option), lambda by: by.wire != SHORT and same.items() <= by._asdict().items()

    late = f"{{}} with messages {H - 1} rounds late, in every {H}th round, {words}"
    return (
        *_of_each(f"{{}} with gossip in every {H}th round {words}", seldom, *among("every", late=0), rounds),
        *_of_each(late, seldom, *among("late", every=H), rounds),
        *_of_each(f"{{}} with messages a round late {words}", often, *among("late", every=1), rounds),
    )


def _best(what: str, cost: Cost, unit: str) -> tuple[Said, Said]:
    """Which channel is the best at equal cost."""
    return (
        (f"At equal {what} int8 is the best, or level with it", best_at_equal(cost, unit, _small)),
        (
            f"At equal {what} int8 with gossip in every {H}th round is the best, or level with it",
            best_at_equal(cost, unit, _small_and_seldom),
        ),
    )


ITSELF = (
    "Every rule is compared with itself: messages in another encoding, later or less often, everything else being the "
    "same; learning rates are chosen for each. Only losses count: a gain is within every bound."
)
EQUAL = (
    "At equal cost: budgets are what the cheapest run costs in all, then twice as much, up to the dearest. A run that "
    "costs more counts with its last recorded values within the budget, not at all before its first; its learning rate "
    "and decay are those for its own end."
)
BYTES = (
    "Bytes are what a node sends over the run, encoded, mean over the nodes: on the ring to two neighbours, one vector "
    "of dsgd, two of dat and dat-d2. All-reduce is in float32, as a ring all-reduce of the gradient, or of the models "
    f"in every {H}th round (local SGD)."
)
SECONDS = (
    "Seconds are computed by a clock (docs/clock.md), not measured: links of "
    f"{' and of '.join(LINKS)} (bandwidth in each direction, time until a message arrives), {1e3 * GRADIENT:g} ms for "
    "a gradient, and messages that travel meanwhile where the rule and `late` allow."
)
APART = (
    f"Nodes that mix in every {H}th round are apart in between, also with an all-reduce. Recorded rounds lie anywhere, "
    "so that the course of local SGD goes up and down. Of gossip the course shows dat alone, a choice made after the "
    "runs: the seeds of dat-d2 lie too far apart to be read."
)
CHANNELS = Target(
    "Channels: error on least squares with few bytes, late messages and local steps, on the ring",
    SQUARES,
    {"quick": {"steps": 1_000, "seeds": 1}, "paper": {"steps": ROUNDS, "seeds": 3, "screen": {"seeds": 1}}},
    link_costs.against_bytes,
    (
        *_encodings(OF_SQUARES, "5 %", 0.05),
        *_ways(OF_SQUARES, OF_SQUARES, "has at most twice the error", FLAT - 1, ROUNDS),
        *said(SOURCE, *_best("bytes", megabytes, "MB")),
    ),
    (ITSELF, BYTES, EQUAL),
)
IMAGES_CHANNELS = Target(
    "Channels: test accuracy on Fashion-MNIST with few bytes, late messages and local steps, on the ring",
    {},
    {
        "quick": {**images(8, topologies=SOME, epochs=2), "rules": QUICK},
        "paper": {**images(16, [0.1, 10.0], ALL), "epochs": 25, "rules": COMPARED, "screen": SCREEN},
    },
    link_costs.against_bytes,
    (
        *_encodings(OF_IMAGES, "half a point", HALF_A_POINT),
        *said(SOURCE, ("In the mean over rules and channels, int8 is within half a point of float32", int8_on_average)),
        *_ways(OF_IMAGES[:-1], OF_IMAGES[:2], "loses at most a point", LEVEL),
        *said(
            SOURCE,
            *_best("bytes", megabytes, "MB"),
            *(each for name, link in LINKS.items() for each in _best(f"seconds on {name}", seconds_on(link), "s")),
        ),
    ),
    (ITSELF, BYTES, SECONDS, EQUAL, APART, f"Figures end {100 * link_costs.SHOWN:g} points below the best accuracy."),
    {f"{name.split()[0]}-mbit": _against_seconds(name) for name in LINKS} | {"course": _course},
)
