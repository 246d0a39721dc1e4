"""Rounds in native code: a traced rule on a quadratic problem, many rounds per call, a block of columns per thread.

The kernel keeps a block of columns in the cache for all rounds of a call, without Python in between. Columns are
independent, so the choice of blocks changes a result by rounding at most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import klatsch.columns as cols
from klatsch import native
from klatsch.problems import Problem
from klatsch.rules import State
from klatsch.simulation.preparation import Prepared
from klatsch.simulation.stack import Stack
from klatsch.simulation.trace import LINEAR, NotLinearError, Program, coefficient_table, trace
from klatsch.topology import Topology
from klatsch.topology.matrix import exact_weights, mapped

WIDEST = 64  # bytes of the widest vector; the kernel may read as far past the end of H
MOST_INPUTS, MOST_REGISTERS = 6, 64  # the kernel's limits
CACHE = 2 << 20  # bytes of a core's second-level cache on current machines

Array = NDArray[Any]


class FusedStack(Stack):
    """Rounds in native code; an OSError without the kernel, a NotLinearError if the rule cannot be traced."""

    name, place = "fused", "cpu"

    def __init__(self, problem: Problem, parts: Prepared) -> None:
        super().__init__(problem, parts)
        (topology, *others), quadratic = parts.topologies, problem.quadratic()
        if self.device.type != "cpu":
            raise ValueError("it runs on the CPU only")
        if others:
            raise ValueError("it runs one network at a time")
        if quadratic is None or not problem.draws_ahead:
            raise ValueError(f"the gradients of {type(problem).__name__} are not those of a quadratic problem")
        if topology.loss:
            raise ValueError(f"{topology.name} loses other messages in every round")
        if not topology.row_stochastic:
            raise ValueError(f"the rows of {topology.name} do not sum to 1")
        parts.rehearsal.check(slices=True)
        # Coefficients are computed in float64, whatever the dtype of the run.
        self._rule, self._rates = cols.mapped(parts.rule, Tensor.double), replace(self.rates, dtype=torch.float64)
        first, *more = self.start.values()
        nodes, self.columns, dim = first.shape
        library, single = native.library(), self.rates.dtype == torch.float32
        kernel = library.klatsch_rounds_f32 if single else library.klatsch_rounds_f64
        if any(v.shape != first.shape for v in more):
            raise NotLinearError("the fields of the state differ in shape")
        program = self._program = self._trace(1, 3)
        if len(program.level) > MOST_REGISTERS or any(len(o.inputs) > MOST_INPUTS for o in program.operations):
            raise NotLinearError(f"the rule takes more than {MOST_REGISTERS} steps, or {MOST_INPUTS} vectors in one")
        H = _aligned(quadratic.H.shape, quadratic.H.numpy().dtype, behind=WIDEST)
        H[...] = quadratic.H.numpy()
        shared = {"H": H, "rows": quadratic.rows.numpy(), **_links(topology, self.rates.dtype)}
        scale, noise = quadratic.scale.expand(self.columns, -1), quadratic.noise.expand(self.columns)
        threads = torch.get_num_threads()
        self._blocks = []
        for part in column_blocks(self.columns, nodes, dim, first.element_size(), threads):
            own = {"mult": scale[part].contiguous().numpy(), "sigma": noise[part].contiguous().numpy()}
            width = part.stop - part.start
            self._blocks.append(_Block(kernel, program, (nodes, width, dim), shared | own, part, topology.period))
        self._pool = native.quiet_threads(max(1, min(len(self._blocks), threads)))
        self._drawer = native.quiet_threads(1)

    def advance(self, state: State, done: int, until: int) -> State:
        used = [state[name].contiguous().numpy() for name in self.start]  # a round may reorder the fields
        for block in self._blocks:
            block.load(used)
        while done < until:
            drawn_to = (done // self.gradients.chunk + 1) * self.gradients.chunk
            end = min(until, drawn_to)
            table = self._table(done, end)
            drawn = np.ascontiguousarray(self.gradients.drawn(done, end).numpy())
            running = [self._pool.submit(block.run, table, drawn, done) for block in self._blocks]
            if drawn_to < self.rates.steps:
                self.gradients.draw_next(done, self._drawer)  # while the blocks run
            for run in running:
                run.result()
            done = end
        # NumPy copies, here and in the blocks: torch would start threads for them, which slow the kernel down.
        results = [np.empty_like(v) for v in used]
        for block in self._blocks:
            block.store(results)
        return {name: torch.from_numpy(v) for name, v in zip(self.start, results, strict=True)}

    def _table(self, done: int, until: int) -> Array:
        """The coefficients of rounds done + 1 to until, (rounds, coefficients, C)."""
        rounds = max(2, until - done)
        program = self._trace(done + 1, done + rounds + 1)
        if (program.operations, program.next_state) != (self._program.operations, self._program.next_state):
            raise ValueError(
                f"{self.rule.name} took other steps in round {done + 1} than before; make it depend only on its "
                "arguments, or use engine='torch'"
            )
        return coefficient_table(program, rounds, self.columns, self.rates.dtype)[: until - done].numpy()

    def _trace(self, first: int, beyond: int) -> Program:
        """The rule as a program, with coefficients for rounds `first` to `beyond` - 1."""
        times = torch.arange(first, beyond, dtype=torch.float64)[:, None, None]
        lr = self._rates.between(first - 1, beyond - 1) if self._rates.change else self._rates(first)
        every = self.parts.topologies[0].every
        return trace(self._rule, self.start, times, lr, (times % every != 0).double() if every > 1 else False)


class _Block:
    """A block of columns: its buffers and its kernel job."""

    def __init__(
        self,
        kernel: Callable[[object], int],
        program: Program,
        shape: tuple[int, int, int],
        arrays: dict[str, Array],
        part: slice,
        period: int,
    ) -> None:
        self.kernel, self.part, self.fields, self.period = kernel, part, program.fields, period
        buffer_of, turn, buffers, scratch_rows = assigned(program)
        self._buffers = [_aligned(shape, arrays["H"].dtype) for _ in range(buffers)]
        self._table = np.array([v.ctypes.data for v in self._buffers], dtype=np.uintp)
        self._arrays = {  # kept alive while the job points to them
            **arrays,
            "op": encoded(program),
            "buffer_of": np.array(buffer_of, dtype=np.int32),
            "turn": np.array(turn, dtype=np.int32),
            "buffer": self._table,
        }
        self._job = native.Job(
            **dict(zip(("nodes", "columns", "dim"), shape, strict=True)),
            rank=arrays["rows"].shape[1],
            registers=len(program.level),
            buffers=buffers,
            scratch_rows=scratch_rows,
            operations=len(program.operations),
            coefs=len(program.coefficients),
            query=program.query,
            before=program.before,
            gradient=program.gradient,
            period=period,
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )

    def run(self, table: Array, drawn: Array, done: int) -> None:
        """Run the rounds after `done`; `table` is (rounds, coefficients, all columns), `drawn` is (rounds, M, d)."""
        own = np.ascontiguousarray(table[:, :, self.part])
        job = self._job
        job.rounds, job.first_phase = len(own), done % self.period
        job.coef, job.noise = own.ctypes.data, drawn.ctypes.data
        if self.kernel(ctypes.byref(job)):
            raise MemoryError("not enough memory for a simulation of this size; choose fewer nodes or columns")

    def load(self, states: list[Array]) -> None:
        """Copy this block's columns of all fields in, (M, C, d) each."""
        for buffer, whole in zip(self._current(), states, strict=True):
            buffer[...] = whole[:, self.part]

    def store(self, states: list[Array]) -> None:
        """Copy this block's columns out."""
        for buffer, whole in zip(self._current(), states, strict=True):
            whole[:, self.part] = buffer

    def _current(self) -> list[Array]:
        where = {v.ctypes.data: v for v in self._buffers}  # the kernel turns the table, not the memory
        return [where[int(address)] for address in self._table[: self.fields]]


