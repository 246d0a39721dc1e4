"""What training over a channel costs on a link, and figures of accuracy or error against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from klatsch.clock import Clock, Links
from klatsch.report import figures
from klatsch.report.claims import family
from klatsch.report.figures import GRAPH_COLOURS, MARKERS, Layout, Style
from klatsch.study.cases import Channel
from klatsch.study.choices import Row
from klatsch.study.traffic import elapsed
from klatsch.topology.channel import WIRES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cost = Callable[[Row], float]

GRADIENT = 5e-3  # seconds: a LeNet takes 2 to 6 ms for 32 images on two cores
SHOWN = 0.1  # of accuracy: what lies further below the best is not drawn
LINES = ("solid", "dashed")  # of the variants of a rule
SERVERS = "*PXdhv^<>"  # markers of all-reduce
GOODPUT = 0.94e6 / 8  # bytes per second of TCP on a line of 1 Mbit/s
LINKS = {
    name: Clock(GRADIENT, Links(megabits * GOODPUT, latency))
    for name, megabits, latency in (("200 Mbit/s, 5 ms", 200, 5e-3), ("50 Mbit/s, 50 ms", 50, 5e-2))
}


def channel(row: Row) -> Channel:
    """How its messages travel."""
    assert row.case is not None, f"{row.rule} on {row.topology} has no runs"
    return row.case.channel


def at_server(row: Row) -> bool:
    """Whether its nodes use an all-reduce."""
    return row.exchange is not None and row.exchange.all_reduce


def megabytes(row: Row) -> float:
    """What a node sends over the run."""
    return row.megabytes


def seconds_on(link: Clock) -> Cost:
    """The seconds of a run on a link, by its clock; nan where they are not known."""

    def seconds(row: Row) -> float:
        found = row.case and elapsed(row.case, row.exchange, link, (row.case.steps,))
        return found[0] if found else math.nan

    return seconds


# --- figures --------------------------------------------------------------------------------------------------------


def final_against(rows: Sequence[Row], title: str, cost: Cost, across: str) -> Figure:
    """Final values against a cost: a panel per setting and rule, a line per way to speak, a marker per encoding.

    All-reduce stands in every panel, in black. Where a rule has several variants, the others are dashed and hollow.
    """
    gossip = [row for row in rows if not at_server(row)] or list(rows)  # of a study that is not finished
    servers = [row for row in rows if at_server(row)]
    reduced = sorted({_reduced(row, servers) for row in servers}, key=lambda found: (found[1], found[0]))
    ways = sorted({channel(row)[:2] for row in gossip})
    variants = {name: sorted({row.rule for row in gossip if family(row) == name}) for name in map(family, gossip)}
    setting, caption = figures.in_letters(rows), figures.in_letters(rows, lambda row: [family(row)])

    def second(row: Row) -> bool:
        return variants[family(row)].index(row.rule) > 0

    def look(row: Row) -> Style:
        colour = GRAPH_COLOURS[ways.index(channel(row)[:2])]
        return {"color": colour, "linestyle": LINES[second(row)], "marker": ""}

    settings = figures.distinct(rows, setting)
    gossip = sorted(gossip, key=lambda row: (settings.index(setting(row)), family(row)))  # stable
    layout = Layout(figures.quantity(rows[0]), caption, lambda row: row.rule, look, len(variants))
    figure, panels = figures.panelled(gossip, title, layout, "final ")
    for axis, mine in panels:
        for way, rule in dict.fromkeys((channel(row)[:2], row.rule) for row in mine):
            line = sorted((r for r in mine if (channel(r)[:2], r.rule) == (way, rule)), key=cost)
            ends = np.array([[row.value, row.low, row.high] for row in line]).T
            figures.line_of_seeds(axis, "", list(map(cost, line)), ends, look(line[0]))
            for row in line:
                marker = MARKERS[WIRES.index(channel(row).wire)]
                face = {"markerfacecolor": "white"} if second(row) else {}
                axis.plot([cost(row)], [row.value], **look(row) | {"marker": marker, **face}, markersize=5)
                figures.mark(axis, row, cost(row), row.final[:, row.best])
        for row in (row for row in servers if setting(row) == setting(mine[0])):
            marker = SERVERS[reduced.index(_reduced(row, servers))]
            axis.plot([cost(row)], [row.value], marker, color="black", markersize=7)
            figures.mark(axis, row, cost(row), row.final[:, row.best])
        _scale(axis, across)
        axis.set_title(f"{axis.get_title()}{_told(variants[family(mine[0])])}", fontsize=9)
    keys: list[tuple[str, Style]] = [
        *((_way(way), {"color": GRAPH_COLOURS[k], "marker": ""}) for k, way in enumerate(ways)),
        *((wire, {"color": "grey", "marker": MARKERS[k], "linestyle": ""}) for k, wire in enumerate(WIRES)),
        *(
            (f"{name}{_server(every)}", {"color": "black", "marker": SERVERS[k], "linestyle": ""})
            for k, (name, every) in enumerate(reduced)
        ),
    ]
    for text, style in keys:
        figure.axes[0].plot([], [], label=text, **style)
    figures.legend(figure)
    _limit(figure, rows, lambda row: np.array([row.low, row.high]))
    return figure


against_bytes = partial(final_against, cost=megabytes, across="MB sent per node")


def course(rows: Sequence[Row], title: str, links: Mapping[str, Clock]) -> Figure:
    """Values against seconds while nodes train: a panel per setting and link, a line per channel or all-reduce."""
    placed = [replace(row, setting={**row.setting, "link": name}) for name in links for row in rows]
    names, setting = figures.distinct(rows, _line), figures.in_letters(rows)

    def caption(row: Row) -> str:
        return ", ".join(filter(None, (setting(row), str(row.setting["link"]))))

    def look(row: Row) -> Style:
        colour = "black" if at_server(row) else GRAPH_COLOURS[names.index(_line(row)) % len(GRAPH_COLOURS)]
        return {"color": colour, "linestyle": "--" if channel(row).every > 1 else "-"}

    wide = len(figures.distinct(rows, setting))
    figure, panels = figures.panelled(placed, title, Layout(figures.quantity(rows[0]), caption, _line, look, wide))
    for axis, mine in panels:
        for row in mine:
            total = seconds_on(links[str(row.setting["link"])])(row)
            spread = np.stack((row.curve.mean(0), row.curve.min(0), row.curve.max(0)))
            when = [total * step / row.steps[-1] for step in row.steps]
            figures.line_of_seeds(axis, _line(row), when, spread, look(row))
            for k, second in enumerate(when):
                figures.mark(axis, row, second, row.curve[:, k], f" after {second:.3g} s")
        _scale(axis, "seconds")
    figures.legend(figure)
    _limit(figure, rows, lambda row: row.curve)
    return figure


def _line(row: Row) -> str:
    return f"{family(row)}, {_server(channel(row).every) if at_server(row) else told(channel(row))}"


def _scale(axis: Axes, across: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel(across)


def _told(variants: Sequence[str]) -> str:
    """How the variants of a rule differ, below the caption of its panel."""
    options = [rule.partition(" (")[2].removesuffix(")").split(", ") for rule in variants]
    apart = [", ".join(o for o in mine if not all(o in each for each in options)) for mine in options]
    return "\n" * (len(apart) > 1) + ", ".join(f"{line}: {o}" for line, o in zip(LINES, apart, strict=False) if o)


def _limit(figure: Figure, rows: Sequence[Row], values: Callable[[Row], NDArray[np.float64]]) -> None:
    """Accuracies up to SHOWN below the best: small differences matter."""
    if rows[0].largest:
        best = max(row.value for row in rows)
        figure.axes[0].set_ylim(*figures.limits([v[v > best - SHOWN] for v in map(values, rows)]))


def told(found: Channel) -> str:
    """A channel in words."""
    return f"{_way(found[:2])}, {found.wire}"


def _way(way: tuple[int, int]) -> str:
    every, late = way
    often = "every round" if every == 1 else f"every {every}th round"
    return f"{often}, late {late}" if late else often


def _reduced(row: Row, servers: Sequence[Row]) -> tuple[str, int]:
    """A row with an all-reduce by its rule, where there are several, and by how often it speaks."""
    several = len({family(each) for each in servers}) > 1
    return f"{family(row)}, " if several else "", channel(row).every


def _server(every: int) -> str:
    return "all-reduce" if every == 1 else f"all-reduce every {every}th round"
