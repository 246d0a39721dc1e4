"""Runs that advance together: those that share a problem instance are columns of one stacked simulation.

On a GPU, where kernel launches limit small networks, networks of several sizes and seeds share a stack, too.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch import own, problems, rules
from klatsch.problems import Problem
from klatsch.sealed import CheckpointError
from klatsch.simulation import simulate_together
from klatsch.simulation.mixing import common_period
from klatsch.study.cases import Case
from klatsch.study.spec import Options, make_rule
from klatsch.study.traffic import Exchange, dim_of, exchange_of
from klatsch.topology import Topology
from klatsch.topology.channel import CHANNEL
from klatsch.version import VERSION

CHECKPOINT_EVERY = 1.0  # seconds that a kill may cost
MOST_COLUMNS = 256  # per batch: a larger one only loses more when it is killed
MOST_ROUNDS = 512  # of the common period of networks in one stack, all of which are captured
GPU_SHARE = 16  # a stack's vectors get one such share of a GPU's memory: activations need more
DTYPES = {"float64": torch.float64, "float32": torch.float32}
VECTORS = 12  # a run holds about this many vectors of the size of its state
# What even a slow machine does in a few seconds: batches to build, rounds to run, numbers to multiply.
QUICK_BATCHES, QUICK_ROUNDS, QUICK_NUMBERS = 64, 20_000, 1 << 30

Columns = tuple[Case, ...]  # the runs on one network, column by column


@dataclass(frozen=True)
class Batch:
    """Runs done in one go: one network, or a stack of several with as many columns each."""

    networks: tuple[Columns, ...]
    device: str

    @property
    def cases(self) -> list[Case]:
        return [case for network in self.networks for case in network]

    @property
    def names(self) -> tuple[str, str, str]:
        """Its problem, rule and topology; any of them may be custom."""
        first = self.networks[0][0]
        return first.problem, first.rule, first.topology

    @property
    def key(self) -> str:
        """The name of its checkpoint: a hash of its runs."""
        return hashlib.sha256(" ".join(case.key for case in self.cases).encode()).hexdigest()[:32]

    @property
    def work(self) -> int:
        """The number of gradients, one per node, run and round."""
        return sum(case.nodes * case.steps for case in self.cases)

    def without(self, done: set[str]) -> list[Batch]:
        """What remains of it."""
        if not done & {case.key for case in self.cases}:
            return [self]
        return pack([case for case in self.cases if case.key not in done], self.device)


@dataclass(frozen=True)
class Finished:
    """The results of a batch, in the order of its runs."""

    keys: list[str]
    steps: list[int]
    metrics: dict[str, NDArray[np.float64]]  # (steps, runs)
    diverged: list[bool]
    engine: str
    seconds: float  # of all runs together
    environment: dict[str, str]
    exchanges: list[Exchange]  # what the nodes of each run send


def pack(cases: Iterable[Case], device: str) -> list[Batch]:
    """Runs as batches; on one machine the same runs always make the same batches."""
    networks: dict[str, list[Case]] = {}
    for case in cases:
        networks.setdefault(_text(_split(case)[0], case.nodes, case.seed), []).append(case)
    blocks = [
        tuple(columns[k : k + most])
        for columns in networks.values()
        for most in [_most_columns(columns[0], device)]
        for k in range(0, len(columns), most)
    ]
    if device == "cpu":
        return [Batch((block,), device) for block in blocks]
    stacks: dict[str, list[Columns]] = {}
    for block in blocks:
        stacks.setdefault(_text(*_in_stack(block)), []).append(block)
    return [Batch(tuple(stack), device) for blocks in stacks.values() for stack in _cut(blocks, device)]


def quick(batches: Sequence[Batch]) -> bool:
    """Whether batches take only seconds even on a slow machine, less than starting processes."""
    dims = [batch.cases[0].problem_settings.get("dim") for batch in batches]
    if None in dims or len(batches) > QUICK_BATCHES:  # images have no dim, and take long
        return False
    rounds = sum(batch.cases[0].steps for batch in batches)
    numbers = sum(batch.work * int(dim or 0) ** 2 for batch, dim in zip(batches, dims, strict=True))
    return rounds <= QUICK_ROUNDS and numbers <= QUICK_NUMBERS


def simulation_arguments(batch: Batch) -> tuple[list[Problem], list[rules.Rule], list[Topology], int, Options]:
    """The arguments of `simulate_together` for a batch: problems, rules, graphs, steps, and options by name."""
    first = batch.networks[0][0]
    first.check_sources()
    seeded = "seed" in problems.options(first.problem)

    def problem(network: Columns) -> Problem:
        options = _joined([case.problem_options for case in network])
        seed = {"seed": network[0].seed} if seeded else {}
        return problems.make(first.problem, network[0].nodes, **seed, **options)

    options = [_joined([case.rule_options for case in network]) for network in batch.networks]
    same = all(each == options[0] for each in options)
    made = [make_rule(first.rule, each, first.steps) for each in (options[:1] if same else options)]
    graphs = [network[0].make_graph() for network in batch.networks]
    choices = {"record": first.points, "dtype": DTYPES[first.dtype], "any_graph": first.any_graph}
    return [problem(network) for network in batch.networks], made, graphs, first.steps, choices


def run_batch(batch: Batch, checkpoint: Path | None = None, progress: Callable[[int], None] | None = None) -> Finished:
    """Run a batch, from its checkpoint if there is one."""
    instances, rule, graphs, steps, choices = simulation_arguments(batch)
    if any(problem.fingerprint() is None for problem in instances):
        checkpoint = None  # nothing would tell it from another problem's
    choices |= {"device": batch.device, "checkpoint": checkpoint, "checkpoint_every": CHECKPOINT_EVERY}
    choices |= {"checkpoint_at_end": False, "meets": batch.cases[0].meets}  # the store keeps what is finished
    run = partial(simulate_together, instances, rule, graphs, steps, progress=progress or False, **choices)
    with own.explained(*batch.names):
        try:
            results = run()
        except CheckpointError:  # another version's, or damaged; it is ours, so repeat the rounds
            assert checkpoint is not None
            checkpoint.unlink(missing_ok=True)
            results = run()
    first, pairs = results[0], list(zip(results, batch.networks, strict=True))
    return Finished(
        keys=[case.key for case in batch.cases],
        steps=first.steps,
        metrics={
            name: torch.cat([each.metrics[name].expand(-1, len(network)) for each, network in pairs], dim=1).numpy()
            for name in first.metrics
        },
        diverged=torch.cat([each.diverged.expand(len(network)) for each, network in pairs]).tolist(),
        engine=first.engine,
        seconds=first.seconds,
        environment={
            "klatsch": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(batch.device),
        },
        exchanges=[exchange_of(case, each.output.shape[-1]) for each, network in pairs for case in network],
    )


def _processor(device: str) -> str:
    """The name of the GPU, or of the CPU if the system tells."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _joined(options: list[Options]) -> Options:
    """Options of several columns: a value where all agree, a list where they differ."""
    together = {name: [each[name] for each in options] for name in options[0]}
    return {name: values[0] if all(v == values[0] for v in values) else values for name, values in together.items()}


