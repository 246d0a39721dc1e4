"""Schedules, averages and corrections on images: `klatsch reproduce averages`, `schedules` and `schedules-graphs`."""

from __future__ import annotations

from klatsch.paper.target import Content, images

BOTH = ("constant", "cosine")
ALPHAS = [0.1, 1.0, 10.0]
ALL_REDUCE = "complete"
# Learning rates about a factor of 3 apart. A momentum of 0.9 makes steps ten times as long.
PLAIN_RATES = (0.03, 0.1, 0.3, 1.0)
MOMENTUM_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
PAPER_RATES = (0.001, 0.003, 0.01, 0.03)
ANYTIME_RATES = (0.1, 0.3, 1.0, 3.0)

DSGD: Content = {"name": "dsgd", "momentum": 0.9, "lr": MOMENTUM_RATES}
PAPER: Content = {"name": "dat", "averaging": "fixed(0.9)", "momentum": 0.9, "lr": PAPER_RATES}  # as in Section 5.2
D2: Content = {"name": "d2", "lr": PLAIN_RATES}
GT: Content = {"name": "gt", "lr": PLAIN_RATES}
QG: Content = {"name": "qg", "lr": MOMENTUM_RATES}


def anytime(name: str, averaging: object, beta: object, schedule: object = BOTH) -> Content:
    """A rule with an anytime average, by its weights and its query point."""
    return {"name": name, "averaging": averaging, "beta": beta, "lr": ANYTIME_RATES, "schedule": schedule}


# --- averages: which weights, and which point between w and x? ------------------------------------------------------

WEIGHTS, BETAS = ("constant", "fixed(0.9)", "fixed(0.99)"), (1.0, 0.9, 0.7)
CANDIDATES = tuple(anytime(name, WEIGHTS, BETAS) for name in ("dat", "dat-d2", "dat-gt"))

# --- schedules: the best of them, and what a user would pick instead ------------------------------------------------

SCHEDULE_FREE = anytime("dat", "constant", 0.9)
FINALISTS: tuple[Content, ...] = (
    SCHEDULE_FREE,
    anytime("dat-d2", "fixed(0.99)", 0.9, "constant"),
    anytime("dat-d2", "fixed(0.9)", 1.0, "cosine"),
    anytime("dat-gt", "fixed(0.99)", 0.7, "constant"),
    anytime("dat-gt", "fixed(0.9)", 0.9, "cosine"),
)
WITH_ALL_REDUCE = tuple({**rule, "topologies": ALL_REDUCE} for rule in (DSGD, SCHEDULE_FREE))
SCHEDULES: Content = {
    "rules": (DSGD, PAPER, D2, GT, QG, *FINALISTS, *WITH_ALL_REDUCE),
    "schedule": BOTH,
    "leave_out": True,  # D2 is not defined on graphs that change
}
SHORT = {"epochs": 20, "seeds": 1, "record": 2}


def _scale(nodes: object, topologies: object) -> Content:
    return {**images(nodes, ALPHAS, topologies), "screen": SHORT, "record": 6}
