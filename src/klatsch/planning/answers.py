"""The answer of a race in words: how many machines, what it takes, and why nothing else."""

from __future__ import annotations

import math

from klatsch.planning.race import ENOUGH, Answer, Task, Trial
from klatsch.units import duration

SLOW = 2.0  # a round that takes so many gradients is one of the network


def lines(task: Task, answer: Answer) -> list[str]:
    """At most twelve lines; the first says what to do."""
    best, alone = answer.best, answer.alone
    if best is None:
        return [*_no(answer), *_notes(task, answer)]
    if best.way.machines == 1:
        enough = "one machine, as far as was tried" if answer.stopped else "one machine is enough"
        first = f"{enough}: {best.way.named_rule}, {effort(best)}, learning rate {best.lr:.2g}"
        found = [first, *_why_alone(task, answer)]
    else:
        found = [f"take {best.way}, learning rate {best.lr:.2g}", f"  time: {effort(best)}"]
        if math.isfinite(alone.seconds):
            found.append(f"  {alone.way}: {effort(alone)}; {alone.seconds / best.seconds:.3g} times as long")
        else:
            who = "most of its seeds do" if alone.seeds > 1 and alone.error <= _error(answer) else "it does"
            found.append(f"  one machine: {who} not get there within {duration(alone.tried * alone.each)}")
    reduced = [] if answer.reduced is None else [(answer.reduced, "all-reduce", effort(answer.reduced))]
    others = [(t, "next", f"{duration(t.seconds)}{_why_not(best, t)}") for t in answer.others]
    for trial, what, text in (*reduced, *others):
        if trial.way != best.way and not any(f" {trial.way}: " in line for line in found):  # nothing is said twice
            found.append(f"  {what}: {trial.way}: {text}")
    return [*found, *_notes(task, answer)]


def effort(trial: Trial) -> str:
    """What it takes, with the range of the seeds."""
    between = " (1 seed)"
    if trial.seeds > 1:
        most = min(trial.high, trial.tried)
        beyond = "more than " if math.isinf(trial.high) else ""
        between = f" ({duration(trial.low * trial.each)} to {beyond}{duration(most * trial.each)}, {trial.seeds} seeds)"
    rounds = f"{trial.rounds:,.0f}" if trial.rounds >= 10 else f"{trial.rounds:.2g}"
    return f"{duration(trial.seconds)}{between}, {rounds} round{'s' * (rounds != '1')} of {duration(trial.each)}"


def _no(answer: Answer) -> list[str]:
    """Nothing gets there: how far it went."""
    nearest = min(answer.trials, key=lambda trial: trial.error)
    value = 1.0 - nearest.error if answer.largest else nearest.error
    if nearest.error <= _error(answer):
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


def _error(answer: Answer) -> float:
    """The target as an error, which falls, to rounding."""
    return (1.0 - answer.target if answer.largest else answer.target) * (1 + 1e-9)


def _why_alone(task: Task, answer: Answer) -> list[str]:
    more = [trial for trial in answer.trials if trial.way.machines > 1 and math.isfinite(trial.seconds)]
    if not more:
        several = any(trial.way.machines > 1 for trial in answer.trials)
        why = "no choice of more machines reached the target" if several else "more machines were not tried"
        return [f"  {why if task.machines > 1 else 'only one machine is allowed'}"]
    nearest = min(more, key=lambda trial: trial.seconds)
    why = "they would hardly be faster"
    if nearest.seconds * ENOUGH < answer.alone.seconds:
        why = "each would bring less than a tenth of a machine"
    elif nearest.each > SLOW * answer.alone.each:
        why = f"the network is too slow, a round takes {duration(nearest.each)}"
    return [f"  with more: {nearest.way}: {effort(nearest)}; {why}"]


def _why_not(best: Trial, other: Trial) -> str:
    if other.seconds < best.seconds:
        return ", with more machines that bring less than a tenth of a machine each, or not 5 % sooner"
    rounds, each = other.rounds / best.rounds, other.each / best.each
    if max(rounds, each) < 1.05:
        return "; hardly slower"
    return f"; {rounds:.2g} times the rounds" if rounds >= each else f"; a round takes {each:.2g} times as long"


def _notes(task: Task, answer: Answer) -> list[str]:
    found = [f"  not more: {answer.most}"] if answer.most else []
    if answer.stopped:
        what = (
            f"{min(answer.untried):,} machines or more were not tried" if answer.untried else "not all ran to the end"
        )
        found.append(f"  not sure: time was short, and {what}; give --minutes {math.ceil(5 * task.seconds / 60)}")
    return found
