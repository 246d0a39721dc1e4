"""Tracing: any rule that adds, scales and mixes becomes a program, and the kernel runs that program right."""

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.simulation.fused import FLOW, LINEAR, assigned, trace
from klatsch.wire.program import NotTraceableError
from tests.support import table
from tests.support.machine import KERNEL


class RandomRule(rules.Rule):
    """A rule nobody would invent: random combinations, mixes, flows and hand-overs between fields."""

    lr = 0.01

    def __init__(self, seed):
        self.seed = seed
        self.fields = int(np.random.default_rng(seed).integers(1, 5))

    def init(self, x):
        return {f"f{k}": x + k for k in range(self.fields)}

    def iterate(self, s):
        return s[f"f{self.seed % self.fields}"]

    def query(self, s):
        """A field, or a point between two."""
        if self.seed % 3:
            return self.iterate(s)
        return 0.25 * s["f0"] + 0.75 * s[f"f{self.fields - 1}"]

    def update(self, s, grad, flow, t, lr):
        random = np.random.default_rng(self.seed)
        known = [*s.values(), lr * grad] if random.random() < 0.5 else [*s.values(), grad * lr]

        def combination():
            chosen = random.choice(len(known), size=int(random.integers(1, min(4, len(known)) + 1)), replace=False)
            shares = random.dirichlet(np.ones(len(chosen)))
            result = float(shares[0]) * known[chosen[0]] + 0 * known[chosen[0]]
            for share, k in zip(shares[1:], chosen[1:], strict=True):
                result = (
                    result + known[k] * float(share) if random.random() < 0.5 else result - (-float(share)) * known[k]
                )
            return result

        for _ in range(int(random.integers(1, 6))):
            kind = random.random()
            exchange = flow if random.random() < 0.5 else flow.mix
            if kind < 0.4:
                known += exchange(*(known[int(k)] for k in random.choice(len(known), size=int(random.integers(1, 3)))))
            elif kind < 0.6:
                known += exchange(combination())
            else:
                known.append(combination() * (1 - 1 / (t + 5)))
        return {name: known[int(random.integers(len(known)))] for name in s}


@KERNEL
@pytest.mark.parametrize("seed", range(30))
def test_random_rules_run_the_same_in_both_engines(seed):
    rule = RandomRule(seed)
    random = np.random.default_rng(1000 + seed)
    graph = (tp.ring, tp.base_graph, tp.complete, tp.one_peer_exponential)[seed % 4](int(random.integers(1, 8)))
    problem = problems.LeastSquares(
        graph.size, dim=int(random.integers(1, 40)), noise=[1.0] * int(random.integers(1, 9))
    )
    plain, fused = (klatsch.simulate(problem, rule, graph, 25, record=[24], engine=e) for e in ("torch", "fused"))
    for name, expected in plain.state.items():
        torch.testing.assert_close(fused.state[name], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(30))
def test_buffers_are_never_overwritten_while_they_are_needed(seed):
    """Run a program on the buffers assigned, with whole levels at once in the worst order for the rows."""
    program = traced(RandomRule(seed), torch.zeros(1, 1, 2))
    buffer_of, turn, buffers, scratch = assigned(program)
    assert sorted(turn) == list(range(buffers))
    assert [turn[s] for s in range(program.fields)] == [buffer_of[r] for r in program.next_state]
    assert all(-scratch <= b < buffers for b in buffer_of)
    coefficients = program.table(1, 1, torch.float64)[0, :, 0]
    nodes, random = 4, np.random.default_rng(seed)
    P = random.dirichlet(np.ones(nodes), size=nodes)
    start = random.normal(size=(program.fields + 1, nodes))
    values = {k: start[k] for k in range(program.fields)}  # the plain way: a place for every register
    before, after = program.by_level()[: program.before], program.by_level()[program.before :]
    for operation in before:
        assert program.gradient not in operation.inputs
        values[operation.out] = _result(operation, coefficients, P, values)
    values[program.gradient] = start[program.fields] + values[program.query]
    for operation in after:
        values[operation.out] = _result(operation, coefficients, P, values)
    memory = {b: np.full(nodes, np.nan) for b in range(-scratch, buffers)}
    for k in range(program.fields):
        memory[buffer_of[k]] = start[k].copy()
    levels = sorted({0, *(program.level[operation.out] for operation in program.operations)})
    for level in levels:  # as the kernel does: level by level, row by row
        for i in range(nodes):
            for operation in (*before, None, *after):  # the gradient comes between
                if operation is None and level == 0:
                    point = memory[buffer_of[program.query]][i]
                    memory[buffer_of[program.gradient]][i] = start[program.fields][i] + point
                elif operation is not None and program.level[operation.out] == level:
                    seen = {r: memory[buffer_of[r]] for r in operation.inputs}
                    memory[buffer_of[operation.out]][i] = _result(operation, coefficients, P, seen)[i]
    for register in program.next_state:
        np.testing.assert_allclose(memory[buffer_of[register]], values[register], rtol=1e-12)


def traced(rule, x):
    """A rule as a program, for one round."""
    return trace(rule, rule.init(x), torch.ones(1, 1, 1), rule.lr)


def _result(operation, coefficients, P, values):
    if operation.kind != LINEAR:
        v = values[operation.inputs[0]]
        return P @ v - v if operation.kind == FLOW else P @ v
    return sum(
        float(coefficients[c]) * values[r] for c, r in zip(operation.coefficients, operation.inputs, strict=True)
    )


@pytest.mark.parametrize("rule", table.LINEAR)
def test_our_rules_are_linear_and_short(rule):
    program = traced(table.RULES[rule]([0.1, 0.2]), torch.zeros(3, 2, 4))
    assert len(program.operations) <= 9
    assert max(len(operation.inputs) for operation in program.operations) <= 6


@pytest.mark.parametrize("rule", ["sgp", "dat-sgp", "dadam", "dat-gt-adam"])
def test_push_sum_is_not(rule):
    with pytest.raises(NotTraceableError):
        traced(rules.make(rule, lr=0.1), torch.zeros(3, 2, 4))


def test_rules_that_change_vectors_in_place_run_as_written():
    """Fields of a state may share memory, which registers of the fused engine do not."""

    class Shared(rules.Rule):
        def __init__(self, lr, method):
            self.lr, self.method = lr, method

        def init(self, x):
            return {"w": x, "a": x}

        def output(self, s):
            return s["a"]

        def update(self, s, grad, flow, t, lr):
            w = s["w"]
            if self.method:
                w.sub_(lr * grad)
            else:
                w -= lr * grad
            (w,) = flow.mix(w)
            return {"w": w, "a": 0.9 * s["a"] + 0.1 * w}

    for method in (True, False):
        run = klatsch.simulate(problems.LeastSquares(4, dim=3), Shared(0.1, method), tp.ring(4), 5, progress=False)
        assert run.engine == "torch"
