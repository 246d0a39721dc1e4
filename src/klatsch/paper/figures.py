"""Figures of studies, in the style of a paper: log axes, seeds as a band, units on the axes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from klatsch import rules
from klatsch.study.summary import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart; one marker per rule for print.
COLOURS = ("#0072B2", "#D55E00", "#999999", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#009E73", "#F0E442")
GRAPH_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*h"
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
VALUE = "value: "  # an element of this id carries a text, which a report shows where one points

ERROR = r"$\frac{1}{M}\sum_i \|x_T^i - x^*\|^2$"
SYMBOLS = {"noise": r"$\sigma$", "heterogeneity": r"$\zeta$"}

Style = dict[str, Any]
Look = Callable[[Row], Style]


def error_against_nodes(rows: Sequence[Row], title: str, look: Look | None = None) -> Figure:
    """The best final error against the number of machines: a panel per setting and topology, a line per rule.

    With `look`, which says how a row is drawn, all topologies share the panels of their settings.
    """
    shared = look is not None
    describe = _describer(rows)
    settings = distinct(rows, lambda row: describe(row.setting))
    topologies = distinct(rows, lambda row: row.topology)
    places = [(setting, topology) for setting in settings for topology in (["" if shared else t for t in topologies])]
    places = list(dict.fromkeys(places))
    look = look or by_rule(rows)
    wide = 2 if shared else min(4, len(topologies))
    figure, axes = panels(len(places), wide, title, log=not rows[0].largest)
    nodes = sorted({row.nodes for row in rows})
    for axis, (setting, topology) in zip(axes, places, strict=True):
        mine = [row for row in rows if describe(row.setting) == setting and topology in ("", row.topology)]
        for rule, graph in distinct(mine, lambda row: (row.rule, row.topology)):
            line = [row for row in mine if (row.rule, row.topology) == (rule, graph)]
            label = f"{rule}, {graph}" if shared else rule
            line_of_seeds(axis, label, [row.nodes for row in line], _spread(line), look(line[0]))
            for row in line:
                mark(axis, row, row.nodes, row.final[:, row.best])
        axis.set_xscale("log")
        axis.set_xticks(nodes, [str(n) for n in nodes], fontsize=10 if len(nodes) < 8 else 7.5)
        axis.minorticks_off()
        axis.set_xlabel("machines M")
        axis.set_title(
            ", ".join(part for part in (topology, setting if len(settings) > 1 else "") if part), fontsize=10
        )
    for axis in axes[::wide]:
        axis.set_ylabel("final " + _quantity(rows[0], ERROR))
    legend(figure, axes)
    return figure


def error_against_rounds(rows: Sequence[Row], title: str, look: Look | None = None) -> Figure:
    """The error round by round at the best learning rate: a panel per setting, topology and size, a line per rule.

    With `look`, which says how a row is drawn, all sizes share the panels of their settings.
    """
    shared = look is not None
    describe = _describer(rows)

    def place(row: Row) -> tuple[str, str, int]:
        return describe(row.setting), "" if shared else row.topology, 0 if shared else row.nodes

    places = distinct(rows, place)
    look = look or by_rule(rows)
    wide = 2 if shared else min(3, len(places))
    figure, axes = panels(len(places), wide, title, log=not rows[0].largest)
    several = len({setting for setting, _, _ in places}) > 1
    for axis, panel in zip(axes, places, strict=True):
        for row in (row for row in rows if place(row) == panel):
            curve = row.curve
            label = f"{row.rule}, M = {row.nodes}" if shared else f"{row.rule}, lr {row.lr:g}"
            spread = (curve.mean(0), curve.min(0), curve.max(0))
            when = row.steps if row.epochs is None else [row.epochs * step / row.steps[-1] for step in row.steps]
            line_of_seeds(axis, label, when, spread, look(row) | {"marker": ""})
            for k in range(len(row.steps) - 1, -1, -6):
                mark(axis, row, when[k], curve[:, k], f" after {row.steps[k]:,} rounds")
        axis.set_xscale("log" if rows[0].epochs is None else "linear")
        axis.set_xlabel("rounds t" if rows[0].epochs is None else "epochs")
        where = "" if shared else f"{panel[1]}, {panel[2]} machines"
        axis.set_title(", ".join(part for part in (where, panel[0] if several else "") if part), fontsize=10)
        if not shared:
            axis.legend(frameon=False, fontsize="small")
    for axis in axes[::wide]:
        axis.set_ylabel(_quantity(rows[0], ERROR.replace("_T", "_t")))
    if shared:
        legend(figure, axes)
    return figure


def _quantity(row: Row, formula: str) -> str:
    return f"error  {formula}" if row.metric == "distance" else row.metric


def _describer(rows: Sequence[Row]) -> Callable[[Mapping[str, Any]], str]:
    """How to call settings: by the options that differ between rows, in the paper's letters."""
    names = dict.fromkeys(name for row in rows for name in row.setting)
    varying = [name for name in names if len({row.setting.get(name) for row in rows}) > 1]
    return lambda setting: ", ".join(
        f"{SYMBOLS.get(name, name)} = {setting[name]:g}" for name in varying if name in setting
    )


