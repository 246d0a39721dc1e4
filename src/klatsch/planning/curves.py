"""A plan as a picture: error and time against the number of machines."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from klatsch.planning.planner import Plan
from klatsch.planning.race import Answer
from klatsch.planning.words import recommendation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart.
COLOURS = {
    "dsgd": "#0072B2",
    "dat": "#D55E00",
    "dat (cta)": "#009E73",
    "gt": "#CC79A7",
    "dat-d2": "#56B4E9",
    "all-reduce": "#E69F00",
}
HIGHEST = 30  # times the goal; larger errors are cut off


def curves(plan: Plan) -> Figure:
    """Predicted error and time against M: all rules on the recommended family of graphs, and the all-reduce."""
    from matplotlib.figure import Figure

    task, best = plan.task, plan.best
    fastest_first = sorted(plan.lines, key=lambda line: line.best.seconds)
    topology = best.topology or next((line.topology for line in fastest_first if line.topology), "")
    shown = [line for line in plan.lines if line.topology in ("", topology)]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for line in shown:
        label = f"{line.rule}, {line.topology}" if line.topology else line.rule
        dashes = "--" if not line.topology else ":" if line.rule.endswith("(cta)") else "-"  # curves may coincide
        width = 1.8 if len(line.choices) < 300 else 1.0  # curves of many sizes ripple
        style = {"color": COLOURS[line.rule], "linewidth": width, "linestyle": dashes, "label": label}
        machines = [choice.machines for choice in line.choices]
        values = [choice.error if task.samples else choice.rounds for choice in line.choices]
        for axis, heights in ((left, values), (right, [choice.seconds for choice in line.choices])):
            axis.plot(machines, [v if math.isfinite(v) else math.nan for v in heights], **style)
    mark = {"color": "#000000", "marker": "*", "markersize": 14, "linestyle": "none", "zorder": 5}
    left.plot([best.machines], [best.error if task.samples else best.rounds], **mark)
    right.plot([best.machines], [best.seconds], label="recommended", **mark)
    right.axhline(plan.alone.seconds, color="#999999", linestyle=":", linewidth=1.2, label="one machine")
    if task.samples:
        left.axhline(task.goal, color="#999999", linestyle="--", linewidth=1.2)
        lowest = min(choice.error for line in shown for choice in line.choices)
        highest = max(e for line in shown for choice in line.choices if (e := choice.error) < math.inf)
        if lowest > 0:
            left.set_ylim(min(lowest, task.goal) / 1.2, max(min(highest, HIGHEST * task.goal), task.goal) * 1.2)
        left.annotate("goal", (1, task.goal), fontsize=8, color="#666666", va="bottom")
    left.set_ylabel(
        f"predicted error with {task.samples:,.3g} samples" if task.samples else "predicted rounds to target"
    )
    right.set_ylabel(f"predicted seconds to error {task.goal:.3g}")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log" if task.goal > 0 else "linear")
        axis.set_xlim(0.9, 1.1 * max(2, *(choice.machines for line in shown for choice in line.choices)))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel("machines M")
        axis.grid(True, linewidth=0.4, alpha=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(recommendation(plan), 130)), fontsize=10)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=9)
    return figure


def measured_curves(answer: Answer) -> Figure:
    """The measured time against M: a line for each rule and graph."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    there = sorted((t for t in answer.trials if math.isfinite(t.seconds) and t.way.machines > 1), key=lambda t: t.way)
    for rule, graph in dict.fromkeys((t.way.rule, t.way.graph) for t in there):
        mine = [t for t in there if (t.way.rule, t.way.graph) == (rule, graph)]
        name, seldom = f"{rule}, {graph}", "/" in graph
        if mine[0].way.reduces:
            rule, name = "all-reduce", f"all-reduce{graph.removeprefix('complete')}"
        axis.plot(
            [t.way.machines for t in mine],
            [t.seconds for t in mine],
            color=COLOURS[rule],
            marker="s" if graph.startswith("one_peer") else "o",
            linestyle="--" if seldom else "-",
            markersize=4,
            label=name,
        )
    best, alone = answer.best, answer.alone
    if math.isfinite(alone.seconds):
        axis.axhline(alone.seconds, color="#999999", linestyle=":", linewidth=1.2, label="one machine")
    if best is not None:
        ends = [[(best.rounds - best.low) * best.each], [(min(best.high, best.tried) - best.rounds) * best.each]]
        axis.errorbar(
            [best.way.machines], [best.seconds], ends, fmt="k*", markersize=14, capsize=3, label="recommended"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel("machines M")
    axis.set_ylabel(f"seconds to {answer.metric} {answer.target:.3g}")
    axis.grid(True, linewidth=0.4, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure
