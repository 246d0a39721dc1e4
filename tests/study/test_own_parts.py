"""Rules, problems and topologies of one's own by `file.py:name`, wherever a study runs."""

import csv
import json
import re
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import klatsch
from klatsch import own, problems, rules, topology
from klatsch.study import Store, expand, load, parse, run_study, workers
from tests.support import signs
from tests.support.cluster import Cluster
from tests.support.on_ranks import assert_same_as_in
from tests.support.processes import Ranks

ROOT = Path(__file__).parents[2]
EXTRA = '''from dataclasses import dataclass

from klatsch.rules import Rule


@dataclass(frozen=True)
class Extra(Rule):
    """EXTRA: w <- w + mix(w) - (w_prev + mix(w_prev)) / 2 - lr (g - g_prev), first mix(w) - lr g."""

    lr: float

    def init(self, x):
        return {"w": x, "w_prev": x, "mixed_prev": x, "g_prev": 0 * x}  # all nodes start at x, so that mix(x) = x

    def update(self, s, grad, flow, t, lr):
        (mixed,) = flow.mix(s["w"])
        w = s["w"] + mixed - (s["w_prev"] + s["mixed_prev"]) / 2 - lr * (grad - s["g_prev"])
        return {"w": w, "w_prev": s["w"], "mixed_prev": mixed, "g_prev": grad}
'''

PARTS = '''import networkx as nx
import torch

from klatsch import problems, topology


def band(n, width=2):
    """Everyone talks to the next nodes on both sides."""
    return topology.from_networkx(nx.circulant_graph(n, range(1, width + 1)))


def wrong(n):
    return "a ring"


class Wishes(problems.Problem):
    """Every node wants to be near its own number."""

    headline = problems.Headline("off", "distance from the mean of all wishes")

    def __init__(self, nodes, far=1.0, seed=0, words="none"):
        self.nodes, self.dim = nodes, 1
        draw = torch.Generator().manual_seed(seed)
        self.wishes = far * torch.randn(nodes, 1, dtype=torch.float64, generator=draw)

    def start(self):
        return torch.zeros(1, dtype=torch.float64)

    def grad(self, x, t, nodes=None):
        return x - (self.wishes if nodes is None else self.wishes[list(nodes)])[:, None, :]

    def metrics(self, x):
        return {"off": (x - self.wishes.mean(0)).square().mean((0, 2))}
'''

