"""Figures of comparisons, in the style of a paper: log axes, seeds as a band, units on the axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from klatsch import algorithms
from klatsch.study.compare import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart; one marker per rule for print.
COLOURS = ("#0072B2", "#D55E00", "#999999", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#009E73", "#F0E442")
MARKERS = "osD^vPX*h"

ERROR = r"$\frac{1}{M}\sum_i \|x_T^i - x^*\|^2$"


def error_against_nodes(rows: Sequence[Row], title: str) -> Figure:
    """The best final error against the number of machines, one panel per topology, one line per rule."""
    panels = list(dict.fromkeys(row.topology for row in rows))
    figure, axes = _panels(len(panels), title)
    for axis, topology in zip(axes, panels, strict=True):
        for rule in dict.fromkeys(row.rule for row in rows):
            line = [row for row in rows if row.rule == rule and row.topology == topology]
            mean, low, high = ([getattr(row, name) for row in line] for name in ("error", "low", "high"))
            _line(axis, rule, rule, [row.nodes for row in line], mean, low, high)
        nodes = sorted({row.nodes for row in rows})
        axis.set_xscale("log")
        axis.set_xticks(nodes, [str(n) for n in nodes])
        axis.minorticks_off()
        axis.set_xlabel("machines M")
        axis.set_title(topology)
    axes[0].set_ylabel("final error  " + ERROR)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(9, len(labels)), frameon=False)
    return figure


def error_against_rounds(rows: Sequence[Row], title: str) -> Figure:
    """The error round by round at the best learning rate, one panel per topology, one line per rule."""
    panels = list(dict.fromkeys((row.topology, row.nodes) for row in rows))
    figure, axes = _panels(len(panels), title)
    for axis, (topology, nodes) in zip(axes, panels, strict=True):
        for row in rows:
            if (row.topology, row.nodes) == (topology, nodes):
                curve = row.curves[:, :, row.best]
                label = f"{row.rule}, lr {row.lr:g}"
                _line(axis, row.rule, label, row.steps, curve.mean(0), curve.min(0), curve.max(0), marker="")
        axis.set_xscale("log")
        axis.set_xlabel("rounds t")
        axis.set_title(f"{topology}, {nodes} machines")
        axis.legend(frameon=False, fontsize="small")
    axes[0].set_ylabel("error  " + ERROR.replace("_T", "_t"))
    return figure


def _panels(count: int, title: str) -> tuple[Figure, Any]:
    # The object, not pyplot: no window system is asked for, and nothing is kept alive.
    from matplotlib import figure as figures

    figure = figures.Figure(figsize=(1.2 + 3.2 * count, 3.9), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.set_yscale("log")
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return figure, axes


def _line(axis: Any, rule: str, label: str, x: Any, mean: Any, low: Any, high: Any, marker: str | None = None) -> None:
    k = list(algorithms.ALGORITHMS).index(rule)  # a rule looks the same in every figure
    colour, shape = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)] if marker is None else marker
    shown = np.isfinite(np.asarray(mean, dtype=float))  # what diverged has no place on the axis
    x, mean, low, high = (np.asarray(v, dtype=float)[shown] for v in (x, mean, low, high))
    axis.plot(x, mean, color=colour, marker=shape, markersize=4, linewidth=1.4, label=label)
    axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
