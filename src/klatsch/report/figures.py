"""Figures of studies in the style of a paper: seeds as a band, units on the axes, one look per rule."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from klatsch import rules
from klatsch.arguments import named, there_are
from klatsch.clock import Clock
from klatsch.report import selection
from klatsch.report.selection import Selections, best_of, distinct, in_words, options_of, selected
from klatsch.report.sentences import Race, factor, is_behind, spread
from klatsch.study.cases import sent_by
from klatsch.study.choices import LOSS, Row
from klatsch.study.spec import Options, grouped
from klatsch.units import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart; one marker per rule for print.
OKABE_ITO = ("#0072B2", "#D55E00", "#999999", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#009E73", "#F0E442")
TOL = ("#882255", "#AA4499", "#332288", "#44AA99", "#117733", "#999933", "#CC6677", "#661100", "#6699CC")
COLOURS = (*OKABE_ITO, *TOL, "#AA7744", "#4477AA", "#228833", "#AA3377")
OTHER_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, REFERENCES = "osD^vPX*h<>pdH8x+1234|", "*PXdhv^<>"
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MOST_PANELS = 100
PANEL_LINES, PANEL_LETTERS = 6, 36  # of a legend that fits into a panel
NAMES = 2  # that fit into a cell
VALUE = "value: "  # an id that starts with this is a tooltip in the report
ERROR = r"error  $\frac{1}{M}\sum_i \|x_%s^i - x^*\|^2$"
SYMBOLS = {"noise": r"$\sigma$ = %g", "heterogeneity": r"$\zeta$ = %g", "alpha": "alpha = %g", "nodes": "%d machines"}
UNITS = {"nodes": "machines M", "rounds": "rounds t", "seconds": "seconds", "bytes": "MB sent per node"}
PARTS = ("rule", "options", "topology", "graph")  # by which a panel has no references of its own
TICKS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36_000: "10 h", 360_000: "100 h"}  # of races
PLAIN = {  # what stands in HTML for what only matplotlib can set
    r"\$\\frac.*\$": "‖x − x*‖², mean over nodes",
    r"\$\\sigma\$": "σ",
    r"\$\\zeta\$": "ζ",
    r"\\\$": "$",
    " +": " ",
}


@dataclass(frozen=True)
class Course:
    """A line of a figure in numbers."""

    name: str
    more: str  # what else stands beside its name
    x: NDArray[np.float64]
    spread: NDArray[np.float64]  # the mean of the seeds, the lowest and the highest
    style: Options
    notes: list[str] = field(default_factory=list)  # on some of its points


# What axes show, which matplotlib knows only as strokes and areas.
DRAWN: WeakKeyDictionary[Axes, list[Course]] = WeakKeyDictionary()


class StudyFigure(selection.Words):
    """A figure of a study.

    Args:
        name: what is added to the study's name for its file; nothing for the first.
        across: "nodes", "rounds" (or epochs), "bytes" or "seconds"; "rules": final values, the best rule on top;
            "best": a table of the best rules at each point.
        final: whether final values are shown against the bytes or seconds of the whole run, instead of courses.
        where: the rows that are shown.
        of: whose values: "merged" is the model that is the mean of all, "worst" the worst node, "loss" the training
            loss beside an accuracy; by default the mean of the nodes.
        panels: options that differ between panels.
        lines: options that differ between lines: the first decides the colour, the others the kind of line.
        marker: an option that decides the marker.
        reference: rows that stand in every panel, in black, such as those with an all-reduce.
        clock: the name of a clock of the study, for seconds; names, or "all", for panels with each.
        first_done: whether learning rates are chosen for when the first run of a panel is done.
        wide: panels side by side; by default those of the last option of `panels`.
        below: what lies further below the best accuracy is not shown.
        race: shown in place of all that: the seconds of the first of each family to shares of the best accuracy, by
            each clock; see `sentences.Race`. Its own are coloured.
    """

    name: str = ""
    across: Literal["nodes", "rounds", "seconds", "bytes", "rules", "best"] = "rounds"
    final: bool = False
    where: Selections = ({},)
    of: Literal["mean", "merged", "worst", "loss"] = "mean"
    panels: tuple[str, ...] | None = None
    lines: tuple[str, ...] = ()
    marker: str = ""
    reference: Selections = ()
    clock: str | tuple[str, ...] = ""
    first_done: bool = False
    wide: Annotated[int | None, Field(ge=1, le=MOST_PANELS)] = None
    below: float = 1.0
    race: Race | None = None

    def check_names(self, place: str, known: Mapping[str, Options], clocks: Mapping[str, Clock]) -> None:
        """Refuse options that no run has, values that none can have, and a clock that the study does not have."""
        selection.check_tables(place, (*self.where, *self.reference), known)
        if self.race is not None:
            self.race.check_names(f"{place}.race", known, clocks)
        selection.check_names(place, {*(self.panels or ()), *self.lines, self.marker} - {""}, known)
        if not self.clock and (self.across == "seconds" or self.first_done or self.race is not None):
            raise ValueError(f"{place}: seconds need a clock; give clock = 'all', or the name of one of the study's")
        if self.clock not in ("", "all"):
            selection.check_names(place, self.clocks, clocks, "clock")

    @property
    def clocks(self) -> tuple[str, ...]:
        """Their names, if it says any."""
        return (self.clock,) if isinstance(self.clock, str) else self.clock

    def draw(
        self, rows: Sequence[Row], title: str, clocks: Mapping[str, Clock], style: str | Path | None = None
    ) -> Figure:
        """The figure; of all rows where it selects none, as in a study that is not finished."""
        rows = selected(rows, self.where) or list(rows)
        if self.of != "mean":
            rows = [row.showing(self.of) for row in rows if self.of in row.others] or rows
        chosen = clocks if self.clock == "all" else {name: clocks[name] for name in self.clocks if name}
        if self.race is not None:
            return _raced(rows, self.race, chosen)
        if self.clock:
            rows = [row for name, clock in chosen.items() for row in selection.timed(rows, name, clock)]
        if self.first_done:
            panels = grouped(rows, lambda row: row.setting_text).values()
            rows = [selection.chosen_for(row, selection.first_done(panel))[0] for panel in panels for row in panel]
        if self.across in ("rules", "best"):
            return (_dots if self.across == "rules" else _cells)(rows, title)
        return plot(rows, self.across, title, words=self, style=style)


def plot(
    rows: Sequence[Row],
    across: str = "rounds",
    title: str = "",
    *,
    words: StudyFigure | None = None,
    order: Sequence[str] | None = None,
    colours: Mapping[str, str] = MappingProxyType({}),
    labels: Mapping[str, str] = MappingProxyType({}),
    size: tuple[float, float] | None = None,
    style: str | Path | None = None,
) -> Figure:
    """A figure of rows: the matplotlib figure, to change and save.

    Args:
        rows: of `study.run_study` or `study.summarize`.
        across: "nodes" (final values), "rounds", "seconds" (of rows of `study.timed`) or "bytes".
        title: above it.
        words: what panels and lines are; by default courses in panels whose legends tell the learning rates.
        order: names of rules as the rows have them, first to last; others are left out.
        colours: by name of a rule; those of klatsch for others.
        labels: what to call rules, by name.
        size: width and height in inches.
        style: a file of matplotlib's style, or the name of one of its own.
    """
    import matplotlib
    from matplotlib import style as styles

    named("axis", across, UNITS)
    known = distinct(rows, lambda row: row.rule)
    for name in (*(order or ()), *colours, *labels):
        if name not in known:
            raise ValueError(f"no row has the rule {name!r}; {there_are(name, known)}")
    if order is not None:
        rows = sorted((row for row in rows if row.rule in order), key=lambda row: list(order).index(row.rule))
    if not rows:
        raise ValueError("there are no rows to draw; run the study first")
    rows = [row for row in rows if len(_course(row, across)[0])]
    if not rows:
        raise ValueError(f"of no run the {across} are known; show rounds")
    words = words or StudyFigure()
    per_graph = across in ("nodes", "rounds")  # seconds and bytes of a round differ between graphs, which share a panel
    final, rates = words.final or across == "nodes", words.panels is None and across != "nodes"
    names = words.panels
    if names is None:
        names = (*selection.varying(rows), *["nodes"] * (across != "nodes"), *["graph"] * per_graph)
    look = Look(rows, words.lines or (("options",) if per_graph else ("options", "graph")), words, colours, labels)
    with matplotlib.rc_context():
        if style is not None:
            try:
                styles.use(style)
            except OSError as error:
                raise ValueError(f"style {style}: {str(error).splitlines()[0]}; give an .mplstyle file") from None
            if tuple(matplotlib.rcParams["figure.figsize"]) != tuple(matplotlib.rcParamsDefault["figure.figsize"]):
                size = size or tuple(matplotlib.rcParams["figure.figsize"])
        figure, panels = _panelled(look.main, title, names, words.wide, "final " * final, "T" if final else "t")
        for axis, place, of_panel in panels:
            shared = {name: value for name, value in place.items() if name not in PARTS}
            shown = [*of_panel, *selected(look.references, shared)]
            if final:
                _draw_finals(axis, shown, across, look)
            else:
                _draw_courses(axis, shown, across, look, rates)
        for axis, *_ in panels:
            _tick(axis.yaxis, *axis.get_ylim())
            if across != "nodes":
                _tick(axis.xaxis, *axis.get_xlim())
        if rates:
            _legends(figure, [axis for axis, *_ in panels])
        if rows[0].largest:
            least = max(0.0, max(row.value for row in rows) - words.below)
            values = [np.array([row.low, row.high]) if final else row.curve for row in rows]
            seen = [float(value) for each in values for value in each.flat if value > least]  # diverged ones fall below
            figure.axes[0].set_ylim(max(0.0, min(seen, default=0.0) - 0.03), min(1.0, max(seen, default=1.0) + 0.02))
        if not rates:
            _legend(figure)
    if size is not None:
        figure.set_size_inches(*size)
    return figure


class Look:
    """What lines are called and how they look; a built-in rule has the same colour and marker in every figure."""

    def __init__(
        self,
        rows: Sequence[Row],
        lines: Sequence[str] = ("options",),
        words: StudyFigure | None = None,
        colours: Mapping[str, str] = MappingProxyType({}),
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        from matplotlib import colormaps

        words = words or StudyFigure()
        self.names, self.marker, self.colours, self.labels = lines, words.marker, colours, labels
        self.references = selected(rows, words.reference)
        self.black = {id(row): k for k, row in enumerate(self.references)}
        self.main = [row for row in rows if id(row) not in self.black] or list(rows)
        self.kinds, marks = distinct(self.main, self._kind), distinct(self.main, self._marker)
        self.markers = sorted(marks, key=lambda mark: (isinstance(mark, str), mark))
        values, known = distinct(self.main, self._coloured), list(rules.RULES)
        if lines[0] in ("rule", "options"):
            self.table: Sequence[object] = COLOURS
            free = (k for k in range(len(known) + len(values)) if k >= len(known) or known[k] not in values)
            self.places = {value: known.index(value) if value in known else next(free) for value in values}
        else:
            shades = [colormaps["viridis_r"](0.15 + 0.85 * k / max(1, len(values) - 1)) for k in range(len(values))]
            self.table = shades if lines[0] == "nodes" else OTHER_COLOURS
            self.places = {value: k for k, value in enumerate(sorted(values) if lines[0] == "nodes" else values)}

    def _coloured(self, row: Row) -> Any:
        """What decides the colour."""
        return row.rule.partition(" (")[0] if self.names[0] == "options" else options_of(row).get(self.names[0])

    def _kind(self, row: Row) -> tuple[object, ...]:
        """What decides the kind of line."""
        variant = row.rule.partition(" (")[2] if self.names[0] == "options" else ""
        return variant, *(options_of(row).get(name) for name in self.names[1:])

    def _marker(self, row: Row) -> Any:
        return options_of(row).get(self.marker, "")

    def label(self, row: Row) -> str:
        rule = self.labels.get(row.rule, row.rule)
        if id(row) in self.black:
            return f"{rule}, {row.topology}"
        options = options_of(row) | {"options": rule}
        said = (in_words(name, options[name]) for name in self.names if options.get(name) is not None)
        return ", ".join(filter(None, said))

    def style(self, row: Row) -> Options:
        """How matplotlib draws its line."""
        if (place := self.black.get(id(row))) is not None:
            kind = DASHES[place % len(DASHES)]
            return {"color": "black", "linestyle": kind, "marker": REFERENCES[place % len(REFERENCES)]}
        place, line = self.places[self._coloured(row)], self.kinds.index(self._kind(row))
        mark = self.markers.index(self._marker(row)) if self.marker else place + place // len(self.table)
        colour = self.colours.get(row.rule, self.table[place % len(self.table)])
        return {"color": colour, "linestyle": DASHES[line % len(DASHES)], "marker": MARKERS[mark % len(MARKERS)]}


def _draw_finals(axis: Axes, rows: Sequence[Row], across: str, look: Look) -> None:
    """Final values against machines, or what a whole run costs; of rows with one label, graph and size, the best."""
    for name, of_line in grouped(rows, look.label).items():
        line = [best_of(same) for same in grouped(of_line, lambda row: (row.topology, row.nodes)).values()]
        line.sort(key=lambda row: _course(row, across)[0][-1])
        x = [_course(row, across)[0][-1] for row in line]
        ends = np.array([[row.value, row.low, row.high] for row in line]).T
        _band(axis, name, x, ends, look.style(line[0]) | ({"marker": ""} if look.marker and len(line) > 1 else {}))
        for where, row in zip(x, line, strict=True):
            if look.marker:
                axis.plot([where], [row.value], markersize=5, **look.style(row))
            _tooltip(axis, row, where, row.final[:, row.best])
    for mark, value in zip(MARKERS, look.markers if look.marker else (), strict=False):
        axis.plot([], [], mark, color="grey", markersize=5, label=in_words(look.marker, value))
    axis.set_xscale("log")
    axis.set_xlabel(UNITS[across])
    if across == "nodes":
        sizes = sorted({row.nodes for row in look.main})
        axis.set_xticks(sizes, [str(M) for M in sizes], fontsize=10 if len(sizes) < 8 else 7.5)
        axis.minorticks_off()


def _draw_courses(axis: Axes, rows: Sequence[Row], across: str, look: Look, rates: bool) -> None:
    """Values while nodes train."""
    unit = _course(rows[0], across)[1]
    for row in rows:
        x, _ = _course(row, across)
        spread = np.stack((row.curve.mean(0), row.curve.min(0), row.curve.max(0)))
        _band(axis, look.label(row), x, spread, look.style(row) | {"marker": ""}, f", lr {row.lr:g}" * rates)
        for k in range(len(row.steps) - 1, -1, -3 if unit == "epochs" else -6):  # points with a tooltip
            after = f"{row.steps[k]:,} rounds" if unit == UNITS["rounds"] else f"{x[k]:.3g} {unit}"
            _tooltip(axis, row, x[k], row.curve[:, k], f" after {after}")
    axis.set_xscale("linear" if unit == "epochs" else "log")
    axis.set_xlabel(unit)


def _course(row: Row, across: str) -> tuple[Sequence[float], str]:
    """Where the points of a row lie, and what the axis is called."""
    if across == "rounds" and row.epochs is not None:
        return [row.epochs * step / row.steps[-1] for step in row.steps], "epochs"
    x: Sequence[float] = row.steps if across == "rounds" else [row.nodes]
    if across == "seconds":
        x = row.elapsed or ()
    elif across == "bytes":
        x = [] if row.case is None or row.sent is None else [sent_by(row.case, t, row.megabytes) for t in row.steps]
    return x, UNITS[across]


def _dots(rows: Sequence[Row], title: str) -> Figure:
    """Final values, the best rule on top: mean of nodes with the range of its seeds, merged model, worst node."""

    def label(row: Row) -> str:
        return row.rule if row.topology == rows[0].topology else f"{row.rule}, {row.topology}"

    means = {name: np.mean([row.value for row in same]) for name, same in grouped(rows, label).items()}
    order = sorted(means, key=lambda name: means[name], reverse=not rows[0].largest)
    names = ["nodes", *selection.varying(rows)]
    figure, panels = _panelled(rows, title, names, None, "", "T", 0.7 + 0.17 * len(order))
    for axis, _, of_panel in panels:
        shown = [row for row in of_panel if not row.diverged]
        y = [order.index(label(row)) for row in shown]
        blue, orange, green, *_ = OTHER_COLOURS
        axis.hlines(y, [row.low for row in shown], [row.high for row in shown], color=blue, linewidth=1.2)
        for text, marker, colour, values in (
            ("worst node", "v", orange, [row.beside("worst") for row in shown]),
            ("merged model", "^", green, [row.beside("merged") for row in shown]),
            ("mean of nodes", "o", blue, [row.value for row in shown]),
        ):
            axis.plot(values, y, marker, color=colour, markersize=3.5, label=text)
        for place, row in zip(y, shown, strict=True):
            _tooltip(axis, row, row.value, row.final[:, row.best], at=place)
        axis.set(yscale="linear", xlabel=_quantity(rows[0], "T"), ylabel="")
        axis.set_yticks(range(len(order)), map(literal, order), fontsize=7)
        axis.margins(y=0.6 / len(order))
    _legend(figure)
    return figure


def _raced(rows: Sequence[Row], race: Race, clocks: Mapping[str, Clock]) -> Figure:
    """Seconds to shares of the best accuracy: a dot when all seeds are there, after a line from the first of them."""
    from matplotlib import figure as figures

    standings = race.run(rows, clocks)
    names, sizes, families = list(clocks), sorted({each.nodes for each in standings}), list(race.families)
    step = len(families) + 2  # lines of a clock: its name, its families and a gap
    lines = [step * k + 1 + line for k in range(len(names)) for line in range(len(families))]
    ends = [row.value for each in standings for row in each.first.values() if not row.diverged] or [1.0]
    least, most = 0.5 * min(ends), 5 * max(ends)
    ticks = [tick for tick in TICKS if least < tick < most]
    size = 1.2 + 3.7 * len(sizes), 0.5 + len(race.to) * (0.4 + 0.14 * step * len(names))
    figure = figures.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(race.to), len(sizes), sharex=True, sharey=True, squeeze=False)
    for clock, M, share, first in standings:
        axis, top = axes[race.to.index(share), sizes.index(M)], step * names.index(clock)
        apart = [word for word in clock.split(", ") if not all(word in name.split(", ") for name in names)]
        text = {"va": "center", "fontsize": 8.5, "transform": axis.get_yaxis_transform()}
        axis.text(0, top, literal(", ".join(apart)), weight="bold", **text)
        for y, of in enumerate(families, top + 1):
            colour = OKABE_ITO[0] if of in race.ours else "#6e6e6e"
            if (row := first.get(of)) is None:
                axis.text(1, y, "not run", color=colour, ha="right", **text)
                continue
            name = f"{VALUE}{row.rule}, {row.topology}, M = {M}, {clock}, {share:.0%}: {spread(row)}"
            axis.plot([row.low, min(row.value, most)], [y, y], color=colour, alpha=0.45, linewidth=2.2)
            if row.diverged:
                axis.text(1, y, "never", color=colour, ha="right", bbox={"color": "white", "pad": 1}, **text)
            else:
                axis.plot([row.value], [y], "o", color=colour, markersize=5.5, gid=name)
                axis.text(
                    row.value, y, f"   {duration(row.value)}", color=colour, **text | {"transform": axis.transData}
                )
    for axis, (share, M) in zip(axes.flat, product(race.to, sizes), strict=True):
        axis.set_title(f"{share:.0%} of the best accuracy, {SYMBOLS['nodes'] % M}", fontsize=10, loc="left")
        axis.set(xscale="log", xlim=(least, most), ylim=(step * len(names) - 1.2, -0.8))
        axis.set_xticks(ticks, [TICKS[tick] for tick in ticks], fontsize=8)
        axis.set_yticks(lines, families * len(names), fontsize=8.5)
        axis.minorticks_off()
        axis.tick_params(length=0)
        axis.grid(axis="x", alpha=0.3, linewidth=0.6)
        axis.spines[:].set_visible(False)
    figure.suptitle(literal(race.title), fontsize=10.5)
    return figure


def _cells(rows: Sequence[Row], title: str) -> Figure:
    """A table of the best rules in their colours: of all, and of those without decay."""
    from matplotlib import figure as figures

    points = grouped((row for row in rows if not row.diverged), lambda row: (row.topology, row.setting_text, row.nodes))
    sizes, places = sorted({row.nodes for row in rows}), distinct(rows, lambda row: (row.topology, row.setting_text))
    look, order = Look(rows), distinct(rows, lambda row: row.rule)
    wide = 2 if len(sizes) < 5 else 1  # panels side by side
    size = 2.4 + 1.55 * len(sizes) * wide, 1.2 + 2 / wide * (0.6 + 0.46 * len(places))
    figure = figures.Figure(figsize=size, layout="constrained")
    titles = "the best of all rules, and the next that is not level", "the best without decay, times the smallest error"
    for axis, text in zip(figure.subplots(2 // wide, wide, sharey=True), titles, strict=True):
        for (graph, setting, M), of_point in points.items():
            shown = of_point if text == titles[0] else selected(of_point, {"schedule": "constant"})
            if not shown:
                continue
            best, x, y = best_of(shown), sizes.index(M), places.index((graph, setting))
            level = sorted((r for r in shown if not is_behind(r, best)), key=lambda row: order.index(row.rule))
            words = [row.rule for row in level[:NAMES]] + [f"and {len(level) - NAMES} more"] * (len(level) > NAMES)
            if text != titles[0]:
                words.append(f"× {factor(best.value / best_of(of_point).value)}")
            elif behind := [row for row in shown if is_behind(row, best)]:
                words.append(f"next × {factor(best_of(behind).value / best.value)}")
            colour = look.style(level[0])["color"]  # of the first that is level, not the luckiest
            axis.fill_between([x - 0.48, x + 0.48], y - 0.45, y + 0.45, color=colour, alpha=0.3, linewidth=0)
            axis.text(x, y, "\n".join(words), ha="center", va="center", fontsize=6.5)
        axis.set_title(text, fontsize=10)
        axis.set_xticks(range(len(sizes)), [f"M = {M}" for M in sizes])
        axis.set_yticks(range(len(places)), [f"{graph}\n{setting}" for graph, setting in places], fontsize=7)
        axis.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(places) - 0.5, -0.5))
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize=10)
    return figure


# --- parts of figures -----------------------------------------------------------------------------------------------


def _panelled(
    rows: Sequence[Row], title: str, names: Sequence[str], wide: int | None, which: str, when: str, tall: float = 3.0
) -> tuple[Figure, list[tuple[Axes, Options, list[Row]]]]:
    """A figure; its panels, each with the values of some options and the rows that have them."""
    # Not pyplot, which needs a window system and keeps figures alive.
    from matplotlib import figure as figures

    values = {name: list(dict.fromkeys(options_of(row).get(name) for row in rows)) for name in names}
    varied = [name for name in names if len(values[name]) > 1 or name not in rows[0].setting]
    groups = grouped(rows, lambda row: tuple(options_of(row).get(name) for name in names))
    places = sorted(groups, key=lambda place: [values[name].index(v) for name, v in zip(names, place, strict=True)])
    if (count := len(places)) > MOST_PANELS:
        raise ValueError(f"a figure of {count:,} panels; {MOST_PANELS} are the most: show fewer runs")
    wide = wide or min(4, count, len(values[names[-1]]) if names else 1)
    high = -(-count // wide)
    figure = figures.Figure(figsize=(1.2 + 3.2 * min(wide, count), 0.9 + tall * high), layout="constrained")
    axes = figure.subplots(high, wide, sharey=True, squeeze=False).flatten()
    for axis in axes[count:]:
        axis.remove()
    panels = []
    for k, place in enumerate(places):
        axis, of = axes[k], dict(zip(names, place, strict=True))
        words = [SYMBOLS[name] % of[name] if name in SYMBOLS else literal(in_words(name, of[name])) for name in varied]
        axis.set_title(", ".join(words), fontsize=10)
        axis.set_yscale("linear" if rows[0].largest or selection.in_bits(rows[0]) else "log")
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        if k % wide == 0:
            axis.set_ylabel(f"{which}{_quantity(rows[0], when)}")
        panels.append((axis, of, groups[place]))
    figure.suptitle(textwrap.fill(literal(title), int(13 * figure.get_figwidth())), fontsize=10)
    return figure, panels


def literal(text: str) -> str:
    """A name that matplotlib shows as it is: a dollar begins no formula, and an underscore hides no line."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def _quantity(row: Row, when: str) -> str:
    """What its values are, at the end ("T") or at any round ("t")."""
    metric, comma, which = row.metric.partition(",")
    if row.metric == "distance":
        return ERROR % when
    if metric == "accuracy":
        return f"test {row.metric}" if comma else "test accuracy, mean over nodes"
    if metric == LOSS:
        return "training loss, mean over nodes"
    return f"bits per byte{comma}{which}" if metric == "bits" else literal(row.title)


