"""The simulator: columns, engines, dtypes, recording, divergence, going on."""

import io
import math
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

import klatsch
from klatsch import native, pictures, problems, rules
from klatsch import topology as tp
from klatsch.simulation import simulate_together
from klatsch.simulation.driver import progress_bar
from klatsch.simulation.fused import column_blocks
from klatsch.simulation.mixing import StackedMix
from klatsch.simulation.record import record_points
from klatsch.simulation.stack import Gradients
from tests.support.comparisons import assert_same_to_rounding
from tests.support.covering import covering
from tests.support.machine import CUDA, ENGINES, KERNEL
from tests.support.table import GRAPHS, LINEAR, RULES, TABLE, ZeroGradients, sampled


@dataclass(frozen=True)
class Own(rules.Rule):
    """A rule of a user's own, but for its update."""

    lr: float


@KERNEL
@pytest.mark.parametrize("name", sampled(LINEAR))
def test_the_fused_engine_equals_plain_operations(name):
    """On every other graph in float64, and in float32 on one that stays and one that changes."""
    small = 0.01 if "polynomial" in name else 1.0  # its weights grow with the square of t
    rule = RULES[name]([0.0005 * small, 0.002 * small, 0.004 * small])
    graphs = [graph for label, graph in TABLE if label == name]
    cases = [(graph, torch.float64) for graph in graphs[LINEAR.index(name) % 2 :: 2]]
    cases += [(graph, torch.float32) for graph in ("lazy ring", "one peer") if graph in graphs]
    for label, dtype in cases:
        graph = GRAPHS[label]
        problem = problems.LeastSquares(graph.size, dim=19, noise=[1.0, 0.0, 3.0], heterogeneity=2.0)
        plain, fused = (
            klatsch.simulate(problem, rule, graph, 41, record=[2, 40], dtype=dtype, engine=engine)
            for engine in ("torch", "fused")
        )
        assert (plain.engine, fused.engine) == ("torch", "fused")
        tolerance = {torch.float32: 2e-4, torch.float64: 1e-11}[dtype]
        scale = plain.output.abs().amax()
        close = partial(torch.testing.assert_close, msg=lambda text, where=(label, dtype): f"{where}: {text}")
        close(fused.output / scale, plain.output / scale, rtol=0, atol=tolerance)
        for metric in plain.metrics:
            close(fused.metrics[metric], plain.metrics[metric], rtol=100 * tolerance, atol=tolerance)


@ENGINES
def test_a_brief_run_has_the_headline_alone(engine):
    """One column diverges, and counts as the worst there is."""
    problem, graph, rule = problems.LeastSquares(4, dim=7), tp.ring(4), rules.make("dat", [1e-3, 1e-2, 1e6])
    points = [1, 2, 7, 150]
    whole = klatsch.simulate(problem, rule, graph, 160, points, engine=engine)
    brief = klatsch.simulate(problem.briefly(), rule, graph, 160, points, engine=engine)
    assert (brief.steps, list(brief.metrics), brief.rounds) == (points, ["distance"], 160)
    torch.testing.assert_close(brief.metrics["distance"], whole.metrics["distance"], rtol=1e-9, atol=0)
    assert math.isinf(brief.metrics["distance"][-1, -1])
    assert brief.diverged.tolist() == [False, False, True]
    for other, before in ((problem.briefly(), whole), (problem, brief)):
        with pytest.raises(ValueError, match="after is a result of another choice of metrics"):
            klatsch.simulate(other, rule, graph, 170, after=before)


def test_problems_in_a_stack_are_all_brief_or_none():
    one, rule, graph = problems.LeastSquares(4, dim=7), rules.make("dat", 1e-3), tp.ring(4)
    found = simulate_together([one.briefly()] * 2, rule, [graph] * 2, 5)
    assert [list(result.metrics) for result in found] == [["distance"]] * 2
    with pytest.raises(ValueError, match="measure their headline alone, others more; give all or none `briefly`"):
        simulate_together([one, one.briefly()], rule, [graph] * 2, 5)


