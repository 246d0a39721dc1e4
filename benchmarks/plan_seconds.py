"""The planner's answer to the question of the study of seconds: which machines, if any, train LeNet fastest.

Run: KLATSCH_DATA=FOLDER .venv/bin/python benchmarks/plan_seconds.py [--network internet] [--deaths] [--minutes 32]
     ... [--machines 64] [--device cuda]

Skewed Fashion-MNIST (alpha = 0.1), timed as a model of 25 million parameters on the study's networks with stragglers:
the first to 95 % of the best accuracy. One machine has all data. It runs on one core, or on a GPU.
"""

from __future__ import annotations

import argparse
import math
import time

from klatsch.planning import Task, answers, of_any_size, race
from klatsch.report.selection import clock_of
from klatsch.study.spec import content_of
from klatsch.units import duration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="internet", help="or rack, or two sites")
    parser.add_argument("--deaths", action="store_true", help="machines die now and then")
    parser.add_argument("--minutes", type=float, default=32)
    parser.add_argument("--machines", type=int, default=16, help="at most")
    parser.add_argument("--target", type=float, default=0.855)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    trouble = "deaths" if given.deaths else "stragglers"
    clock = clock_of(content_of("seconds", "paper")["clocks"][f"25 M, {given.network}, {trouble}"])
    make, _ = of_any_size("fashion-mnist", given.machines, alpha=0.1, test=2000)
    limits = {"machines": given.machines, "target": given.target, "seconds": 60 * given.minutes}
    task = Task(make, clock, params=clock.params, device=given.device, **limits)
    began = time.monotonic()
    answer = race.race(task)
    print(*answers.lines(task, answer), sep="\n")
    took = (time.monotonic() - began) / 60
    print(f"after {took:.1f} of {given.minutes:g} minutes, with {len(answer.trials)} ways tried")
    for machines in sorted({trial.way.machines for trial in answer.trials}):
        tried = [trial for trial in answer.trials if trial.way.machines == machines]
        there = [f"{trial.way}: {duration(trial.seconds)}" for trial in tried if math.isfinite(trial.seconds)]
        print(f"{machines} machines, {len(tried)} ways; {there[0] if there else 'none was there'}")


if __name__ == "__main__":
    main()
