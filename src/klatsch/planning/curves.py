"""An answer as a picture: measured time against the number of machines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from klatsch.planning.race import Answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart.
COLOURS = {"dsgd": "#0072B2", "dat": "#D55E00", "dat-d2": "#009E73"}
MARKERS = {"ring": "o", "one_peer_exponential": "s", "exponential": "v", "hypercube": "D", "complete": "^"}
LINES = ("-", "--", "-.", ":")  # by how seldom nodes talk


def curves(answer: Answer) -> Figure:
    """The measured time against M: a line for each rule, graph and H, over its fastest channels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    there = sorted((t for t in answer.trials if math.isfinite(t.seconds) and t.way.machines > 1), key=lambda t: t.way)
    silence = sorted({t.way.every for t in there})
    for rule, graph, every in dict.fromkeys(t.way[1:4] for t in there):
        mine = [t for t in there if t.way[1:4] == (rule, graph, every)]
        fastest = {m: min(t.seconds for t in mine if t.way.machines == m) for m in {t.way.machines for t in mine}}
        reduces = mine[0].way.reduces
        axis.plot(
            sorted(fastest),
            [fastest[m] for m in sorted(fastest)],
            color=COLOURS[rule],
            marker=MARKERS[graph],
            linestyle=LINES[silence.index(every) % len(LINES)],
            markersize=4,
            label=f"{rule}, {'all-reduce' if reduces else graph}" + (f"/{every}" if every > 1 else ""),
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
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.yaxis.set_minor_formatter(LogFormatter())  # 60, and not 6 x 10¹
    axis.set_xlabel("machines M")
    axis.set_ylabel(f"seconds to {answer.metric} {answer.target:.3g}")
    axis.grid(True, linewidth=0.4, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right center", frameon=False, fontsize=8, handlelength=3.5)
    return figure