def _band(axis: Axes, name: str, x: ArrayLike, spread: NDArray[np.float64], style: Options, more: str = "") -> None:
    """A line for the mean of the seeds, and a band from the lowest to the highest; `spread` holds these three."""
    shown = np.isfinite(spread[0])  # diverged values are not drawn
    course = Course(name, more, np.asarray(x, dtype=float)[shown], spread[:, shown], style)
    mean, low, high = course.spread
    axis.plot(course.x, mean, markersize=4, linewidth=1.4, label=literal(name + more), **style)
    axis.fill_between(course.x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    DRAWN.setdefault(axis, []).append(course)


def _tooltip(axis: Axes, row: Row, x: float, values: NDArray[np.float64], when: str = "", at: float = np.nan) -> None:
    """A tooltip for the report: the mean of the seeds and their range; at another height than the mean, if given."""
    if np.isfinite(mean := values.mean()):
        spread = f"{mean:.3g} ({values.min():.3g} to {values.max():.3g})"
        text = f"{row.rule}, {row.topology}, M = {row.nodes}{when}: {spread}, lr {row.lr:g}"
        axis.plot([x], [mean if np.isnan(at) else at], "o", markersize=9, alpha=0, gid=f"{VALUE}{text}")
        if axis in DRAWN:
            DRAWN[axis][-1].notes.append(text)


def _legend(figure: Figure) -> None:
    """One legend below all panels; a long one makes the figure higher."""
    lines = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(lines), int(figure.get_figwidth() / (0.55 + 0.085 * max(map(len, lines))))))
    figure.set_figheight(figure.get_figheight() + 0.21 * max(0, -(-len(lines) // columns) - 3))
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns, frameon=False)


def _legends(figure: Figure, axes: Sequence[Axes]) -> None:
    """A legend in each panel, or below it where it would not fit in."""
    entries = [axis.get_legend_handles_labels() for axis in axes]
    longest = max(len(label) for _, labels in entries for label in labels)
    if longest <= PANEL_LETTERS and max(len(labels) for _, labels in entries) <= PANEL_LINES:
        for axis in axes:
            axis.legend(loc="best", frameon=False, fontsize="small")
        return
    above = len({round(axis.get_position().y0, 6) for axis in axes})  # panels above each other
    letters = longest if len(axes) == above else PANEL_LETTERS
    wrapped = [[textwrap.fill(label, letters) for label in labels] for _, labels in entries]
    for axis, (lines, _), labels in zip(axes, entries, wrapped, strict=True):
        axis.legend(lines, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize="small")
    most = max(1 + "\n".join(labels).count("\n") for labels in wrapped)
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, 0.9 + 0.075 * letters), height + 0.17 * most * above)


