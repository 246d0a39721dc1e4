"""Rules from parts: products of a pattern, a direction and an average, and what makes no sense together."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import klatsch
from klatsch import columns, problems, rules
from klatsch import topology as tp
from klatsch.simulation.mixing import StackedMix
from tests.support.comparisons import assert_same_to_rounding
from tests.support.covering import covering
from tests.support.machine import ENGINES, KERNEL
from tests.support.table import trajectory

PATTERNS = {
    "plain": rules.Plain,
    "plain, cta": lambda lr, direction: rules.Plain(lr, direction, "cta"),
    "corrected": rules.Corrected,
    "corrected, published": lambda lr, direction: rules.Corrected(lr, direction, lazy=False),
    "tracked": rules.Tracked,
    "push": rules.Push,
    "kgt": rules.KGT,
    "plain, outer": lambda lr, direction: rules.Plain(lr, direction, outer=rules.outer(0.7, 0.8)),
    "corrected, outer": lambda lr, direction: rules.Corrected(lr, direction, outer=rules.outer(0.9, 0.3)),
    "tracked, outer": lambda lr, direction: rules.Tracked(lr, direction, outer=rules.outer(0.9, 0.3)),
}
DIRECTIONS = {
    "sgd": rules.sgd(),
    "momentum": rules.momentum(0.7),
    "shared": rules.momentum(0.7, shared=True),
    "adam": rules.adam(0.5, 0.9, 1e-3, weight_decay=0.01),
    "muon": rules.muon(momentum=0.5, weight_decay=0.01, eps=1e-3),
}
AROUND = {
    "nothing": lambda base: base,
    "anytime": lambda base: rules.Anytime(base, "linear"),
    "beta 0.9": lambda base: rules.Anytime(base, "constant", 0.9),
    "averaged": lambda base: rules.Averaged(base, "linear"),
}
PARTS = "pattern, direction, around"
products = covering(PARTS, PATTERNS, DIRECTIONS, AROUND, where=lambda *parts: parts[:2] != ("push", "shared"))  # sums
LINEAR = [name for name in PATTERNS if name != "push"], ["sgd", "momentum", "shared"], AROUND
linear = covering(f"{PARTS}, dtype", *LINEAR, [torch.float32, torch.float64])
RING = tp.ring(7)  # odd: D2 as published wants no eigenvalue of -1/3


def build(pattern, direction, around, lr=5e-4):
    return AROUND[around](PATTERNS[pattern](lr, DIRECTIONS[direction]))


def least_squares(graph, **choices):
    problem = problems.LeastSquares(graph.size, **{"dim": 6, "heterogeneity": 3.0, **choices})
    problem.matrices = [problems.WeightMatrix(1, 2, 2)]
    return problem


@products
def test_every_product_learns(pattern, direction, around):
    problem = least_squares(RING, noise=0.0)
    remembers = (direction in ("momentum", "shared")) + ("outer" in pattern)
    lr = (0.02 / 20**remembers if around == "anytime" else 0.02) / problem.L  # steps of linear weights grow with t
    if direction in ("adam", "muon"):  # which divide by the size of gradients
        lr = 3e-4 if around == "anytime" else 0.01
    result = klatsch.simulate(problem, build(pattern, direction, around, lr), RING, 400, record=[1, 400])
    assert result.metrics["distance"][1] < 0.8 * result.metrics["distance"][0]


@products
def test_torch_is_the_plain_loop(pattern, direction, around):
    rule, problem = build(pattern, direction, around), least_squares(RING)
    state = trajectory(rule, RING, problem, 20)[-1]
    found = klatsch.simulate(problem, rule, RING, 20, record=[3, 17, 20], engine="torch")
    assert set(found.state) == set(state)
    for name, expected in state.items():
        torch.testing.assert_close(found.state[name], expected, rtol=1e-10, atol=1e-12)


@KERNEL
@linear
def test_fused_is_torch(pattern, direction, around, dtype):
    """Products of linear parts; rounds that are recorded change the order of a state's fields."""
    rule, problem = build(pattern, direction, around, [5e-4, 1e-3]), least_squares(RING, noise=[1.0, 0.3])
    plain, fused = (
        klatsch.simulate(problem, rule, RING, 40, record=[3, 17, 40], engine=engine, dtype=dtype)
        for engine in ("torch", "fused")
    )
    for name, expected in plain.state.items():
        size = float(expected.abs().max()) or 1.0  # of K-GT's y nothing is left after a mix
        atol = 1e-12 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(fused.state[name] / size, expected / size, rtol=0, atol=atol)