def _split(case: Case) -> tuple[list[object], list[Options]]:
    """What all runs of a batch share besides size and seed, and what may differ between its columns."""
    varying = problems.declared(case.problem).per_column, ("lr",) if own.is_own(case.rule) else rules.PER_COLUMN
    given = list(zip((case.problem_options, case.rule_options), varying, strict=True))
    shared: list[object] = [
        *(case.problem, case.rule, case.topology, case.topology_options, case.lazy),
        *({name: None if name in names else value for name, value in options.items()} for options, names in given),
        *(case.steps, case.record, case.epochs, case.dtype, case.any_graph),
    ]
    return shared, [{name: options.get(name) for name in names} for options, names in given]


def _in_stack(block: Columns) -> list[object]:
    """What all networks of a stack share."""
    case, columns = block[0], [_split(case)[1] for case in block]
    per_network = problems.declared(case.problem).per_network
    if case.meets:  # whose nodes do not run beside other networks
        return [_split(case)[0], columns, case.nodes, case.seed]
    if per_network is None:
        return [_split(case)[0], columns]
    case = replace(
        case,
        problem_options={name: value for name, value in case.problem_options.items() if name not in per_network},
        topology="",
        topology_options={name: v for name, v in case.topology_options.items() if name in CHANNEL},  # which rules see
        lazy=False,
    )
    if own.is_own(case.rule):
        return [_split(case)[0], columns]
    # Each network may have its own numbers in the rule, and its own schedule.
    rule_options = {name: value for name, value in case.rule_options.items() if name != "schedule"}
    return [_split(replace(case, rule_options=rule_options))[0], [problem for problem, _ in columns]]


def _most_columns(case: Case, device: str) -> int:
    """Columns per batch; one where columns share no work, so that many small batches keep all cores busy.

    On a GPU such columns, each a model on every node, have to fit its memory.
    """
    problem = problems.declared(case.problem)
    if own.is_own(case.rule) and not is_dataclass(case.make_rule()):  # its lists are not columns
        return 1
    if problem.columns_share:
        return MOST_COLUMNS
    numbers = VECTORS * case.nodes * dim_of(case)  # of a column
    return 1 if device == "cpu" else max(1, min(MOST_COLUMNS, most_numbers(case, device) // numbers))


def most_numbers(case: Case, device: str) -> int:
    """How many numbers the vectors of a stack on a GPU may have; if it cannot be asked, as for 128 GiB."""
    try:
        memory = torch.cuda.get_device_properties(device).total_memory
    except (AssertionError, RuntimeError, ValueError):  # no such GPU: the study may be done already
        memory = 128 << 30
    return memory // GPU_SHARE // DTYPES[case.dtype].itemsize


def _cut(blocks: list[Columns], device: str) -> list[list[Columns]]:
    """Networks as stacks that fit in memory and whose common period can be captured."""
    first = blocks[0][0]
    problem = problems.declared(first.problem)
    if problem.joined is None:
        return [[block] for block in blocks]
    dim, most = dim_of(first), most_numbers(first, device)
    # Per node: its matrix (joined, and the network's own), and the draws of the captured rounds.
    held = 2 * dim + 3 * MOST_ROUNDS if problem.numbers_per_parameter is None else problem.numbers_per_parameter
    stacks: list[list[Columns]] = []
    graphs: list[Topology] = []
    size = 0
    for block in sorted(blocks, key=lambda b: (b[0].make_graph().period, b[0].nodes, b[0].seed)):
        graph = block[0].make_graph()
        numbers = block[0].nodes * dim * (VECTORS * len(block) + held)
        if not stacks or size + numbers > most or common_period([*graphs, graph]) > MOST_ROUNDS:
            stacks.append([])
            graphs, size = [], 0
        stacks[-1].append(block)
        graphs.append(graph)
        size += numbers
    return stacks


def _text(*parts: object) -> str:
    return json.dumps(parts, sort_keys=True)
