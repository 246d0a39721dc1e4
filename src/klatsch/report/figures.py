"""Figures of studies in the style of a paper: seeds as a band, units on the axes, one look per rule."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from klatsch import rules
from klatsch.arguments import named, there_are
from klatsch.report.claims import at_its_best, family
from klatsch.study.choices import Row
from klatsch.study.traffic import sent_by
from klatsch.topology.families import split
from klatsch.units import compact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart; one marker per rule for print.
OKABE_ITO = ("#0072B2", "#D55E00", "#999999", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#009E73", "#F0E442")
TOL = ("#882255", "#AA4499", "#332288", "#44AA99", "#117733", "#999933", "#CC6677", "#661100", "#6699CC")
COLOURS = (*OKABE_ITO, *TOL)
GRAPH_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*h<>pdH8x+1"
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MOST_PANELS = 100
VALUE = "value: "  # an id that starts with this is a tooltip in the report

ERROR = r"$\frac{1}{M}\sum_i \|x_T^i - x^*\|^2$"
SYMBOLS = {"noise": r"$\sigma$", "heterogeneity": r"$\zeta$"}

Style = dict[str, Any]  # how matplotlib draws a line
Text = Callable[[Row], str]
Look = Callable[[Row], Style]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Layout:
    """Rows with one caption share a panel, rows with one label are a line; all panels show the same quantity."""

    quantity: str
    caption: Text
    label: Text
    look: Look
    wide: int  # panels side by side
    legends: bool = False  # one in every panel, not one for all


@dataclass(frozen=True)
class Dress:
    """Colours and labels of one's own, by the names of rules."""

    colours: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, layout: Layout) -> Layout:
        def look(row: Row) -> Style:
            return layout.look(row) | ({"color": self.colours[row.rule]} if row.rule in self.colours else {})

        def label(row: Row) -> str:
            return layout.label(replace(row, rule=self.labels.get(row.rule, row.rule)))

        return replace(layout, look=look, label=label)


PLAIN = Dress()


def plot(
    rows: Sequence[Row],
    across: str = "rounds",
    title: str = "",
    *,
    order: Sequence[str] | None = None,
    colours: Mapping[str, str] = MappingProxyType({}),
    labels: Mapping[str, str] = MappingProxyType({}),
    size: tuple[float, float] | None = None,
    style: str | Path | None = None,
) -> Figure:
    """A figure of rows with a look of your own: the matplotlib figure, to change and save.

    Args:
        rows: of `study.run_study` or `study.summarize`.
        across: "nodes" (final values), "rounds", "seconds" (of rows of `study.timed`) or "bytes".
        title: above it.
        order: names of rules as the rows have them, first to last; others are left out.
        colours: by name of a rule; those of klatsch for others.
        labels: what to call rules, by name.
        size: width and height in inches.
        style: a file of matplotlib's style, or the name of one of its own.
    """
    import matplotlib
    from matplotlib import style as styles

    named("axis", across, dict.fromkeys(("nodes", "rounds", "seconds", "bytes")))
    known = distinct(rows, lambda row: row.rule)
    for name in (*(order or ()), *colours, *labels):
        if name not in known:
            raise ValueError(f"no row has the rule {name!r}; {there_are(name, known)}")
    if order is not None:
        rows = sorted((row for row in rows if row.rule in order), key=lambda row: list(order).index(row.rule))
    if not rows:
        raise ValueError("there are no rows to draw; run the study first")
    with matplotlib.rc_context():
        if style is not None:
            try:
                styles.use(style)
            except OSError as error:
                raise ValueError(f"style {style}: {str(error).splitlines()[0]}; give an .mplstyle file") from None
            if tuple(matplotlib.rcParams["figure.figsize"]) != tuple(matplotlib.rcParamsDefault["figure.figsize"]):
                size = size or tuple(matplotlib.rcParams["figure.figsize"])
        dress = Dress(colours, labels)
        if across == "nodes":
            figure = error_against_nodes(rows, title, dress=dress)
        else:
            figure = error_against_rounds(rows, title, across=across, dress=dress)
    if size is not None:
        figure.set_size_inches(*size)
    return figure


