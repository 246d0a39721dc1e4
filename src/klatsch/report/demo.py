"""The demo: how many machines help? Six rules on three graphs, in a minute on two cores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from klatsch import pictures
from klatsch.report import figures
from klatsch.study import workers
from klatsch.study.cases import LeftOut
from klatsch.study.choices import Row
from klatsch.study.execute import Told, run_study
from klatsch.study.spec import Study, parse

RULES = (  # those of the paper, ours without a schedule, a baseline with one; learning rates among which the best lies
    {"name": "dsgd", "lr": (2e-6, 5e-6, 1e-5, 5e-5, 1e-4)},
    {"name": "dat", "lr": (5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2)},
    {"name": "dat", "beta": 0.9, "lr": (1e-5, 5e-5, 1e-4, 5e-4, 1e-3)},
    {"name": "dat-d2", "beta": 0.9, "lr": (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2)},
    {"name": "dat-gt", "beta": 0.9, "lr": (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2)},
    {"name": "gt", "schedule": "cosine", "lr": (1e-5, 5e-5, 1e-4, 5e-4)},
)
ROUNDS, ALL_ROUNDS = 10_000, 20_000  # of the demo, and of README's figure
NODES, ALL_NODES = (4, 9, 25), (4, 9, 25, 49)  # what the demo shows, and what README does
TITLE = "Least squares, heterogeneous data: error after {steps:,} rounds, learning rate chosen for each point"


@dataclass(frozen=True)
class Demo:
    """What the demo found."""

    rows: list[Row]
    left_out: list[LeftOut]
    sentence: str
    files: tuple[Path, ...]


def study(steps: int | None = None, seeds: int | None = None, full: bool = False) -> Study:
    """The runs of the demo: the paper's problem (Section 5.1) with sigma = 1 and zeta = 10."""
    return parse(
        {
            "name": "demo",
            "rules": RULES,
            "topologies": ["ring", "torus", "one_peer_exponential"],
            "nodes": ALL_NODES if full else NODES,
            "steps": (ALL_ROUNDS if full else ROUNDS) if steps is None else steps,
            "seeds": (2 if full else 1) if seeds is None else seeds,
            "problem": {"name": "least-squares", "noise": 1.0, "heterogeneity": 10.0},
            "dtype": "float32",
            "leave_out": True,
        }
    )


def demo(runs: Study, folder: Path, told: Told | None = None) -> Demo:
    """Run the demo and save its figure as PNG and SVG."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; make it first, or choose another with --out")
    found = run_study(runs, executor=workers.threads, told=told)
    figure = figures.error_against_nodes(found.rows, TITLE.format(steps=runs.steps))
    files = tuple(folder / f"klatsch-demo{suffix}" for suffix in (".png", ".svg"))
    for file in files:
        pictures.save(figure, file, dpi=160)
    # The remedies that follow a reason are options of klatsch run, which the demo does not have.
    left_out = [item._replace(reason=item.reason.partition(";")[0]) for item in found.left_out]
    return Demo(found.rows, left_out, sentence(found.rows), files)


def sentence(rows: list[Row]) -> str:
    """What the figure shows, in words."""
    few, many = min(row.nodes for row in rows), max(row.nodes for row in rows)
    error = {(row.rule, row.topology, row.nodes): row.value for row in rows}
    rules, topologies = dict.fromkeys(row.rule for row in rows), dict.fromkeys(row.topology for row in rows)
    both = {(rule, t) for rule in rules for t in topologies if {(rule, t, few), (rule, t, many)} <= error.keys()}
    lines = [f"From {few} to {many} machines, the error of"]
    for rule in rules:
        moves = [f"{_moved(error[rule, t, few], error[rule, t, many])} on {t}" for t in topologies if (rule, t) in both]
        lines.append(f"  {rule} {', '.join(moves)}")
    last = sorted((row for row in rows if row.nodes == many), key=lambda row: row.value)
    best = {t: next(row for row in last if row.topology == t) for t in topologies}
    leads = [
        f"{row.rule} on {t} (dsgd's error is {_times(error['dsgd', t, many] / row.value)} times as large)"
        for t, row in best.items()
    ]
    lines.append(f"At {many} machines the best rule is {', '.join(leads)}.")
    if (steps := rows[0].steps[-1]) < ROUNDS:
        lines.append(f"{steps:,} rounds are too few for large rings; the figure of the README has {ALL_ROUNDS:,}.")
    return "\n".join(lines)


def _moved(first: float, last: float) -> str:
    if not (math.isfinite(first) and math.isfinite(last)):
        return "diverges"
    ratio = last / first
    if 0.8 < ratio < 1.25:
        return "stays"
    return f"grows {_times(ratio)}-fold" if ratio > 1 else f"falls to 1/{_times(1 / ratio)}"


def _times(ratio: float) -> str:
    return f"{float(f'{ratio:.2g}'):,.0f}" if math.isfinite(ratio) and ratio >= 10 else f"{ratio:.2g}"
