"""Gossip in every H-th round only: every topology, its spectrum, its name, and runs on it."""

import math
import pickle
from dataclasses import replace
from itertools import product as product_of

import numpy as np
import pytest
import torch

import klatsch
from klatsch import topology as tp
from klatsch.problems import LeastSquares
from klatsch.ranks.membership import lag
from klatsch.simulation.mixing import StackedMix
from klatsch.study import cases, spec
from tests.support.comparisons import assert_same_to_rounding
from tests.support.graphs import REPEATING, product

SIZE = 16
COLUMNS = tp.from_matrices([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]], stochastic="columns", name="pushed")
GRAPHS = {name: tp.make(name, SIZE) for name in REPEATING} | {"pushed": COLUMNS, "lazy": tp.lazy(tp.ring(6))}
EVERY = (2, 5, 16)


def written_out(graph, H):
    """The same as a graph that changes, without knowledge of its silence."""
    matrices = [np.eye(graph.size) if t % H else graph.matrix(t // H) for t in range(1, H * graph.period + 1)]
    return tp.from_matrices([np.asarray(P if isinstance(P, np.ndarray) else P.toarray()) for P in matrices])


# --- the graph ----------------------------------------------------------------------------------------------------


def test_nodes_talk_in_every_hth_round():
    for graph, H in product_of(GRAPHS.values(), EVERY):
        silent = tp.every(graph, H)
        assert (silent.period, silent.every, silent.size) == (H * graph.period, H, graph.size)
        assert silent.name == f"{graph.name}/{H}"
        assert silent.changes == graph.changes == (graph.period > 1)
        for t in range(1, 2 * silent.period + 2):
            assert silent.speaks(t) == (t % H == 0)
            found = silent.matrix(t).toarray()
            if silent.speaks(t):
                assert np.array_equal(found, graph.matrix(t // H).toarray())  # bits: a copy
                assert silent.neighbors(1, t).tolist() == graph.neighbors(1, t // H).tolist()  # bits: whole numbers
                assert silent.receivers(1, t).tolist() == graph.receivers(1, t // H).tolist()  # bits: whole numbers
            else:
                assert np.array_equal(found, np.eye(graph.size))  # bits: a copy
                assert len(silent.neighbors(1, t)) == len(silent.receivers(1, t)) == 0
        for fact in ("symmetric", "directed", "row_stochastic", "column_stochastic", "edges", "degree", "lattice"):
            assert getattr(silent, fact) == getattr(graph, fact), fact
        assert silent.messages == pytest.approx(graph.messages / H)


def test_copies_stay_silent_and_read_only():
    for graph in GRAPHS.values():
        silent = tp.every(graph, 7)
        for copy in (pickle.loads(pickle.dumps(silent)), replace(silent, name="other")):
            assert copy == silent
            assert (copy.every, copy.period, copy.changes) == (7, silent.period, silent.changes)
            assert len({id(P) for P in copy.matrices}) == len(silent.speaking) + 1  # one identity for all silent rounds
            with pytest.raises(ValueError, match="read-only"):
                copy.matrix(1).data[0] = 2
        with pytest.raises(AttributeError):
            silent.every = 2


def test_every_goes_with_every_and_lazy():
    for graph in GRAPHS.values():
        assert tp.every(graph, 1) is graph
        assert tp.every(tp.every(graph, 2), 3) == tp.every(graph, 6)
        assert tp.every(tp.every(graph, 2), 3).name == f"{graph.name}/6"
        assert tp.lazy(tp.every(graph, 4)) == tp.every(tp.lazy(graph), 4)
        assert tp.lazy(tp.every(graph, 4)).name == f"lazy {graph.name}/4"
        assert tp.every(graph, 4) not in (graph, tp.every(graph, 5))


def test_what_it_is_called():
    assert repr(tp.make("ring/8", 16)) == "<Topology ring/8: 16 nodes, 16 edges, every 8 rounds>"
    assert (
        repr(tp.make("base_graph/3", 4)) == "<Topology base_graph(k=1)/3: 4 nodes, 4 edges, period 6, every 3 rounds>"
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tp.every(tp.ring(4), 0), r"every = 0; give a whole number from 1 up"),
        (lambda: tp.every(tp.ring(4), 2.0), r"every = 2.0; give a whole number from 1 up"),
        (lambda: tp.every(tp.ring(4), True), r"every = True; give"),
        (lambda: tp.every(tp.ring(4), "8"), r"every = '8'; give"),
        (lambda: tp.every(tp.ring(4), 10**7), r"every = 10,000,000; give a whole number of rounds from 1 to 1,000,000"),
        (lambda: tp.every(tp.base_graph(4), 10**6), r"a period of 2,000,000 rounds; give .* from 1 to 500,000"),
        (lambda: tp.every("ring", 8), r"every takes a Topology, not a str"),
        (lambda: tp.make("ring", 4, every=0), r"every = 0; give a whole number"),
        (lambda: tp.make("ring/x", 4), r"topology 'ring/x': 'x' is not a number of rounds; write ring/8"),
        (lambda: tp.make("ring/0", 4), r"'ring/0': '0' is not a number of rounds"),
        (lambda: tp.make("ring/", 4), r"'ring/': '' is not a number of rounds"),
        (lambda: tp.make("ring/8/2", 4), r"'8/2' is not a number of rounds"),
        (lambda: tp.make("rign/8", 4), r"unknown topology 'rign'; did you mean ring\?"),
        (lambda: tp.make("ring/8", 4, every=2), r"ring/8 with every = 2: the name says that; leave one"),
        (lambda: tp.spectral_gap("ring/8", 4, every=2), r"ring/8 with every = 2"),
        (lambda: tp.Topology("x", (np.eye(2),) * 3, every=2), r"x: 3 matrices with every = 2; give a multiple of 2"),
        (lambda: tp.Topology("x", (np.full((2, 2), 0.5),) * 2, every=2), r"x, matrix 1: not the identity"),
        (lambda: tp.Topology("x", (np.eye(3), np.full((2, 2), 0.5)), every=2), r"matrices of 2 and 3 nodes"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- how fast it mixes --------------------------------------------------------------------------------------------


def test_the_spectrum_is_that_of_the_matrices_written_out():
    for graph, H in product_of(GRAPHS.values(), EVERY):
        silent = tp.every(graph, H)
        eigenvalues = np.sort(np.abs(np.linalg.eigvals(product(silent))))
        gap = (1 - (0 if silent.averages_exactly else eigenvalues[-2])) / silent.period
        assert silent.spectral_gap == pytest.approx(gap, abs=1e-9)
        assert silent.spectral_gap == pytest.approx(graph.spectral_gap / H, rel=1e-9)
        assert silent.exact_after == (None if graph.exact_after is None else H * graph.exact_after)
        assert silent.averages_exactly == graph.averages_exactly
        assert silent.rounds_to_halve == H * graph.rounds_to_halve
        if graph.symmetric and not graph.changes:
            assert silent.smallest_eigenvalue == pytest.approx(graph.smallest_eigenvalue)
        if not graph.doubly_stochastic:
            continue
        slow = written_out(graph, H)
        assert silent.rounds_to_halve == slow.rounds_to_halve
        for gamma in (0.0, 0.5, 0.95, 0.999):
            assert silent.effective_neighbors(gamma) == pytest.approx(slow.effective_neighbors(gamma), rel=1e-8)


def test_gaps_by_name():
    for name, H in product_of(tp.TOPOLOGIES, EVERY):
        assert tp.spectral_gap(f"{name}/{H}", SIZE) == pytest.approx(tp.make(name, SIZE).spectral_gap / H, rel=1e-9)
        assert tp.spectral_gap(name, SIZE, every=H) == tp.spectral_gap(f"{name}/{H}", SIZE)


def test_gaps_in_closed_form():
    for H in EVERY:
        ring = (2 - 2 * math.cos(2 * math.pi / SIZE)) / 3
        for name, gap in {
            "ring": ring,
            "torus": 2 / 5,
            "complete": 1,
            "base_graph": 1 / 4,
            "one_peer_exponential": 1 / 4,
        }.items():
            assert tp.make(f"{name}/{H}", SIZE).spectral_gap == pytest.approx(gap / H)
        assert tp.spectral_gap(f"ring/{H}", 10**6) == tp.spectral_gap("ring", 10**6) / H


@pytest.mark.parametrize("name", ["ring/1000", "base_graph/1000", "directed_ring/1000"])
def test_a_thousand_rounds_cost_as_little_as_one(name):
    """Silent rounds share one matrix, and so one check, product and eigenvalue; also in another process."""
    graph = tp.make(name, 200)
    copied = pickle.loads(pickle.dumps(graph))
    for each in (graph, copied):
        assert len({id(P) for P in each.matrices}) == len({id(P) for P in each.speaking}) + 1
    summary = tp.summarize(copied)
    assert lag(graph) % 1000 == 0
    StackedMix(graph, dtype=torch.float64, device=torch.device("cpu"))
    assert summary.every == 1000
    assert summary.rho == pytest.approx(tp.spectral_gap(name, 200), rel=1e-6)


def test_summaries():
    found, left_out = tp.compare(12, every=5)
    assert {one.every for one in found} == {5}
    assert [one.name for one in found] == [f"{one.name}/5" for one in tp.compare(12)[0]]
    assert all("/" not in reason for reason in left_out.values())
    closed = tp.summarize(tp.make("ring/8", 100), rho=tp.spectral_gap("ring/8", 100))
    assert closed.rounds_to_halve == tp.make("ring/8", 100).rounds_to_halve


@pytest.mark.parametrize("name, panels", [("ring/8", 1), ("base_graph/8", 4), ("star/8", 1)])
def test_drawings_show_the_rounds_with_messages(name, panels, tmp_path):
    from klatsch.topology.drawing import figure

    drawn = figure(tp.make(name, 16))
    assert [bool(axes.patches) for axes in drawn.axes if axes.collections] == [True] * panels
    assert tp.draw(tp.make(name, 16), tmp_path / "graph.svg").stat().st_size > 1000


# --- names --------------------------------------------------------------------------------------------------------


def test_names():
    for name, H in product_of(tp.TOPOLOGIES, EVERY):
        graph = tp.every(tp.make(name, SIZE), H)
        for made in (tp.make(f"{name}/{H}", SIZE), tp.make(name, SIZE, every=H)):
            assert (made, made.name, made.every) == (graph, graph.name, H)
        assert tp.make(f"{name}/1", SIZE) == tp.make(name, SIZE)
        assert tp.options(f"{name}/{H}") == tp.options(name)
        assert tp.options(name)[-5:] == ("every", "late", "wire", "loss", "one_way")
        assert tp.nth_size(f"{name}/{H}", 7) == tp.nth_size(name, 7)


def test_names_with_options():
    assert tp.make("base_graph/4", 16, k=2) == tp.every(tp.base_graph(16, 2), 4)
    assert tp.make("torus/4", rows=3, cols=5) == tp.every(tp.torus(rows=3, cols=5), 4)
    assert tp.spectral_gap("base_graph/4", 27, k=2) == pytest.approx(1 / 12)


def test_theory_takes_them():
    often, seldom = (klatsch.theory.largest_machines("dat", 1e8, name) for name in ("ring", "ring/8"))
    assert 1 < seldom < often
    with pytest.raises(ValueError, match="unknown topology 'rign'; did you mean ring"):
        klatsch.theory.largest_machines("dat", 1e8, "rign/8")


# --- studies ------------------------------------------------------------------------------------------------------


def expanded(*topologies):
    content = {"steps": 50, "nodes": [8], "rules": ["dsgd"], "lr": [0.01], "seeds": 1, "topologies": list(topologies)}
    return cases.expand(spec.parse(content))[0]


def test_a_study_knows_both_ways_to_say_it():
    (short,), (long,) = expanded("ring/8"), expanded({"name": "ring", "every": 8})
    assert short == long
    assert (short.key, short.graph_label) == (long.key, "ring/8")
    assert short.make_graph() == tp.make("ring/8", 8)
    (k2,) = expanded({"name": "base_graph/4", "k": 2, "lazy": True})
    assert k2.graph_label == "lazy base_graph/4 (k 2)"
    assert k2.make_graph() == tp.lazy(tp.every(tp.base_graph(8, 2), 4))


def test_runs_without_silence_have_one_key():
    (plain,) = expanded("ring")
    assert plain.topology_options == {}
    assert [case.key for case in expanded({"name": "ring", "every": 1})] == [plain.key]
    assert [case.graph_label for case in expanded({"name": "ring", "every": [1, 2, 4]})] == ["ring", "ring/2", "ring/4"]


@pytest.mark.parametrize(
    "entry, message",
    [
        ("ring/x", r"topologies\[0\]: topology 'ring/x': 'x' is not a number of rounds"),
        ({"name": "ring/8", "every": 2}, r"topologies\[0\]: ring/8 with every = 2: the name says that"),
        ({"name": "ring", "every": [2, 0]}, r"topologies\[0\]: every = 0; give a whole number"),
        ("rign/8", r"topologies\[0\]: unknown topology 'rign'; did you mean ring\?"),
    ],
)
def test_studies_refuse(entry, message):
    with pytest.raises(ValueError, match=message):
        expanded(entry)


def test_on_the_command_line(run_cli, tmp_path):
    code, out, err = run_cli("topology", "ring/8", "-n", 16, "--draw", tmp_path / "ring.svg")
    assert (code, err) == (0, "")
    assert "ring/8, 16 nodes" in out
    assert any(line.split()[:2] == ["every", "8"] for line in out.splitlines())
    options = ("--steps", 40, "--seeds", 1, "-n", 8, "--lr", 0.01, "--store", tmp_path / "runs.sqlite")
    code, out, err = run_cli("run", "--topology", "ring/4,base_graph/2", "--set", "k=2", *options)
    assert (code, err) == (0, "")
    assert "ring/4" in out
    assert "base_graph/2 (k 2)" in out
    code, out, _ = run_cli("results", tmp_path / "runs.sqlite", "--topology", "ring/4")
    assert code == 0
    assert "ring/4" in out
    assert "base_graph" not in out
    assert "ring/8" in run_cli("list")[1]


# --- simulation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "fused"])  # where silence is known to both
@pytest.mark.parametrize("name, label", [("ring", "dsgd"), ("base_graph", "dat"), ("one_peer_exponential", "dat-gt")])
def test_a_run_is_that_of_the_matrices_written_out(label, name, engine):
    rule = klatsch.rules.make(label, lr=[1e-3, 1e-2])
    graph = tp.make(name, 8)
    found, expected = (
        klatsch.simulate(LeastSquares(8, dim=5, seed=1), rule, silent, 21, record=1, engine=engine)
        for silent in (tp.every(graph, 4), written_out(graph, 4))
    )
    assert_same_to_rounding(found.output, expected.output)
    alone = klatsch.simulate(LeastSquares(8, dim=5, seed=1), rule, graph, 21, record=1, engine=engine)
    assert (alone.output - found.output).abs().max() > 1e-6


@pytest.mark.parametrize("name", klatsch.rules.RULES)
def test_every_rule_takes_local_steps_or_refuses_them(name):
    graph = COLUMNS if "sgp" in name else tp.ring(6)
    silent, problem = tp.every(graph, 8), LeastSquares(graph.size, dim=4)
    rule = klatsch.rules.make(name, lr=1e-3)
    if name == "decentlam":
        with pytest.raises(ValueError, match="use d2 or dat-d2 for local steps"):
            klatsch.simulate(problem, rule, silent, 500)
        return
    distance = klatsch.simulate(problem, rule, silent, 500, record=[1, 500]).metrics["distance"]
    assert distance[-1] < distance[0], f"{name} does not work with local steps: let its check_graph refuse them"


def test_push_sum_on_a_graph_that_sums_by_columns():
    rule = klatsch.rules.make("sgp", lr=1e-3)
    silent = tp.every(COLUMNS, 4)
    slow = tp.from_matrices([P.toarray() for P in silent.matrices], stochastic="columns")
    found, expected = (klatsch.simulate(LeastSquares(3, dim=4), rule, graph, 40) for graph in (silent, slow))
    assert_same_to_rounding(found.output, expected.output)


def test_silent_rounds_cost_no_product(monkeypatch):
    calls, multiply = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *tensors: calls.append(1) or multiply(*tensors))
    cpu, v = torch.device("cpu"), torch.randn(12, 3, dtype=torch.float64)
    mix = StackedMix(tp.make("ring/4", 12), dtype=torch.float64, device=cpu)
    assert [len(calls) for t in range(1, 9) if mix.in_round(t).mix(v, v)] == [0, 0, 0, 2, 2, 2, 2, 4]
    calls.clear()
    mix = StackedMix(tp.make("ring/4", 5), tp.make("base_graph/6", 7), dtype=torch.float64, device=cpu)
    spoken = [t for t in range(1, 13) if (before := len(calls), mix.in_round(t).mix(v)) and len(calls) > before]
    assert spoken == [4, 6, 8, 12]


# --- how news travels ---------------------------------------------------------------------------------------------


def test_news_needs_one_silence_per_hop():
    for graph, H in product_of(GRAPHS.values(), EVERY[-1:]):
        assert lag(tp.every(graph, H)) == H * lag(graph) == lag(replace(tp.every(graph, H), every=1, all_reduce=False))