STUDY = """
steps = 60
nodes = 3
seeds = 2
record = 5
lr = [1e-3, 4e-3]
rules = ["mine.py:Extra", "d2"]
topologies = ["ring"]
problem = { dim = 4, heterogeneity = 10.0 }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(EXTRA)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def errors(store, rule="mine.py:Extra"):
    """The course of the error by learning rate and seed."""
    with Store(store, read_only=True) as opened:
        keys = {(case.lr, case.seed): key for key, case in opened.runs() if case.label == rule}
        found = opened.outcomes(keys.values())
        metric = next(name for name in ("distance", "off") if name in next(iter(found.values())).metrics)
        return {run: found[key].metrics[metric] for run, key in keys.items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for run in expected:
        np.testing.assert_allclose(found[run], expected[run], rtol=1e-8)


def test_a_rule_in_a_file_runs_everywhere_with_the_same_numbers(folder, run_cli, prepared):
    assert len(EXTRA.splitlines()) <= 25
    rates, expected = (1e-3, 4e-3), {}
    for seed in (0, 1):  # in Python, both learning rates at once
        problem = problems.LeastSquares(3, dim=4, heterogeneity=10.0, seed=seed)
        rule = rules.make("mine.py:Extra", lr=list(rates))
        curves = klatsch.simulate(problem, rule, topology.ring(3), 60, record=5).metrics["distance"]
        expected |= {(lr, seed): curves[:, k].numpy() for k, lr in enumerate(rates)}

    code, out, err = run_cli("run", "study.toml", "--workers", 2)  # as a study, in worker processes
    assert (code, err) == (0, "")
    assert "8 runs new" in out
    same(errors("study.sqlite"), expected)

    assert_same_as_in("study.sqlite", Ranks(prepared, folder, 3, "on_ranks.study", file=str(folder / "study.toml")))

    options = [
        "-n",
        "3",
        "--steps",
        "60",
        "--seeds",
        "2",
        "--lr",
        "0.001,0.004",
        "--set",
        "dim=4",
        "--set",
        "heterogeneity=10",
        "--json",
    ]
    code, out, err = run_cli("run", "--rules", "mine.py:Extra", *options)  # by its name alone
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["rows"]
    assert row["rule"] == "mine.py:Extra"
    for lr, error in row["final_by_lr"].items():
        assert error == pytest.approx(np.mean([expected[float(lr), seed][-1] for seed in (0, 1)]), rel=1e-8)


@pytest.mark.processes
def test_a_problem_and_a_topology_in_a_file(folder, run_cli):
    options = ("-t", "parts.py:band", "--problem", "parts.py:Wishes", "-n", "6,7", "--steps", 100, "--seeds", 2)
    code, out, err = run_cli("run", "--rules", "dsgd,gt", *options, "--store", "s.sqlite", "--workers", 2)
    assert (code, err) == (0, "")
    assert "parts.py:Wishes: distance from the mean of all wishes" in out
    assert str(folder) not in out
    with Store("s.sqlite", read_only=True) as store:
        assert {case.graph_label for _, case in store.runs()} == {"parts.py:band"}
    file = folder / "own.toml"
    file.write_text(
        'steps = 50\nnodes = 6\nseeds = 1\nlr = 0.1\nrules = ["gt"]\n'
        'topologies = [{ name = "parts.py:band", width = [1, 2] }]\n'
        'problem = { name = "parts.py:Wishes", far = [1.0, 9.0], words = "some" }\n'
    )
    found = run_study(load(file))
    assert [row.topology for row in found.rows] == ["parts.py:band (width 1)"] * 2 + ["parts.py:band (width 2)"] * 2
    assert found.rows[0].setting_text == "far 1, words some"
    near, far = found.rows[:2]
    assert far.value == pytest.approx(81 * near.value)
    wide = own.load("topology", "parts.py:band")(6)
    expected = klatsch.simulate(own.load("problem", "parts.py:Wishes")(6), rules.make("gt", lr=0.1), wide, 50)
    assert found.rows[2].value == pytest.approx(float(expected.metrics["off"][-1]), rel=1e-9)


@pytest.mark.slow
def test_results_and_report_do_not_need_the_files(folder, in_threads, run_cli):
    (folder / "own.toml").write_text(
        STUDY.replace('["ring"]', '["parts.py:band"]').replace(
            "dim = 4, heterogeneity = 10.0", 'name = "parts.py:Wishes"'
        )
    )
    assert run_cli("run", "own.toml")[0] == 0
    shown = run_cli("results", "own.sqlite")[1]
    (folder / "mine.py").unlink()
    (folder / "parts.py").unlink()
    assert run_cli("results", "own.sqlite")[1] == shown
    assert str(folder) not in shown
    assert "mine.py:Extra" in run_cli("results", "own.sqlite", "--all")[1]
    assert run_cli("results", "own.sqlite", "--rule", "mine.py:Extra", "--csv", "runs.csv")[0] == 0
    assert "parts.py:band" in (folder / "runs.csv").read_text()
    code, _, err = run_cli("report", "own.sqlite")
    assert (code, err) == (0, "")
    page = (folder / "report.html").read_text()
    assert "mine.py:Extra" in page
    assert "distance from the mean of all wishes" in page.lower()
    code, _, err = run_cli("run", "own.toml")
    assert code == 2
    assert "there is no file" in err


def test_schedule_is_the_studys_word(folder, run_cli):
    (folder / "mine.py").write_text(EXTRA.replace("    lr: float\n", '    lr: float\n    schedule: str = "warm"\n'))
    code, _, err = run_cli("run", "study.toml")
    assert code == 2
    assert "mine.py:Extra has an option schedule, which is the study's word; give it another name" in err


@pytest.mark.slow
def test_a_key_knows_the_source_and_not_the_place(folder, run_cli):
    keys = [case.key for case in expand(load("study.toml"))[0]]
    (folder / "elsewhere").mkdir()
    for name in ("mine.py", "study.toml"):
        shutil.copy(name, folder / "elsewhere" / name)
    assert [case.key for case in expand(load("elsewhere/study.toml"))[0]] == keys
    assert run_cli("run", "study.toml")[0] == 0
    assert "0 runs new" in run_cli("run", "elsewhere/study.toml", "--store", "study.sqlite")[1]
    (folder / "mine.py").write_text(EXTRA.replace("lr * (grad", "0.5 * lr * (grad"))
    edited = [case.key for case in expand(load("study.toml"))[0]]
    assert len(set(keys) & set(edited)) == 4  # those of d2
    assert "4 runs new" in run_cli("run", "study.toml")[1]
    rows = json.loads(run_cli("results", "study.sqlite", "--json")[1])["rows"]
    names = {row["rule"]: row["error"] for row in rows}
    assert len(names) == len(rows) == 3  # both versions, told apart, and d2
    assert all(re.fullmatch(r"d2|mine.py:Extra \[[0-9a-f]{6}\]", name) for name in names)
    assert run_cli("results", "study.sqlite", "--csv", "r.csv")[0] == 0
    with Path("r.csv").open() as file:
        assert {line["rule"] for line in csv.DictReader(file)} == set(names)
    for options in ((), ("--all",)):
        shown = run_cli("results", "study.sqlite", *options)[1]
        assert all(name in shown for name in names)


SAME = """from klatsch import problems, rules, topology