def error_against_nodes(rows: Sequence[Row], title: str, together: bool = False, dress: Dress = PLAIN) -> Figure:
    """The best final error against the number of machines: a panel per setting and topology, a line per rule.

    With `together`, all topologies share the panels of their settings.
    """
    setting, shown = in_letters(rows), _quantity(rows[0], ERROR)
    settings = distinct(rows, setting)
    rows = sorted(rows, key=lambda row: settings.index(setting(row)))
    if together:
        layout = Layout(shown, setting, lambda row: f"{row.rule}, {row.topology}", _by_topology(rows), 2)
        return _against_nodes(rows, title, layout)
    wide = min(4, len({row.topology for row in rows}))
    caption = in_letters(rows, lambda row: [row.topology])
    return _against_nodes(rows, title, dress(Layout(shown, caption, lambda row: row.rule, by_rule(rows), wide)))


def error_against_rounds(
    rows: Sequence[Row], title: str, together: bool = False, across: str = "rounds", dress: Dress = PLAIN
) -> Figure:
    """The error round by round at the best learning rate: a panel per setting, topology and size, a line per rule.

    With `together`, all sizes share the panels of their settings; `across` is "rounds", "seconds" or "bytes". What a
    round costs differs between graphs, so these share a panel then.
    """
    setting, shown = in_letters(rows), _quantity(rows[0], ERROR.replace("_T", "_t"))
    if together:
        layout = Layout(shown, setting, lambda row: f"{row.rule}, M = {row.nodes}", _by_size(rows), 2)
        return _against_rounds(rows, title, layout)
    apart = across == "rounds"
    caption = in_letters(rows, lambda row: [*([row.topology] if apart else []), f"{row.nodes} machines"])
    wide = min(3, len(distinct(rows, caption)))

    def label(row: Row) -> str:
        return f"{row.rule}{'' if apart else f', {row.topology}'}, lr {row.lr:g}"

    layout = Layout(shown, caption, label, by_rule(rows) if apart else _by_family(rows), wide, legends=True)
    return _against_rounds(rows, title, dress(layout), across)


def error_against_seconds(rows: Sequence[Row], title: str, wide: int) -> Figure:
    """The error against seconds: a panel per setting, so many beside each other, a line per rule and graph."""
    look = in_letters(rows), lambda row: f"{row.rule}, {row.topology}", _by_family(rows), wide
    return _against_rounds(rows, title, Layout(_quantity(rows[0], ERROR.replace("_T", "_t")), *look), "seconds")


def accuracy_against_epochs(rows: Sequence[Row], title: str) -> Figure:
    """Figure 2: a row of panels per number of machines, a column per alpha; colours are rules, lines are graphs."""
    layout = Layout(
        _accuracy(rows[0]),
        lambda row: f"{row.nodes} machines, {_alpha(row)}",
        lambda row: _family_and_graph(row) + " (diverged)" * row.diverged,
        _by_family(rows),
        len(distinct(rows, _alpha)),
    )
    figure = _against_rounds(sorted(rows, key=lambda row: (row.nodes, row.setting["alpha"])), title, layout)
    figure.axes[0].set_ylim(*limits([row.curve for row in rows]))  # which all panels share
    return figure


def accuracy_against_nodes(rows: Sequence[Row], title: str) -> Figure:
    """Figure 3: the final accuracy against the number of machines, a panel per alpha."""
    layout = Layout(_accuracy(rows[0]), _alpha, _family_and_graph, _by_family(rows), len(distinct(rows, _alpha)))
    figure = _against_nodes(sorted(rows, key=lambda row: row.setting["alpha"]), title, layout)
    figure.axes[0].set_ylim(*limits([np.array([row.low, row.high]) for row in rows]))
    return figure


