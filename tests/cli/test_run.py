"""klatsch list, run, demo and reproduce of a table, and the comparison behind them."""

import json
import re
import signal
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import klatsch
from klatsch import pictures, problems, rules
from klatsch import topology as tp
from klatsch.report import figures
from klatsch.report.pages import Outline
from klatsch.study import Row, expand, parse, run_study, spec, workers
from tests.support.pictures import check_picture
from tests.support.waiting import HANG, wait_until

QUICK = ("--steps", 200, "--seeds", 2, "--lr", "0.0001,0.001,0.01")


def test_list_names_everything_with_a_line_each(run_cli):
    code, out, err = run_cli("list")
    assert (code, err) == (0, "")
    for name in (*rules.RULES, *tp.TOPOLOGIES, *problems.PROBLEMS):
        assert re.search(rf"^ {re.escape(name)} +\w.{{10}}", out, re.M), name


def test_run_prints_the_error_the_learning_rate_and_the_spread(run_cli):
    code, out, err = run_cli("run", "--rules", "dat,dsgd", "-t", "ring,torus", "-n", "4,9", *QUICK)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith((" ring", " torus"))]
    assert [row[:3] for row in rows] == [
        [topology, nodes, rule] for topology in ("ring", "torus") for nodes in ("4", "9") for rule in ("dat", "dsgd")
    ]
    for row in rows:
        error, low, high = float(row[3]), float(row[5]), float(row[6])
        assert low <= error <= high
        assert row[4].rstrip("*") in ("0.0001", "0.001", "0.01")


def test_one_seed_has_no_spread(run_cli):
    _, out, _ = run_cli("run", "--rules", "dat", "-n", 4, "--steps", 20, "--seeds", 1, "--lr", 0.01)
    header = next(line.split() for line in out.splitlines() if line.startswith(" topology"))
    assert header == ["topology", "nodes", "rule", "error", "lr", "merged", "worst", "Gamma"]
    assert "from, to" not in out


def test_run_says_that_results_are_not_kept(run_cli, tmp_path):
    arguments = ("run", "--rules", "dat", "-n", 4, "--steps", 20, "--seeds", 1, "--lr", 0.01)
    hint = "the results are not kept; --store results.sqlite keeps them"
    assert hint in run_cli(*arguments)[1]
    assert hint not in run_cli(*arguments, "--store", tmp_path / "kept.sqlite")[1]
    assert json.loads(run_cli(*arguments, "--json")[1])["rows"]


def test_a_study_file_that_is_not_there_is_named_before_its_options(run_cli, tmp_path):
    _, _, err = run_cli("run", tmp_path / "nowhere.toml", "--steps", 5)
    assert f"there is no file {tmp_path / 'nowhere.toml'}" in err
    (tmp_path / "study.toml").write_text('rules = "dat"\ntopologies = "ring"\nnodes = 4\nsteps = 5\n')
    assert "--steps does not go with a study file" in run_cli("run", tmp_path / "study.toml", "--steps", 5)[2]


def test_run_gives_json_that_agrees_with_the_library(run_cli):
    code, out, _ = run_cli(
        "run", "--rules", "dat", "-n", 4, *QUICK, "--set", "averaging=linear", "--set", "order=cta", "--json"
    )
    (row,) = json.loads(out)["rows"]
    rule = rules.make("dat", [0.0001, 0.001, 0.01], averaging="linear", order="cta")
    finals = [
        klatsch.simulate(problems.LeastSquares(4, seed=seed), rule, tp.ring(4), 200).metrics["distance"][-1]
        for seed in (0, 1)
    ]
    mean = np.mean([values.numpy() for values in finals], axis=0)
    assert code == 0
    assert row["lr"] == (0.0001, 0.001, 0.01)[mean.argmin()]
    assert row["error"] == pytest.approx(mean.min(), rel=1e-9)
    assert row["curve"][-1] == pytest.approx(row["error"])
    assert row["steps"][-1] == 200
    assert list(row["final_by_lr"]) == ["0.0001", "0.001", "0.01"]


