"""The planner's answer to the question of the study of seconds: which machines, if any, train LeNet fastest.

Run: KLATSCH_DATA=FOLDER .venv/bin/python benchmarks/plan_seconds.py [--network internet] [--minutes 32]

Skewed Fashion-MNIST (alpha = 0.1), timed as a model of 25 million parameters on the study's networks with stragglers:
the first to 95 % of the best accuracy, among one to 16 machines. One machine has all data. It runs on one core.
"""

from __future__ import annotations

import argparse
import time

from klatsch.planning import Task, answers, of_any_size, race
from klatsch.report.selection import clock_of
from klatsch.study.spec import content_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="internet", help="or rack, or two sites")
    parser.add_argument("--minutes", type=float, default=32)
    parser.add_argument("--target", type=float, default=0.855)
    given = parser.parse_args()
    clock = clock_of(content_of("seconds", "paper")["clocks"][f"25 M, {given.network}, stragglers"])
    make, _ = of_any_size("fashion-mnist", 16, alpha=0.1, test=2000)
    task = Task(make, clock, machines=16, params=clock.params, target=given.target, seconds=60 * given.minutes)
    began = time.monotonic()
    print(*answers.lines(task, race.race(task)), sep="\n")
    print(f"after {(time.monotonic() - began) / 60:.0f} of {given.minutes:g} minutes")


if __name__ == "__main__":
    main()
