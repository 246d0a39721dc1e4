"""Runs that advance together: those that share a problem instance are columns of one stacked simulation.

On a GPU the same rule on networks of several sizes and seeds goes into one stack, too, since small networks are bound
by kernel launches there.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch import own, problems, rules
from klatsch.problems import Problem
from klatsch.sealed import CheckpointError
from klatsch.simulation import Result, simulate, simulate_together
from klatsch.simulation.mixing import common_period
from klatsch.study.cases import Case
from klatsch.study.grids import Options
from klatsch.topology import Topology
from klatsch.version import VERSION

CHECKPOINT_EVERY = 3.0  # seconds: what a kill may cost
MOST_COLUMNS = 256  # of one batch: more would only make it longer to lose
MOST_ROUNDS = 512  # of the common period of networks in one stack, all of which are captured
MOST_NUMBERS = 1 << 29  # of a stack on a GPU, all in all: 4 GiB in float64
VECTORS = 12  # that a run holds of the size of its state, about
# What even a slow machine does in a few seconds: batches to build, rounds to go through, numbers to multiply.
QUICK_BATCHES, QUICK_ROUNDS, QUICK_NUMBERS = 64, 20_000, 1 << 30

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Batch:
    """Runs that are done in one go: one network, or several in one stack, with the same columns each."""

    networks: tuple[tuple[Case, ...], ...]  # of each network its runs, column by column
    device: str

    @property
    def cases(self) -> list[Case]:
        """All runs."""
        return [case for network in self.networks for case in network]

    @property
    def names(self) -> tuple[str, str, str]:
        """Its problem, rule and topology, of which some may be somebody's own."""
        first = self.networks[0][0]
        return first.problem, first.rule, first.topology

    @property
    def key(self) -> str:
        """What tells this batch from others: the name of its checkpoint."""
        return hashlib.sha256(" ".join(case.key for case in self.cases).encode()).hexdigest()[:32]

    @property
    def work(self) -> int:
        """Gradients to take, one per node, run and round."""
        return sum(case.nodes * case.steps for case in self.cases)

    def without(self, done: set[str]) -> list[Batch]:
        """What is left of it."""
        if not done & {case.key for case in self.cases}:
            return [self]
        return pack([case for case in self.cases if case.key not in done], self.device)


@dataclass(frozen=True)
class Finished:
    """What came out of a batch, in the order of its runs."""

    keys: list[str]
    steps: list[int]
    metrics: dict[str, NDArray[np.float64]]  # (steps, runs)
    diverged: list[bool]
    engine: str
    seconds: float  # of all runs together
    environment: dict[str, str]


def pack(cases: Iterable[Case], device: str) -> list[Batch]:
    """Runs as batches, always the same ones for the same runs."""
    networks: dict[str, list[Case]] = {}
    for case in cases:
        networks.setdefault(_text(_shared(case), case.nodes, case.seed), []).append(case)
    blocks = [
        tuple(columns[k : k + most])
        for columns in networks.values()
        for most in [_most_columns(columns[0], device)]
        for k in range(0, len(columns), most)
    ]
    if device == "cpu":
        return [Batch((block,), device) for block in blocks]
    stacks: dict[str, list[tuple[Case, ...]]] = {}
    for block in blocks:
        stacks.setdefault(_text(_in_stack(block[0]), [_columns(case) for case in block]), []).append(block)
    return [Batch(tuple(stack), device) for blocks in stacks.values() for stack in _cut(blocks)]


def quick(batches: Sequence[Batch]) -> bool:
    """Whether batches are a matter of seconds even on a slow machine: less than processes take to start."""
    dims: list[Any] = [batch.cases[0].problem_settings.get("dim") for batch in batches]
    if None in dims or len(batches) > QUICK_BATCHES:  # images have none, and take long
        return False
    rounds = sum(batch.cases[0].steps for batch in batches)
    numbers = sum(batch.work * dim**2 for batch, dim in zip(batches, dims, strict=True))
    return rounds <= QUICK_ROUNDS and numbers <= QUICK_NUMBERS


@dataclass(frozen=True)
class Parts:
    """What a batch is run from: one rule for all networks, and of each network its problem and graph."""

    rule: Any
    problems: list[Problem]
    graphs: list[Topology]
    steps: int
    choices: dict[str, Any]  # of `simulate`


def parts(batch: Batch) -> Parts:
    """What a batch is run from."""
    first = batch.networks[0][0]
    first.check_sources()
    return Parts(
        rule=rules.make(first.rule, **_joined([case.rule_options for case in batch.networks[0]])),
        problems=[_problem(network) for network in batch.networks],
        graphs=[network[0].make_graph() for network in batch.networks],
        steps=first.steps,
        choices={"record": first.points, "dtype": getattr(torch, first.dtype), "any_graph": first.any_graph},
    )