@KERNEL
@pytest.mark.parametrize("around", AROUND)
def test_fused_says_why_it_cannot_run_push_sum(around):
    with pytest.raises(ValueError, match=r"fused.* (differ in shape|divided)"):
        klatsch.simulate(least_squares(RING), build("push", "sgd", around), RING, 5, engine="fused")


# --- columns and schedules ----------------------------------------------------------------------------------------

COLUMNS = {"lr": [2e-4, 5e-4, 1e-3], "momentum": [0.0, 0.5, 0.9], "beta": [1.0, 0.9, 0.3]}


@pytest.mark.parametrize(
    "name, engine, varied",
    [
        *(("dat", "torch", (key,)) for key in COLUMNS),
        *((name, "torch", COLUMNS) for name in ("dat-gt", "dat-d2", "dat-sgp")),
        *(pytest.param(name, "fused", COLUMNS, marks=KERNEL) for name in ("dat", "dat-gt", "dat-d2")),
    ],
)
def test_a_list_per_column_is_as_many_single_runs(name, varied, engine):
    problem = least_squares(RING)
    choices = {"lr": 5e-4, "momentum": 0.5, "beta": 0.8} | {key: COLUMNS[key] for key in varied}
    together = klatsch.simulate(problem, rules.make(name, **choices), RING, 30, record=1, engine=engine)
    for c in range(3):
        single = choices | {key: COLUMNS[key][c] for key in varied}
        alone = klatsch.simulate(problem, rules.make(name, **single), RING, 30, record=1, engine=engine)
        torch.testing.assert_close(together.output[:, [c]], alone.output, rtol=1e-10, atol=1e-13)


@ENGINES
@pytest.mark.parametrize("name", ["dat", "dat-d2", "dat-gt", "decentlam"])
def test_schedules_per_column(name, engine):
    problem, schedules = least_squares(RING), (lambda t: 1e-3 / (1 + t / 20), lambda t: 5e-4)
    rule = rules.make(name, lr=lambda t: [lr(t) for lr in schedules])
    together = klatsch.simulate(problem, rule, RING, 60, record=1, engine=engine)
    for c, lr in enumerate(schedules):
        alone = klatsch.simulate(problem, rules.make(name, lr=lr), RING, 60, record=1, engine=engine)
        torch.testing.assert_close(together.output[:, [c]], alone.output, rtol=1e-10, atol=1e-13)
    constant = klatsch.simulate(problem, rules.make(name, lr=5e-4), RING, 60, record=1, engine=engine)
    assert_same_to_rounding(alone.output, constant.output)


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, product",
    [
        ("plain+anytime", {}, rules.Anytime(rules.Plain(0.1))),
        ("dat-d2", {"momentum": 0.5, "lazy": False}, rules.Anytime(rules.Corrected(0.1, rules.momentum(0.5), False))),
        ("dat-adam", {"eps": 1e-3}, rules.Anytime(rules.Plain(0.1, rules.adam(0.0, eps=1e-3)), "lr(2)", 0.9)),
        ("d2-adam", {}, rules.Corrected(0.1, rules.adam(shared="v"))),
        ("push+adam+anytime", {"beta": 0.3, "beta1": 0.4}, rules.Anytime(rules.Push(0.1, rules.adam(0.4)), beta=0.3)),
        ("decentlam+anytime", {"momentum": 0.2}, rules.Anytime(rules.DecentLaM(0.1, 0.2))),
        (
            "tracked+sgd",
            {"momentum": 0.2, "average": "linear"},
            rules.Averaged(rules.Tracked(0.1, rules.sgd(0.2)), "linear"),
        ),
    ],
)
def test_a_name_is_the_product_of_its_parts_and_options_go_to_the_part_that_has_them(name, options, product):
    rule = rules.make(name, 0.1, **options)
    assert columns.described(rule) == columns.described(product)
    assert rule.name == product.name
    assert columns.described(rules.make(rule.name, 0.1, **options)) == columns.described(rule)
    assert rules.kind(name)(0.1, **options).name == rule.name
    averaged = rules.make("plain+averaged", 0.1)
    assert columns.described(averaged) == columns.described(rules.Averaged(rules.Plain(0.1), "constant"))
    with pytest.raises(TypeError, match="speed"):
        rules.kind(name)(0.1, speed=1)


