"""Which rule has the smallest error at each point, a graph with a size and a setting, and by what factor."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from klatsch.report import figures
from klatsch.report.claims import Answer, asks, clearly_above, factor, has_no_decay
from klatsch.study.choices import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = 2  # that fit into a cell
Place = tuple[str, int, str]  # graph, size and setting


def by_point(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    """The rows of each point, the best first; without those that diverged."""
    points: dict[Place, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.value):
        if not row.diverged:
            points.setdefault((row.topology, row.nodes, row.setting_text), []).append(row)
    return points


def level(line: Sequence[Row]) -> list[Row]:
    """The best of a point, and those that the seeds cannot tell from it."""
    return [row for row in line if not clearly_above(row, line[0])]


def behind(line: Sequence[Row]) -> list[Row]:
    """The others of a point."""
    return [row for row in line if clearly_above(row, line[0])]


@asks
def best_at_every_point(rows: Sequence[Row], ours: Callable[[Row], bool]) -> Answer:
    """Whether one of these rules is the best on every graph and at every size, or level with it."""
    lines = list(by_point(rows).values())
    if not any(ours(row) for line in lines for row in line):
        return None, "was not run"
    held = [any(map(ours, level(line))) for line in lines]
    counts = Counter(row.rule for line in lines for row in level(line))
    best = ", ".join(f"{rule} at {count}" for rule, count in counts.most_common())
    rivals = {"the next rule": list(map(behind, lines))}
    if not all(has_no_decay(row) for line in lines for row in line):
        rivals["the best without decay"] = [list(filter(has_no_decay, line)) for line in lines]
    rivals["dat"] = [[row for row in line if row.rule == "dat"] for line in lines]
    texts = []
    for name, theirs in rivals.items():
        if times := [mine[0].value / line[0].value for line, mine in zip(lines, theirs, strict=True) if mine]:
            texts.append(f"{name} {factor(median(times))} ({factor(min(times))} to {factor(max(times))})")
    text = f"in {sum(held)} of {len(held)} points; best or level with it: {best}"
    return all(held), "; ".join([text, *([f"times the best error: {', '.join(texts)}"] if texts else [])])


def best_of_points(rows: Sequence[Row], title: str) -> Figure:
    """A table of the best rules in their colours: of all, and of those without decay."""
    from matplotlib import figure as drawings

    points, free = by_point(rows), by_point(list(filter(has_no_decay, rows)))
    nodes = sorted({row.nodes for row in rows})
    places = list(dict.fromkeys((row.topology, row.setting_text) for row in rows))
    wide = 2 if len(nodes) < 5 else 1  # panels side by side
    size = 2.4 + 1.55 * len(nodes) * wide, 1.2 + 2 / wide * (0.6 + 0.46 * len(places))
    figure = drawings.Figure(figsize=size, layout="constrained")
    first, second = figure.subplots(2 // wide, wide, sharey=True)
    look, order = figures.by_rule(rows), list(dict.fromkeys(row.rule for row in rows))

    def fill(axis: Axes, place: Place, line: Sequence[Row], *words: str) -> None:
        x, y = nodes.index(place[1]), places.index((place[0], place[2]))
        mine = sorted(level(line), key=lambda row: order.index(row.rule))  # not by luck, where they are level
        names = [row.rule for row in mine[:NAMES]]
        more = [f"and {len(mine) - NAMES} more"] if len(mine) > NAMES else []
        axis.fill_between(
            [x - 0.48, x + 0.48], y - 0.45, y + 0.45, color=look(mine[0])["color"], alpha=0.3, linewidth=0
        )
        axis.text(x, y, "\n".join([*names, *more, *words]), ha="center", va="center", fontsize=6.5)

    for place, line in points.items():
        fill(first, place, line, *[f"next × {factor(row.value / line[0].value)}" for row in behind(line)[:1]])
    for place, line in free.items():
        fill(second, place, line, f"× {factor(line[0].value / points[place][0].value)}")
    first.set_title("the best of all rules, and the next that is not level", fontsize=10)
    second.set_title("the best without decay, times the smallest error of all", fontsize=10)
    for axis in (first, second):
        axis.set_xticks(range(len(nodes)), [f"M = {M}" for M in nodes])
        axis.set_yticks(range(len(places)), [f"{graph}\n{setting}" for graph, setting in places], fontsize=7)
        axis.set_ylim(len(places) - 0.5, -0.5)
        axis.set_xlim(-0.5, len(nodes) - 0.5)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize=10)
    return figure