def dat(lr, order="atc"):
    return rules.make("dat", lr=lr, order=order)


def graph(n, family="one_peer_exponential"):
    return topology.make(family, n)


class Same(problems.LeastSquares):
    pass
"""


@pytest.mark.slow
def test_parts_of_ones_own_have_bytes_and_seconds_like_built_in_ones(folder, in_threads, run_cli):
    """Also after their file is gone, and where a schedule of meetings was stored."""
    (folder / "same.py").write_text(SAME)
    channels = ['every = 4, wire = "int8"', "late = 2", 'meets = "pairwise 0.1 over wan"']
    theirs = ['"one_peer_exponential"', *(f'{{ name = "ring", {channel} }}' for channel in channels)]
    ours = ['"same.py:graph"', *(f'{{ name = "same.py:graph", family = "ring", {channel} }}' for channel in channels)]
    costs = {}
    for name, rule, graphs, problem in (
        ("theirs", "dat", theirs, "dim = 9"),
        ("ours", "same.py:dat", ours, 'name = "same.py:Same", dim = 9'),
    ):
        (folder / f"{name}.toml").write_text(
            f'steps = 30\nnodes = 4\nseeds = 1\nrecord = 3\nlr = 0.01\nrules = ["{rule}"]\n'
            f"topologies = [{', '.join(graphs)}]\nproblem = {{ {problem} }}\n"
        )
        code, _, err = run_cli("run", f"{name}.toml")
        assert code == 0, err
        (folder / "same.py").rename(folder / "gone.py")
        options = ("--gradient", "lognormal(0.05, 0.5)", "--network", "wan", "--csv", f"{name}.csv", "--curves")
        assert run_cli("results", f"{name}.sqlite", *options)[0] == 0
        (folder / "gone.py").rename(folder / "same.py")
        with Path(f"{name}.csv").open() as file:
            costs[name] = sorted((line["step"], line["bytes_sent"], line["elapsed"]) for line in csv.DictReader(file))
    assert len(costs["ours"]) == 12
    assert costs["ours"] == costs["theirs"]


def test_a_rule_that_no_clock_understands_says_so(folder, in_threads, run_cli):
    odd = EXTRA.replace('(mixed,) = flow.mix(s["w"])', '(mixed,) = flow.mix(s["w"]) if t % 2 else (s["w"],)')
    (folder / "mine.py").write_text(odd)
    assert run_cli("run", "study.toml")[0] == 0
    code, out, _ = run_cli("results", "study.sqlite", "--gradient", "0.1")
    assert code == 0
    assert "no time of mine.py:Extra on ring: " in out


def test_a_file_that_changes_while_a_study_waits_is_not_taken_for_the_old_one(folder):
    study = load("study.toml")
    expanded = expand(study)
    (folder / "mine.py").write_text(EXTRA + "\n")
    with pytest.raises(ValueError, match=r"mine.py:Extra has changed since the study was read"):
        run_study(study, expanded=expanded, executor=workers.threads)


def test_other_options_of_a_rule_are_rows_and_functions_make_rules(folder):
    more = EXTRA.replace("    lr: float\n", "    lr: float\n    slow: float = 1.0\n").replace(
        "- lr *", "- self.slow * lr *"
    )
    more += "\n\ndef half(lr, times=1):\n    return Extra(lr, 0.5 * times)\n\n\nclass Plain(Rule):\n"
    more += (
        "    def __init__(self, lr):\n        self.rule, self.lr = Extra(lr), lr\n        self.init = self.rule.init\n"
    )
    more += "        self.query = self.output = lambda s: s['w']\n        self.update = self.rule.update\n"
    (folder / "mine.py").write_text(more)
    content = {"steps": 100, "nodes": 4, "seeds": 1, "lr": [1e-3, 2e-3], "topologies": ["ring"], "record": 3}
    entries = [{"name": "mine.py:Extra", "slow": [1.0, 0.5]}, {"name": "mine.py:half", "times": 2}, "mine.py:Plain"]
    rows = run_study(parse({**content, "rules": entries}), executor=workers.threads).rows
    assert [row.rule for row in rows] == [
        *("mine.py:Extra (slow 1)", "mine.py:Extra (slow 0.5)", "mine.py:half (times 2)", "mine.py:Plain")
    ]
    for k in (2, 3):
        np.testing.assert_allclose(rows[k].final, rows[0].final, rtol=1e-9)
    assert rows[1].value != rows[0].value
    with pytest.raises(ValueError, match=r"mine.py:Extra has no option 'fast'; it takes lr, slow"):
        parse({**content, "rules": [{"name": "mine.py:Extra", "fast": 1}]})


@pytest.mark.soak
def test_a_dask_cluster_runs_parts_of_ones_own(folder, run_cli, prepared):
    pytest.importorskip("distributed", reason="needs Dask: pip install 'klatsch[dask]'")
    (folder / "workers").mkdir()
    cluster = Cluster(prepared, folder / "workers")  # whose current folder is another one
    code, _, err = run_cli("run", "study.toml", "--dask", cluster.address, "--store", "dask.sqlite")
    assert (code, err) == (0, "")
    assert run_cli("run", "study.toml")[0] == 0
    same(errors("dask.sqlite"), errors("study.sqlite"))


WRONG = {
    "no file": ("gone.py:Extra", r"there is no file .*gone.py; give FILE.py:NAME"),
    "no name": ("mine.py:Extar", r"mine.py has no Extar; did you mean Extra\?"),
    "no such name": ("mine.py:Other", r"mine.py has no Other; it has Extra"),
    "no identifier": ("mine.py:", r"'mine.py:'; give FILE.py:NAME"),
    "not callable": ("mine.py:Number", r"Number in .*mine.py is a int; give a class or function that makes a rule"),
    "no rule": ("mine.py:nothing", r"the rule is a NoneType; give one"),
    "old update": ("mine.py:Old", r"Old.update takes \(s, grad, mix, t\); let it take \(s, grad, flow, t, lr\)"),
    "raises": ("mine.py:broken", r"mine.py, line \d+: ZeroDivisionError: division by zero; fix it and rerun"),
    "no arguments": ("mine.py:bare", r"bare has no option 'lr'"),
}
MORE = """