def accuracy_against_bytes(rows: Sequence[Row], title: str) -> Figure:
    """The final accuracy against what a node sends: a panel per alpha, a line per rule and family of graphs.

    Markers are the rounds H between two mixes. Each rule has its best options.
    """
    rows = sorted(at_its_best(rows), key=lambda row: (row.setting["alpha"], row.megabytes))
    names, between = _places(rows), sorted({split(row.topology)[1] for row in rows})
    graphs = sorted({split(row.topology)[0] for row in rows}, key=lambda graph: graph == "complete")  # dashed

    def label(row: Row) -> str:
        graph = split(row.topology)[0]
        return f"{family(row)}, {'all-reduce' if graph == 'complete' else graph}"

    def look(row: Row) -> Style:
        return _style(names[_named(row)[0]], graphs.index(split(row.topology)[0])) | {"marker": ""}

    layout = Layout(_accuracy(rows[0]), _alpha, label, look, len(distinct(rows, _alpha)))
    figure, panels = panelled(rows, title, layout)
    for axis, mine in panels:
        for name in sorted(distinct(mine, label)):
            line = [row for row in mine if label(row) == name]
            ends = np.array([[row.value, row.low, row.high] for row in line]).T
            line_of_seeds(axis, name, [row.megabytes for row in line], ends, look(line[0]))
            for row in line:
                style = look(row) | {"marker": MARKERS[between.index(split(row.topology)[1])]}
                axis.plot([row.megabytes], [row.value], markersize=5, **style)
                mark(axis, row, row.megabytes, row.final[:, row.best])
        for k, H in enumerate(between):
            axis.plot([], [], MARKERS[k], color="grey", markersize=5, label=f"H = {H}")
        axis.set_xscale("log")
        axis.set_xlabel("MB sent per node")
    legend(figure)
    figure.axes[0].set_ylim(*limits([np.array([row.low, row.high]) for row in rows]))
    return figure


def accuracy_of_schedules(rows: Sequence[Row], title: str) -> Figure:
    """The accuracy over the epochs: panels as in figure 2; a line per rule and graph, black with an all-reduce."""
    look = by_rule(rows)

    def at_server(row: Row) -> bool:
        return row.topology == "complete"

    layout = Layout(
        _accuracy(rows[0]),
        lambda row: f"{row.nodes} machines, {_alpha(row)}",
        lambda row: f"{row.rule}, {'all-reduce' if at_server(row) else row.topology}",
        lambda row: look(row) | ({"color": "black"} if at_server(row) else {}),
        len(distinct(rows, _alpha)),
    )
    figure = _against_rounds(sorted(rows, key=lambda row: (row.nodes, row.setting["alpha"])), title, layout)
    figure.axes[0].set_ylim(*limits([row.curve for row in rows]))
    return figure


def final_of_rules(rows: Sequence[Row], title: str) -> Figure:
    """Final values, the best rule on top: mean of nodes with the range of its seeds, merged model, worst node."""
    from matplotlib import figure as figures

    def label(row: Row) -> str:
        return row.rule if row.topology == rows[0].topology else f"{row.rule}, {row.topology}"

    places = sorted({(row.nodes, row.setting["alpha"]) for row in rows})
    means = {name: np.mean([row.value for row in rows if label(row) == name]) for name in distinct(rows, label)}
    order = sorted(means, key=lambda name: means[name], reverse=not rows[0].largest)
    wide = len(distinct(rows, _alpha))
    high = -(-len(places) // wide)
    size = 2.6 + 3.0 * wide, 1.4 + (0.7 + 0.17 * len(order)) * high
    figure = figures.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(high, wide, sharex="col", sharey=True, squeeze=False).flatten()
    for axis, (nodes, alpha) in zip(axes, places, strict=False):
        mine = [row for row in rows if (row.nodes, row.setting["alpha"]) == (nodes, alpha) and not row.diverged]
        y = [order.index(label(row)) for row in mine]
        axis.hlines(y, [row.low for row in mine], [row.high for row in mine], color="#0072B2", linewidth=1.2)
        for text, marker, colour, values in (
            ("worst node", "v", "#D55E00", [row.beside("worst") for row in mine]),
            ("merged model", "^", "#009E73", [row.beside("merged") for row in mine]),
            ("mean of nodes", "o", "#0072B2", [row.value for row in mine]),
        ):
            axis.plot(values, y, marker, color=colour, markersize=3.5, label=text)
        for place, row in zip(y, mine, strict=True):
            mark(axis, row, row.value, row.final[:, row.best], at=place)
        axis.set_yticks(range(len(order)), map(literal, order), fontsize=7)
        axis.margins(y=0.6 / len(order))
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(f"{nodes} machines, alpha = {alpha:g}", fontsize=10)
    for axis in axes[len(places) :]:
        axis.remove()
    for axis in axes[-wide:]:
        axis.set_xlabel("test accuracy" if rows[0].largest else quantity(rows[0]))
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize=10)
    legend(figure)
    return figure


