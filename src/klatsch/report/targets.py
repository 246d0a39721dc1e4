"""The table behind `klatsch reproduce`: each figure with its title, study, drawing and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from klatsch.report import best, claims, figures, tables
from klatsch.report.claims import points_of as of
from klatsch.report.entries import ALPHA_MIDDLE, PAPER_ROUNDS, Content, Said, Target, images, said, skewed
from klatsch.report.language import LANGUAGE_LINKS, LANGUAGE_RULES, LANGUAGE_SIZES
from klatsch.report.local_steps import LOCAL_STEPS
from klatsch.report.pages import Page
from klatsch.report.schedule_free import AVERAGES, ORDERS, SCHEDULES
from klatsch.report.slow_networks import CHANNELS, IMAGES_CHANNELS
from klatsch.report.stragglers import STRAGGLERS
from klatsch.study.choices import Row
from klatsch.study.spec import PAPER_GRID, Study, parse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES: dict[str, Content] = {
    "quick": {"nodes": (4, 9, 16, 25, 49, 100), "steps": 20_000, "seeds": 3},
    "paper": {"nodes": (4, 9, 16, 25, 36, 49, 64, 81, 100), "steps": PAPER_ROUNDS, "seeds": 3},
}
BEYOND_SCALES: dict[str, Content] = {
    "quick": {"nodes": (4, 25, 100), "steps": 4_000, "seeds": 1},
    "paper": {"nodes": (4, 9, 25, 49, 100, 256), "steps": PAPER_ROUNDS, "seeds": 3, "screen": {"seeds": 1}},
}
CURVES = (4, 9, 25, 49, 100)  # sizes whose curves are drawn: all nine would hide each other
RING, TORUS, PEER = "ring", "torus", "one_peer_exponential"

LEAST_SQUARES: Content = {
    "problem": {"name": "least-squares", "noise": [1.0, 10.0], "heterogeneity": [1.0, 10.0]},
    "topologies": (RING, TORUS, PEER),
    "rules": ("dat", "dsgd"),
    "lr": PAPER_GRID,
}
RATES = (1e-7, 5e-7, 1e-6, 5e-6, 1e-5, 5e-5, *PAPER_GRID, 0.5)


def _variant(name: str, lowest: float, highest: float, **options: object) -> Content:
    """A rule with the learning rates among which its best lies, at 4,000 rounds as at 100,000."""
    return {"name": name, "lr": [lr for lr in RATES if lowest <= lr <= highest], **options}


COSINE, BETA = {"schedule": "cosine"}, {"beta": 0.9}
VARIANTS: Content = {
    "rules": (
        _variant("dsgd", 1e-7, 5e-4),
        _variant("dsgd", 1e-6, 1e-3, **COSINE),
        _variant("dsgd", 5e-7, 5e-3, average="constant"),
        _variant("gt", 1e-6, 1e-3),
        _variant("gt", 1e-6, 5e-3, **COSINE),
        _variant("gt", 1e-6, 5e-2, average="constant"),
        _variant("d2", 1e-6, 1e-3),
        _variant("d2", 1e-6, 5e-3, **COSINE),
        _variant("dat", 1e-6, 5e-2),
        _variant("dat", 5e-6, 5e-2, **COSINE),
        _variant("dat", 1e-6, 5e-2, order="cta"),
        _variant("dat", 5e-7, 5e-3, **BETA),
        _variant("dat", 5e-6, 5e-2, **BETA, **COSINE),
        _variant("dat-gt", 5e-6, 5e-2),
        _variant("dat-gt", 5e-6, 5e-1, **BETA),
        _variant("dat-d2", 1e-5, 1e-1),
        _variant("dat-d2", 5e-5, 1e-1, **COSINE),
        _variant("dat-d2", 1e-5, 5e-2, **BETA),
        _variant("dat-d2", 5e-5, 5e-1, **BETA, **COSINE),
    ),
    "leave_out": True,
}
VARIANT_NAMES = (
    *("dsgd", "dsgd (cosine)", "dsgd (average constant)", "gt", "gt (cosine)", "gt (average constant)"),
    *("d2", "d2 (cosine)", "dat", "dat (cosine)", "dat (cta)", "dat (beta 0.9)", "dat (beta 0.9, cosine)"),
    *("dat-gt", "dat-gt (beta 0.9)", "dat-d2", "dat-d2 (cosine)", "dat-d2 (beta 0.9)", "dat-d2 (beta 0.9, cosine)"),
)
DRAWN = (  # all of them would hide each other
    *("dsgd", "dsgd (cosine)", "d2 (cosine)", "gt (cosine)", "gt (average constant)"),
    *("dat", "dat (beta 0.9)", "dat-gt (beta 0.9)", "dat-d2 (beta 0.9)"),
)
VARIANT_NOTES = (
    f"The first figure shows {len(DRAWN)} of {len(VARIANT_NAMES)} rules, the second one the best of all at each point; "
    "the table has all. Rules are level within 5 %, or where the ranges of their seeds overlap; next × 2 says that the "
    "next rule that is not level has twice the error of the best.",
    "Learning rates are chosen for the error at the end. A cosine lowers its learning rate to 0 at the last round, "
    "which it has to know in advance.",
    "Rules are compared after equally many rounds, not bytes. To each neighbour dsgd and d2 send one vector per round, "
    "gt, dat and dat-d2 two, dat-gt three: dat and dat-d2 send twice as much as their bases, dat-gt 1.5 times.",
)

# Section 5.2: LeNet on Fashion-MNIST. Learning rates and momentum are the paper's; batch, epochs and schedule are ours.
IMAGES: Content = {
    "rules": ({"name": "dat", "averaging": "fixed(0.9)", "momentum": 0.9}, {"name": "dsgd", "momentum": 0.9}, "d2"),
    "lr": (0.001, 0.01, 0.1),
    "any_graph": True,  # the paper runs D2 on the Base-2 graph, for which it is not defined
}
IMAGE_NOTES = (
    "Where the paper is silent: 32 images per node and round, every node goes through its own images in a new order in "
    "every epoch, constant learning rate, LeNet with GroupNorm after each convolution, all nodes start equal.",
    "D2 mixes with (I + P) / 2, which suits it on every symmetric graph; on the Base-2 graph, which changes from round "
    "to round, it is not defined and run all the same. An accuracy of 0 means that a run diverged.",
)


def study_of(
    target: str, scale: str, device: str = "cpu", dtype: str | None = None, epochs: int | None = None
) -> Study:
    """The study behind a figure at "quick" or "paper" scale, where image studies have 50 epochs.

    By default dtype is float32 for images and on a CPU, where it is twice as fast, and float64 on a GPU.
    """
    chosen = TARGETS[target]
    content: dict[str, Any] = {"name": f"{target}-{scale}", "device": device, **chosen.study, **chosen.scales[scale]}
    if "epochs" not in content:
        if epochs is not None:
            raise ValueError(f"epochs = {epochs}, but {target} has no data set to go through; leave epochs out")
        usual = {"dtype": "float32" if device == "cpu" else "float64"}
        return parse(usual | content | ({} if dtype is None else {"dtype": dtype}))
    if dtype not in (None, "float32"):
        raise ValueError(f"dtype = {dtype!r}; {target} trains in float32, leave dtype out")
    epochs = int(content["epochs"]) if epochs is None else epochs
    points = {"record": max(3, min(epochs, 10))}
    if screen := content.get("screen"):
        content["screen"] = {**screen, "epochs": min(epochs, screen["epochs"])}
    return parse(points | content | {"dtype": "float32", "epochs": epochs})


# --- drawings and sentences -----------------------------------------------------------------------------------------


def _courses(rows: Sequence[Row], title: str) -> Figure:
    return figures.error_against_rounds([row for row in rows if row.nodes in CURVES] or rows, title, together=True)


def _chosen(rows: Sequence[Row], title: str) -> Figure:
    return figures.error_against_nodes([row for row in rows if row.rule in DRAWN] or rows, title)


def _sooner(when: str, share: float) -> tuple[Said, ...]:
    return tuple(
        (f"{SOONER.format(ours, base)}, {when}", claims.smaller(f"{ours} (beta 0.9)", f"{base} (cosine)", share))
        for ours, base in OURS_AND_BASE
    )


def _convergence(title: str, graph: str, *more: Said) -> Target:
    """Figures 4 to 6: the error over the rounds on one graph, and what the appendix says about it."""
    here, ours = "Appendix, additional experimental results", "a check of ours on the sentence before"
    never = "D-SGD does not end better with more machines than 9"
    first = "D-SGD is better with larger M in the first rounds"
    relative = "D-SGD is so also in relation to where it starts (the start is nearer for larger M)"
    where = "exponential graph" if graph == PEER else graph
    sentences = (
        *said(here, (f"{never}, on the {where}", of("dsgd", graph, claims.never_helps(9)))),
        *said(here, (f"{first}, on the {where}", claims.first_rounds(relative=False))),
        *said(ours, (f"{relative}, on the {where}", claims.first_rounds(relative=True))),
        *said(here, *((f"{claim}, on the {where}", *rest) for claim, *rest in more)),
    )
    return Target(title, {**LEAST_SQUARES, "topologies": graph}, SCALES, _courses, sentences)


LATER, STEADILY = "D-SGD with larger M falls behind later", "DAT improves steadily with M"
OURS_AND_BASE = (("dat", "dsgd"), ("dat-d2", "d2"), ("dat-gt", "gt"))
SOONER = "In the middle of all points, {} with beta 0.9 and without decay has a smaller error than {} with a cosine"
CEILING = "{} has no ceiling on the ring: its error does not grow up to M = {{most}}"
AVERAGE = "In the middle of all points, the average of {}'s iterates is better than the last one"
SECTION, BEYOND = "Section 5.2", "beyond the paper"

TARGETS: dict[str, Target] = {
    "fig1": Target(
        "Figure 1: final error against the number of machines",
        LEAST_SQUARES,
        SCALES,
        partial(figures.error_against_nodes, together=True),
        said(
            "Section 5.1, figure 1",
            ("D-SGD gets worse with M on the ring from M = 4", of("dsgd", RING, claims.grows_from(4))),
            ("D-SGD gets worse with M on the torus from M = 9", of("dsgd", TORUS, claims.grows_from(9))),
            ("D-SGD stays about the same on the exponential graph", of("dsgd", PEER, claims.flat)),
            ("DAT improves steadily with M on the torus", of("dat", TORUS, claims.falls()), PAPER_ROUNDS),
            ("DAT improves steadily with M on the exponential graph", of("dat", PEER, claims.falls())),
            ("DAT improves on the ring up to M = 25", of("dat", RING, claims.falls(25)), PAPER_ROUNDS),
            (
                "DAT deteriorates on the ring beyond a threshold between M = 25 and M = 49",
                of("dat", RING, claims.turns(25, 49)),
                PAPER_ROUNDS,
            ),
            (
                "DAT enables improvement for larger M: its best M is above D-SGD's on every graph",
                claims.larger_best_size,
            ),
        ),
    ),
    "fig2": Target(
        "Figure 2: test accuracy on Fashion-MNIST over the epochs",
        IMAGES,
        {"quick": images(8, epochs=3), "paper": images((8, 16), [0.1, 10.0], ("ring", "base_graph"))},
        figures.accuracy_against_epochs,
        said(
            SECTION,
            ("Under heterogeneous data DAT is ahead of D-SGD", claims.ahead("dat", "dsgd")),
            ("Under heterogeneous data DAT is ahead of D2", claims.ahead("dat", "d2")),
            ("DAT on the ring is level with the baselines on the Base-2 graph for M = 8", claims.ring_is_level(8)),
            about=skewed,
        )
        + said(
            SECTION,
            ("Under homogeneous data D-SGD is ahead of DAT", claims.ahead("dsgd", "dat")),
            ("Under homogeneous data D2 is ahead of DAT", claims.ahead("d2", "dat")),
            about=lambda row: bool(row.setting["alpha"] > ALPHA_MIDDLE),
        ),
        IMAGE_NOTES,
    ),
    "fig3": Target(
        "Figure 3: final test accuracy on Fashion-MNIST against the number of machines",
        IMAGES,
        {"quick": images((2, 4, 8, 16), epochs=2), "paper": images((2, 4, 8, 16, 32))},
        figures.accuracy_against_nodes,
        said(
            SECTION,
            ("DAT loses most between M = 8 and 16", claims.largest_drop("dat", 8, 16)),
            ("D-SGD loses most between M = 4 and 8", claims.largest_drop("dsgd", 4, 8)),
            ("D2 loses most between M = 4 and 8", claims.largest_drop("d2", 4, 8)),
        ),
        IMAGE_NOTES,
    ),
    "fig4": _convergence(
        "Figure 4: convergence on ring",
        RING,
        (LATER, of("dsgd", RING, claims.last_is_worse)),
        ("DAT improves from M = 9 to 25", of("dat", RING, claims.step(9, 25, up=False)), PAPER_ROUNDS),
        ("DAT is worse at M = 100 than at 25", of("dat", RING, claims.step(25, 100, up=True)), PAPER_ROUNDS),
    ),
    "fig5": _convergence(
        "Figure 5: convergence on torus",
        TORUS,
        (LATER, of("dsgd", TORUS, claims.last_is_worse)),
        (STEADILY, of("dat", TORUS, claims.falls()), PAPER_ROUNDS),
    ),
    "fig6": _convergence(
        "Figure 6: convergence on one_peer_exponential",
        PEER,
        ("D-SGD ends at about the same error for all M", of("dsgd", PEER, claims.flat)),
        (STEADILY, of("dat", PEER, claims.falls())),
    ),
    "beyond": Target(
        "Beyond the paper: other rules on the same axes",
        {**LEAST_SQUARES, **VARIANTS},
        BEYOND_SCALES,
        _chosen,
        said(
            BEYOND,
            *((CEILING.format(rule), of(rule, RING, claims.no_ceiling), PAPER_ROUNDS) for rule in VARIANT_NAMES),
            ("cta costs accuracy: dat (cta) is worse than dat in the middle of all points", claims.cta_is_worse),
            *((AVERAGE.format(rule), claims.smaller(f"{rule} (average constant)", rule)) for rule in ("dsgd", "gt")),
            ("A rule without decay is the best at every point", best.best_at_every_point(claims.has_no_decay)),
            *_sooner("at the end", share=1.0),
            *_sooner("after half of the rounds", share=0.5),
        )
        + said(
            BEYOND,
            (
                "Of the rules without decay, dat-gt or dat-d2 with beta 0.9 is the best at every point",
                best.best_at_every_point(lambda row: "beta" in row.rule and row.rule.startswith("dat-")),
            ),
            about=claims.has_no_decay,
        ),
        VARIANT_NOTES,
        {"best": best.best_of_points},
    ),
    "averages": AVERAGES,
    "schedules": SCHEDULES,
    "orders": ORDERS,
    "local-steps": LOCAL_STEPS,
    "channels": CHANNELS,
    "images-channels": IMAGES_CHANNELS,
    "stragglers": STRAGGLERS,
    "language-rules": LANGUAGE_RULES,
    "language-links": LANGUAGE_LINKS,
    "language-sizes": LANGUAGE_SIZES,
}
GROUPS = {  # several figures at once
    "schedule-free": ("averages", "schedules", "beyond"),
    "slow-networks": ("channels", "images-channels"),
    "language": ("language-rules", "language-links", "language-sizes"),
}
TABLES: dict[str, Callable[[], Page]] = {"table1": tables.table_1, "table2": tables.table_2}
