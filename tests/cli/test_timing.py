"""Studies beside a clock: seconds and bytes in tables, exports, figures and reports, computed when they are shown."""

import csv
import json

import pytest

from klatsch import rules, topology
from klatsch.clock import Clock
from klatsch.report import figures
from klatsch.study import Store, expand, parse, run_study, workers
from klatsch.study.cases import elapsed, exchange_of
from klatsch.study.choices import summarize, timed
from tests.support.pictures import check_picture

STUDY = {
    "steps": 60,
    "nodes": 4,
    "seeds": 1,
    "lr": [0.001, 0.01],
    "record": 4,
    "rules": ["dat", {"name": "dat", "order": "cta"}],
    "topologies": ["ring", "complete", {"name": "ring", "every": 8, "wire": "int8"}],
    "problem": {"dim": 500, "noise": 1.0},
}
WAN = ("--gradient", "0.05", "--network", "wan")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("timing") / "s.sqlite"
    run_study(parse(STUDY), path, executor=workers.threads)
    return path


def expected(steps):
    """What the clock says of each, by rule and graph."""
    clock, found = Clock(0.05, "wan"), {}
    for order in ("atc", "cta"):
        for name, options in (("ring", {}), ("complete", {}), ("ring", {"every": 8, "wire": "int8"})):
            graph = topology.make(name, 4, **options)
            found[order, name, graph.wire] = clock.seconds(rules.make("dat", 0.1, order=order), graph, 500, steps)
    return found