Number = 3


def nothing(lr):
    pass


def bare():
    pass


class Mixes(Extra):
    def update(self, s, grad, flow, t, lr):
        return {"w": flow.mix(s["w"] - lr * grad)}


def broken(lr):
    return 1 / 0


class Old(Extra):
    def update(self, s, grad, mix, t):
        return s
"""


@pytest.mark.parametrize("name, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_rule_is_one_line(name, message, folder, run_cli):
    (folder / "mine.py").write_text(EXTRA + MORE)
    code, out, err = run_cli("run", "--rules", name, "-n", 4, "--steps", 5, "--seeds", 1)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_a_rule_that_cannot_be_run_is_refused_before_anything_is_run(folder, run_cli, monkeypatch):
    (folder / "mine.py").write_text(EXTRA + MORE)
    monkeypatch.setattr(import_module("klatsch.study.execute"), "execute", None)
    code, out, err = run_cli("run", "--rules", "dsgd,mine.py:Mixes", "-n", 4, "--steps", 5, "--seeds", 1)
    assert (code, out) == (2, "")
    assert "Mixes.update returns a dictionary of w where the state is" in err


@pytest.mark.parametrize(
    "source, message",
    [
        ("import nothing_of_that_name\n", r"mine.py, line 1: ModuleNotFoundError: No module named"),
        ("a = 1\ndef f(:\n", r"mine.py, line 2: SyntaxError: invalid syntax"),
        ("raise SystemExit(3)\n", r"mine.py, line 1: SystemExit: 3"),
        ("\0\0", r"mine.py.*(SyntaxError|ValueError)"),
    ],
)
def test_a_file_that_cannot_be_executed_is_one_line(source, message, folder, run_cli):
    (folder / "mine.py").write_text(source)
    code, _, err = run_cli("run", "study.toml")
    assert code == 2
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_what_is_wrong_with_topologies_and_problems_is_one_line(folder, run_cli):
    text = PARTS.replace('headline = problems.Headline("off", ', 'other = ("off", ')
    (folder / "parts.py").write_text(
        text + "\n\nclass Flat(Wishes):\n    def grad(self, x, t, nodes=None):\n        return x[:, 0]\n"
    )
    for options, message in (
        (("-t", "parts.py:wrong"), r"parts.py:wrong returns a str; return a Topology"),
        (("-t", "parts.py:bnad"), r"parts.py has no bnad; did you mean band\?"),
        (("--problem", "parts.py:Wishes"), r"has no metric 'distance' .* headline = problems.Headline\('off'"),
        (("--problem", "parts.py:Flat"), r"parts.py:Flat: grad\(x, 1\) has shape \(4, 1\); give \(4, 1, 1\)"),
        (("--problem", "parts.py:band"), r"parts.py:band gives a Topology; give a problem"),
    ):
        code, _, err = run_cli("run", "--rules", "dsgd", "-n", 4, "--steps", 5, "--seeds", 1, *options)
        assert code == 2, options
        assert re.search(message, err), err


@pytest.mark.processes
def test_an_error_in_the_middle_of_a_run_has_a_place(folder, run_cli):
    (folder / "mine.py").write_text(EXTRA.replace("(mixed,) =", "t > 3 and s['u']\n        (mixed,) ="))
    for more in ((), ("--workers", 1)):
        code, out, err = run_cli("run", "study.toml", *more)
        assert (code, out) == (2, "")
        assert re.search(r"klatsch: error: .*mine.py, line 16: KeyError: 'u'", err)
        assert "Traceback" not in err


def test_two_files_of_one_name(folder):
    (folder / "other").mkdir()
    (folder / "other" / "mine.py").write_text("def Extra(lr):\n    return 'another'\n")
    assert own.load("rule", "other/mine.py:Extra")(1) == "another"
    assert own.load("rule", "mine.py:Extra")(1.0).lr == 1.0


def test_an_encoding_of_ones_own_in_a_study(folder, in_threads, run_cli):
    """Known by its content, found beside the study, shown without its folder; its bytes are those that it says."""
    (folder / "signs.py").write_text(
        Path(signs.__file__).read_text().replace("Path(__file__).parents[2]", f"Path({str(ROOT)!r})")
    )
    graphs = 'topologies = [{ name = "ring", wire = ["int8", "signs.py:Signs"] }]'
    (folder / "study.toml").write_text(STUDY.replace('topologies = ["ring"]', graphs).replace('"mine.py:Extra", ', ""))
    assert run_cli("run", "study.toml")[0] == 0
    cases, _ = expand(load("study.toml"))
    assert {case.graph_label for case in cases} == {"ring (wire int8)", "ring (wire signs.py:Signs)"}
    (folder / "elsewhere").mkdir()
    for name in ("study.toml", "signs.py"):
        shutil.copy(folder / name, folder / "elsewhere" / name)
    assert [case.key for case in expand(load("elsewhere/study.toml"))[0]] == [case.key for case in cases]
    with (folder / "signs.py").open("a") as file:
        file.write("# edited")
    kept = {case.key for case in expand(load("study.toml"))[0]} & {case.key for case in cases}
    assert len(kept) == len(cases) // 2
    (folder / "signs.py").unlink()
    options = ("--gradient", "0.1", "--network", "wan", "--csv", "r.csv", "--curves")
    assert run_cli("results", "study.sqlite", *options)[0] == 0
    with Path("r.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if "signs.py:Signs" in line["topology"]]
    assert lines
    assert all(float(line["elapsed"]) > 0 for line in lines if int(line["step"]) > 0)  # without its file
    given = ("topology", "ring", "-n", 4, "--set", f"wire={signs.WIRE}", "--params", 256, "--json")
    assert json.loads(run_cli(*given)[1])["bytes_per_round_dsgd"] == 2 * (2 + 32)