def test_a_rule_may_be_written_by_its_parts(run_cli, tmp_path):
    words = ("-n", 4, "--steps", 20, "--seeds", 1, "--lr", 0.001, "--json")
    rows = json.loads(run_cli("run", "--rules", "dat,plain+anytime,push+adam+anytime", *words, "--set", "beta=0.9")[1])[
        "rows"
    ]
    assert [row["rule"].split()[0] for row in rows] == ["dat", "plain+anytime", "push+adam+anytime"]
    assert rows[0]["error"] == pytest.approx(rows[1]["error"], rel=1e-9)
    study = tmp_path / "study.toml"
    entries = '"dat", { name = "plain+anytime", beta = 1.0 }, "plain+anytime"'  # the last two are one run
    study.write_text(f'rules = [{entries}]\ntopologies = "ring"\nnodes = 4\nsteps = 20\nseeds = 1\nlr = 0.001\n')
    rows = json.loads(run_cli("run", study, "--json")[1])["rows"]
    assert rows[0]["error"] == pytest.approx(rows[1]["error"], rel=1e-9)


def test_options_reach_problem_rule_and_graph(run_cli):
    arguments = ("run", "--rules", "dsgd", "-n", 6, "--steps", 50, "--seeds", 1, "--lr", 0.001, "--json")
    plain = json.loads(run_cli(*arguments)[1])["rows"][0]["error"]
    for option in (
        ("--set", "noise=5"),
        ("--set", "heterogeneity=9"),
        ("--set", "dim=5"),
        ("--set", "momentum=0.5"),
        ("--lazy",),
        ("-t", "base_graph", "--set", "k=2"),
        ("--problem", "logistic", "--set", "batch=4", "--set", "alpha=1"),
    ):
        assert json.loads(run_cli(*arguments, *option)[1])["rows"][0]["error"] != plain, option
    rough = json.loads(run_cli(*arguments, "--float32")[1])["rows"][0]["error"]
    assert rough == pytest.approx(plain, rel=1e-3)
    assert rough != plain


def test_what_is_refused_is_left_out_with_the_reason_and_the_rest_runs(run_cli):
    code, out, _ = run_cli("run", "--rules", "d2,dat", "-t", "ring,torus", "-n", 7, *QUICK)
    assert code == 0
    assert "left out at 7 nodes: torus" in out
    code, out, _ = run_cli("run", "--rules", "d2,dat", "-t", "base_graph", "-n", 6, *QUICK)
    assert "left out at 6 nodes: d2 on base_graph(k=1): the graph is time-varying" in out
    code, out, err = run_cli("run", "--rules", "d2", "-t", "base_graph", "-n", 6, *QUICK)
    assert (code, out) == (2, "")
    assert "use a static graph" in err


@pytest.mark.slow
def test_beta_and_momentum_may_be_several(run_cli):
    options = ("run", "--rules", "dat,dsgd", "-n", 6, *QUICK, "--json")
    rows = json.loads(run_cli(*options, "--set", "beta=0.5,1", "--set", "momentum=0,0.5")[1])["rows"]
    found = {row["rule"]: row["error"] for row in rows}
    assert list(found) == [
        *(f"dat (beta {beta}, momentum {momentum})" for beta in (0.5, 1) for momentum in (0, 0.5)),
        *("dsgd (momentum 0)", "dsgd (momentum 0.5)"),
    ]
    (plain, *_) = json.loads(run_cli(*options)[1])["rows"]
    assert found["dat (beta 1, momentum 0)"] == pytest.approx(plain["error"], rel=1e-9)
    assert len(set(found.values())) == 6
    assert "beta = 2" in run_cli(*options, "--set", "beta=2")[2]


def test_a_rule_that_diverges_everywhere_says_so(run_cli):
    arguments = ("run", "--rules", "dsgd", "-n", 4, "--steps", 1000, "--seeds", 1, "--lr", "1,2")
    assert "diverged" in run_cli(*arguments)[1]
    row = json.loads(run_cli(*arguments, "--json")[1])["rows"][0]
    assert row["error"] is None


@pytest.mark.parametrize("suffix, nodes", [(".png", "4"), (".svg", "4,9"), (".pdf", "4")])
@pytest.mark.slow
def test_run_draws(suffix, nodes, run_cli, tmp_path):
    path = tmp_path / f"figure{suffix}"
    code, _, err = run_cli("run", "--rules", "dat,dsgd", "-n", nodes, *QUICK, "--plot", path)
    assert (code, err) == (0, f"drawn to {path}\n")
    check_picture(path)


def test_a_study_is_drawn_as_it_says(run_cli, tmp_path):
    figures = '[[figures]]\nacross = "bytes"\n\n[[figures]]\nname = "all"\nacross = "rules"\n'
    study = (
        'problem = "least-squares"\ntopologies = "ring"\nrules = ["dat", "dsgd"]\nlr = 0.01\nnodes = 4\nsteps = 20\n'
    )
    (tmp_path / "study.toml").write_text(f"{study}seeds = 1\n{figures}")
    code, _, err = run_cli("run", tmp_path / "study.toml", "--plot", tmp_path / "a.svg")
    assert (code, [line for line in err.splitlines() if "drawn" in line]) == (
        0,
        [f"drawn to {tmp_path / name}" for name in ("a.svg", "a-all.svg")],
    )
    assert "MB sent per node" in (tmp_path / "a.svg").read_text()


