"""The image study: epochs, learning rates by accuracy, figures 2 and 3, verdicts, `klatsch data`, and both engines."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from klatsch import problems
from klatsch.problems import classification, fashion_mnist
from klatsch.report.pages import Outline, page_of
from klatsch.study import Row, Store, expand, parse, run_study, spec
from klatsch.study.batches import pack
from tests.support.machine import DATA, needs_data
from tests.support.on_ranks import assert_same_as_in
from tests.support.pictures import check_picture

pytestmark = needs_data


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.setenv("KLATSCH_DATA", str(DATA))
    monkeypatch.setattr(classification, "LOSS_SAMPLES", 500)  # nothing here is about the training loss


def study(**changes):
    content = {
        "name": "tiny",
        "epochs": 1,
        "nodes": [64, 128],
        "seeds": 2,
        "lr": [0.001, 0.1],
        "record": 2,
        "dtype": "float32",
        "rules": [{"name": "dat", "averaging": "fixed(0.9)", "momentum": 0.9}, {"name": "d2"}],
        "topologies": ["ring", "base_graph"],
        "problem": {"name": "fashion-mnist", "alpha": [0.1, 10.0], "batch": 200, "test": 200},
        "any_graph": True,
    }
    return parse(content | changes)


def test_more_machines_do_fewer_rounds_in_an_epoch():
    cases, _ = expand(study(epochs=3))
    assert {(case.nodes, case.steps) for case in cases} == {(64, 12), (128, 6)}
    assert {case.length for case in cases} == {"3 epochs"}
    assert next(case for case in cases if case.nodes == 64).points == [6, 12]


def test_on_a_gpu_graphs_alphas_and_seeds_share_a_stack():
    cases, _ = expand(study(nodes=[8, 16]))
    assert len(pack(cases, "cpu")) == len(cases)  # one model after the other, on all cores
    stacks = pack(cases, "cuda")
    assert len(stacks) == 4  # by rule, and by size, which have other numbers of rounds
    assert sorted(len(stack.networks) for stack in stacks) == [8, 8, 8, 8]  # 2 graphs, 2 alphas, 2 seeds
    assert {case.key for stack in stacks for case in stack.cases} == {case.key for case in cases}


def test_on_a_gpu_learning_rates_and_schedules_share_a_stack_too():
    cases, _ = expand(study(nodes=8, rules="dat", schedule=["constant", "cosine"]))
    chosen = [case for case in cases if case.lr == (0.1 if case.seed else 0.001)]  # as if short runs had chosen
    (stack,) = pack(chosen, "cuda")
    assert [len(network) for network in stack.networks] == [1] * 16  # 2 graphs, 2 alphas, 2 seeds, 2 schedules


def test_on_a_gpu_graphs_of_other_periods_do_not_share_a_stack():
    cases, _ = expand(study(nodes=8, rules="d2", topologies=["ring", "ring/4"]))
    assert len(pack(cases, "cuda")) == 2  # D2 corrects over as many rounds as lie between two mixes


@pytest.mark.soak
def test_learning_rates_are_chosen_by_accuracy(tmp_path, in_threads, start):
    tiny = {"name": "fashion-mnist", "alpha": 1.0, "test": 500}
    small = study(
        nodes=4, topologies="ring", rules=["dsgd"], lr=[1e-9, 0.1], seeds=1, epochs=None, steps=40, problem=tiny
    )
    with Store(tmp_path / "s.sqlite") as store:
        found = run_study(small, store)
        for row in found.rows:
            assert row.title == "accuracy"
            assert row.largest
            assert row.lr == 0.1
            assert 0.2 < row.low <= row.value <= row.high < 1.0
        page = page_of(next(iter(store.studies())), store)
        other = parse(
            {"steps": 5, "nodes": 4, "rules": "dat", "topologies": "ring", "seeds": 1, "lr": 0.01, "record": 2}
        )
        run_study(other, store)
    check_a_store_of_two_problems(start, tmp_path / "s.sqlite", tmp_path)
    assert "accuracy" in page.header
    assert "largest mean final accuracy" in page.facts[0]
    assert found.progress.best[0] == max(row.final.max() for row in found.rows)


def check_a_store_of_two_problems(start, store, folder):
    """Everything in it can be looked at, also where the data set is not."""
    nowhere = os.environ | {"KLATSCH_DATA": "/nowhere"}
    for words, found in (
        (("results", str(store)), ("accuracy", "least-squares: distance")),
        (("results", str(store), "--all"), ("accuracy", "distance")),
        (("results", str(store), "--metric", "accuracy_min"), ("accuracy_min",)),
        (("results", str(store), "--all", "--metric", "distance"), ("distance",)),
        (("report", str(store), "-o", str(folder / "r.html")), ("2 pages",)),
    ):
        done = start(*words, env=nowhere).done()
        assert (done.returncode, done.stderr) == (0, "")
        assert all(word in done.stdout for word in found), done.stdout


def verdicts(target, rows):
    content = spec.study_of(target, "paper")
    return Outline.of(content, expand(content)[0]).verdicts(rows)


def drawn(target, rows):
    content = spec.study_of(target, "paper")
    ((_, figure),) = Outline.of(content, expand(content)[0]).drawn(rows, target, "a title")
    return figure


def row(rule, topology, nodes, accuracy, alpha=0.1, spread=0.002):
    final = accuracy + np.array([-spread, 0.0, spread])
    curves = np.stack([np.full(3, 0.1), final], axis=1)[:, :, None]
    return Row(rule, topology, nodes, (0.1,), (5, 50), curves, curves, 1.0, {"alpha": alpha}, "accuracy", True, 50)


DAT = "dat (averaging fixed(0.9), momentum 0.9)"


def as_the_paper_says():
    rows = []
    for M in (8, 16):
        for alpha, dat, others in ((0.1, 0.85, 0.80), (10.0, 0.87, 0.89)):
            rows.append(row(DAT, "ring", M, dat, alpha))
            rows.append(row(DAT, "base_graph", M, dat + 0.03, alpha))
            for rule in ("dsgd (momentum 0.9)", "d2"):
                rows.append(row(rule, "ring", M, others, alpha))
                rows.append(row(rule, "base_graph", M, others + 0.05, alpha))
    return rows


def test_verdicts_on_figure_2():
    assert [verdict.holds for verdict in verdicts("fig2", as_the_paper_says())] == [True] * 5
    ring = verdicts("fig2", [r for r in as_the_paper_says() if r.topology == "ring"])
    assert [verdict.holds for verdict in ring] == [True, True, None, True, True]
    worse = [row(DAT, "ring", 8, 0.70), *(r for r in as_the_paper_says() if (r.rule, r.topology) != (DAT, "ring"))]
    assert verdicts("fig2", worse)[2].holds is False
    assert "70.0% (69.8% to 70.2%)" in verdicts("fig2", worse)[2].figures[0]


def test_ahead_means_more_than_a_percent_and_more_than_the_seeds_scatter():
    for gap, spread, holds in ((0.005, 0.001, False), (0.02, 0.001, True), (0.02, 0.05, False)):
        rows = [row(DAT, "ring", 8, 0.8 + gap, spread=spread), row("dsgd", "ring", 8, 0.8, spread=spread)]
        assert verdicts("fig2", rows)[0].holds is holds


def test_what_diverged_or_was_short_decides_nothing():
    rows = [
        row(DAT, "ring", 8, 0.8),
        row("d2", "ring", 8, 0.7),
        row(DAT, "base_graph", 8, 0.1),
        row("d2", "base_graph", 8, 0.0, spread=0.0),
    ]
    ahead = verdicts("fig2", rows)[1]
    assert ahead.holds is True
    assert "yes, in 1 of 1" in ahead.figures[0]
    assert verdicts("fig2", rows[2:])[1].holds is None
    assert verdicts("fig2", [replace(r, epochs=3) for r in rows])[1].holds is None
    single = [replace(r, curves=r.curves[:1], consensus=r.consensus[:1]) for r in rows]
    assert verdicts("fig2", single)[1].holds is None
    assert "needs 20 epochs and 2 seeds, these are 50 and 1" in verdicts("fig2", single)[1].figures[0]
    level = [row(DAT, "ring", M, 0.8) for M in (4, 8, 16)]
    assert verdicts("fig3", level)[0].holds is None


def test_a_rule_that_was_not_lazy_at_some_sizes_is_one_line():
    rows = [row("d2 (not lazy)" if M == 2 else "d2", "ring", M, 0.8) for M in (2, 4, 8)]
    figure = drawn("fig3", rows)
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "d2, ring"]
    assert list(line.get_xdata()) == [2, 4, 8]


def test_verdicts_on_figure_3():
    drops = {
        DAT: (0.9, 0.89, 0.88, 0.7, 0.68),
        "dsgd (momentum 0.9)": (0.9, 0.88, 0.7, 0.65, 0.6),
        "d2": (0.9, 0.7, 0.6, 0.5, 0.4),
    }
    rows = [
        row(rule, "ring", M, a) for rule, line in drops.items() for M, a in zip((2, 4, 8, 16, 32), line, strict=True)
    ]
    assert [verdict.holds for verdict in verdicts("fig3", rows)] == [True, True, False]
    assert [v.holds for v in verdicts("fig3", [r for r in rows if r.nodes < 16])] == [None, None, None]


@pytest.mark.slow
def test_figures(tmp_path):
    rows = as_the_paper_says()
    for name, figure, words in (
        ("2", drawn("fig2", rows), ("8 machines, alpha = 0.1", "dat, ring", "epochs")),
        ("3", drawn("fig3", rows), ("machines M", "d2, base_graph", "alpha = 10")),
    ):
        figure.savefig(tmp_path / f"{name}.png")
        check_picture(tmp_path / f"{name}.png")
        texts = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
        for word in words:
            assert word in texts


@pytest.mark.parametrize("target", ["fig2", "fig3"])
@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_studies_of_the_paper(target, scale):
    found = spec.study_of(target, scale)
    cases, left_out = expand(found)
    assert not left_out
    if (target, scale) == ("fig2", "paper"):
        assert len(cases) == 216
        assert {case.epochs for case in cases} == {50}
        assert {case.lr for case in cases} == {0.001, 0.01, 0.1}
    assert all(case.rule_options.get("momentum") == 0.9 for case in cases if case.rule in ("dat", "dsgd"))


@pytest.mark.slow
def test_pages_say_what_differs(in_threads, tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "SAMPLES", 4_000)  # an epoch of ten rounds
    tiny = study(
        nodes=4,
        topologies="ring",
        seeds=1,
        lr=[0.01],
        rules=[{"name": "dsgd", "momentum": 0.9}],
        problem={"name": "fashion-mnist", "alpha": 0.1, "batch": 100, "test": 200},
    )
    with Store(tmp_path / "s.sqlite") as store:
        content = spec.content_of("fig2", "quick")
        words = {"title": content["title"], "notes": tuple(content["notes"]), "sentences": tuple(content["sentences"])}
        run_study(tiny.model_copy(update=words), store, command="klatsch reproduce fig2")
        page = page_of(next(iter(store.studies())), store)
    assert page.title.startswith("Figure 2")
    assert any("32 images per node" in note for note in page.notes)
    assert len(page.verdicts) == 5


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"steps": 10}, "both are given"),
        ({"epochs": None}, "neither is given"),
        ({"epochs": 0}, "epochs = 0; give a whole number from 1 up"),
        ({"problem": "least-squares"}, "least-squares has no data set"),
        ({"nodes": 3000}, "nodes = 3000 and batch = 200, but there are 60,000 images to learn from; give fewer nodes"),
        ({"problem": {"name": "fashion-mnist", "alpha": -1}}, "alpha = -1"),
        ({"problem": {"name": "fashion-mnist", "batch": 40_000}}, "batch = 40000"),
    ],
)
def test_bad_studies(changes, found):
    with pytest.raises(ValueError, match=found):
        expand(study(**changes))


def test_sizes_that_do_not_fit_can_be_left_out():
    cases, left_out = expand(study(nodes=[64, 3000], leave_out=True))
    assert {case.nodes for case in cases} == {64}
    assert "nodes = 3000 and batch = 200, but there are 60,000 images" in left_out[0].reason


def test_a_study_without_its_data_says_so_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("KLATSCH_DATA", "/nowhere")
    with Store(tmp_path / "s.sqlite") as store:
        with pytest.raises(ValueError, match="KLATSCH_DATA = /nowhere is not a folder"):
            run_study(study(), store)
        assert not store.studies()


def test_data_show(tmp_path, start):
    done = start("data", "show", "-n", "6", "--alpha", "0.1", "--draw", str(tmp_path / "h.png"), "--json").done()
    counts = np.array(json.loads(done.stdout)["counts"])
    assert counts.shape == (6, 10)
    assert set(counts.sum(axis=1)) == {10_000}
    check_picture(tmp_path / "h.png")
    table = start("data", "show", "-n", "6").done().stdout
    assert "ankle boot" in table
    assert "alpha = 0.1" in table


@pytest.mark.parametrize(
    "words, found",
    [
        (("data", "show", "--data", "/nowhere"), "--data = /nowhere is not a folder"),
        (("data", "show", "--alpha", "0"), "alpha = 0"),
        (("data", "show", "-n", "60001"), "60001"),
        (("reproduce", "fig2", "--data", "/nowhere"), "/nowhere is not a folder"),
        (("reproduce", "fig1", "--epochs", "3"), "fig1 has no data set"),
        (("reproduce", "table1", "--epochs", "3"), "table1 trains nothing"),
        (("reproduce", "fig2", "--dtype", "float64"), "fig2 trains in float32"),
        (("run", "--problem", "fashion-mnist", "--steps", "3", "--epochs", "1"), "both are given"),
    ],
)
def test_command_line_refuses_in_one_line(tmp_path, run_cli, monkeypatch, words, found):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_cli(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert found in err


@pytest.mark.soak
def test_the_same_on_ranks(tmp_path, start, launch):
    """Processes, one per node, gives the accuracies of the simulation."""
    file = tmp_path / "images.toml"
    file.write_text(
        'steps = 4\nnodes = 2\nseeds = 1\nlr = [0.05]\nrecord = 1\ndtype = "float32"\ntopologies = "ring"\n'
        'rules = ["dat", "dsgd"]\n[problem]\nname = "fashion-mnist"\ntest = 500\n'
    )
    assert start("run", file).done().returncode == 0
    tolerances = {"train_loss": {"rtol": 1e-4}, "accuracy": {"atol": 0.005}}
    assert_same_as_in(tmp_path / "images.sqlite", launch(2, "on_ranks.study", file=str(file)), tolerances)


@pytest.mark.slow
def test_a_problem_of_ones_own_model(monkeypatch):
    """The Python way, with another model and another start."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    problem = problems.ImageClassification(model, DATA, nodes=4, alpha=1.0, batch=8, test=300)
    assert problem.dim == 7850