# --- what makes no sense ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rules.make("dat", lr=0.1, average="linear"), "dat has no average: it returns x, .* already"),
        (lambda: rules.make("dat-gt", lr=0.1, average="linear"), "dat-gt has no average: it returns x"),
        (lambda: rules.make("dsgd", lr=0.1, beta=0.9), "dsgd has no beta: it keeps no average x"),
        (lambda: rules.make("gt", lr=0.1, beta=0.9), "gt has no beta: .* use dat, dat-gt"),
        (
            lambda: rules.make("d2", lr=0.1, averaging="linear"),
            "d2 has no averaging: it takes gradients at its",
        ),
        (lambda: rules.make("d2", lr=0.1, order="cta"), "d2 has no order: it has the order atc only"),
        (lambda: rules.make("gt", lr=0.1, order="cta"), "gt has no order: it has the order atc only"),
        (lambda: rules.make("dsgd", lr=0.1, lazy=True), r"dsgd has no lazy: .* topology.lazy\(graph\)"),
        (lambda: rules.make("dat", lr=0.1, lazy=True), "dat has no lazy: "),
        (lambda: rules.make("dat", lr=0.1, momentun=0.9), "momentun.*momentum"),
        (lambda: rules.make("dta", lr=0.1), "unknown rule 'dta'; did you mean dat"),
        (lambda: rules.make("plain+addam", lr=0.1), "unknown part 'addam' of the rule 'plain.addam'; write a pattern"),
        (lambda: rules.make("qg+adam", lr=0.1), "unknown part 'adam' of .* if the pattern has no momentum of its own"),
        (
            lambda: rules.make("sgp+adam", lr=0.1),
            r"unknown part 'sgp' of the rule 'sgp.adam'; write a pattern \(.*push",
        ),
        (lambda: rules.make("plain+anytime+adam", lr=0.1), "unknown part 'anytime' of the rule"),
        (lambda: rules.make("push+adam", lr=0.1, shared=True), "push.adam with shared = true: .* leave shared out"),
        (lambda: rules.make("dat"), r"lr = None; dat needs a learning rate, .*: make\('dat', lr=0.01\)"),
        (lambda: rules.make("dat", 0.1, order="act"), "order = 'act'; choose atc"),
        (lambda: rules.make("d2", 0.1, lazy="auto"), "lazy = 'auto'; give true, or false for D2 as published"),
        (lambda: rules.make("dat", 0.1, beta=1.1), "beta = 1.1; give a number from 0 to 1"),
        (lambda: rules.make("dat", 0.1, beta=[0.5, -1.0]), "beta = -1 in column 1; give a number from 0 to 1"),
        (
            lambda: rules.make("dat", 0.1, momentum=1.0),
            "momentum = 1.0; give a number from 0 up to but not including 1",
        ),
        (lambda: rules.make("dat", -0.1), "lr = -0.1; give a number above 0"),
        (lambda: rules.Plain(0.1, 0.9), r"direction = 0.9; give one, such as rules.momentum\(0.9\)"),
        (lambda: rules.Anytime(rules.make("dat", 0.1)), "dat returns an average already; give the pattern alone"),
        (lambda: rules.Anytime(rules.make("gt", 0.1, average="linear")), "gt returns an average already"),
        (lambda: rules.Averaged(rules.make("dat-d2", 0.1), "linear"), "dat-d2 returns an average already"),
        (lambda: rules.Anytime(rules.Plain), "the rule is the class Plain"),
        (lambda: rules.Anytime(0.1), "the rule is a float; give one, such as"),
    ],
)
def test_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Duck:
    """Everything that a rule has, but not a rule."""

    lr = 0.1
    init, query, output, update = (vars(rules.Rule)[name] for name in ("init", "query", "output", "update"))


class OtherUpdate(rules.Rule):
    lr = 0.1

    def update(self, state, grad, mix, t):
        return state


@pytest.mark.parametrize(
    "rule, message",
    [
        (Duck(), "the rule is a Duck; give one, .* that derives from klatsch.rules.Rule"),
        (OtherUpdate(), r"OtherUpdate.update takes \(state, grad, mix, t\); let it take \(s, grad, flow, t, lr\)"),
    ],
)
def test_only_rules_are_rules(rule, message):
    with pytest.raises(ValueError, match=message):
        klatsch.simulate(least_squares(RING), rule, RING, 5)


# --- flows --------------------------------------------------------------------------------------------------------


