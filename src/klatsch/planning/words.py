"""The recommendation in words: what to take, what it brings, and why nothing else."""

from __future__ import annotations

import math

from klatsch.planning.planner import Choice, Plan, Span
from klatsch.planning.predictions import CANDIDATES, predicted
from klatsch.planning.verify import Verification

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86_400, "years": 31_557_600}
UP_TO = (1e-3, 1, 120, 7200, 172_800, 86_400_000, math.inf)  # seconds, for each unit


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds == math.inf:
        return "forever"
    unit, size = next(pair for pair, most in zip(UNITS.items(), UP_TO, strict=True) if seconds < most)
    return f"{seconds / size:,.3g} {unit}"


def size(count: float) -> str:
    """Bytes as people say them."""
    steps = min(5, max(0, math.floor(math.log10(max(count, 1)) / 3)))
    return f"{count / 1000**steps:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[steps]}"


def rounds(count: float) -> str:
    """A number of rounds as people say it."""
    return "1 round" if count == 1 else f"{count:,.0f} rounds"


def effort(choice: Choice) -> str:
    """What it takes to reach the goal: rounds, the time of each, and the total."""
    return f"{rounds(choice.rounds)} of {duration(choice.seconds_per_round)}, {duration(choice.seconds)}"


def span(between: Span, measured: bool) -> str:
    """How far the number of machines moves if a constant changes; `measured` by a probe, with intervals."""
    end = "at an end of its interval (halved or doubled, where it came from a flag)"
    varied = end if measured else "halved or doubled"
    same = between.low == between.high
    number = f"{between.low:,} machines would still" if same else f"{between.low:,} to {between.high:,} machines would"
    reach = ", or the target would be out of reach" if between.out_of_reach else ""
    return f"with any one of the constants {varied}, {number} be best{reach}"


def recommendation(plan: Plan) -> str:
    """One line: what to take, and what it needs."""
    best, alone = plan.best, plan.alone
    if best.machines == 1:
        return f"one machine: {effort(best)}"
    share = f"{best.speedup / best.machines:.0%} per machine"
    faster = f", {best.speedup:.3g} times as fast as one machine ({share})" if alone.seconds < 1e300 else ""
    channel = f", {plan.task.channel}" if best.topology and plan.task.channel else ""
    return f"{best.title}, {best.machines:,} machines{channel}: {effort(best)}{faster}"


def reasons(plan: Plan) -> list[str]:
    """Why: the time of a round, more machines, and the next best choice."""
    best = plan.best
    found = [_why_alone(plan)] if best.machines == 1 else [_of_the_round(plan, best), _of_more(plan, best)]
    others = [line for line in plan.lines if (line.rule, line.topology) != (best.rule, best.topology)]
    reachable = [line for line in others if line.best.seconds < 1e300 and line.best.machines > 1]
    if best.machines > 1 and reachable:
        second = min(reachable, key=lambda line: line.best.seconds).best
        hardly = " (not 5 % faster, with more machines)" if second.seconds < best.seconds else ""
        found.append(f"next is {second.title} with {second.machines:,} machines: {duration(second.seconds)}{hardly}")
    if not CANDIDATES[best.rule].proved:
        found.append(f"no rate is proved for {best.rule}; that of dat on homogeneous data stands in")
    return found


def _why_alone(plan: Plan) -> str:
    task = plan.task
    if task.constants.D1 == 0:
        return "the start is the optimum: there is nothing to do"
    if task.constants.sigma == 0:
        return "without noise there is nothing to average: one machine that sees all the data does as well"
    if plan.alone.rounds <= 1:
        return "one round is enough"
    pairs = [choice for line in plan.lines for choice in line.choices if choice.machines > 1]
    if not pairs:
        return "only one machine is allowed"
    nearest = min(pairs, key=lambda choice: choice.seconds)
    if nearest.speedup > 1 and nearest.speedup >= task.efficiency * nearest.machines:
        return f"{nearest.machines:,} machines ({nearest.title}) would not be 5 % faster"
    if nearest.speedup > 1:
        return (
            f"{nearest.machines:,} machines ({nearest.title}) would be {nearest.speedup:.3g} times as fast: less than "
            f"{task.efficiency:.0%} of a machine each"
        )
    if nearest.seconds_per_round > 2 * task.network.gradient:
        return (
            f"the network is too slow: a round takes {duration(nearest.seconds_per_round)} even as {nearest.title} "
            f"with {nearest.machines:,} machines, a gradient {duration(task.network.gradient)}"
        )
    return f"no choice of more machines reaches {task.goal:.3g} sooner"


def _of_the_round(plan: Plan, best: Choice) -> str:
    gradient = plan.task.network.gradient
    waits = best.seconds_per_round - gradient
    if waits > 0.1 * gradient:
        return f"a round is {duration(gradient)} of gradient and {duration(waits)} of communication"
    chosen = CANDIDATES[best.rule]
    may_hide = chosen.rule is not None and (chosen.vectors[1] == 0 or plan.task.late > 0)
    hidden = ": communication hides behind it" if may_hide else ""
    return f"a round takes hardly longer than its gradient ({duration(gradient)}){hidden}"


def _of_more(plan: Plan, best: Choice) -> str:
    line, task = plan.line(best.rule, best.topology), plan.task
    larger = [choice for choice in line.choices if choice.machines > best.machines]
    if not larger:
        return f"{best.machines:,} machines are the most of this kind that are considered"
    more = min(larger, key=lambda choice: abs(choice.machines - 2 * best.machines))
    parts = predicted(CANDIDATES[best.rule], more.machines, best.rounds, more.rho, task.constants, task.by(best.rule))
    mixing = parts.network > parts.optimization or best.rounds < more.rounds < math.inf
    held_up = "they mix more slowly" if mixing else "some rounds are needed even without noise"
    if more.seconds == math.inf:
        return f"{more.machines:,} machines do not reach it with these samples: {held_up}"
    text = f"{more.machines:,} machines would take {effort(more)}"
    if more.speedup < task.efficiency * more.machines:
        return f"{text}: less than {task.efficiency:.0%} of a machine each"
    longer = more.seconds_per_round > 1.2 * best.seconds_per_round and more.rounds < best.rounds
    slower = "their rounds take longer" if longer else held_up
    return f"{text}: {'not 5 % sooner' if more.seconds < best.seconds else slower}"


def verdict(checked: Verification) -> list[str]:
    """What a simulation says: whether the order held, how far the errors are off, and whether fewer would do."""
    flips = [f"{b.machines:,} machines came out ahead of {a.machines:,}" for a, b in checked.flips]
    held = "the predicted order holds" if checked.held else f"the predicted order does not hold: {', '.join(flips)}"
    found = [held if len(checked.trials) > 1 else "one size only: there is no order to compare"]
    ratios = sorted(t.predicted / t.simulated for t in checked.trials if t.simulated > 0 and t.predicted > 0)
    if ratios and (ratios[0] > 3 or ratios[-1] < 1 / 3):
        far = ratios if ratios[0] > 3 else [1 / ratio for ratio in reversed(ratios)]
        way = "below" if ratios[0] > 3 else "above"
        found.append(f"simulated errors are {far[0]:,.0f} to {far[-1]:,.0f} times {way} the predicted ones")
    if checked.enough is not None and checked.enough.machines < min(trial.machines for trial in checked.trials):
        found.append(
            f"here {checked.enough.machines:,} machines reach the goal of {checked.goal:.3g} in the planned time: try "
            "them first if your problem is as well conditioned"
        )
    return found