def colour_of_topology(rows: Sequence[Row]) -> Look:
    """One colour per topology, one line style and marker per rule."""
    topologies, rules = distinct(rows, lambda row: row.topology), distinct(rows, lambda row: row.rule)
    return lambda row: {
        "color": GRAPH_COLOURS[topologies.index(row.topology) % len(GRAPH_COLOURS)],
        "linestyle": DASHES[rules.index(row.rule) % len(DASHES)],
        "marker": MARKERS[rules.index(row.rule) % len(MARKERS)],
    }


def colour_of_size(rows: Sequence[Row]) -> Look:
    """One shade per number of machines, dark for many; one line style per rule."""
    from matplotlib import colormaps

    nodes, rules = sorted({row.nodes for row in rows}), distinct(rows, lambda row: row.rule)
    return lambda row: {
        "color": colormaps["viridis_r"](0.15 + 0.85 * nodes.index(row.nodes) / max(1, len(nodes) - 1)),
        "linestyle": DASHES[rules.index(row.rule) % len(DASHES)],
    }


def by_rule(rows: Sequence[Row]) -> Look:
    """A rule looks the same in every figure; its variants differ in the line."""
    labels = distinct(rows, lambda row: row.rule)
    names = [label.split(" ")[0] for label in labels]
    places = list(dict.fromkeys([*rules.RULES, *names]))  # rules of one's own come after the others

    def look(row: Row) -> Style:
        k, name = labels.index(row.rule), row.rule.split(" ")[0]
        place = places.index(name)
        variant = names[:k].count(name)
        return {
            "color": COLOURS[place % len(COLOURS)],
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": DASHES[variant % len(DASHES)],
        }

    return look


def panels(count: int, wide: int, title: str, log: bool = True) -> tuple[Figure, Any]:
    """A figure with so many panels, side by side as far as `wide` allows."""
    # The object, not pyplot: no window system is asked for, and nothing is kept alive.
    from matplotlib import figure as figures

    high = -(-count // wide)
    figure = figures.Figure(figsize=(1.2 + 3.2 * min(wide, count), 0.9 + 3.0 * high), layout="constrained")
    axes = figure.subplots(high, wide, sharey=True, squeeze=False).flatten()
    for axis in axes[count:]:
        axis.remove()
    for axis in axes[:count]:
        axis.set_yscale("log" if log else "linear")
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize=10)
    return figure, axes[:count]


def _spread(line: Sequence[Row]) -> Any:
    return tuple([getattr(row, name) for row in line] for name in ("value", "low", "high"))


def line_of_seeds(axis: Any, label: str, x: Any, spread: Any, style: Style) -> None:
    """A line for the mean of the seeds, and a band from the smallest to the largest."""
    shown = np.isfinite(np.asarray(spread[0], dtype=float))  # what diverged has no place on the axis
    x, mean, low, high = (np.asarray(v, dtype=float)[shown] for v in (x, *spread))
    axis.plot(x, mean, markersize=4, linewidth=1.4, label=label, **style)
    axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def mark(axis: Any, row: Row, x: float, errors: Any, when: str = "") -> None:
    """What a page shows where one points at a marker: the mean of the seeds, and their range."""
    if np.isfinite(mean := errors.mean()):
        text = (
            f"{row.rule}, {row.topology}, M = {row.nodes}{when}: {mean:.3g} ({errors.min():.3g} to {errors.max():.3g})"
        )
        axis.plot([x], [mean], "o", markersize=9, alpha=0, gid=f"{VALUE}{text}, lr {row.lr:g}")


def legend(figure: Figure, axes: Any) -> None:
    """One legend below all panels."""
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(lines), int(figure.get_figwidth() / (0.55 + 0.085 * max(map(len, lines))))))
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns, frameon=False)


def distinct(rows: Sequence[Row], of: Callable[[Row], Any]) -> list[Any]:
    """The different values of something, in order."""
    return list(dict.fromkeys(of(row) for row in rows))