def classes_of_nodes(counts: NDArray[np.int64], classes: Sequence[str], title: str) -> Figure:
    """A bar per node, made of its classes; counts are (nodes, classes)."""
    from matplotlib import colormaps
    from matplotlib import figure as figures

    nodes, few = np.arange(len(counts)), len(counts) <= 24
    figure = figures.Figure(figsize=(7.5, 1.6 + (0.26 if few else 0.14) * len(counts)), layout="constrained")
    axis = figure.subplots()
    ends = counts.cumsum(axis=1)
    for k, name in enumerate(classes):
        colour, left = colormaps["tab10"](k % 10), ends[:, k] - counts[:, k]
        axis.barh(nodes, counts[:, k], left=left, height=0.72, color=colour, label=name)
    axis.set_yticks(nodes, [str(node) for node in nodes], fontsize=8 if few else 5)
    axis.set_ylim(len(counts) - 0.5, -0.5)
    axis.set_xlim(0, float(ends.max()))
    axis.set_xlabel("images")
    axis.set_ylabel("node")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


# --- what a row is called and how it looks --------------------------------------------------------------------------


def in_letters(rows: Sequence[Row], before: Callable[[Row], list[str]] = lambda row: []) -> Text:
    """The options that differ between rows, in the paper's letters, after other words."""
    names = dict.fromkeys(name for row in rows for name in row.setting)
    varying = [name for name in names if len({row.setting.get(name) for row in rows}) > 1]

    def text(row: Row) -> str:
        values = {name: row.setting[name] for name in varying if name in row.setting}
        letters = (f"{SYMBOLS.get(name) or literal(name)} = {literal(compact(v))}" for name, v in values.items())
        return ", ".join([*map(literal, before(row)), *letters])

    return text