@covering(
    "name, size, dtype",
    ["ring", "star", "torus", "base_graph", "directed_ring", "one_peer_exponential"],
    [9, 36],  # dense and sparse
    [torch.float32, torch.float64],
)
def test_flows_sum_to_zero_and_mix_adds_them(name, size, dtype):
    graph = tp.make(name, size)
    flows = StackedMix(graph, dtype=dtype, device=torch.device("cpu"))
    v = torch.randn(size, 2, 5, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 100
    for t in range(1, graph.period + 2):
        flow = flows.in_round(t)
        (f,), (mixed,), (both, other) = flow(v), flow.mix(v), flow(v, 2 * v)
        unit = torch.finfo(dtype).eps
        assert f.abs().max() > 0.1
        assert f.sum(0).abs().max() < 100 * size * unit
        assert_same_to_rounding(mixed, v + f)
        assert_same_to_rounding(both, f)
        assert_same_to_rounding(other / 2, f)
        assert_same_to_rounding(rules.Flow(flow).mix(v)[0], mixed)


def test_alike_nodes_feel_no_flow():
    """Not even one of rounding, which rules that add flows up would pile up."""
    flow = StackedMix(tp.ring(9), dtype=torch.float32, device=torch.device("cpu")).in_round(1)
    assert not flow(torch.full((9, 1, 4), 0.1))[0].any()


def test_rules_are_short():
    """With beta, local steps and free products they take fewer lines than the nine hand-written ones, 908."""
    lines = sum(len(path.read_text().splitlines()) for path in Path(rules.__file__).parent.glob("*.py"))
    assert lines / len(rules.RULES) < 908 / 9, "lines per named rule; see which parts of the new one there are already"


def test_every_pattern_is_among_the_products():
    kinds = {type(pattern(0.1, rules.sgd())) for pattern in PATTERNS.values()}
    own = {kind for kind in rules.Pattern.__subclasses__() if kind.__module__.startswith("klatsch.")}
    assert {rules.Plain, rules.Tracked} <= own <= kinds, "add the new pattern to PATTERNS above"


# --- the kernel ---------------------------------------------------------------------------------------------------


@KERNEL
@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_blends_and_flows_in_every_shape(seed):
    """Query points between fields, and flows, against plain operations; rows end inside vectors, or are shorter."""
    random = np.random.default_rng(seed)
    M, C, d = int(random.integers(1, 12)), int(random.integers(1, 20)), int(random.integers(1, 50))
    dtype = (torch.float32, torch.float64)[seed % 2]
    name = ("dat", "dat-d2", "dat-gt", "d2")[seed % 4]
    beta = {} if name == "d2" else {"beta": random.uniform(0, 1, C).tolist() if seed % 3 else 0.6}
    lr = (5e-4 * random.uniform(0.1, 1, C)).tolist()
    graph = tp.ring(M) if "d2" in name else (tp.base_graph, tp.complete, tp.directed_ring)[seed % 3](M)
    problem = problems.LeastSquares(M, dim=d, heterogeneity=2.0, seed=seed)
    rule = rules.make(name, lr=lr, momentum=0.5, **beta)
    plain, fused = (
        klatsch.simulate(problem, rule, graph, 30, record=[29], dtype=dtype, engine=engine)
        for engine in ("torch", "fused")
    )
    for field, expected in plain.state.items():
        scale = max(float(expected.abs().max()), float(plain.state["w"].abs().max()))
        worst = float((fused.state[field] - expected).abs().max())
        assert worst <= (1e-12 if dtype == torch.float64 else 1e-4) * scale, field


def test_parts_that_keep_fields_of_one_name_are_refused():
    @dataclass(frozen=True)
    class Mine(rules.Rule):
        lr: float

        def init(self, x):
            return {"w": x, "x": x}

        def update(self, s, grad, flow, t, lr):
            return s

    with pytest.raises(ValueError, match="both keep a field x; give one another name"):
        rules.Anytime(Mine(0.1)).init(torch.zeros(3))


def test_decentlam_refuses_local_steps():
    graph = tp.every(tp.ring(5), 4)
    for rule in (rules.make("decentlam", 0.1), rules.Anytime(rules.DecentLaM(0.1))):
        with pytest.raises(ValueError, match=r"on ring/4: its momentum repeats .* use d2 or dat-d2"):
            rule.check_graph(graph)
    rules.make("decentlam", 0.1, momentum=0).check_graph(graph)