def _tick(axis: Axis, low: float, high: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten on a short logarithmic axis: labels of the usual ones would overlap."""
    if axis.get_scale() == "log" and 2.5 * low < high < 100 * low:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        inside = [tick for tick in ticks if low <= tick <= high]
        axis.set_ticks(inside, labels=[f"{tick:,.6g}" for tick in inside])
        axis.set_ticks([], minor=True)


def values_of(figure: Figure) -> Options | None:
    """The lines of a figure in numbers, for an interactive page; None if it has none."""
    from matplotlib.colors import to_hex

    def plain(text: str) -> str:
        for formula, words in PLAIN.items():
            text = re.sub(formula, words, text)
        return text.strip()

    def line(course: Course) -> Options:
        x, mean, low, high = ([float(f"{v:.6g}") for v in values] for values in (course.x, *course.spread))
        notes = course.notes if len(course.notes) == len(x) else []
        look = {"colour": to_hex(course.style["color"]), "dash": DASHES.index(course.style["linestyle"])}
        words = {"name": course.name, "more": course.more, "notes": notes}
        return {**words, **look, "x": x, "mean": mean, "low": low, "high": high}

    axes = [axis for axis in figure.axes if axis in DRAWN]
    if not axes:
        return None
    return {
        "x": axes[0].get_xlabel(),
        "y": plain(axes[0].get_ylabel()),
        "log": [axes[0].get_xscale() == "log", axes[0].get_yscale() == "log"],
        "within": None if axes[0].get_autoscaley_on() else axes[0].get_ylim(),  # as high and low as is shown at most
        "panels": [{"title": plain(axis.get_title()), "lines": [*map(line, DRAWN[axis])]} for axis in axes],
    }