def literal(text: str) -> str:
    """A name that matplotlib shows as it is: a dollar begins no formula, and an underscore hides no line."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def _alpha(row: Row) -> str:
    return f"alpha = {row.setting['alpha']:g}"


def _accuracy(row: Row) -> str:
    """What its values are: of the mean of nodes, or of what the row shows instead."""
    return "test accuracy, mean over nodes" if row.metric == "accuracy" else f"test {row.metric}"


def _family_and_graph(row: Row) -> str:
    return f"{family(row)}, {row.topology}"


def in_bits(row: Row) -> bool:
    """Whether its values are bits per byte."""
    return row.metric.partition(",")[0] == "bits"


def _quantity(row: Row, formula: str) -> str:
    return f"error  {formula}" if row.metric == "distance" else literal(row.title)


def quantity(row: Row) -> str:
    """What its final values are."""
    if in_bits(row):
        return f"bits per byte{row.metric.removeprefix('bits')}"
    return _accuracy(row) if row.largest else _quantity(row, ERROR)


def _by_topology(rows: Sequence[Row]) -> Look:
    """A colour per topology, a kind of line and marker per rule."""
    topologies, names = distinct(rows, lambda row: row.topology), distinct(rows, lambda row: row.rule)
    return lambda row: _style(
        topologies.index(row.topology), names.index(row.rule), names.index(row.rule), GRAPH_COLOURS
    )


def _by_size(rows: Sequence[Row]) -> Look:
    """One shade per number of machines, dark for many; one kind of line per rule."""
    from matplotlib import colormaps

    nodes, names = sorted({row.nodes for row in rows}), distinct(rows, lambda row: row.rule)
    shades = [colormaps["viridis_r"](0.15 + 0.85 * k / max(1, len(nodes) - 1)) for k in range(len(nodes))]
    return lambda row: _style(nodes.index(row.nodes), names.index(row.rule), colours=shades)


def by_rule(rows: Sequence[Row]) -> Look:
    """The same colour and marker for a rule in every figure; one kind of line per variant: "(cosine)"."""
    places, variants = _places(rows), distinct(rows, lambda row: _named(row)[1])

    def look(row: Row) -> Style:
        name, variant = _named(row)
        return _style(places[name], variants.index(variant))

    return look


def _places(rows: Sequence[Row]) -> dict[str, int]:
    """The places of rules in the tables of looks: custom ones take those that no other rule of the figure has."""
    names, known = distinct(rows, lambda row: _named(row)[0]), list(rules.RULES)
    places = {name: known.index(name) for name in names if name in known}
    free = [k for k in range(len(names) + len(known)) if k not in places.values()]
    return places | dict(zip((name for name in names if name not in known), free, strict=False))


def _named(row: Row) -> tuple[str, str]:
    """The name of a rule and its options."""
    name, _, variant = row.rule.partition(" ")
    return name, variant


def _by_family(rows: Sequence[Row]) -> Look:
    """One colour and marker per rule, one kind of line per graph."""
    families, graphs = distinct(rows, family), distinct(rows, lambda row: row.topology)
    return lambda row: _style(families.index(family(row)), graphs.index(row.topology))


def _style(colour: int, line: int, marker: int | None = None, colours: Sequence[object] = COLOURS) -> Style:
    """A line's style by places in the tables above; by default a marker per colour, another one when these recur."""
    marker = colour + colour // len(colours) if marker is None else marker
    tables = {"color": (colours, colour), "marker": (MARKERS, marker), "linestyle": (DASHES, line)}
    return {name: table[k % len(table)] for name, (table, k) in tables.items()}


# --- drawing --------------------------------------------------------------------------------------------------------


def _against_nodes(rows: Sequence[Row], title: str, layout: Layout) -> Figure:
    figure, panels = panelled(rows, title, layout, "final ")
    nodes = sorted({row.nodes for row in rows})
    for axis, mine in panels:
        for name in distinct(mine, layout.label):
            line = [row for row in mine if layout.label(row) == name]
            ends = np.array([[row.value, row.low, row.high] for row in line]).T
            line_of_seeds(axis, name, [row.nodes for row in line], ends, layout.look(line[0]))
            for row in line:
                mark(axis, row, row.nodes, row.final[:, row.best])
        axis.set_xscale("log")
        axis.set_xticks(nodes, [str(n) for n in nodes], fontsize=10 if len(nodes) < 8 else 7.5)
        axis.minorticks_off()
        axis.set_xlabel("machines M")
    legend(figure)
    return figure


def _across(row: Row, across: str) -> tuple[Sequence[float], str]:
    """Where the points of a row lie on an axis, and what it is called."""
    share = [step / row.steps[-1] for step in row.steps]
    if across == "seconds":
        return row.elapsed or (), "seconds"
    if across == "bytes":
        case = row.case
        return [math.nan if case is None else sent_by(case, t, row.megabytes) for t in row.steps], "MB sent per node"
    return (row.steps, "rounds t") if row.epochs is None else ([row.epochs * part for part in share], "epochs")


