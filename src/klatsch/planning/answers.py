"""The answer of a race in words and as a picture: how many machines, what it takes, and why nothing else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from klatsch.extras import need
from klatsch.planning.race import ENOUGH, Answer, Task, Trial
from klatsch.units import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLOW = 2.0  # a round that takes so many gradients is one of the network
# Okabe and Ito's colours, which most colour-blind people can tell apart.
COLOURS = {"dsgd": "#0072B2", "momentum": "#E69F00", "shared-momentum": "#56B4E9", "qg": "#CC79A7", "diloco": "#000000"}
COLOURS |= {"kgt": "#F0E442", "dat": "#D55E00", "dat-d2": "#009E73"}
MARKERS = {"ring": "o", "one_peer_exponential": "s", "exponential": "v", "hypercube": "D", "complete": "^"}
LINES = ("-", "--", "-.", ":")  # by how seldom nodes talk


def lines(task: Task, answer: Answer) -> list[str]:
    """At most twelve lines; the first says what to do."""
    best, alone = answer.best, answer.alone
    goal = (1.0 - answer.target if answer.largest else answer.target) * (1 + 1e-9)  # as an error, to rounding
    if best is None:
        said = _no(answer, goal)
    elif best.way.machines == 1:
        enough = "one machine, as far as was tried" if answer.stopped else "one machine is enough"
        what = f"{enough}: {best.way.named_rule}, {effort(best)}, learning rate {best.lr:.2g}"
        said = [what, _why_alone(task, answer)]
    else:
        said = [f"take {best.way}, learning rate {best.lr:.2g}", f"  time: {effort(best)}"]
        if math.isfinite(alone.seconds):
            said.append(f"  {alone.way}: {effort(alone)}; {alone.seconds / best.seconds:.3g} times as long")
        else:
            who = "most of its seeds do" if alone.seeds > 1 and alone.error <= goal else "it does"
            said.append(f"  one machine: {who} not get there within {duration(alone.tried * alone.each)}")
    if best is not None:
        reduced = [] if answer.reduced is None else [(answer.reduced, "all-reduce", effort(answer.reduced))]
        others = [(t, "next", f"{duration(t.seconds)}{_why_not(best, t)}") for t in answer.others]
        for trial, what, text in (*reduced, *others):
            if trial.way != best.way and not any(f" {trial.way}: " in line for line in said):  # nothing is said twice
                said.append(f"  {what}: {trial.way}: {text}")
    if answer.most:
        said.append(f"  not more: {answer.most}")
    if answer.stopped:
        tried = f"{min(answer.untried):,} machines or more were not tried" if answer.untried else ""
        minutes = math.ceil(5 * task.seconds / 60)
        said.append(f"  not sure: time was short, and {tried or 'not all ran to the end'}; give --minutes {minutes}")
    return said


def effort(trial: Trial) -> str:
    """What it takes, with the range of the seeds."""
    between = " (1 seed)"
    if trial.seeds > 1:
        low, high = duration(trial.low * trial.each), duration(min(trial.high, trial.tried) * trial.each)
        between = f" ({low} to {'more than ' * math.isinf(trial.high)}{high}, {trial.seeds} seeds)"
    rounds = f"{trial.rounds:,.0f}" if trial.rounds >= 10 else f"{trial.rounds:.2g}"
    return f"{duration(trial.seconds)}{between}, {rounds} round{'s' * (rounds != '1')} of {duration(trial.each)}"


def _no(answer: Answer, goal: float) -> list[str]:
    """Nothing gets there: how far it went."""
    nearest = min(answer.trials, key=lambda trial: trial.error)
    value = 1.0 - nearest.error if answer.largest else nearest.error
    if nearest.error <= goal:
        when = "with most seeds" if nearest.seeds > 1 else "when it ran again"
        return [
            f"no: {answer.metric} {answer.target:.3g} is reached now and then only",
            f"  by {nearest.way}, learning rate {nearest.lr:.2g}",
            f"  but not {when}, in {nearest.tried:,} rounds; give another --target",
        ]
    return [
        f"no: nothing {'reached' if answer.stopped else 'reaches'} {answer.metric} {answer.target:.3g}",
        f"  nearest: {value:.3g}, {nearest.way}, learning rate {nearest.lr:.2g}, {nearest.tried:,} rounds",
        "  noise or data allow no more, or it takes longer than was tried; give another --target, or more --minutes",
    ]


def _why_alone(task: Task, answer: Answer) -> str:
    several = [trial for trial in answer.trials if trial.way.machines > 1]
    nearest = min((t for t in several if math.isfinite(t.seconds)), key=lambda t: t.seconds, default=None)
    if task.machines == 1:
        return "  only one machine is allowed"
    if nearest is None:
        return "  no choice of more machines reached the target" if several else "  more machines were not tried"
    why = "they would hardly be faster"
    if nearest.seconds * ENOUGH < answer.alone.seconds:
        why = "each would bring less than a tenth of a machine"
    elif nearest.each > SLOW * answer.alone.each:
        why = f"the network is too slow, a round takes {duration(nearest.each)}"
    return f"  with more: {nearest.way}: {effort(nearest)}; {why}"


def _why_not(best: Trial, other: Trial) -> str:
    if other.seconds < best.seconds:
        return ", with more machines that bring less than a tenth of a machine each, or not 5 % sooner"
    rounds, each = other.rounds / best.rounds, other.each / best.each
    if max(rounds, each) < 1.05:
        return "; hardly slower"
    return f"; {rounds:.2g} times the rounds" if rounds >= each else f"; a round takes {each:.2g} times as long"


def curves(answer: Answer) -> Figure:
    """The measured time against M: a line for each rule, graph and H, over its fastest channels."""
    need("a figure", "matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    trials = sorted((t for t in answer.trials if math.isfinite(t.seconds) and t.way.machines > 1), key=lambda t: t.way)
    silence = sorted({t.way.every for t in trials})
    for kind, graph, every in dict.fromkeys(t.way[1:4] for t in trials):
        line = sorted((t for t in trials if t.way[1:4] == (kind, graph, every)), key=lambda t: -t.seconds)
        fastest = dict(sorted({t.way.machines: t.seconds for t in line}.items()))
        label = f"{kind}, {'all-reduce' if line[0].way.reduces else graph}" + f"/{every}" * (every > 1)
        dashes = LINES[silence.index(every) % len(LINES)]
        (drawn,) = axis.plot([*fastest], [*fastest.values()], MARKERS[graph] + dashes, markersize=4, label=label)
        drawn.set_color(COLOURS[kind])
    best, alone = answer.best, answer.alone
    if math.isfinite(alone.seconds):
        axis.axhline(alone.seconds, color="#999999", linestyle=":", linewidth=1.2, label="one machine")
    if best is not None:
        ends = [[(best.rounds - best.low) * best.each], [(min(best.high, best.tried) - best.rounds) * best.each]]
        point = [best.way.machines], [best.seconds], ends
        axis.errorbar(*point, fmt="k*", markersize=14, capsize=3, label="recommended")
    axis.set(xlabel="machines M", ylabel=f"seconds to {answer.metric} {answer.target:.3g}", yscale="log")
    axis.set_xscale("log", base=2)
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:,g}")
    axis.yaxis.set_minor_formatter(LogFormatter())  # 60, and not 6 x 10¹
    axis.grid(True, linewidth=0.4, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right center", frameon=False, fontsize=8, handlelength=3.5)
    return figure