def test_rows_have_the_seconds_of_their_clock(store, run_cli):
    code, out, _ = run_cli("results", store, *WAN, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert len(rows) == 6
    wanted = expected(rows[0]["steps"])
    for row in rows:
        order, wire = "cta" if "cta" in row["rule"] else "atc", "int8" if "int8" in row["topology"] else "float32"
        name = row["topology"].partition(" ")[0].partition("/")[0]
        assert row["elapsed"] == pytest.approx(wanted[order, name, wire], rel=1e-12)
    assert json.loads(run_cli("results", store, "--json")[1])["rows"][0]["elapsed"] is None


def test_tables_show_time_and_bytes_where_there_is_a_clock(store, run_cli):
    code, out, _ = run_cli("results", store, *WAN)
    assert code == 0
    assert "time: by the clock, until all nodes are done; sent: by a node" in " ".join(out.split())
    assert "time" not in run_cli("results", store)[1]


def test_exports_have_bytes_and_with_a_clock_seconds(store, run_cli, tmp_path):
    file = tmp_path / "a.csv"
    assert run_cli("results", store, *WAN, "--rule", "dat", "-t", "ring", "--csv", file, "--curves")[0] == 0
    with file.open() as opened:
        lines = [line for line in csv.DictReader(opened) if line["lr"] == "0.01" and line["topology"] == "ring"]
    lines = [line for line in lines if "cta" not in line["rule"]]
    wanted = expected([int(line["step"]) for line in lines])["atc", "ring", "float32"]
    assert [float(line["elapsed"]) for line in lines] == pytest.approx(wanted, rel=1e-12)
    # To two neighbours, two vectors of 500 numbers in each round.
    assert [float(line["bytes_sent"]) for line in lines] == [int(line["step"]) * 2 * 2 * 2000 for line in lines]
    assert run_cli("results", store, "--csv", file)[0] == 0
    assert "elapsed" not in file.read_text().splitlines()[0]


@pytest.mark.parametrize(
    "across, label", [("seconds", "seconds"), ("bytes", "MB sent per node"), ("rounds", "rounds t")]
)
def test_figures_against_seconds_and_bytes(store, across, label):
    with Store(store, read_only=True) as opened:
        found = timed(summarize(opened.runs(), opened), Clock(0.05, "wan"))
    figure = figures.plot(found, across, "a title")
    assert {axis.get_xlabel() for axis in figure.axes} == {label}
    assert len(figure.axes) == (3 if across == "rounds" else 1)  # by graph, or all together
    if across == "seconds":
        ends = sorted(line.get_xdata()[-1] for line in figure.axes[0].lines if len(line.get_xdata()) == 4)
        assert ends == pytest.approx(sorted(row.elapsed[-1] for row in found))


def test_silent_rounds_send_nothing(store, run_cli, tmp_path):
    file = tmp_path / "a.csv"
    run_cli("results", store, "--csv", file, "--curves")
    with file.open() as opened:
        lines = [line for line in csv.DictReader(opened) if "ring/8" in line["topology"]]
    by_step = {int(line["step"]): float(line["bytes_sent"]) for line in lines}
    assert by_step[1] == 0
    assert by_step[60] > 0
    assert by_step == {step: pytest.approx(by_step[60] * (step // 8) / 7) for step in by_step}


def test_equal_graphs_of_different_names():
    """On the complete graph nodes use an all-reduce, also with three, where it is a ring."""
    case = expand(parse({**STUDY, "nodes": 3, "topologies": ["ring", "complete"]}))[0]
    clock = Clock(0.05, "wan")
    found = {each.topology: elapsed(each, exchange_of(each), clock, [60]) for each in case}
    wanted = {
        name: tuple(clock.seconds(rules.make("dat", 0.1, order="cta"), topology.make(name, 3), 500, [60]))
        for name in ("ring", "complete")
    }
    assert found == wanted
    assert wanted["ring"] != wanted["complete"]


def test_plots_and_reports(store, run_cli, tmp_path):
    code, _, err = run_cli("results", store, *WAN, "--plot", tmp_path / "a.png", "--against", "seconds")
    assert (code, err) == (0, f"drawn to {tmp_path / 'a.png'}\n")
    check_picture(tmp_path / "a.png")
    code, _, _ = run_cli("report", store, *WAN, "--against", "seconds", "-o", tmp_path / "a.html")
    assert code == 0
    assert "<th>seconds</th>" in (tmp_path / "a.html").read_text().replace(' scope="col"', "")
    assert run_cli("report", store, "-o", tmp_path / "b.html")[0] == 0
    assert (tmp_path / "a.html").read_text().count("<svg") == (tmp_path / "b.html").read_text().count("<svg") + 1


def test_run_takes_a_clock(run_cli, in_threads, tmp_path):
    options = ["--rules", "dat", "-n", "4", "--steps", "20", "--lr", "0.01", "--seeds", "1", "--json"]
    plot = ["--plot", tmp_path / "a.png", "--against", "seconds"]
    code, out, _ = run_cli("run", *options, *WAN, *plot)
    assert code == 0
    assert json.loads(out)["rows"][0]["elapsed"][-1] > 20 * 0.05
    check_picture(tmp_path / "a.png")


@pytest.mark.parametrize(
    "options, words",
    [
        (("--plot", "a.png", "--all"), "--plot draws the best learning rates; leave --all, --csv and --parquet out"),
        (("--network", "wan"), "--network needs to know how long a gradient takes; give --gradient 0.05"),
        (("--against", "seconds"), "--against seconds needs to know how long a gradient takes"),
        (("--gpus", "8"), "--gpus needs to know how long a gradient takes"),
        (("--against", "hours"), "unknown axis 'hours'"),
        (("--gradient", "fast"), "gradient = 'fast'; give seconds, such as 0.05, or a distribution"),
        (("--gradient", "0.05", "--network", "wam"), "unknown network 'wam'; did you mean wan?"),
        (("--gradient", "0.1,0.2,0.3"), "3"),
        (("--gradient", "999999999*0.05"), "nodes = 999999999; give a whole number from 0 to 1000000"),
        (("--style", "a.mplstyle"), "--style is for a figure; give --plot FILE as well"),
        (("--latex", "--all"), "--latex prints the best learning rates"),
        (("--compare", "/nowhere/b.sqlite"), "there is no folder /nowhere"),
        (("--gradient", "0.05", "--plot", "/nowhere/a.png"), "there is no folder /nowhere"),
    ],
)
def test_mistakes_are_one_line(options, words, store, run_cli):
    code, out, err = run_cli("results", store, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
