"""klatsch results: print, filter and export what a store holds."""

import csv
import json
import shutil
import sqlite3
import sys

import numpy as np
import pytest

from klatsch.cli.results import _in_latex
from klatsch.study import Store, parse, run_study, workers

STUDY = {
    "steps": 60,
    "nodes": [4, 6],
    "seeds": 2,
    "lr": [0.001, 0.01, 5e9],
    "record": 4,
    "rules": ["dat", {"name": "dsgd", "momentum": 0.5}],
    "topologies": ["ring", "complete"],
    "problem": {"dim": 5, "noise": [1.0, 10.0]},
}
RUNS = 2 * 2 * 2 * 2 * 2 * 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "s.sqlite"
    run_study(parse(STUDY), path, executor=workers.threads)
    return path


def test_the_best_learning_rates_are_those_of_the_study(store, run_cli):
    code, out, err = run_cli("results", store, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["rows"]
    expected = run_study(parse(STUDY), executor=workers.threads).rows
    assert len(rows) == len(expected) == 16

    def key(topology, noise, nodes, rule):
        return topology, noise, nodes, rule

    mine = {key(r["topology"], r["setting"]["noise"], r["nodes"], r["rule"]): (r["lr"], r["error"]) for r in rows}
    theirs = {key(r.topology, r.setting["noise"], r.nodes, r.rule): (r.lr, r.value) for r in expected}
    assert mine.keys() == theirs.keys()
    for case, (lr, error) in theirs.items():
        assert mine[case] == (lr, pytest.approx(error, rel=1e-9)), case


def test_filters(store, run_cli):
    def count(*options):
        code, out, err = run_cli("results", store, "--all", "--json", *options)
        assert (code, err) == (0, "")
        return len(json.loads(out)["runs"])

    assert count() == RUNS
    assert count("--rule", "dat") == RUNS // 2
    assert count("--rule", "dsgd") == count("--rule", "dsgd (momentum 0.5)") == RUNS // 2
    assert count("-t", "ring", "-n", "6", "--seed", "1") == RUNS // 8
    assert count("-n", "4,6") == RUNS
    assert count("--lr", "0.01") == RUNS // 3
    assert count("--where", "noise=10") == count("--where", "noise=1e1") == RUNS // 2
    assert count("--where", "lr=1e-2", "--where", "seed=1") == RUNS // 6
    assert count("--where", "noise=10", "--where", "momentum=0.5") == RUNS // 4


@pytest.mark.parametrize(
    "options, words",
    [
        (("--rule", "gt"), "no run has rule gt; there are dat"),
        (("-n", "5"), "no run has nodes 5; there are 4, 6"),
        (("--where", "noise"), "--where noise: give a name and a value"),
        (("--where", "noise=3"), "no run has noise 3; there are 1, 10"),
        (("--where", "nosie=3"), "unknown setting 'nosie'; did you mean noise?"),
        (("--curves",), "--curves is for exports"),
        (("-n", "many"), "'many' is not a whole number"),
        (("--metric", "speed"), "no metric 'speed'; there are Gamma"),
        (("--metric", "speed", "--all"), "no metric 'speed'"),
        (("--csv", "/nowhere/a.csv"), "cannot write /nowhere/a.csv"),
        (("--parquet", "/nowhere/a.parquet"), "cannot write /nowhere/a.parquet"),
    ],
)
def test_mistakes_are_one_line(options, words, store, run_cli):
    code, out, err = run_cli("results", store, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.slow
def test_studies_that_share_a_store_but_little_else(run_cli, tmp_path):
    path = tmp_path / "s.sqlite"
    common = {"steps": 50, "nodes": 4, "rules": ["dat"], "topologies": ["ring"]}
    for change in (
        {"lr": 0.01, "seeds": [0]},
        {"lr": 0.02, "seeds": [1]},
        {"lr": 0.01, "seeds": [0], "record": 7},
        {"lr": 0.01, "problem": {"noise": 10.0}},
        {"lr": 0.01, "problem": {"name": "logistic"}},
    ):
        run_study(parse({**common, **change}), path, executor=workers.threads)
    code, out, err = run_cli("results", path)
    assert (code, err) == (0, "")
    assert len([line for line in out.splitlines() if line.startswith(" ring")]) == 4
    assert "smallest and largest of 1 or 3 seeds" in out


def test_results_of_another_revision_are_still_shown(store, run_cli, monkeypatch):
    monkeypatch.setattr("klatsch.study.cases.REVISION", 3)
    code, out, err = run_cli("results", store)
    assert (code, err) == (0, "")
    assert "dat" in out


@pytest.mark.slow
def test_two_comparisons_in_one_store_are_two_studies(run_cli, in_threads, tmp_path):
    for rule in ("dat", "gt"):
        options = ("--rules", rule, "-n", 4, "--steps", 50, "--seeds", 1, "--lr", 0.01, "--workers", 1)
        assert run_cli("run", *options, "--store", tmp_path / "s.sqlite")[0] == 0
    code, out, _ = run_cli("report", tmp_path / "s.sqlite", "-o", tmp_path / "r.html")
    assert code == 0
    assert "2 pages" in out


def test_a_store_that_is_not_there(run_cli, tmp_path):
    code, _, err = run_cli("results", tmp_path / "s.sqlite")
    assert code == 2
    assert "there is no store" in err
    with Store(tmp_path / "e.sqlite") as begun:
        begun.remember(parse({"steps": 5, "nodes": 4, "rules": ["dat"], "topologies": ["ring"]}))
    assert "holds no finished run yet" in run_cli("results", tmp_path / "e.sqlite")[2]


def test_tables(store, run_cli):
    code, out, _ = run_cli("results", store, "--rule", "dat", "-t", "ring")
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines() if line.startswith(" ring")] == [
        ["ring", noise, nodes, "dat"] for noise in ("1", "10") for nodes in ("4", "6")
    ]
    code, out, _ = run_cli("results", store, "--all", "--lr", "5e9", "--rule", "dsgd", "-n", 4)
    assert code == 0
    assert out.count("diverged") == 8


@pytest.mark.parametrize("curves", [False, True])
def test_csv_and_parquet_hold_what_the_store_holds(curves, store, run_cli, tmp_path):
    import pyarrow.parquet as pq

    options = ["--curves"] if curves else []
    code, out, _ = run_cli("results", store, "--csv", tmp_path / "a.csv", "--parquet", tmp_path / "a.parquet", *options)
    lines = RUNS * (4 if curves else 1)
    assert code == 0
    assert out.count(f"{lines} lines written") == 2
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert len(rows) == len(table) == lines
    with Store(store, read_only=True) as opened:
        outcomes = opened.outcomes(row["key"] for row in table)
    for text, typed in zip(rows, table, strict=True):
        outcome = outcomes[typed["key"]]
        k = list(outcome.steps).index(typed["step"])
        assert float(text["distance"]) == typed["distance"] == outcome.metrics["distance"][k]
        assert int(text["nodes"]) == typed["nodes"]
        assert typed["step"] == 60 or curves
    assert any(np.isinf(typed["distance"]) for typed in table)


def test_without_pyarrow_it_says_what_to_install(store, run_cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = run_cli("results", store, "--parquet", tmp_path / "a.parquet")
    assert code == 2
    assert "pip install 'klatsch[parquet]'" in err


def test_two_stores_are_compared(store, run_cli, tmp_path):
    other = tmp_path / "other.sqlite"
    shutil.copy(store, other)
    base = sqlite3.connect(other)
    base.execute("UPDATE metrics SET value = 2 * value WHERE run = 1")
    base.execute("DELETE FROM metrics WHERE run = 2")
    base.execute("DELETE FROM runs WHERE id = 2")
    base.commit()
    base.close()
    with Store(other) as opened, opened.transaction():
        opened._seal(1)
    code, out, err = run_cli("results", store, "--compare", other)
    assert code == 0, err
    assert "1 run only in" in " ".join(out.split())
    found = json.loads(run_cli("results", store, "--compare", other, "--json")[1])
    assert (found["only_here"], found["only_there"]) == (1, 0)
    assert sorted({row["largest"] for row in found["differences"]}) == [0.0, 0.5]
    assert sum(row["runs"] for row in found["differences"]) == len(all_runs(store)) - 1


def all_runs(store):
    with Store(store, read_only=True) as opened:
        return opened.runs()


def test_a_table_for_latex(store, run_cli):
    code, out, _ = run_cli("results", store, "--latex")
    assert code == 0
    assert out.startswith("\\begin{tabular}{l")
    assert out.rstrip().endswith("\\end{tabular}")
    body = out.split("\\midrule\n")[1].split("\\bottomrule")[0].splitlines()
    rows = json.loads(run_cli("results", store, "--json")[1])["rows"]
    assert len(body) == len(rows)
    assert {line.count(" & ") for line in body} == {out.splitlines()[2].count(" & ")}


def test_names_in_latex_are_texts():
    assert _in_latex("a_b & 50% $x$ \\cmd") == r"a\_b \& 50\% \$x\$ \textbackslash{}cmd"
    assert _in_latex("1.5e-05*") == r"$1.5 \cdot 10^{-5}$*"


def test_a_frame_has_options_as_columns(store, monkeypatch):
    pytest.importorskip("pandas")
    with Store(store, read_only=True) as opened:
        frame, curves = opened.frame(), opened.frame(curves=True)
        cases = [case for _, case in opened.runs()]
    assert len(frame) == len(cases)
    assert len(curves) > len(frame)
    for name in {name for case in cases for name in (*case.rule_options, *case.topology_options)}:
        assert name in frame
    assert {"distance", "bytes_sent", "nodes", "rule"} <= set(frame)


def test_without_pandas_it_says_what_to_install(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with Store(store, read_only=True) as opened, pytest.raises(ValueError, match=r"pip install 'klatsch\[pandas\]'"):
        opened.frame()