BAD = {
    "unknown rule": (("--rules", "adam"), "unknown rule 'adam'"),
    "misspelt rule": (("--rules", "dta"), "did you mean dat"),
    "no rule": (("--rules", ","), "at least one"),
    "unknown topology": (("-t", "rnig"), "did you mean ring"),
    "unknown problem": (("--problem", "lasso"), "unknown problem 'lasso'"),
    "zero lr": (("--lr", "0"), "lr = 0"),
    "negative lr": (("--lr", "0.1,-1"), "lr = -1.0; give a number above 0"),
    "nan lr": (("--lr", "nan"), "lr = nan"),
    "no number": (("--lr", "fast"), "'fast' is not a number"),
    "no steps": (("--steps", 0), "steps = 0"),
    "no seeds": (("--seeds", 0), "seeds = 0"),
    "no nodes": (("-n", 0), "0"),
    "half a node": (("-n", "2.5"), "'2.5' is not a whole number"),
    "wrong averaging": (("--set", "averaging=cubic"), "averaging = 'cubic'"),
    "wrong gamma": (("--set", "averaging=fixed(1)"), "gamma = 1.0"),
    "wrong order": (("--set", "order=random"), "order = 'random'"),
    "wrong momentum": (("--set", "momentum=1"), "momentum = 1"),
    "option of nobody": (
        ("--rules", "d2", "--set", "beta=0.5"),
        "--set beta: none of d2, ring, least-squares has an option 'beta': it keeps no average",
    ),
    "option of another problem": (
        ("--set", "batch=3"),
        "none of dat, dsgd, ring, least-squares has an option 'batch'; there are order, momentum, shared",
    ),
    "negative noise": (("--set", "noise=-1"), "noise = -1"),
    "wrong ending": (("--plot", "figure.gif"), ".gif"),
    "no such folder": (("--plot", "nowhere/figure.png"), "no folder"),
    "no such device": (("--device", "quantum"), "device = 'quantum'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(case, run_cli):
    options, words = BAD[case]
    code, out, err = run_cli("run", "-n", 4, "--steps", 50, "--seeds", 1, *options)
    assert (code, out) == (2, "")
    assert err.startswith("klatsch: error: ")
    assert err.count("\n") == 1
    assert words in err


def small_demo(patch):
    """The demo with two rules: dsgd, and dat-d2, which a changing graph leaves out."""
    whole = spec.content_of
    patch.setattr(spec, "content_of", lambda *names: (content := whole(*names)) | {"rules": content["rules"][::3]})


def test_the_demo_runs_the_promised_grid():
    study = spec.study_of("demo", "quick")
    cases, left_out = expand(study)
    assert {(case.label, case.topology, case.nodes) for case in cases} == {
        (rule, topology, nodes)
        for rule in ("dsgd", "dat", "dat (beta 0.9)", "dat-d2 (beta 0.9)", "dat-gt (beta 0.9)", "gt (cosine)")
        for topology in ("ring", "torus", "one_peer_exponential")
        for nodes in (4, 9, 25)
        if (rule, topology) != ("dat-d2 (beta 0.9)", "one_peer_exponential")
    }
    assert all("symmetric" in reason for _, reason in left_out)


def row(rule, topology, nodes, error, steps=10_000):
    curves = np.full((1, 1, 1), error)
    return Row(rule, topology, nodes, lrs=(0.1,), steps=(steps,), curves=curves, consensus=curves, seconds=0.0)


def test_the_demos_sentences_tell_the_numbers():
    study = spec.study_of("demo", "full")
    script = Outline.of(study, expand(study)[0])
    rows = [
        *(row("dsgd", "ring", n, e) for n, e in ((4, 1e-4), (9, 7.0), (49, 0.0171))),
        *(row("dat", "ring", n, e) for n, e in ((4, 3e-5), (9, 2e-5), (49, 1e-5))),
        *(row("d2", "ring", n, e) for n, e in ((4, 3e-5), (49, np.inf))),
    ]
    told = {verdict.claim: (verdict.word, verdict.figures[0]) for verdict in script.verdicts(rows)}
    assert told.pop("dsgd improves up to 49 machines on every graph") == (
        "does not hold",
        "no, 4: 0.0001, 9: 7, 49: 0.0171",
    )
    assert told.pop("dat improves up to 49 machines on every graph")[0] == "holds"
    assert told.pop("d2 improves up to 49 machines on every graph")[0] == "not decided"
    ((word, text),) = told.values()
    assert (word, text[:15]) == ("holds", "yes, in 3 of 3:")
    assert "ring, M = 49: dat on ring 1e-05 against dsgd on ring 0.0171, 0.000585 times" in text
    short = [replace(r, steps=(400,)) for r in rows]
    assert {verdict.figures[0] for verdict in script.verdicts(short)} == {"needs 10,000 rounds, these are 400"}


@pytest.mark.slow
def test_the_same_figure_is_the_same_file(tmp_path):
    for kind in ("svg", "png", "pdf"):
        for name in ("a", "b"):
            figure = figures.plot([row("dat", "ring", n, 1 / n) for n in (4, 9)], "nodes", "title")
            pictures.save(figure, tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


@pytest.mark.slow
def test_the_demo_on_the_command_line(run_cli, tmp_path, monkeypatch):
    small_demo(monkeypatch)
    code, out, err = run_cli("demo", "--steps", 60, "--seeds", 1, "--out", tmp_path)
    assert (code, err) == (0, "")
    assert "not decided: dsgd improves up to 25 machines" in out
    for suffix in (".png", ".svg"):
        check_picture(tmp_path / f"klatsch-demo{suffix}")
    assert "--" not in out  # it names no option that it does not have
    code, _, err = run_cli("demo", "--out", tmp_path / "nowhere")
    assert code == 2
    assert "no folder" in err


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_tables_fit_the_terminal(width, run_cli, monkeypatch):
    monkeypatch.setattr("klatsch.cli.terminal.console", lambda: Console(width=width))
    _, out, _ = run_cli("run", "--rules", "dat,decentlam", "-t", "one_peer_exponential,ring", "-n", 8, *QUICK)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= width
    header = next(line for line in out.splitlines() if line.startswith(" topology"))
    assert ("Gamma:" in out) == (" Gamma" in header)


def test_a_graph_that_a_rule_refuses_can_be_asked_for(run_cli):
    code, out, _ = run_cli("run", "--rules", "d2,d2", "-t", "base_graph", "-n", "6,6", *QUICK, "--any-graph", "--json")
    assert code == 0
    assert len(json.loads(out)["rows"]) == 1


def test_without_a_kernel_it_says_so(run_cli, monkeypatch):
    monkeypatch.setattr("klatsch.native.why_not", lambda: "there is no C compiler; install gcc or clang")
    assert "slower than it could be: there is no C compiler" in run_cli("run", "-n", 4, *QUICK)[1]


INTERRUPTED = """
import sys
from pathlib import Path
from klatsch.cli import main
from klatsch.study import workers

real, begun = workers.run_batch, Path(sys.argv.pop())
workers.run_batch = lambda *arguments: (begun.touch(), real(*arguments))[1]
main()
"""


def test_an_interrupt_ends_a_comparison_at_once(tmp_path, python):
    """A real process and a real Ctrl-C, with minutes of work ahead."""
    begun = tmp_path / "begun"
    words = ("run", "--steps", "5000000", "-n", "16,25,36", "--seeds", "5", begun)
    process = python("-c", INTERRUPTED, *words)
    wait_until(begun.exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert (out, err) == ("", "")


def test_a_comparison_treats_all_rules_alike():
    study = parse(
        {
            "rules": ["dat", "gt"],
            "topologies": "ring",
            "nodes": 5,
            "steps": 100,
            "seeds": 2,
            "lr": [0.001, 0.01],
            "record": 3,
        }
    )
    told = []
    found = run_study(study, executor=workers.threads, told=lambda progress: told.append(progress.runs_done))
    assert not found.left_out
    assert told == [0, 2, 4, 6, 8]  # two rules, two seeds, two learning rates each
    assert [row.rule for row in found.rows] == ["dat", "gt"]
    for row in found.rows:
        assert row.curves.shape == (2, len(row.steps), 2)
        assert row.value == pytest.approx(row.final.mean(axis=0).min())
        assert row.at_edge


def test_bytes_are_shown_where_channels_differ(run_cli):
    words = ("run", "--rules", "dsgd", "-n", 4, "--steps", 5, "--seeds", 1, "--lr", 0.001)
    for graphs, shown in ((("-t", "ring", "--set", "wire=float32,int4"), True), (("-t", "ring,torus"), False)):
        code, out, _ = run_cli(*words, *graphs)
        assert (code, "  sent" in out) == (0, shown)
