"""Runs that advance together: those that share a problem instance are columns of one stacked simulation.

On a GPU, where kernel launches limit small networks, networks of several sizes and seeds share a stack, too.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from klatsch import own, problems, rules
from klatsch.extras import VERSION
from klatsch.problems import Problem
from klatsch.sealed import CheckpointError
from klatsch.simulation import simulate_together
from klatsch.simulation.mixing import common_period
from klatsch.study.cases import Case, Exchange, dim_of, exchange_of
from klatsch.study.spec import Options, grouped, make_rule
from klatsch.topology import Topology
from klatsch.topology.channel import CHANNEL

CHECKPOINT_EVERY = 1.0  # seconds that a kill may cost
MOST_COLUMNS = 256  # per batch: a larger one only loses more when it is killed
MOST_ROUNDS = 512  # of the common period of networks in one stack, all of which are captured
GPU_SHARE = 16  # a stack's vectors get one such share of a GPU's memory: activations need more
DTYPES = {"float64": torch.float64, "float32": torch.float32}
MOST_SAVED = 1 << 29  # numbers in a vector of all nodes: a checkpoint has several, and is hashed
VECTORS = 12  # a run holds about this many vectors of the size of its state
# What even a slow machine does in a few seconds: batches to build, rounds to run, numbers to multiply.
QUICK_BATCHES, QUICK_ROUNDS, QUICK_NUMBERS = 64, 20_000, 1 << 30

APART = ("nodes", "seed", "sources", "data", "key")  # what else a run knows than its batch's settings

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
class Outcome:
    """What a run found, and how."""

    steps: NDArray[np.int64]  # the recorded rounds
    metrics: dict[str, NDArray[np.float64]]  # at each of them
    exchange: Exchange  # what its nodes send
    diverged: bool
    device: str
    engine: str
    seconds: float  # its share of the batch
    finished: str  # when
    environment: dict[str, str]  # versions and machine


def pack(cases: Iterable[Case], device: str) -> list[Batch]:
    """Runs as batches; on one machine the same runs always make the same batches."""
    networks = grouped(cases, lambda case: _text(_shared(case), case.nodes, case.seed))
    blocks = [
        tuple(columns[k : k + most])
        for columns in networks.values()
        for most in [_most_columns(columns[0], device)]
        for k in range(0, len(columns), most)
    ]
    if device == "cpu":
        return [Batch((block,), device) for block in blocks]
    stacks = grouped(blocks, _in_stack).values()
    return [Batch(tuple(stack), device) for blocks in stacks for stack in _cut(blocks, device)]


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


def run_batch(
    batch: Batch, checkpoint: Path | None = None, progress: Callable[[int], None] | None = None
) -> list[Outcome]:
    """Run a batch, from its checkpoint if there is one; what each of its runs found."""
    instances, rule, graphs, steps, choices = simulation_arguments(batch)
    held = sum(problem.nodes * problem.dim for problem in instances) * len(batch.networks[0])
    if held > MOST_SAVED or any(problem.fingerprint() is None for problem in instances):
        checkpoint = None  # it would take longer than a kill costs; or nothing tells it from another problem's
    choices |= {"device": batch.device, "checkpoint": checkpoint, "checkpoint_every": CHECKPOINT_EVERY}
    choices |= {"checkpoint_at_end": False, "meets": batch.cases[0].meets}  # the store keeps what is finished
    run = partial(simulate_together, instances, rule, graphs, steps, progress=progress or False, **choices)
    first = batch.cases[0]
    with own.explained(first.problem, first.rule, first.topology, first.channel.wire):
        try:
            results = run()
        except CheckpointError:  # another version's, or damaged; it is ours, so repeat the rounds
            assert checkpoint is not None
            checkpoint.unlink(missing_ok=True)
            results = run()
    facts: Options = {
        "device": batch.device,
        "engine": results[0].engine,
        "seconds": results[0].seconds / len(batch.cases),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {
            "klatsch": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(batch.device),
        },
    }
    outcomes = []
    for result, network in zip(results, batch.networks, strict=True):
        curves = {name: v.expand(-1, len(network)).numpy() for name, v in result.metrics.items()}
        diverged = result.diverged.expand(len(network)).tolist()
        for k, case in enumerate(network):
            metrics = {name: values[:, k] for name, values in curves.items()}
            exchange = exchange_of(case, result.output.shape[-1])
            outcomes.append(Outcome(np.array(result.steps), metrics, exchange, diverged[k], **facts))
    return outcomes


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


def _per_column(case: Case) -> dict[str, Collection[str]]:
    """The options that may differ between the columns of a network."""
    of_rule = ("lr",) if own.is_own(case.rule) else rules.PER_COLUMN
    return {"problem_options": problems.declared(case.problem).per_column, "rule_options": of_rule}


def _shared(case: Case) -> Options:
    """What all runs of a batch share besides size and seed."""
    facts = {name: value for name, value in vars(case).items() if name not in APART}
    for kind, names in _per_column(case).items():
        facts[kind] = {name: None if name in names else value for name, value in facts[kind].items()}
    return facts


def _in_stack(block: Columns) -> str:
    """What all networks of a stack share."""
    case, shared, varying = block[0], _shared(block[0]), _per_column(block[0])
    per_network = problems.declared(case.problem).per_network
    alone = (case.nodes, case.seed) if case.meets else ()  # nodes that meet in pairs do not run beside other networks
    if per_network is not None and not alone:
        graph = {name: v for name, v in case.topology_options.items() if name in CHANNEL}  # which rules see
        problem = {name: v for name, v in shared["problem_options"].items() if name not in per_network}
        shared |= {"topology": "", "topology_options": graph, "lazy": False, "problem_options": problem}
        if (made := case.make_graph()).encoding.remembers:  # they hold copies for the same rounds of a period
            shared["audiences"] = made.audiences
        if not own.is_own(case.rule):  # each network may have its own numbers in the rule, and its own schedule
            shared["rule_options"].pop("schedule", None)
            del varying["rule_options"]
    columns = [[{n: vars(each)[kind].get(n) for n in names} for kind, names in varying.items()] for each in block]
    return _text(shared, columns, *alone)


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