def column_blocks(columns: int, nodes: int, dim: int, bytes_each: int, threads: int) -> list[slice]:
    """Columns in blocks that stay in the cache for all rounds, at least one per thread.

    Every round reads H. If it fits in a core's cache, a block takes what is left of the cache; if not, wide blocks
    spread the cost of reading it. Multiples of 8 columns fill the vectors best; the optimum is flat.
    """
    left = CACHE - nodes * dim * dim * bytes_each
    width = min(16, max(8, left // (4 * nodes * dim * bytes_each) // 4 * 4)) if left > 0 else 40
    count = -(-columns // width)
    count = min(columns, -(-count // threads) * threads)
    edges = [k * columns // count for k in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def assigned(program: Program) -> tuple[list[int], list[int], int, int]:
    """Memory for registers: the buffer of each (-1 - k: scratch row k), how buffers rotate after a round, how many.

    A result may overwrite a register that does not outlive the round, that no later operation reads, and that is mixed
    in earlier levels only: a mix reads all rows at any time of its level, a combination only its own row.
    """
    operations = program.by_level()
    registers = range(len(program.level))
    last_use, last_mix = dict.fromkeys(registers, -1), dict.fromkeys(registers, -1)
    for k, operation in enumerate(operations):
        last_use |= dict.fromkeys(operation.inputs, k)
        if operation.kind != LINEAR:
            last_mix |= dict.fromkeys(operation.inputs, program.level[operation.out])
    last_use |= dict.fromkeys(program.next_state, len(operations))
    owners, scratch = list(range(program.fields)), list[int]()  # the register in each buffer, and in each scratch row
    buffer_of = dict(enumerate(owners))
    results = [*enumerate(operation.out for operation in operations)]
    results.insert(program.before, (-1, program.gradient))  # overwrites nothing
    for k, register in results:
        pool = scratch if program.needs_rows_only(register) else owners
        free = (
            b
            for b, owner in enumerate(pool)
            if k >= 0 and last_use[owner] <= k and last_mix[owner] < program.level[register]
        )
        place = next(free, len(pool))
        pool[place : place + 1] = [register]
        buffer_of[register] = -1 - place if pool is scratch else place
    turn = [buffer_of[register] for register in program.next_state]
    turn += sorted(set(range(len(owners))) - set(turn))
    return [buffer_of[register] for register in registers], turn, len(owners), len(scratch)


def encoded(program: Program) -> NDArray[np.int32]:
    """Operations as the kernel reads them: kind, level, out, number of inputs, six inputs, six coefficients."""
    table = np.zeros((len(program.operations), 4 + 2 * MOST_INPUTS), dtype=np.int32)
    for line, (kind, out, inputs, coefficients) in zip(table, program.by_level(), strict=True):
        line[:4] = kind, program.level[out], out, len(inputs)
        line[4 : 4 + len(inputs)] = inputs
        line[4 + MOST_INPUTS : 4 + MOST_INPUTS + len(coefficients)] = coefficients
    return table


def _links(topology: Topology, dtype: torch.dtype) -> dict[str, Array]:
    """All matrices of a period as one list of links, without the diagonal."""
    phases = [links for links, _ in mapped(topology.matrices, lambda P: exact_weights(P, dtype))]
    begins = np.cumsum([0, *(links.nnz for links in phases)])[:-1]
    first = [links.indptr + begin for links, begin in zip(phases, begins, strict=True)]
    return {
        "first": np.concatenate(first).astype(np.int32),
        "neighbour": np.concatenate([*(links.indices for links in phases), [0]]).astype(np.int32),  # never empty
        "weight": np.concatenate([*(links.data for links in phases), [0.0]]).astype(str(dtype).removeprefix("torch.")),
    }


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any], behind: int = 0) -> Array:
    """Memory aligned for vectors, with some readable bytes behind it."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + behind + WIDEST, dtype=np.uint8)
    begin = -raw.ctypes.data % WIDEST
    return np.asarray(raw[begin : begin + size].view(dtype).reshape(shape))
