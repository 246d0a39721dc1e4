"""Several networks side by side in one stack of tensors: on a GPU the small ones cost no more than one large one.

The nodes of all networks lie one after the other along the first axis, and the gossip matrix is block-diagonal. The
networks share the rule and its columns; they differ in size, seed and graph. Each is measured by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch

import klatsch.columns as cols
from klatsch.problems import Problem, adopted
from klatsch.rules import Rule
from klatsch.sealed import digest
from klatsch.simulation.checkpoint import Saver
from klatsch.simulation.choice import fastest_together
from klatsch.simulation.driver import Network, Run, Snapshot, unharmed
from klatsch.simulation.gradients import Gradients
from klatsch.simulation.mixing import StackedMix
from klatsch.simulation.preparation import check_parts, check_place, check_steps, identity, length
from klatsch.simulation.progress import Advance, progress_bar
from klatsch.simulation.record import Result, record_points
from klatsch.simulation.simulator import drive, result
from klatsch.simulation.stack import Rates, TorchRounds, placed
from klatsch.topology import Topology


def simulate_together(
    problems: Sequence[Problem],
    rule: Rule,
    topologies: Sequence[Topology],
    steps: int,
    record: int | Sequence[int] = 50,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 30.0,
    progress: bool | Advance | None = None,
    any_graph: bool = False,
) -> list[Result]:
    """Run one rule on several problems over a topology each, all in one stack.

    The problems are of one kind that can be joined (`LeastSquares`), with the same number of parameters and the same
    noise per column, and each has a topology of its size. All other arguments are those of `simulate`.

    Returns:
        One result per problem; `seconds` is the time of all of them.

    Raises:
        ValueError: something does not fit; the message says what, and how to put it right.
    """
    if not problems or len(problems) != len(topologies):
        raise ValueError(f"{len(problems)} problems and {len(topologies)} topologies; give one topology per problem")
    kinds = {type(problem) for problem in problems}
    problems = [adopted(problem) for problem in problems]
    join = problems[0].joined
    if len(kinds) > 1 or join is None:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"problems of type {names} cannot be run in one stack; call simulate for each of them")
    fitted = [check_parts(p, rule, g, any_graph) for p, g in zip(problems, topologies, strict=True)]
    rule, C = fitted[0][0], max(columns for _, columns in fitted)
    if len({str(cols.flattened("rule", each)) for each, _ in fitted}) > 1:
        raise ValueError(f"{rule.name} is another rule on each of these graphs; give graphs with the same every")
    steps = check_steps(steps)
    points, where = record_points(record, steps), check_place(dtype, device)
    joined = join(problems).to(dtype, where)
    local, rates = placed(rule, dtype, where), Rates(rule, steps, C, dtype, where)
    ends = pairwise(accumulate((problem.nodes for problem in problems), initial=0))
    networks = [Network(problem.to(dtype, where), slice(*nodes)) for problem, nodes in zip(problems, ends, strict=True)]
    starts = [network.problem.start().expand(network.problem.nodes, C, joined.dim) for network in networks]
    state = local.init(torch.cat(starts).contiguous())
    mix = StackedMix(*topologies, dtype=dtype, device=where)
    plain = TorchRounds(Gradients(joined, where.type), local, rates, mix)
    rounds = fastest_together(plain, state)

    origins = [identity(p, rule, g, C, dtype) for p, g in zip(problems, topologies, strict=True)]
    run = Run(Snapshot(state, *unharmed(len(networks) * C)), [])
    whole = {"networks": digest({}, {"each": origins})}
    saver = Saver(checkpoint, checkpoint_every, whole | length(rule, steps, points, run, where.type, rounds.name))
    run = saver.restored(state) or run

    title = f"{rule.name} on {len(networks)} networks"
    with progress_bar(progress, steps, run.now.rounds, title) as tell:
        drive(run, plain, rounds, networks, points, steps, saver, tell)
    results = []
    for k, (network, origin) in enumerate(zip(networks, origins, strict=True)):
        own = slice(k * C, (k + 1) * C)
        metrics = {name: values[:, own] for name, values in run.metrics.items()}
        now = run.now._replace(diverged=run.now.diverged[own], diverged_at=run.now.diverged_at[own])
        results.append(result(now, metrics, local, network, points, rounds.name, origin))
    return results