def _against_rounds(rows: Sequence[Row], title: str, layout: Layout, across: str = "rounds") -> Figure:
    rows = [
        row
        for row in rows
        if not ((across == "seconds" and row.elapsed is None) or (across == "bytes" and row.sent is None))
    ]
    if not rows:
        raise ValueError(f"of no run the {across} are known; show rounds")
    figure, panels = panelled(rows, title, layout)
    rounds = rows[0].epochs is None or across != "rounds"
    for axis, mine in panels:
        for row in mine:
            when, unit = _across(row, across)
            spread = np.stack((row.curve.mean(0), row.curve.min(0), row.curve.max(0)))
            line_of_seeds(axis, layout.label(row), when, spread, layout.look(row) | {"marker": ""})
            for k in range(len(row.steps) - 1, -1, -6 if rounds else -3):  # points with a tooltip
                after = f"{row.steps[k]:,} rounds" if unit == "rounds t" else f"{when[k]:.3g} {unit}"
                mark(axis, row, when[k], row.curve[:, k], f" after {after}")
        axis.set_xscale("log" if rounds else "linear")
        axis.set_xlabel(unit)
        if layout.legends:
            axis.legend(loc="best", frameon=False, fontsize="small")
    if not layout.legends:
        legend(figure)
    return figure


def panelled(
    rows: Sequence[Row], title: str, layout: Layout, which: str = ""
) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    """A figure with its panels, and the rows of each."""
    # Not pyplot, which needs a window system and keeps figures alive.
    from matplotlib import figure as figures

    captions, wide = distinct(rows, layout.caption), layout.wide
    if len(captions) > MOST_PANELS:
        raise ValueError(f"a figure of {len(captions):,} panels; {MOST_PANELS} are the most: show fewer runs")
    count, high = len(captions), -(-len(captions) // wide)
    figure = figures.Figure(figsize=(1.2 + 3.2 * min(wide, count), 0.9 + 3.0 * high), layout="constrained")
    axes = figure.subplots(high, wide, sharey=True, squeeze=False).flatten()
    for axis in axes[count:]:
        axis.remove()
    for axis, text in zip(axes[:count], captions, strict=True):
        axis.set_yscale("linear" if rows[0].largest or in_bits(rows[0]) else "log")
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(text, fontsize=10)
    for axis in axes[:count:wide]:
        axis.set_ylabel(f"{which}{layout.quantity}")
    figure.suptitle(textwrap.fill(literal(title), int(13 * figure.get_figwidth())), fontsize=10)
    return figure, [(axes[k], [row for row in rows if layout.caption(row) == text]) for k, text in enumerate(captions)]


def line_of_seeds(axis: Axes, label: str, x: ArrayLike, spread: NDArray[np.float64], style: Style) -> None:
    """A line for the mean of the seeds, and a band from the lowest to the highest; `spread` holds these three."""
    shown = np.isfinite(spread[0])  # diverged values are not drawn
    x, (mean, low, high) = np.asarray(x, dtype=float)[shown], spread[:, shown]
    axis.plot(x, mean, markersize=4, linewidth=1.4, label=literal(label), **style)
    axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def mark(axis: Axes, row: Row, x: float, values: NDArray[np.float64], when: str = "", at: float | None = None) -> None:
    """A tooltip for the report: the mean of the seeds and their range."""
    if np.isfinite(mean := values.mean()):
        spread = f"{mean:.3g} ({values.min():.3g} to {values.max():.3g})"
        text = f"{row.rule}, {row.topology}, M = {row.nodes}{when}: {spread}, lr {row.lr:g}"
        axis.plot([x], [mean if at is None else at], "o", markersize=9, alpha=0, gid=f"{VALUE}{text}")


def legend(figure: Figure) -> None:
    """One legend below all panels, from which a long one takes no room."""
    lines = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(lines), int(figure.get_figwidth() / (0.55 + 0.085 * max(map(len, lines))))))
    figure.set_figheight(figure.get_figheight() + 0.21 * max(0, -(-len(lines) // columns) - 3))
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns, frameon=False)


def limits(curves: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Limits that show all accuracies; diverged ones fall below."""
    shown = [float(value) for curve in curves for value in curve.flat if value > 0]
    return max(0.0, min(shown, default=0.0) - 0.03), min(1.0, max(shown, default=1.0) + 0.02)


def distinct(rows: Sequence[Row], of: Callable[[Row], Value]) -> list[Value]:
    """The distinct values, in order."""
    return list(dict.fromkeys(of(row) for row in rows))
