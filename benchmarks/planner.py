"""The planner against the truth: what `klatsch plan` says, and what an exhaustive search finds.

    python benchmarks/planner.py                    # least squares and logistic regression: an hour of one core
    python benchmarks/planner.py images --device cuda --data ../shared/fashion-mnist

Ten combinations of problem, network and target. The search runs more rules, graphs, silences and learning rates than
the planner, each as long as it may still be first, and what is near the best again with three seeds that the planner
has not seen. Both take the fastest whose machines pay (or fewer that are hardly slower). The planner is right where its
M is within a factor of two of the best one, and its choice, run with those seeds, takes at most 1.3 times as long.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from klatsch.clock import Clock
from klatsch.planning import race, ways
from klatsch.planning.race import Runner, Task, Trial
from klatsch.planning.ways import ALL_REDUCE, Way

SEEDS = (11, 12, 13)
FACTOR, SLOWER = 2.0, 1.3
NEAR = 1.5  # times the best time by one seed: what runs with three
ways.KINDS["gt"] = ways.Kind("gt", {}, {}, "dsgd")  # searched, and not planned


class Combination(NamedTuple):
    """A question."""

    problem: str
    options: dict[str, float]
    network: str
    gradient: str
    params: int
    target: float | None = None  # by default what one machine has after 1,024 rounds
    machines: int = 64


QUESTIONS = {
    "1": Combination("least-squares", {"noise": 3.0, "heterogeneity": 5.0}, "1gbe", "0.02", 1_000_000),
    "2": Combination("least-squares", {"noise": 30.0, "dim": 20}, "10gbe", "0.01", 5_000_000, 2e-2),
    "3": Combination("least-squares", {"noise": 5.0, "dim": 100}, "wan", "0.2", 300_000),
    "4": Combination("least-squares", {"noise": 1.0, "heterogeneity": 10.0}, "100gbe", "0.002", 2_000_000),
    "5": Combination("least-squares", {"noise": 20.0}, "wan", "lognormal(0.5, 0.5)", 20_000_000),
    "6": Combination("least-squares", {"noise": 0.1, "dim": 30}, "wan", "0.001", 10_000_000),
    "7": Combination("logistic", {"dim": 20, "alpha": 10.0, "batch": 16}, "1gbe", "0.01", 500_000, 3e-2, 8),
    "8": Combination(
        "logistic", {"dim": 30, "alpha": 1.0, "batch": 8}, "10gbe", "slow(0.02, 10, 0.05)", 10**7, 1e-2, 16
    ),
}
IMAGES = {
    "9": Combination("fashion-mnist", {"alpha": 10.0, "test": 2000}, "1gbe", "0.005", 44_470, 0.75, 8),
    "10": Combination("fashion-mnist", {"alpha": 0.3, "test": 2000}, "wan", "0.05", 5_000_000, 0.75, 8),
}

GRAPHS = ("ring", "one_peer_exponential", "hypercube", "exponential")
SEARCHED = {
    "dsgd": (*GRAPHS, ALL_REDUCE),
    "momentum": (*GRAPHS, ALL_REDUCE),
    "shared-momentum": (*GRAPHS, ALL_REDUCE),
    "qg": GRAPHS,
    "diloco": (ALL_REDUCE,),
    "kgt": ("ring", "hypercube"),
    "dat": (*GRAPHS, ALL_REDUCE),
    "dat-d2": ("ring", "hypercube"),
    "gt": GRAPHS[:3],
}
SILENCES = (1, 2, 4, 8, 16, 32, 64)
FEWER = {
    "dsgd": ("ring", "one_peer_exponential", ALL_REDUCE),
    "momentum": (ALL_REDUCE,),
    "shared-momentum": ("one_peer_exponential",),
    "qg": ("ring", "one_peer_exponential"),
    "dat": ("ring", "one_peer_exponential", ALL_REDUCE),
    "dat-d2": ("ring", "hypercube"),
}


def task_of(asked: Combination, device: str, seconds: float) -> Task:
    make, _ = ways.of_any_size(asked.problem, asked.machines, **asked.options)
    clock = Clock(asked.gradient, asked.network)
    return Task(make, clock, asked.target, asked.machines, asked.params, seconds=seconds, device=device)


def all_ways(task: Task, images: bool) -> dict[Way, float]:
    """Every way, with the seconds of a round; late or rounded messages where they save time."""
    found = {Way(1, kind): ways.round_seconds(task.clock, Way(1), task.params) for kind in ("dsgd", "momentum", "dat")}
    for machines in [1 << k for k in range(1, task.machines.bit_length())]:
        for kind, graphs in (FEWER if images else SEARCHED).items():
            for graph in graphs:
                if machines < {"one_peer_exponential": 4, "hypercube": 8, "exponential": 8}.get(graph, 2):
                    continue
                for every in (1, 4, 16) if images else SILENCES:
                    way = Way(machines, kind, graph, every)
                    small = way._replace(wire=ways.KINDS[kind].wires[-1])
                    late = [one for one in [small._replace(late=every - 1)] if every > 1 and one.works]
                    some = [way] if way.reduces else [way, small, *late]
                    each = {one: ways.round_seconds(task.clock, one, task.params) for one in some}
                    for k, one in enumerate(some):
                        if k == 0 or each[one] < 0.95 * min(each[other] for other in some[:k]):
                            found[one] = each[one]
    return found


def exhaustive(task: Task, images: bool) -> list[Trial]:
    """What is near the best, with three seeds; the fastest first."""
    known = all_ways(task, images)
    problems: dict[int, object] = {}
    goal = 1 - task.target if images else task.target
    rates = [r for r in race.LEARNING_RATES if not images or 2e-2 < r < 2]
    best, trials = math.inf, []
    # In stretches, as the planner, but nothing is dropped before its clock has passed what would be near the best.
    rounds, racing = (
        64,
        [
            Runner(w, problems.setdefault(w.machines, task.problem(w.machines)), each, rates)
            for w, each in known.items()
        ],
    )
    while racing and rounds <= (1024 if images else 70_000):
        going = []
        for runner in racing:
            most = min(rounds, math.ceil(NEAR * best / runner.each)) if best < math.inf else rounds
            runner.steps, runner.errors = task.run(
                runner.way._replace(wire="float32"), runner.problem, max(2, most), rates
            )
            seconds = runner.seconds(goal)
            best = min(best, seconds)
            if seconds < math.inf:
                trials.append(runner.trial(goal))
            elif most == rounds:
                going.append(runner)
        racing, rounds = [r for r in going if rounds * r.each < NEAR * best], 4 * rounds
    near = [t for t in race.in_order(trials) if t.seconds <= NEAR * best]
    alone = [t for t in race.in_order(trials) if t.way.machines == 1][:1]
    print(f"{len(known)} ways, {len(near)} near the best", flush=True)
    return race.in_order(repeated(task, trial, goal) for trial in {t.way: t for t in near[:24] + alone}.values())


def repeated(task: Task, trial: Trial, goal: float) -> Trial:
    """A way with the seeds of the search, at three learning rates."""
    shifted = replace(task, make=lambda nodes, seed: task.make(nodes, SEEDS[seed]))
    return race.again(shifted, trial, shifted.problem(trial.way.machines), goal)


def compare(name: str, asked: Combination, device: str, seconds: float) -> dict[str, object]:
    torch.set_num_threads(1)
    images, began = asked.problem == "fashion-mnist", time.monotonic()
    task = task_of(asked, device, seconds)
    answer = race.race(task)
    planned = time.monotonic() - began
    print(
        f"{name}: {answer.best and answer.best.way}, planned in {planned:.0f} s, stopped: {answer.stopped}", flush=True
    )
    task = replace(task, target=answer.target)
    goal = 1 - task.target if images else task.target
    truth = exhaustive(task, images)
    one = next((t for t in truth if t.way.machines == 1), answer.alone)
    best = race.enough(truth, one)
    fastest = min(
        (t for t in truth if t.way.machines == 1 or one.seconds >= race.LEAST_SHARE * t.way.machines * t.seconds),
        key=lambda t: t.seconds,
    )
    if best is None or answer.best is None:
        raise SystemExit(f"{name}: nothing reaches {answer.target:.3g}; ask for less")
    chosen = answer.best
    same = None if chosen is None else repeated(task, replace(chosen, rounds=max(chosen.rounds, 1.0)), goal)
    ratio = math.nan if same is None else same.seconds / fastest.seconds
    off = (
        math.nan
        if chosen is None
        else max(chosen.way.machines / best.way.machines, best.way.machines / chosen.way.machines)
    )
    return {
        "name": name,
        "question": asked._replace(target=answer.target)._asdict(),
        "planned": str(chosen.way) if chosen else "no",
        "promised": [chosen.low * chosen.each, chosen.seconds, chosen.high * chosen.each] if chosen else None,
        "took": same.seconds if same else None,
        "best": str(best.way),
        "best_seconds": best.seconds,
        "fastest": str(fastest.way),
        "fastest_seconds": fastest.seconds,
        "alone_seconds": one.seconds,
        "factor_of_machines": off,
        "times_as_long": ratio,
        "right": bool(off <= FACTOR and ratio <= SLOWER),
        "stopped": answer.stopped,
        "planner_s": planned,
        "search_s": time.monotonic() - began - planned,
    }


def show(found: list[dict[str, object]]) -> None:
    print("| | problem | network, gradient | planned | takes | best | takes | M off by | time | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in found:
        asked = row["question"]
        options = ", ".join(f"{k} {v:g}" for k, v in asked["options"].items())
        print(
            f"| {row['name']} | {asked['problem']} ({options}) to {asked['target']:.3g}, {asked['params']:,} params | "
            f"{asked['network']}, {asked['gradient']} s | {row['planned']} | {row['took']:.3g} s | {row['best']} | "
            f"{row['best_seconds']:.3g} s | {row['factor_of_machines']:g} | {row['times_as_long']:.2f} | "
            f"{'yes' if row['right'] else 'no'} |"
        )
    print(f"\nright in {sum(bool(row['right']) for row in found)} of {len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="numbers of combinations, or images; the first eight by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="folder with Fashion-MNIST")
    parser.add_argument("--seconds", type=float, default=Task.seconds, help="of the planner")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--out", type=Path, help="JSON with all rows")
    given = parser.parse_args()
    if given.data:
        os.environ["KLATSCH_DATA"] = given.data
    every = QUESTIONS | IMAGES
    names = [*IMAGES] if given.names == ["images"] else given.names or [*QUESTIONS]
    jobs = [(name, every[name], given.device, given.seconds) for name in names]
    if given.device != "cpu" or given.processes == 1:
        found = [compare(*job) for job in jobs]
    else:
        with ProcessPoolExecutor(given.processes) as pool:
            found = list(pool.map(compare, *zip(*jobs, strict=True)))
    show(found)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
