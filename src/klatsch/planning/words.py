"""The recommendation in words: what to take, what it brings, and why not something else."""

from __future__ import annotations

from klatsch.planning.plan import Choice, Plan
from klatsch.planning.rates import RULES, predicted


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit, size, next_size in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < next_size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days" if seconds < 86_400 * 1000 else f"{seconds / 31_557_600:,.3g} years"


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000 or unit == "PB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def recommendation(plan: Plan) -> str:
    """One line: what to take, and what it needs."""
    best, alone = plan.best, plan.alone
    if best.machines == 1:
        return f"one machine: {best.rounds:,.0f} rounds of {duration(best.seconds_per_round)}, {duration(best.seconds)}"
    faster = f", {alone.seconds / best.seconds:.3g} times faster than one machine" if alone.seconds < 1e300 else ""
    return (
        f"{best.title}, {best.machines:,} machines: {best.rounds:,.0f} rounds of {duration(best.seconds_per_round)}, "
        f"{duration(best.seconds)}{faster}"
    )


def reasons(plan: Plan) -> list[str]:
    """Why: of the time of a round, of more machines, and of the next best."""
    best = plan.best
    found = [_why_alone(plan)] if best.machines == 1 else [_of_the_round(plan, best), _of_more(plan, best)]
    others = [line for line in plan.lines if (line.rule, line.topology) != (best.rule, best.topology)]
    reachable = [line for line in others if line.best.seconds < 1e300 and line.best.machines > 1]
    if best.machines > 1 and reachable:
        second = min(reachable, key=lambda line: line.best.seconds).best
        found.append(f"next is {second.title} with {second.machines:,} machines: {duration(second.seconds)}")
    if not RULES[best.rule].proved:
        found.append(f"no rate is proved for {best.rule}; it is taken as that of dat on homogeneous data")
    return found


def _why_alone(plan: Plan) -> str:
    task = plan.task
    if task.constants.sigma * task.constants.D1 == 0:
        return "without noise more machines bring nothing: each would compute the same"
    pairs = [choice for line in plan.lines for choice in line.choices if choice.machines > 1]
    if not pairs:
        return "no more than one was asked for"
    nearest = min(pairs, key=lambda choice: choice.seconds)
    if nearest.seconds_per_round > 2 * task.network.gradient:
        return (
            f"the network is too slow: a round takes {duration(nearest.seconds_per_round)} even as {nearest.title} "
            f"with {nearest.machines:,} machines, a gradient {duration(task.network.gradient)}"
        )
    return f"no choice of more machines reaches {task.goal:.3g} sooner"


def _of_the_round(plan: Plan, best: Choice) -> str:
    gradient = plan.task.network.gradient
    waits = best.seconds_per_round - gradient
    if waits <= 0.1 * gradient:
        return f"a round takes hardly longer than its gradient ({duration(gradient)}): what is sent hides behind it"
    return f"of a round {duration(gradient)} are the gradient, {duration(waits)} the network"


def _of_more(plan: Plan, best: Choice) -> str:
    line = plan.line(best.rule, best.topology)
    larger = [choice for choice in line.choices if choice.machines > best.machines]
    if not larger:
        return f"{best.machines:,} machines are the most that were asked for"
    task, rule = plan.task, RULES[best.rule]
    most = line.choices[-1]
    parts = predicted(rule, most.machines, best.rounds, most.rho, task.constants, task.by(rule.name))
    if most.seconds_per_round > 1.5 * best.seconds_per_round:
        return f"more machines wait longer: a round of {most.machines:,} takes {duration(most.seconds_per_round)}"
    if parts.network > max(parts.statistical, parts.optimization):
        return (
            f"more machines mix too slowly: noise keeps the larger part of the error up to {line.largest:,}, beyond "
            "that the network does"
        )
    return f"more machines average noise that is no longer the larger part: it is up to {line.largest:,} of them"