def run_batch(batch: Batch, checkpoint: Path | None = None, progress: Advance | None = None) -> Finished:
    """Run a batch, from its checkpoint if there is one."""
    made = parts(batch)
    if any(problem.fingerprint() is None for problem in made.problems):
        checkpoint = None  # nothing would tell it from that of another problem
    choices: Any = {
        **made.choices,
        "device": batch.device,
        "checkpoint": checkpoint,
        "checkpoint_every": CHECKPOINT_EVERY,
        "progress": progress if progress is not None else False,
    }

    def run() -> list[Result]:
        if len(made.problems) > 1:
            return simulate_together(made.problems, made.rule, made.graphs, made.steps, **choices)
        return [simulate(made.problems[0], made.rule, made.graphs[0], made.steps, **choices)]

    with own.explained(*batch.names):
        try:
            results = run()
        except CheckpointError:  # of another version, or damaged: it is ours, and the rounds can be done again
            assert checkpoint is not None
            checkpoint.unlink(missing_ok=True)
            results = run()
    return finished(batch, results, results[0].seconds)


def finished(batch: Batch, results: list[Result], seconds: float) -> Finished:
    """What is kept of the results of a batch, one per network."""
    return Finished(
        keys=[case.key for case in batch.cases],
        steps=results[0].steps,
        metrics={
            name: np.concatenate(
                [
                    result.metrics[name].expand(-1, len(network)).numpy()
                    for result, network in zip(results, batch.networks, strict=True)
                ],
                axis=1,
            )
            for name in results[0].metrics
        },
        diverged=[
            bool(v)
            for result, network in zip(results, batch.networks, strict=True)
            for v in result.diverged.expand(len(network))
        ],
        engine=results[0].engine,
        seconds=seconds,
        environment=environment(batch.device),
    )


def environment(device: str) -> dict[str, str]:
    """Versions and machine, for the record."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    return {
        "klatsch": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": gpu or processor(),
    }


def processor() -> str:
    """The name of the CPU, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _problem(network: tuple[Case, ...]) -> Problem:
    first = network[0]
    options = _joined([case.problem_options for case in network])
    seed = {"seed": first.seed} if "seed" in problems.options(first.problem) else {}
    return problems.make(first.problem, first.nodes, **seed, **options)


def _joined(options: list[Options]) -> Options:
    """Options of several columns: one value where all agree, a list where they differ."""
    together = {name: [each[name] for each in options] for name in options[0]}
    return {name: values[0] if all(v == values[0] for v in values) else values for name, values in together.items()}


def _columns(case: Case) -> list[Any]:
    """What may differ between the columns of a batch."""
    varying = problems.declared(case.problem).per_column
    rule = {name: case.rule_options.get(name) for name in case.per_column}
    return [rule, {name: case.problem_options.get(name) for name in varying}]


def _shared(case: Case) -> list[Any]:
    """What all runs of a batch have in common, beside the network's size and seed."""
    varying = problems.declared(case.problem).per_column
    return [
        case.problem,
        {k: v for k, v in case.problem_options.items() if k not in varying},
        sorted(case.problem_options),
        case.rule,
        {k: v for k, v in case.rule_options.items() if k not in case.per_column},
        sorted(case.rule_options),
        [case.topology, case.topology_options, case.lazy],
        [case.steps, case.record, case.epochs, case.dtype, case.any_graph],
    ]


def _in_stack(case: Case) -> list[Any]:
    """What all networks of one stack have in common."""
    own = problems.declared(case.problem).per_network
    if own is None:
        return _shared(case)
    options = {name: value for name, value in case.problem_options.items() if name not in own}
    return _shared(replace(case, problem_options=options, topology="", topology_options={}, lazy=False))


def _most_columns(case: Case, device: str) -> int:
    """Columns of one batch; one where they share no work, so that many small batches keep all cores busy."""
    alone = device == "cpu" and not problems.declared(case.problem).columns_share
    alone |= own.is_own(case.rule) and not is_dataclass(case.make_rule())  # whose lists are no columns
    return 1 if alone else MOST_COLUMNS


def _cut(blocks: list[tuple[Case, ...]]) -> list[list[tuple[Case, ...]]]:
    """Networks as stacks that fit: into memory, and into the rounds that are captured at once."""
    problem = problems.declared(blocks[0][0].problem)
    if problem.joined is None:
        return [[block] for block in blocks]
    stacks: list[list[tuple[Case, ...]]] = []
    graphs: list[Topology] = []
    size = 0
    dim = _dim(blocks[0][0])
    # Of every node: its matrix (joined, and the network's own), and the draws of the rounds that are captured.
    own = problem.numbers_per_parameter
    own = 2 * dim + 3 * MOST_ROUNDS if own is None else own
    for block in sorted(blocks, key=lambda b: (b[0].make_graph().period, b[0].nodes, b[0].seed)):
        graph = block[0].make_graph()
        numbers = block[0].nodes * dim * (VECTORS * len(block) + own)
        if not stacks or size + numbers > MOST_NUMBERS or common_period([*graphs, graph]) > MOST_ROUNDS:
            stacks.append([])
            graphs, size = [], 0
        stacks[-1].append(block)
        graphs.append(graph)
        size += numbers
    return stacks


def _dim(case: Case) -> int:
    return int(problems.make(case.problem, 1, **case.problem_options).dim)


def _text(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True)
