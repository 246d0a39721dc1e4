"""Rounds in native code: a linear rule on least squares or logistic regression, many per call, with blocks of columns.

Most rules are linear in their vectors: the new state combines old fields, the gradient and flows, with coefficients
that depend only on round and column. The kernel keeps a block of columns in the cache for all rounds of a call,
without Python in between. Columns are independent, so the choice of blocks changes a result by rounding at most.

On a GPU (`KernelStack`) a block of columns lies in the shared memory of a few multiprocessors, and the rule is written
down as C for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

import klatsch.columns as cols
from klatsch import native
from klatsch.columns import Number
from klatsch.problems import Logistic, Quadratic
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import Silent
from klatsch.simulation.stack import Prepared, Stack
from klatsch.topology import Topology
from klatsch.topology.matrix import exact_weights, mapped
from klatsch.wire.program import NotTraceableError, Symbol, Tracer

LINEAR, MIX, FLOW = range(3)  # kinds of operations, numbered as in the kernel
WIDEST = 64  # bytes of the widest vector; the kernel may read as far past the end of H
MOST_INPUTS, MOST_REGISTERS = 6, 64  # the kernel's limits
CACHE = 2 << 20  # bytes of a core's second-level cache on current machines

# On a GPU: blocks of a cluster, clusters that run at once, threads of a warp and of a block, columns of a thread.
BLOCKS, CLUSTERS, WARP, MOST_THREADS, MOST_TILE = 8, 16, 32, 512, 14
LINK = np.dtype([("weight", "f8"), ("block", "i4"), ("slot", "i4")])

Array = NDArray[Any]
Kernel = Callable[[object], int]
Terms = dict[int, Number]  # a combination of registers: coefficients by register


class Operation(NamedTuple):
    """`out` is a combination of registers, or the mix or flow of one."""

    kind: int
    out: int
    inputs: tuple[int, ...]
    coefficients: tuple[int, ...]  # places in the list of coefficients; empty unless linear


class LinearRule(Tracer):
    """A rule as operations on registers: first the fields of the state, then the gradient, then results.

    Its symbols know their terms, the combination of registers that they are. What is mixed, asked for or kept gets a
    register of its own. If `apart`, every flow has a level to itself, which takes fewer buffers and more waiting.
    """

    in_place = False  # tensors of a state may share memory, registers do not

    def __init__(self, fields: int, apart: bool = False) -> None:
        self.apart = apart
        self.fields = self.gradient = fields  # how many registers are fields, and the one after them
        self.level = [0] * (fields + 1)  # by register: how many flows come before it
        self.operations: list[Operation] = []
        self.coefficients: list[Number] = []
        self.query, self.before = 0, 0  # the register of the query point, and operations before the gradient
        self.next_state: list[int] = []

    def by_level(self) -> list[Operation]:
        """The operations in order of level: each needs only its own row and the results of lower levels."""
        return sorted(self.operations, key=lambda operation: self.level[operation.out])

    def needs_rows_only(self, register: int) -> bool:
        """Whether a register is used only within its level and row, so that one row of memory is enough."""
        if register < self.fields or register in self.next_state or (self.apart and register == self.query):
            return False
        users = [operation for operation in self.operations if register in operation.inputs]
        return all(user.kind == LINEAR and self.level[user.out] == self.level[register] for user in users)

    def table(self, rounds: int, columns: int, dtype: torch.dtype) -> Tensor:
        """All coefficients, (rounds, coefficients, columns)."""
        table = torch.empty(rounds, len(self.coefficients), columns, dtype=dtype)
        for k, coefficient in enumerate(self.coefficients):
            # (rounds, C, 1), (C, 1) or (1, C, 1): drop the parameter axis.
            table[:, k] = coefficient[..., 0] if isinstance(coefficient, Tensor) and coefficient.ndim else coefficient
        return table

    def add(self, kind: int, terms: Terms) -> int:
        """Add an operation; returns its register."""
        below = self.level if self.apart and kind != LINEAR else (self.level[register] for register in terms)
        self.level.append(max(below) + (kind != LINEAR))
        out, first = len(self.level) - 1, len(self.coefficients)
        self.coefficients += terms.values() if kind == LINEAR else ()
        self.operations.append(Operation(kind, out, tuple(terms), tuple(range(first, len(self.coefficients)))))
        return out

    def register(self, symbol: Symbol) -> int:
        """The register that holds it, computed now if necessary."""
        if len(symbol.known) > 1 or not all(isinstance(c, float) and c == 1.0 for c in symbol.known.values()):
            symbol.known = {self.add(LINEAR, symbol.known): 1.0}
        return int(next(iter(symbol.known)))

    def exchange(self, kind: int, *vectors: Symbol) -> tuple[Any, ...]:
        """Symbols for mixes or flows."""
        return tuple(Symbol(self, {self.add(kind, {self.register(v): 1.0}): 1.0}) for v in vectors)

    def result(self, operation: str, *inputs: Any) -> Terms:
        terms = [v.known if isinstance(v, Symbol) else None for v in inputs]
        match operation, terms:
            case "clone", [dict() as only]:
                return only
            case "neg", [dict() as only]:
                return _scaled(only, -1.0)
            case "mul", [dict() as vector, None]:
                return _scaled(vector, inputs[1])
            case "mul", [None, dict() as vector]:
                return _scaled(vector, inputs[0])
            case "truediv", [dict() as vector, None]:
                return _scaled(vector, 1.0 / inputs[1])
            case "add" | "sub", [dict() as first, dict() as second]:
                total = dict(first)
                for register, coefficient in (second if operation == "add" else _scaled(second, -1.0)).items():
                    total[register] = total[register] + coefficient if register in total else coefficient
                return {register: c for register, c in total.items() if isinstance(c, Tensor) or c != 0.0} or total
        raise NotTraceableError(f"{operation} of {', '.join(type(v).__name__ for v in inputs)}")


def _scaled(terms: Terms, factor: object) -> Terms:
    if not isinstance(factor, int | float | Tensor):
        raise NotTraceableError(f"a vector times a {type(factor).__name__}")
    return {register: coefficient * factor for register, coefficient in terms.items()}


def trace(rule: Rule, state: State, t: Tensor, lr: Number, silent: Silent = False, apart: bool = False) -> LinearRule:
    """A rule whose state has these fields, as linear operations.

    `t` holds the rounds, (len(t), 1, 1), whose coefficients are found at once: two or more, so that a rule that asks
    about a single round (`if t == 1`) fails. `silent` says which of them are. Learning rates and hyper-parameters
    broadcast against (len(t), C, 1).
    """
    linear = LinearRule(len(state), apart)
    # Any: symbols and a tensor of rounds stand in for tensors and a number.
    *fields, gradient = (Symbol(linear, {register: 1.0}) for register in range(len(state) + 1))
    symbols: Any = dict(zip(state, fields, strict=True))
    given: Any = symbols, gradient, Flow(partial(linear.exchange, FLOW), partial(linear.exchange, MIX), silent), t, lr
    try:
        query: Any = rule.query(symbols)
        linear.query, linear.before = linear.register(query), len(linear.operations)
        following: Any = rule.update(*given)
        for name in state:
            kept = linear.register(following[name])
            # Equal fields still need a place each.
            linear.next_state.append(linear.add(LINEAR, {kept: 1.0}) if kept in linear.next_state else kept)
    except NotTraceableError:
        raise
    except Exception as error:  # anything that symbols or a tensor of rounds do not support
        raise NotTraceableError(f"the rule cannot be written as linear steps ({error})") from error
    return linear


class LinearStack(Stack):
    """Rounds of linear steps; a NotTraceableError if the rule is not linear."""

    apart: ClassVar[bool] = False  # whether flows have levels to themselves

    def __init__(self, parts: Prepared) -> None:
        super().__init__(parts)
        if self.device.type != self.place:
            raise ValueError(f"it runs on {self.place} only")
        self.logistic = self.problem.logistic() if self.place == "cpu" else None
        quadratic = self.problem.quadratic() if self.logistic is None else self._as_quadratic(self.logistic)
        if quadratic is None or not self.problem.draws_ahead:
            raise ValueError(f"the gradients of {type(self.problem).__name__} are not those of a quadratic problem")
        self.quadratic = quadratic
        for topology in self.topologies:
            if topology.loss:
                raise ValueError(f"{topology.name} loses other messages in every round")
            if not topology.row_stochastic:
                raise ValueError(f"the rows of {topology.name} do not sum to 1")
        if len({topology.every for topology in self.topologies}) > 1:
            raise ValueError("some networks are silent in other rounds than others")
        parts.rehearsal.check(slices=True)
        # Coefficients are computed in float64, whatever the dtype of the run.
        self._rule = cols.mapped(parts.rule, lambda v: v.to(self.device, torch.float64))
        self._rates = replace(self.rates, dtype=torch.float64)
        first, *more = self.start.values()
        self.nodes, self.columns, self.dim = first.shape
        if any(v.shape != first.shape for v in more):
            raise NotTraceableError("the fields of the state differ in shape")
        self._linear = self._trace(0, 2)

    def _as_quadratic(self, logistic: Logistic) -> Quadratic:
        """What stands where in the kernel: samples for H, l2 for the noise, and no rows."""
        samples = logistic.samples
        return Quadratic(samples, samples[:, :0], samples.new_empty(1, 0), samples.new_full((1,), logistic.l2))

    def _traced(self, done: int, rounds: int) -> LinearRule:
        """The rule with coefficients for some rounds, two or more; refuse one that takes other steps than before."""
        linear = self._trace(done, done + rounds)
        if (linear.operations, linear.next_state) != (self._linear.operations, self._linear.next_state):
            raise ValueError(
                f"{self.rule.name} took other steps in round {done + 1} than before; make it depend only on its "
                "arguments, or use engine='torch'"
            )
        return linear

    def _trace(self, done: int, until: int) -> LinearRule:
        times = torch.arange(done + 1, until + 1, dtype=torch.float64, device=self.device)[:, None, None]
        lr = self._rates.between(done, until) if self._rates.change else self._rates(done + 1)
        if self.apart:  # coefficients have an axis of nodes, too, since networks may differ
            times = times[:, None]
            lr = lr[:, None] if isinstance(lr, Tensor) and self._rates.change and lr.ndim == 3 else lr
        every = self.topologies[0].every
        silent = (times % every != 0).double() if every > 1 else False
        return trace(self._rule, self.start, times, lr, silent, self.apart)


class FusedStack(LinearStack):
    """Rounds in C; an OSError without the kernel."""

    name, place = "fused", "cpu"

    def __init__(self, parts: Prepared) -> None:
        if len(parts.networks) > 1:
            raise ValueError("it runs one network at a time")
        super().__init__(parts)
        (topology,), quadratic, linear = self.topologies, self.quadratic, self._linear
        nodes, dim, size = self.nodes, self.dim, self.rates.dtype.itemsize
        library, single = native.library(), self.rates.dtype == torch.float32
        kernel = library.klatsch_rounds_f32 if single else library.klatsch_rounds_f64
        if len(linear.level) > MOST_REGISTERS or any(len(o.inputs) > MOST_INPUTS for o in linear.operations):
            raise NotTraceableError(f"the rule takes more than {MOST_REGISTERS} steps, or {MOST_INPUTS} vectors in one")
        H = _aligned(quadratic.H.shape, quadratic.H.numpy().dtype, behind=WIDEST)
        H[...] = quadratic.H.numpy()
        shared = {"H": H, "rows": quadratic.rows.numpy(), **_links(topology, self.rates.dtype)}
        scale, noise = quadratic.scale.expand(self.columns, -1), quadratic.noise.expand(self.columns)
        threads, self._blocks = torch.get_num_threads(), list[ColumnBlock]()
        data = H.nbytes if self.logistic is None else nodes * self.logistic.batch * dim * size  # read in a round
        for part in column_blocks(self.columns, nodes, dim, size, threads, data):
            own = {"mult": scale[part].contiguous().numpy(), "sigma": noise[part].contiguous().numpy()}
            shape = nodes, part.stop - part.start, dim
            self._blocks.append(ColumnBlock(kernel, linear, shape, shared | own, part, topology.period, self.logistic))
        self._pool = native.quiet_threads(max(1, min(len(self._blocks), threads)))
        self._drawer = native.quiet_threads(1)

    def advance(self, state: State, done: int, until: int) -> State:
        topology = self.topologies[0]
        used = [state[name].contiguous().numpy() for name in self.start]  # a round may reorder the fields
        # NumPy copies, here and below: torch would start threads for them, which slow the kernel down.
        for block in self._blocks:
            for buffer, whole in zip(block.current(), used, strict=True):
                buffer[...] = whole[:, block.part]
        while done < until:
            drawn_to = (done // self.gradients.chunk + 1) * self.gradients.chunk
            end = min(until, drawn_to)
            table = self._table(done, end)
            drawn = np.ascontiguousarray(self.gradients.drawn(done, end).numpy())
            links = (
                None if topology.shuffle is None else _links_of(range(done + 1, end + 1), topology, self.rates.dtype)
            )
            running = [self._pool.submit(block.run, table, drawn, done, links) for block in self._blocks]
            if drawn_to < self.rates.steps:
                self.gradients.draw_next(done, self._drawer)  # while the blocks run
            for run in running:
                run.result()
            done = end
        results = [np.empty_like(v) for v in used]
        for block in self._blocks:
            for buffer, whole in zip(block.current(), results, strict=True):
                whole[:, block.part] = buffer
        return {name: torch.from_numpy(v) for name, v in zip(self.start, results, strict=True)}

    def _table(self, done: int, until: int) -> Array:
        """The coefficients of rounds done + 1 to until, (rounds, coefficients, C)."""
        rounds = max(2, until - done)
        return self._traced(done, rounds).table(rounds, self.columns, self.rates.dtype)[: until - done].numpy()


class KernelStack(LinearStack):
    """Rounds on a GPU, whose compiler gets the rule as C; an OSError without the compiler.

    A cluster of multiprocessors has one network and some of its columns in shared memory, and waits for nobody else.
    """

    name, place, apart = "cuda kernel", "cuda", True
    pays_from = 10_000  # the compiler takes half a second

    def __init__(self, parts: Prepared) -> None:
        super().__init__(parts)
        columns, dim, size, quadratic = self.columns, self.dim, self.rates.dtype.itemsize, self.quadratic
        self._data = quadratic.H.contiguous(), quadratic.rows.contiguous()
        self._mult = torch.cat([quadratic.scale.expand(columns, -1), quadratic.noise.expand(columns)[:, None]], dim=1)
        nodes, extras, buffers = [own.size for own in self.topologies], self._mult.shape[1], assigned(self._linear)[2]
        self._first = torch.tensor([0, *nodes[:-1]]).cumsum(0)
        each = [buffers * dim * -(-M // BLOCKS) + extras for M in nodes]  # numbers of a column in a block
        beyond = MOST_TILE * (dim + extras)  # that a tile may read behind the last column
        room = native.shared_memory(self.device) // size - beyond
        if room < max(each):
            raise ValueError(f"{max(nodes)} nodes of {dim} parameters do not fit the GPU's shared memory")
        self._jobs = list[tuple[int, ...]]()  # number and first node of a network, its nodes, first column, columns
        for k, (first, M) in enumerate(zip(self._first.tolist(), nodes, strict=True)):
            count = max(-(-columns // (room // each[k])), min(columns, CLUSTERS // len(nodes)))
            ends = pairwise(part * columns // count for part in range(count + 1))
            self._jobs += [(k, first, M, begin, end - begin) for begin, end in ends]
        self._jobs.sort(key=lambda job: -job[2] * job[4])  # large ones first
        tile = min(MOST_TILE, max(job[4] for job in self._jobs))
        lanes = [(-(-dim // 2) * -(-own // tile), -(-M // BLOCKS)) for _, _, M, _, own in self._jobs]  # and nodes
        if max(lanes)[0] > MOST_THREADS:
            raise ValueError(f"{dim} parameters are too many")
        threads = max(-(-own * min(MOST_THREADS // own, most) // WARP) * WARP for own, most in lanes)
        shared = (beyond + max(each[k] * own for k, _, _, _, own in self._jobs)) * size
        source = kernel_source(self._linear, self.rates.dtype, dim, tile, extras, threads)
        kernel = native.gpu_kernel(source, "klatsch_rounds", self.device)
        self._run = partial(kernel, BLOCKS * len(self._jobs), threads, shared)
        self._static = None if any(own.shuffle is not None for own in self.topologies) else self._links(0, 0)
        self.advance(self.start, 0, 1)  # an OSError now, if the GPU does not take it

    def advance(self, state: State, done: int, until: int) -> State:
        together = torch.stack([state[name] for name in self.start])
        while done < until:
            end = min(until, (done // self.gradients.chunk + 1) * self.gradients.chunk)
            coef, drawn = self._coefficients(done, end), self.gradients.drawn(done, end).contiguous()
            tensors = together, *self._data, drawn, self._mult, coef, *(self._static or self._links(done, end))
            self._run(*tensors, end - done, done, self.nodes, self.columns, coef.shape[1], coef.shape[2])
            done = end
        return dict(zip(self.start, together.unbind(), strict=True))

    def _coefficients(self, done: int, until: int) -> Tensor:
        """Of rounds done + 1 to until, (rounds, coefficients, networks, C); one network if all are alike."""
        rounds, own = max(2, until - done), list[Tensor]()
        for coefficient in self._traced(done, rounds).coefficients:
            v = torch.as_tensor(coefficient, dtype=torch.float64, device=self.device)
            own.append(v[..., self._first, :, :] if v.ndim > 2 and v.shape[-3] > 1 else v)
        networks = max([1, *(v.shape[-3] for v in own if v.ndim > 2)])
        table = torch.stack([v.expand(rounds, networks, self.columns, 1) for v in own], dim=1)
        return table[: until - done, ..., 0].to(self.rates.dtype).contiguous()

    def _links(self, done: int, until: int) -> list[Tensor]:
        """Where links begin, links, and jobs; where nodes are shuffled, with the links of rounds done + 1 to until."""
        firsts, links, places = list[Array](), list[Array](), list[tuple[int, ...]]()
        dtype, rounds = self.rates.dtype, range(done + 1, until + 1)
        for k, topology in enumerate(self.topologies):
            steady = topology.shuffle is None
            own = _links(topology, dtype) if steady else _links_of(rounds, topology, dtype)
            first, neighbour, weight = own.values()
            places.append((sum(map(np.size, firsts)), topology.period if steady else len(rounds), k, steady))
            firsts.append(first.ravel() + sum(map(len, links)))
            links.append(np.rec.fromarrays([weight, *divmod(neighbour, -(-topology.size // BLOCKS))], dtype=LINK))
        jobs = np.array([(*job, *places[k]) for k, *job in self._jobs], dtype=np.int32)
        placed = np.concatenate(firsts), np.concatenate(links).view(np.uint8), jobs
        return [torch.from_numpy(v).to(self.device) for v in placed]


class ColumnBlock:
    """A block of columns: its buffers and its kernel job."""

    def __init__(
        self,
        kernel: Kernel,
        rule: LinearRule,
        shape: Sequence[int],
        arrays: dict[str, Array],
        part: slice,
        period: int,
        logistic: Logistic | None,
    ) -> None:
        self.kernel, self.part, self.fields, self.period = kernel, part, rule.fields, period
        buffer_of, turn, buffers, scratch_rows = assigned(rule)
        self._buffers = [_aligned(shape, arrays["H"].dtype) for _ in range(buffers)]
        self._table = np.array([v.ctypes.data for v in self._buffers], dtype=np.uintp)
        places = {"buffer_of": np.array(buffer_of, dtype=np.int32), "turn": np.array(turn, dtype=np.int32)}
        self._arrays = {**arrays, **places, "op": encoded(rule), "buffer": self._table}  # the job points to them
        sizes = {"nodes": shape[0], "columns": shape[1], "dim": shape[2], "rank": arrays["rows"].shape[1]}
        sizes |= {"buffers": buffers, "scratch_rows": scratch_rows, "registers": len(rule.level), "period": period}
        sizes |= {"operations": len(rule.operations), "coefs": len(rule.coefficients)}
        sizes |= {"query": rule.query, "before": rule.before, "gradient": rule.gradient}
        if logistic is not None:
            sizes |= {"samples": logistic.samples.shape[1], "batch": logistic.batch}
        self._job = native.Job(**sizes, **{name: array.ctypes.data for name, array in self._arrays.items()})

    def run(self, table: Array, drawn: Array, done: int, links: dict[str, Array] | None = None) -> None:
        """Run the rounds after `done`; `table` is (rounds, coefficients, all columns), `drawn` is (rounds, M, ...).

        `links` are those of these rounds, if they do not repeat.
        """
        own = np.ascontiguousarray(table[:, :, self.part])
        job = self._job
        job.rounds, job.first_phase = len(own), done % self.period
        if links is not None:
            job.period, job.first_phase = len(own), 0
            job.first, job.neighbour, job.weight = (v.ctypes.data for v in links.values())
        job.coef = own.ctypes.data
        setattr(job, "drawn" if job.batch else "noise", drawn.ctypes.data)
        if self.kernel(ctypes.byref(job)):
            raise MemoryError("not enough memory for a simulation of this size; choose fewer nodes or columns")

    def current(self) -> list[Array]:
        """Where the fields of the state are now, (M, columns of the block, d) each."""
        where = {v.ctypes.data: v for v in self._buffers}  # the kernel turns the table, not the memory
        return [where[int(address)] for address in self._table[: self.fields]]


def column_blocks(columns: int, nodes: int, dim: int, bytes_each: int, threads: int, data: int) -> list[slice]:
    """Columns in blocks that stay in the cache for all rounds, at least one per thread.

    Every round reads H, or some samples: so many bytes of data. If they fit in a core's cache, a block takes what is
    left of the cache; if not, wide blocks spread the cost of reading them. Multiples of 8 columns fill the vectors
    best; the optimum is flat.
    """
    left = CACHE - data
    width = min(16, max(8, left // (4 * nodes * dim * bytes_each) // 4 * 4)) if left > 0 else 40
    count = -(-columns // width)
    count = min(columns, -(-count // threads) * threads)
    return [slice(a, b) for a, b in pairwise(k * columns // count for k in range(count + 1))]


def kernel_source(rule: LinearRule, dtype: torch.dtype, dim: int, tile: int, extras: int, threads: int) -> str:
    """The source of rounds.cu for a rule."""
    buffer_of, turn, buffers, _ = assigned(rule)
    if rule.before > 1:
        raise NotTraceableError("the point where the gradient is taken takes several steps")

    def statements(operations: list[Operation], *made: int) -> tuple[str, str, str]:
        """Declarations of coefficients, what loads them, and what computes a number; some registers are there."""
        linear = [operation for operation in operations if operation.kind == LINEAR]
        numbers = [k for operation in linear for k in operation.coefficients]
        made = *made, *(operation.out for operation in operations)
        lines = [f"const T r{r} = b{buffer_of[r]}[e];" for r in {r for o in linear for r in o.inputs} - {*made}]
        for _, out, inputs, own in linear:
            lines.append(f"const T r{out} = {' + '.join(f'k{k}[s] * r{r}' for k, r in zip(own, inputs, strict=True))};")
        lines += [f"b{buffer_of[r]}[e] = r{r};" for r in made if buffer_of[r] >= 0]
        declared, loaded = ([text.format(k=k) for k in numbers] for text in ("T k{k}[2];", "k{k}[s] = COEF({k});"))
        return " ".join(declared), " ".join(loaded), " ".join(lines)

    operations, levels = rule.by_level(), list[str]()
    zero = [o for o in operations[rule.before :] if rule.level[o.out] == 0]
    for level in range(1, max(rule.level) + 1):
        flow, *others = (o for o in operations if rule.level[o.out] == level)
        value = "sum[s]" if flow.kind == FLOW else "own[s] + sum[s]"
        code = ", ".join(statements([flow, *others]))
        levels.append(f"LEVEL(b{buffer_of[flow.inputs[0]]}, r{flow.out}, {value}, {code})")
    names = "DECLARE_0", "LOAD_0", "LEVEL_0"
    depth = max(u for u in range(1, 11) if dim % u == 0)
    defined = {"T": "float" if dtype == torch.float32 else "double", "BLOCKS": BLOCKS, "THREADS": threads, "D": dim}
    defined |= {"TILE": tile, "DEPTH": depth, "STEP": 2 - depth % 2, "EXTRAS": extras, "COUNT": buffers}
    defined |= {"QUERY": f"b{buffer_of[rule.query]}", "GRADIENT": f"r{rule.gradient}", "BEFORE": rule.before}
    defined |= {"POINT": " ".join(statements(operations[: rule.before])), "LEVELS": " ".join(levels)}
    defined |= dict(zip(names, statements(zero, rule.gradient), strict=True))
    defined["FIELDS"] = "{" + ", ".join(f"b{b}" for b in range(rule.fields)) + "}"
    defined["BUFFERS(first, size)"] = "".join(f"T *b{b} = first + {b} * (size); " for b in range(buffers))
    after = "".join(f"T *const n{b} = b{other}; " for b, other in enumerate(turn))
    defined["TURN"] = "{" + after + "".join(f"b{b} = n{b}; " for b in range(buffers)) + "}"
    return "\n".join([*(f"#define {name} {value}" for name, value in defined.items()), native.ROUNDS.read_text()])


def assigned(rule: LinearRule) -> tuple[list[int], list[int], int, int]:
    """Memory for registers: the buffer of each (-1 - k: scratch row k), how buffers rotate after a round, how many.

    A result may overwrite a register that does not outlive the round, that no later operation reads, and that is mixed
    in earlier levels only: a mix reads all rows at any time of its level, a combination only its own row.
    """
    operations = rule.by_level()
    registers = range(len(rule.level))
    last_use, last_mix = dict.fromkeys(registers, -1), dict.fromkeys(registers, -1)
    for k, operation in enumerate(operations):
        last_use |= dict.fromkeys(operation.inputs, k)
        if operation.kind != LINEAR:
            last_mix |= dict.fromkeys(operation.inputs, rule.level[operation.out])
    last_use |= dict.fromkeys(rule.next_state, len(operations))
    owners, scratch = list(range(rule.fields)), list[int]()  # the register in each buffer, and in each scratch row
    buffer_of = dict(enumerate(owners))
    results = [*enumerate(operation.out for operation in operations)]
    results.insert(rule.before, (-1, rule.gradient))  # overwrites nothing
    for k, register in results:
        pool = scratch if rule.needs_rows_only(register) else owners
        free = (
            b
            for b, owner in enumerate(pool)
            if k >= 0 and last_use[owner] <= k and last_mix[owner] < rule.level[register]
        )
        place = next(free, len(pool))
        pool[place : place + 1] = [register]
        buffer_of[register] = -1 - place if pool is scratch else place
    turn = [buffer_of[register] for register in rule.next_state]
    turn += sorted(set(range(len(owners))) - set(turn))
    return [buffer_of[register] for register in registers], turn, len(owners), len(scratch)


def encoded(rule: LinearRule) -> NDArray[np.int32]:
    """Operations as the kernel reads them: kind, level, out, number of inputs, six inputs, six coefficients."""
    table = np.zeros((len(rule.operations), 4 + 2 * MOST_INPUTS), dtype=np.int32)
    for line, (kind, out, inputs, coefficients) in zip(table, rule.by_level(), strict=True):
        line[: 4 + len(inputs)] = kind, rule.level[out], out, len(inputs), *inputs
        line[4 + MOST_INPUTS :][: len(coefficients)] = coefficients
    return table


def _links_of(rounds: range, topology: Topology, dtype: torch.dtype) -> dict[str, Array]:
    """The matrices of rounds before which nodes are shuffled, as one list of links."""
    size, (links, _) = topology.size, exact_weights(topology.speaking[0], dtype)
    orders, speaks = np.array([topology.places(t) for t in rounds]), np.array([[topology.speaks(t)] for t in rounds])
    with_silence = csr_array((links.data, links.indices, [*links.indptr, links.nnz]), shape=(size + 1, size))
    rows = with_silence[np.where(speaks, np.argsort(orders, axis=1), size).ravel()]
    number = np.repeat(np.arange(len(rounds)), np.diff(rows.indptr[::size]))  # of each link's round
    return {
        "first": rows.indptr[np.arange(len(rounds))[:, None] * size + np.arange(size + 1)].astype(np.int32),
        "neighbour": np.append(orders[number, rows.indices], 0).astype(np.int32),
        "weight": np.append(rows.data, 0.0).astype(str(dtype).removeprefix("torch.")),
    }


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


def _aligned(shape: Sequence[int], dtype: np.dtype[Any], behind: int = 0) -> Array:
    """Memory aligned for vectors, with some readable bytes behind it."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + behind + WIDEST, dtype=np.uint8)
    begin = -raw.ctypes.data % WIDEST
    return np.asarray(raw[begin : begin + size].view(dtype).reshape(shape))