@pytest.mark.parametrize("rule", sampled(RULES))
def test_columns_equal_the_same_runs_done_one_by_one(rule):
    graph, rates = GRAPHS["lazy ring"], [0.001, 0.004, 0.0005]
    sigmas, zetas = [1.0, 0.0, 10.0], [0.0, 5.0, 1.0]
    problem = problems.LeastSquares(6, dim=8, noise=sigmas, heterogeneity=zetas)
    together = klatsch.simulate(problem, RULES[rule](rates), graph, 60, record=4)
    for c, (rate, sigma, zeta) in enumerate(zip(rates, sigmas, zetas, strict=True)):
        one = problems.LeastSquares(6, dim=8, noise=sigma, heterogeneity=zeta)
        alone = klatsch.simulate(one, RULES[rule](rate), graph, 60, record=4)
        torch.testing.assert_close(together.output[:, c], alone.output[:, 0], rtol=1e-10, atol=1e-12)
        for name, values in alone.metrics.items():
            torch.testing.assert_close(together.metrics[name][:, c], values[:, 0], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("rule, option, values", [("dsgd", "momentum", [0.0, 0.5, 0.9]), ("dat", "averaging", None)])
def test_any_hyper_parameter_makes_columns(rule, option, values):
    graph, problem = tp.ring(5), problems.LeastSquares(5, dim=4)
    gammas = [0.5, 0.9, 0.95]
    choices = {option: values or klatsch.rules.averaging.fixed(gammas)}
    together = klatsch.simulate(problem, rules.make(rule, lr=0.001, **choices), graph, 40)
    for c in range(3):
        choices = {option: values[c] if values else klatsch.rules.averaging.fixed(gammas[c])}
        alone = klatsch.simulate(problem, rules.make(rule, lr=0.001, **choices), graph, 40)
        torch.testing.assert_close(together.output[:, c], alone.output[:, 0], rtol=1e-10, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["dsgd", "dat, momentum", "gt, averaged", "dat-d2, linear"])
def test_float32_stays_near_float64(rule):
    graph = tp.ring(9)
    problem = problems.LeastSquares(9, heterogeneity=0.1)
    slow = {"dat, momentum": 0.005, "dat, linear": 0.01, "dat-d2, linear": 0.01, "dat, polynomial, cta": 1e-5}
    rate = slow.get(rule, 0.1) / problem.L
    exact, rough = (
        klatsch.simulate(problem, RULES[rule](rate), graph, 2000, record=10, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert rough.output.dtype == torch.float32
    assert exact.metrics["distance"][-1] < 0.5 * exact.metrics["distance"][0]
    near = exact.metrics["distance"] > 1e-6  # below, rounding errors of float32 are seen
    torch.testing.assert_close(rough.metrics["distance"][near], exact.metrics["distance"][near], rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["star", "base_graph"])
def test_mixing_does_not_drift_in_float32(name):
    """A plain sum with weights like 1/3 drifts by 1e-3 in 100,000 rounds, which shows after a few thousand."""
    graph = tp.make(name, 9)
    mix = StackedMix(graph, dtype=torch.float32, device=torch.device("cpu"))
    v = torch.randn(9, 1, 8, generator=torch.Generator().manual_seed(0)) + 3
    mean = v.double().mean(0)
    for t in range(1, 5_001):
        (v,) = mix.in_round(t).mix(v)
    assert ((v.double().mean(0) - mean) / mean).abs().max() < 1e-5
    assert (v - v.mean(0)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "rule, engine",
    [*sampled(RULES, "torch"), *(sampled(LINEAR[::3], "fused") if native.why_not() is None else [])],
)
def test_a_run_continued_equals_a_run_in_one_go(rule, engine):
    graph, problem = GRAPHS["lazy ring"], problems.LeastSquares(6, dim=7)
    choices = {"record": [10, 30, 47, 60], "engine": engine}
    whole = klatsch.simulate(problem, RULES[rule]([0.001, 0.002]), graph, 60, **choices)
    half = klatsch.simulate(problem, RULES[rule]([0.001, 0.002]), graph, 30, record=[10, 30], engine=engine)
    rest = klatsch.simulate(problem, RULES[rule]([0.001, 0.002]), graph, 60, after=half, **choices)
    assert rest.steps == whole.steps == [10, 30, 47, 60]
    assert torch.equal(rest.output, whole.output)  # bits: same call
    for name, values in whole.metrics.items():
        assert torch.equal(rest.metrics[name], values)  # bits: same call


@KERNEL
def test_blocks_of_columns_change_nothing(monkeypatch):
    graph, problem = tp.one_peer_exponential(7), problems.LeastSquares(7, dim=13, noise=2.0)
    rule = rules.make("dat", [0.001 * (k + 1) for k in range(20)])
    first = klatsch.simulate(problem, rule, graph, 200, engine="fused")
    monkeypatch.setattr("klatsch.simulation.fused.column_blocks", lambda *_: [slice(0, 3), slice(3, 4), slice(4, 20)])
    second = klatsch.simulate(problem, rule, graph, 200, engine="fused")
    assert_same_to_rounding(second.output, first.output)


def test_blocks_cover_every_column_once():
    for columns, threads in product((1, 2, 7, 28, 168), (1, 2, 5)):
        blocks = column_blocks(columns, 100, 50, 4, threads, 10**6)
        covered = [c for block in blocks for c in range(columns)[block]]
        assert covered == list(range(columns))
        assert len(blocks) >= min(threads, columns)


@pytest.mark.parametrize(
    "engine, dtype", [("torch", torch.float64), pytest.param("fused", torch.float32, marks=KERNEL)]
)
def test_a_column_that_diverges_becomes_inf_and_leaves_the_others_alone(engine, dtype):
    graph, problem = tp.ring(6), problems.LeastSquares(6, dim=5)
    rule = rules.make("dsgd", [0.001, 1.0, 0.002])
    mixed = klatsch.simulate(problem, rule, graph, 700, dtype=dtype, engine=engine)
    calm = klatsch.simulate(problem, rules.make("dsgd", [0.001, 0.002]), graph, 700, dtype=dtype, engine=engine)
    assert mixed.diverged.tolist() == [False, True, False]
    assert_same_to_rounding(mixed.output[:, [0, 2]], calm.output)
    assert mixed.output[:, 1].isposinf().all()
    for name, values in mixed.metrics.items():
        assert not values.isnan().any()
        assert values[-1, 1].isposinf(), name
        assert values[:, [0, 2]].isfinite().all()
        assert_same_to_rounding(values[:, [0, 2]], calm.metrics[name], dtype)
    assert mixed.best() in (0, 2)


def test_a_diverged_column_stays_inf_when_the_run_goes_on():
    graph, problem = tp.ring(6), problems.LeastSquares(6, dim=5)
    first = klatsch.simulate(problem, rules.make("dsgd", [0.001, 1.0]), graph, 600)
    more = klatsch.simulate(problem, rules.make("dsgd", [0.001, 1.0]), graph, 900, after=first)
    assert first.diverged[1]
    assert more.metrics["distance"][-1].isposinf().tolist() == [False, True]


def test_a_users_own_problem_needs_the_protocol_only():
    result = klatsch.simulate(ZeroGradients(4), rules.make("dat", [0.1, 0.2]), tp.ring(4), 20)
    assert result.engine == "torch"
    assert result.output.shape == (4, 2, 3)
    torch.testing.assert_close(result.metrics["size"], torch.full((len(result.steps), 2), 5.25, dtype=torch.float64))


def test_a_users_own_rule_that_is_not_linear_runs_with_plain_operations():
    class Sign(Own):
        def update(self, s, grad, flow, t, lr):
            (w,) = flow.mix(s["w"] - lr * grad.sign())
            return {"w": w}

    problem = problems.LeastSquares(4, dim=3)
    result = klatsch.simulate(problem, Sign(0.001), tp.ring(4), 500)
    assert result.engine == "torch"
    assert result.metrics["distance"][-1] < 0.7 * result.metrics["distance"][0]
    with pytest.raises(ValueError, match=r"fused.*(sign|no C compiler|turned off)"):
        klatsch.simulate(problem, Sign(0.001), tp.ring(4), 5, engine="fused")


@ENGINES
def test_the_learning_rate_may_be_a_function_of_the_round(engine):
    graph, problem = tp.ring(5), problems.LeastSquares(5, dim=4)
    result = klatsch.simulate(problem, rules.make("dsgd", lambda t: [0.01 / t, 0.001]), graph, 50, engine=engine)
    fixed = klatsch.simulate(problem, rules.make("dsgd", 0.001), graph, 50, engine=engine)
    torch.testing.assert_close(result.output[:, 1], fixed.output[:, 0], rtol=1e-12, atol=1e-14)
    w = problem.start().expand(5, 1, 4)
    mix = StackedMix(graph, dtype=torch.float64, device=torch.device("cpu"))
    for t in range(1, 51):
        (w,) = mix.in_round(t).mix(w - 0.01 / t * problem.grad(w, t))
    torch.testing.assert_close(result.output[:, :1], w, rtol=1e-12, atol=1e-14)


@ENGINES
@pytest.mark.parametrize("steps", [1, 50])
def test_a_schedule_is_never_asked_beyond_the_last_round(engine, steps, tmp_path):
    table = [0.001] * steps
    rule = rules.make("dsgd", lambda t: table[t - 1])
    klatsch.simulate(
        problems.LeastSquares(5, dim=4), rule, tp.ring(5), steps, engine=engine, checkpoint=tmp_path / "run"
    )


def test_metrics_are_what_they_say():
    graph, problem = tp.ring(5), problems.LeastSquares(5, dim=4, heterogeneity=2.0)
    rule = rules.make("dat", 0.002)
    result = klatsch.simulate(problem, rule, graph, 9, record=[8, 9])
    before = klatsch.simulate(problem, rule, graph, 8, record=[8])
    w, x = result.state["w"][:, 0], result.state["x"][:, 0]
    last = {name: values[-1, 0] for name, values in result.metrics.items()}

    def loss(point):
        return (
            sum(
                0.5 * point @ H @ point + (scale @ rows) @ point
                for H, rows, scale in zip(
                    problem.quadratic().H,
                    problem.quadratic().rows,
                    problem.quadratic().scale.expand(5, -1),
                    strict=True,
                )
            )
            / 5
        )

    best = loss(problem.optimum[0])
    torch.testing.assert_close(last["distance"], sum((x[i] - problem.optimum[0]).norm() ** 2 for i in range(5)) / 5)
    torch.testing.assert_close(last["loss_gap"], loss(x.mean(0)) - best, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(last["worst_loss_gap"], max(loss(x[i]) for i in range(5)) - best, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(last["Gamma"], sum((x[i] - x.mean(0)).norm() ** 2 for i in range(5)) / 5)
    torch.testing.assert_close(last["Xi"], sum((w[i] - w.mean(0)).norm() ** 2 for i in range(5)) / 5)
    g = problem.grad(before.state["x"], 9)[:, 0]
    torch.testing.assert_close(last["Psi"], sum((g[i] - g.mean(0)).norm() ** 2 for i in range(5)) / 5)


def test_record():
    assert record_points(1, 70) == [70]
    assert record_points(5, 10_000) == [1, 10, 100, 1000, 10_000]
    assert record_points(50, 10)[-1] == 10
    assert record_points([7, 3], 10) == [3, 7]
    result = klatsch.simulate(problems.LeastSquares(3, dim=2), rules.make("dsgd", 0.001), tp.ring(3), 10, record=[3, 7])
    assert result.steps == [3, 7]
    assert result.rounds == 10
    assert result.metrics["distance"].shape == (2, 1)


@pytest.mark.parametrize("reason", ["switched off", "no compiler", "broken compiler"])
def test_without_the_kernel_plain_operations_run(reason, monkeypatch, tmp_path):
    native._library.cache_clear()
    monkeypatch.setenv("KLATSCH_CACHE", str(tmp_path / "cache"))
    if reason == "switched off":
        monkeypatch.setenv("KLATSCH_NATIVE", "0")
    else:
        compiler = tmp_path / "cc"
        if reason == "broken compiler":
            compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
            compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
    try:
        result = klatsch.simulate(problems.LeastSquares(3), rules.make("dsgd", 0.001), tp.ring(3), 10)
        assert result.engine == "torch"
        with pytest.raises(ValueError, match="cannot run this"):
            klatsch.simulate(problems.LeastSquares(3), rules.make("dsgd", 0.001), tp.ring(3), 10, engine="fused")
        assert native.why_not()
        assert not list((tmp_path / "cache").glob("*.so")) if (tmp_path / "cache").exists() else True
    finally:
        native._library.cache_clear()


@KERNEL
@pytest.mark.slow
def test_the_kernel_is_built_once_and_never_in_a_folder_that_others_may_write_to(monkeypatch, tmp_path):
    native._library.cache_clear()
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O0"))  # built in a moment
    folder = tmp_path / "cache"
    monkeypatch.setenv("KLATSCH_CACHE", str(folder))
    try:
        native.library()
        (built,) = folder.iterdir()
        stamp = built.stat().st_mtime_ns
        native._library.cache_clear()
        native.library()
        assert [built] == list(folder.iterdir())
        assert built.stat().st_mtime_ns == stamp
        native._library.cache_clear()
        built.unlink()
        folder.chmod(0o777)
        native.library()
        assert not list(folder.iterdir())
    finally:
        native._library.cache_clear()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_and_silence_elsewhere(monkeypatch, capsys):
    problem, rule, graph = problems.LeastSquares(3, dim=2), rules.make("dsgd", 0.001), tp.ring(3)
    klatsch.simulate(problem, rule, graph, 10)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    klatsch.simulate(problem, rule, graph, 10)
    assert "dsgd on ring, 3 nodes" in screen.getvalue()
    silent = Terminal()
    monkeypatch.setattr(sys, "stderr", silent)
    klatsch.simulate(problem, rule, graph, 10, progress=False)
    assert silent.getvalue() == ""


def test_a_bar_shows_pace_and_time_left(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    import time

    with progress_bar(True, 100, 0, "title") as tell:
        for _ in range(4):
            time.sleep(0.15)
            tell(20)
    assert "rounds/s" in screen.getvalue()
    assert "80/100" in screen.getvalue()


def test_progress_may_be_a_function():
    told = []
    problem = problems.LeastSquares(3, dim=2)
    klatsch.simulate(problem, rules.make("dsgd", 0.001), tp.ring(3), 77, progress=told.append)
    assert sum(told) == 77


@pytest.mark.parametrize("engine", ["auto", "cuda graph", "torch"])
@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("rule, graph", TABLE if torch.cuda.is_available() else TABLE[:1])
def test_on_a_gpu_the_numbers_are_the_same(rule, graph, device, engine):
    graph = GRAPHS[graph]
    problem = problems.LeastSquares(graph.size, dim=9)
    small = 0.01 if "polynomial" in rule else 1.0
    make = RULES[rule]
    for rule in (make([0.001 * small, 0.002 * small]), make(lambda t: [0.001 * small, 0.002 * small / t])):
        here = klatsch.simulate(problem, rule, graph, 150)
        there = klatsch.simulate(problem, rule, graph, 150, device=device, engine=engine)
        assert there.engine == ("cuda graph" if engine == "auto" else engine)
        torch.testing.assert_close(there.output.cpu(), here.output, rtol=1e-9, atol=1e-11)


LARGE = {
    "ring": tp.ring(40),
    "directed ring": tp.directed_ring(30),
    "one peer": tp.one_peer_exponential(33),
    "base graph": tp.base_graph(26),
    "random": tp.erdos_renyi(50, p=0.1),
    "pushing": tp.from_networkx(nx.gn_graph(30, seed=1).reverse().to_undirected().to_directed(), stochastic="columns"),
    "arrows": tp.from_networkx(
        nx.DiGraph([(k, (k + s) % 30) for k in range(30) for s in (1, 1 + k % 3)]), stochastic="columns"
    ),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
@covering(
    "graph, dtype, way", LARGE, [torch.float32, torch.float64], [(True, 4), (False, 6), (False, 4)]
)  # of 6 columns
def test_mixing_is_a_product_with_the_matrix_of_the_round(graph, dtype, way, device, monkeypatch):
    dense, widest = way
    graph = LARGE[graph]
    monkeypatch.setattr("klatsch.simulation.mixing.DENSE_NODES", dict.fromkeys(("cpu", "cuda"), 1000 if dense else 0))
    monkeypatch.setattr("klatsch.simulation.mixing.WIDEST", widest)
    mix = StackedMix(graph, dtype=dtype, device=torch.device(device))
    v = torch.randn(graph.size, 2, 3, dtype=dtype)
    for t in (1, 2, 3, 9):
        flow, close = mix.in_round(t), {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-14}
        (mixed,), (pulled,) = flow.mix(v.to(device)), flow(v.to(device))
        expected = torch.tensordot(torch.tensor(graph.matrix(t).toarray()), v.double(), 1)
        torch.testing.assert_close(mixed.cpu().double(), expected, **close)
        torch.testing.assert_close(pulled.cpu().double(), expected - v.double(), **close)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("columns", [3_000_000, 10_000_000])
def test_large_models_of_several_networks_are_mixed_on_a_gpu(columns):
    """cuSPARSE leaves out products of so many columns, without an error."""
    rings = [tp.ring(8), tp.ring(8)]
    mix = StackedMix(*rings, dtype=torch.float32, device=torch.device("cuda")).in_round(1)
    v = torch.randn(16, columns, device="cuda")
    P = torch.tensor(rings[0].matrix(1).toarray(), dtype=torch.float32, device="cuda")
    expected = torch.cat([P @ v[:8], P @ v[8:]])
    for (found,), right in ((mix.mix(v), expected), (mix(v), expected - v)):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


class EveryThird(Own):
    """Local SGD: gossip in every third round only."""

    def update(self, s, grad, flow, t, lr):
        w = s["w"] - lr * grad
        return {"w": flow.mix(w)[0] if t % 3 == 0 else w}


class WarmUp(Own):
    def update(self, s, grad, flow, t, lr):
        (w,) = flow.mix(s["w"] - lr * min(1.0, math.sqrt(t) / 10) * grad)
        return {"w": w}


class First(Own):
    def update(self, s, grad, flow, t, lr):
        (w,) = flow.mix(s["w"] - (10 if t == 1 else 1) * lr * grad)
        return {"w": w}


@pytest.mark.parametrize("rule, record", [(EveryThird, [2, 4, 6, 8]), (WarmUp, [40]), (First, range(1, 41))])
def test_rules_that_ask_about_the_round_run_with_plain_operations(rule, record):
    problem, graph = problems.LeastSquares(5, dim=4), tp.ring(5)
    result = klatsch.simulate(problem, rule([0.001, 0.002]), graph, 40, record=record)
    plain = klatsch.simulate(problem, rule([0.001, 0.002]), graph, 40, record=record, engine="torch")
    assert result.engine == "torch"
    assert_same_to_rounding(result.output, plain.output)


@KERNEL
def test_a_rule_that_begins_to_do_something_else_is_found_out():
    class Turning(Own):
        turned = False

        def update(self, s, grad, flow, t, lr):
            w = s["w"] - lr * grad
            return {"w": flow.mix(w)[0] if not Turning.turned else flow.mix(flow.mix(w)[0])[0]}

    def turn(rounds):
        Turning.turned = rounds > 0

    with pytest.raises(ValueError, match=r"Turning took other steps.*engine='torch'"):
        klatsch.simulate(problems.LeastSquares(4, dim=3), Turning(0.001), tp.ring(4), 50, progress=turn)


@KERNEL
def test_a_rule_of_too_many_steps_runs_with_plain_operations():
    class Often(Own):
        def update(self, s, grad, flow, t, lr):
            w = s["w"] - lr * grad
            for _ in range(70):
                (w,) = flow.mix(w)
            return {"w": w}

    assert klatsch.simulate(problems.LeastSquares(4, dim=3), Often(0.001), tp.ring(4), 9).engine == "torch"


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim, batch, columns", [(1, 1, 1), (7, 17, 3), (20, 2, 9), (33, 64, 13)])
def test_fused_logistic_regression_equals_plain_operations(dim, batch, columns, dtype):
    """With numbers of samples and parameters that fill vectors, or do not."""
    problem = problems.LogisticRegression(4, dim=dim, batch=batch, samples=50)
    for rule, graph in (("dat", tp.one_peer_exponential(4)), ("gt", tp.ring(4))):
        made = rules.make(rule, [0.1 * (k + 1) / columns for k in range(columns)])
        plain, fused = (
            klatsch.simulate(problem, made, graph, 50, record=[1, 50], dtype=dtype, engine=engine)
            for engine in ("torch", "fused")
        )
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(fused.output, plain.output, rtol=tolerance, atol=tolerance)


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_logistic_regression_far_from_the_optimum(dtype):
    """Where exp overflows, or comes to nothing."""
    features = torch.tensor([[1e-3], [1.0], [30.0], [90.0], [1e4], [-1e4]], dtype=dtype)
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    problem = problems.LogisticRegression.from_arrays(features, labels, 1, batch=6, l2=1e-3)
    made = rules.make("dsgd", [1e-9, 1.0])
    plain, fused = (
        klatsch.simulate(problem, made, tp.ring(1), 20, record=1, dtype=dtype, engine=engine)
        for engine in ("torch", "fused")
    )
    assert plain.output.abs().max() > 1e2  # times 1e4: the largest margin
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(fused.output, plain.output, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("base", [problems.LeastSquares, problems.LogisticRegression])
def test_a_subclass_with_a_gradient_of_its_own_means_it(base):
    class Clipped(base):
        def gradient(self, x, drawn):
            return super().gradient(x, drawn).clamp(-0.1, 0.1)

    class AlsoClipped(base):
        def grad(self, x, t, nodes=None):
            return super().grad(x, t, nodes).clamp(-0.1, 0.1)

    first, *others = [
        klatsch.simulate(kind(4, dim=3), rules.make("dsgd", 0.01), tp.ring(4), 50, record=[50], engine=engine).output
        for kind in (Clipped, AlsoClipped)
        for engine in ("auto", "torch")
    ]
    for other in others:
        assert_same_to_rounding(other, first)


def test_runs_in_several_threads_do_not_disturb_each_other():
    problem, graph = problems.LeastSquares(6, dim=8), tp.ring(6)
    alone = [klatsch.simulate(problem, RULES[rule](0.001), graph, 300).output for rule in ("dat", "gt", "dsgd")]
    with ThreadPoolExecutor(3) as pool:
        together = list(
            pool.map(
                lambda rule: klatsch.simulate(problem, RULES[rule](0.001), graph, 300).output, ("dat", "gt", "dsgd")
            )
        )
    for found, expected in zip(together, alone, strict=True):
        assert_same_to_rounding(found, expected)


def test_numpy_numbers_are_numbers():
    problem = problems.LeastSquares(np.int64(4), dim=np.int64(3), seed=np.int32(2))
    result = klatsch.simulate(problem, rules.make("dsgd", np.float32(0.01)), tp.ring(4), np.int64(20))
    assert result.rounds == 20


def test_draws_of_the_past_are_forgotten():
    gradients = Gradients(problems.LeastSquares(3, dim=2), steps=200)
    gradients.chunk = 10
    with ThreadPoolExecutor(1) as pool:
        for done in range(0, 200, 10):
            expected = gradients.problem.draw(torch.arange(done + 1, done + 11))
            assert torch.equal(gradients.drawn(done, done + 10), expected)  # bits: same call
            gradients.draw_next(done, pool)
            assert len(gradients._chunks) <= 2


class Shares(problems.Problem):
    """Every node wants x to be its own number, as autograd sees it; a share of what is right, as large as can be."""

    dim = 2
    headline = problems.Headline("share", "share of x that is right", largest=True)

    def __init__(self, nodes, metric=None):
        self.nodes, self.metric = nodes, metric

    def start(self):
        return torch.zeros(2, dtype=torch.float64)

    def grad(self, x, t, nodes=None):
        x.requires_grad_()
        wishes = torch.arange(self.nodes, dtype=x.dtype)[list(nodes or range(self.nodes)), None, None]
        return torch.autograd.grad((x - wishes).square().sum() / 2, x)[0]

    def metrics(self, x):
        share = 1 / (1 + (x - (self.nodes - 1) / 2).square().sum(-1))
        return {"share": share} if self.metric is None else {"share": share.mean(0), "own": self.metric(share)}


def test_gradients_may_use_autograd():
    result = klatsch.simulate(Shares(4), rules.make("d2", 0.1), tp.ring(4), 500)
    torch.testing.assert_close(result.output, torch.full((4, 1, 2), 1.5, dtype=torch.float64))
    assert not any(v.requires_grad for v in result.state.values())


@pytest.mark.parametrize("meets", ["pairwise 0.01", "stale 0.01"])
def test_gradients_may_use_autograd_without_rounds(meets):
    graph = tp.make("ring", 4, late=2 if "stale" in meets else 0)
    assert klatsch.simulate(Shares(4), rules.make("dsgd", 0.1), graph, 100, meets=meets).metrics["share"][-1] > 0.2


def test_the_best_column_is_the_one_with_the_largest_value_where_that_is_good():
    result = klatsch.simulate(Shares(4), rules.make("d2", [1e-4, 0.1, 1e9]), tp.ring(4), 100, any_graph=True)
    assert result.diverged.tolist() == [False, False, True]
    assert result.best() == result.best("share") == 1
    assert result.best("Gamma") == 0  # which is good when it is small
    assert result.metrics["share"][-1, 2] == -torch.inf
    assert f"best share {float(result.metrics['share'][-1, 1]):.3g}" in repr(result)


def test_metrics_may_be_those_of_every_node():
    kept = klatsch.simulate(Shares(4), rules.make("dsgd", [0.01, 0.1]), tp.ring(4), 30, per_node=True)
    assert kept.per_node["share"].shape == (len(kept.steps), 4, 2)
    torch.testing.assert_close(kept.per_node["share"].mean(1), kept.metrics["share"])
    torch.testing.assert_close(kept.per_node["share"][-1], Shares(4).metrics(kept.output)["share"])
    assert klatsch.simulate(Shares(4), rules.make("dsgd", 0.1), tp.ring(4), 30).per_node == {}
    (axes,) = pictures.spread(kept.steps, kept.per_node["share"][:, :, 1], "share").axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), np.median(kept.per_node["share"][:, :, 1], axis=1))
    with pytest.raises(ValueError, match=r"values have shape \(\d+, 4, 2\); give one row per step"):
        pictures.spread(kept.steps, kept.per_node["share"])
    with pytest.raises(ValueError, match=r"metric own of Shares has shape \(4,\); give .* \(2,\), .* \(4, 2\)"):
        klatsch.simulate(Shares(4, lambda share: share[:, 0]), rules.make("dsgd", [0.01, 0.1]), tp.ring(4), 3)


@ENGINES
def test_curves_of_every_node_go_on_and_are_resumed(engine, tmp_path):
    problem, rule, graph = problems.LeastSquares(5, dim=3), rules.make("dsgd", [0.001, 1.0]), tp.ring(5)
    run = partial(klatsch.simulate, problem, rule, graph, record=[10, 20, 600], engine=engine, per_node=True)
    whole = run(600, checkpoint=tmp_path / "run", checkpoint_every=0)
    assert {name: v.shape for name, v in whole.per_node.items()} == {"distance": (3, 5, 2), "loss_gap": (3, 5, 2)}
    torch.testing.assert_close(whole.per_node["distance"].mean(1)[:, 0], whole.metrics["distance"][:, 0])
    torch.testing.assert_close(whole.per_node["distance"].amax(1)[:, 0], whole.metrics["worst_distance"][:, 0])
    assert whole.per_node["distance"][-1, :, 1].isposinf().all()  # it has diverged
    assert run(600, checkpoint=tmp_path / "run") == whole  # from its file, without a round
    first = klatsch.simulate(problem, rule, graph, 20, record=[10, 20], engine=engine, per_node=True)
    assert_same_to_rounding(run(600, after=first).per_node["distance"][:, :, 0], whole.per_node["distance"][:, :, 0])
    with pytest.raises(ValueError, match="recorded with per_node, and this run is without it"):
        klatsch.simulate(problem, rule, graph, 40, after=first, engine=engine)


def test_every_nodes_headline_where_a_problem_has_no_faster_way():
    class Slow(problems.LeastSquares):
        by_node = problems.Problem.by_node

    def run(kind):
        return klatsch.simulate(kind(5, dim=3), rules.make("dsgd", [1e-3, 1e-2]), tp.ring(5), 9, per_node=True)

    both = run(Slow), run(problems.LeastSquares)
    torch.testing.assert_close(*(result.per_node["distance"] for result in both))


def test_results_are_equal_if_their_numbers_are():
    problem, graph = problems.LeastSquares(5, dim=3), tp.ring(5)
    first, again = (klatsch.simulate(problem, rules.make("dsgd", [0.001, 1e30]), graph, 50) for _ in range(2))
    assert first.diverged[1]
    assert first == again  # bits: same call
    assert first != klatsch.simulate(problem, rules.make("dsgd", [0.002, 1e30]), graph, 50)
    assert first != klatsch.simulate(problem, rules.make("dsgd", [0.001, 1e30]), graph, 51)
    assert first != "a result"


@ENGINES
def test_a_run_may_be_watched_and_stopped(engine, tmp_path):
    problem, rule, graph, seen = problems.LeastSquares(5, dim=3), rules.make("dat", [1e-3, 1e-2]), tp.ring(5), []

    def watch(t, state, metrics):
        seen.append((t, state["w"].shape, metrics["distance"].shape))
        return metrics["distance"].min() < 0.5

    run = partial(klatsch.simulate, problem, rule, graph, 600, record=range(10, 601, 10))
    clock = klatsch.clock.Clock(0.01)
    result = run(watch=watch, engine=engine, clock=clock, checkpoint=tmp_path / "run", per_node=True)
    assert [t for t, *_ in seen] == result.steps == [*range(10, result.rounds + 1, 10)]
    assert 1 < len(seen) < 60
    assert seen[0][1:] == ((5, 2, 3), (2,))
    assert (result.metrics["distance"] < 0.5).any(1).tolist() == [False] * (len(seen) - 1) + [True]
    assert len(result.elapsed) == len(result.steps) == len(result.per_node["distance"])
    assert (tmp_path / "run").exists()
    whole, more = run(engine=engine), run(after=replace(result, per_node={}), engine=engine)
    assert_same_to_rounding(more.output, whole.output)


def test_a_clock_may_send_another_model_than_the_problem_has():
    problem, clock = problems.LeastSquares(5, dim=3), klatsch.clock.Clock(0.01, "wan")
    small, large = (
        klatsch.simulate(problem, rules.make("dsgd", 1e-3), tp.ring(5), 5, clock=clock, params=params).elapsed[-1]
        for params in (None, 10_000_000)
    )
    assert large == clock.seconds(rules.make("dsgd", 1e-3), tp.ring(5), 10_000_000, [5])[0] > 10 * small
    with pytest.raises(ValueError, match="params = 0"):
        klatsch.simulate(problem, rules.make("dsgd", 1e-3), tp.ring(5), 5, clock=clock, params=0)


@pytest.mark.skipif(native.allocator() is None or "LD_PRELOAD" in os.environ, reason="another malloc than glibc's")
def test_what_is_freed_is_kept_for_large_tensors_alone():
    def freed():
        """How much of a tensor that is gone the process still holds, of 64 MB."""
        native.allocator().malloc_trim(0)  # what tests before this one have left
        before = resident()
        torch.ones(1 << 24)
        return (resident() - before) / (1 << 26)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    freed()  # what comes with the first one
    assert freed() < 0.1
    with native.kept_memory(torch.ones(10)):
        assert freed() < 0.1
    with native.kept_memory(torch.ones(native.LARGE // 4)):
        assert freed() > 0.9
        held = resident()
    assert resident() < held - (60 << 20)
    assert freed() < 0.1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(1 << 20)  # 4 MB: as usual, the same pages again
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt < before + 20 * 1024 / 4
