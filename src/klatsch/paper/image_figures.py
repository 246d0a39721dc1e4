"""Figures 2 and 3 of the paper: test accuracy over the epochs, and against the number of machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from klatsch.paper.figures import COLOURS, DASHES, MARKERS, Look, distinct, legend, line_of_seeds, mark, panels
from klatsch.study.summary import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def name_of(row: Row) -> str:
    """What to call a rule here, where all have the paper's momentum and averaging: "dat", "dat (cta)", "d2"."""
    return row.rule.partition(" (")[0] + (" (cta)" if "cta" in row.rule else "")


def accuracy_against_epochs(rows: Sequence[Row], title: str) -> Figure:
    """Figure 2: a row of panels per number of machines, a column per alpha; colours are rules, lines are graphs."""
    alphas = sorted({row.setting["alpha"] for row in rows})
    sizes = sorted({row.nodes for row in rows})
    figure, axes = panels(len(alphas) * len(sizes), len(alphas), title, log=False)
    look = _look(rows)
    for axis, (nodes, alpha) in zip(axes, ((nodes, alpha) for nodes in sizes for alpha in alphas), strict=True):
        for row in (row for row in rows if (row.nodes, row.setting["alpha"]) == (nodes, alpha)):
            curve, epochs = row.curve, [(row.epochs or 1) * step / row.steps[-1] for step in row.steps]
            spread = (curve.mean(0), curve.min(0), curve.max(0))
            line_of_seeds(axis, _label(row), epochs, spread, look(row) | {"marker": ""})
            for k in range(len(epochs) - 1, -1, -3):
                mark(axis, row, epochs[k], curve[:, k], f" after {epochs[k]:.3g} epochs")
        axis.set_title(f"{nodes} machines, alpha = {alpha:g}", fontsize=10)
        axis.set_xlabel("epochs")
    axes[0].set_ylim(*_limits([values for row in rows for values in row.curve]))  # which all panels share
    for axis in axes[:: len(alphas)]:
        axis.set_ylabel("test accuracy, mean over nodes")
    legend(figure, axes)
    return figure


def accuracy_against_nodes(rows: Sequence[Row], title: str) -> Figure:
    """Figure 3: the final accuracy against the number of machines, a panel per alpha."""
    alphas = sorted({row.setting["alpha"] for row in rows})
    figure, axes = panels(len(alphas), len(alphas), title, log=False)
    look, nodes = _look(rows), sorted({row.nodes for row in rows})
    for axis, alpha in zip(axes, alphas, strict=True):
        mine = [row for row in rows if row.setting["alpha"] == alpha]
        for rule, graph in distinct(mine, lambda row: (name_of(row), row.topology)):
            line = [row for row in mine if (name_of(row), row.topology) == (rule, graph)]
            spread = tuple([getattr(row, name) for row in line] for name in ("value", "low", "high"))
            line_of_seeds(axis, f"{rule}, {graph}", [row.nodes for row in line], spread, look(line[0]))
            for row in line:
                mark(axis, row, row.nodes, row.final[:, row.best])
        axis.set_xscale("log", base=2)
        axis.set_xticks(nodes, [str(n) for n in nodes])
        axis.set_xlabel("machines M")
        axis.set_title(f"alpha = {alpha:g}", fontsize=10)
    axes[0].set_ylim(*_limits([[row.low, row.high] for row in rows]))
    axes[0].set_ylabel("final test accuracy, mean over nodes")
    legend(figure, axes)
    return figure


def _label(row: Row) -> str:
    return f"{name_of(row)}, {row.topology}" + (" (diverged)" if row.diverged else "")


def _limits(curves: Sequence[Any]) -> tuple[float, float]:
    """An axis that shows all accuracies; what has diverged is below it."""
    shown = [float(value) for curve in curves for value in curve if value > 0]
    return max(0.0, min(shown, default=0.0) - 0.03), min(1.0, max(shown, default=1.0) + 0.02)


def _look(rows: Sequence[Row]) -> Look:
    """One colour and marker per rule, one kind of line per graph."""
    rules, graphs = distinct(rows, name_of), distinct(rows, lambda row: row.topology)
    return lambda row: {
        "color": COLOURS[rules.index(name_of(row)) % len(COLOURS)],
        "marker": MARKERS[rules.index(name_of(row)) % len(MARKERS)],
        "linestyle": DASHES[graphs.index(row.topology) % len(DASHES)],
    }
