"""Schedules, averages and corrections: the sentences, the figures, and the size of the studies."""

import json

import numpy as np
import pytest

from klatsch.report import figures
from klatsch.report import schedule_free as paper
from klatsch.report.claims import Sentence
from klatsch.report.targets import GROUPS, TARGETS, study_of
from klatsch.study import Row, Store, expand
from klatsch.study.choices import screened
from tests.support.pictures import check_picture

pytestmark = pytest.mark.slow

DSGD, DAT, DAT_D2 = paper.OF_DSGD, paper.OF_DAT, paper.OF_DAT_D2
DECAYED = paper.decayed(DSGD)


def row(rule, end, half=0.7, topology="ring", nodes=16, alpha=0.1, merged=None, worst=None):
    """Three seeds 0.1 points apart, at half time and at the end."""
    seeds = np.array([-0.001, 0.0, 0.001])[:, None, None]

    def curves(value):
        return np.array([half, value])[None, :, None] + seeds

    return Row(
        *(rule, topology, nodes, (0.1,), (25, 50), curves(end), curves(0.1), 1.0, {"alpha": alpha}),
        metric="accuracy",
        largest=True,
        epochs=50,
        merged=curves(end if merged is None else merged),
        worst=curves(end if worst is None else worst),
    )


def test_a_rule_with_decay_is_called_so():
    assert paper.decayed("d2") == "d2 (cosine)"
    assert DECAYED == "dsgd (momentum 0.9, cosine)"


def test_names_of_the_sentences_are_those_of_rows():
    with Store(":memory:") as store:
        cases = {name: expand(study_of(name, "paper"))[0] for name in ("averages", "schedules")}
        short = screened(study_of("schedules", "paper"), cases["schedules"], store).short
    labels = {case.label for case in cases["schedules"]}
    assert {DSGD, DECAYED, paper.OF_PAPER, paper.decayed(paper.OF_PAPER), DAT, DAT_D2, "d2", "d2 (cosine)"} <= labels
    assert set(paper.DRAWN) <= labels
    tried = {case.label for case in cases["averages"]}
    assert {sentence.claim.partition(" is level")[0] for sentence in paper.FROM_THE_BEST} <= tried
    # What one study has run, the other finds: the learning rates on the ring of 16 are chosen already.
    ring = {case.key for case in short if (case.topology, case.nodes) == ("ring", 16)}
    assert ring <= {case.key for case in cases["averages"]}
    orders = {f"{case.label[:-6]})" for case in expand(study_of("orders", "paper"))[0]}
    assert {sentence.claim.partition(" in the order")[0] for sentence in TARGETS["orders"].sentences} == orders
    assert {f"{case.label[:-6]})" for case in expand(study_of("orders", "quick"))[0]} == {DAT}


def test_the_size_of_the_studies():
    cases, _ = expand(study_of("schedules", "paper"))
    points = {(case.graph_label, case.nodes, case.setting) for case in cases}
    assert len(points) == (3 * 3 + 2) * 3  # ring, Base-2 and complete graph of three sizes, torus of two; alphas
    ring = {(case.label, "cosine" in case.label) for case in cases if case.topology == "ring"}
    assert sum(decay for _, decay in ring) == 8  # of dsgd, the paper's dat, d2, gt, qg, dat, dat-d2, dat-gt
    anytime = {case.label for case in expand(study_of("averages", "paper"))[0] if "beta" in case.label}
    assert len(anytime) == 3 * 3 * 3 * 2  # rules, weights, query points, schedules


@pytest.mark.parametrize("ours, holds", [(0.88, True), (0.855, False), (0.869, False)])
def test_ahead_is_by_more_than_a_point(ours, holds):
    rows = [
        row(DAT, ours),
        row(DECAYED, 0.86),
        row(DECAYED, 0.99, topology="complete"),
        row(DAT, 0.5, topology="complete"),
    ]
    found, text = paper.ahead(DAT, DECAYED)(rows)
    assert found is holds
    assert f"yes in {int(holds)} of 1: ring, M = 16" in text  # gossip alone


def test_ahead_at_half_time_or_level():
    rows = [row(DAT, 0.8, half=0.88), row(DECAYED, 0.9, half=0.72)]
    assert paper.ahead(DAT, DECAYED, share=0.5)(rows)[0] is True
    assert paper.ahead(DAT, DECAYED)(rows)[0] is False
    level = [row(DAT, 0.895), row(DECAYED, 0.9)]
    assert paper.ahead(DAT, DECAYED)(level)[0] is False
    assert paper.ahead(DAT, DECAYED, or_level=True)(level)[0] is True
    assert paper.ahead(DAT, "qg")(level)[0] is None


@pytest.mark.parametrize("best, holds", [(0.89, True), (0.88, False)])
def test_near_all_reduce(best, holds):
    server = row(DECAYED, 0.90, topology="complete")
    rows = [row(DAT, best), row(DSGD, 0.7), row(DSGD, 0.99, topology="torus"), server]
    found, text = paper.near_all_reduce(0.015, "ring")(rows)
    assert found is holds
    assert text.startswith(f"M = 16: {DAT} {best:.1%}")
    assert paper.near_all_reduce(0.015, "ring")(rows[:2])[0] is None


def test_needs_no_decay():
    rows = [row(DAT, 0.88, half=0.87), row(DECAYED, 0.90, half=0.72), row(DSGD, 0.75, half=0.70)]
    assert paper.needs_no_decay("ring", 1.0)(rows)[0] is False
    found, text = paper.needs_no_decay("ring", 0.5)(rows)
    assert found is True
    assert text.startswith(f"M = 16: {DAT} 87.0%")
    assert paper.needs_no_decay("ring", 1.0)(rows[:1])[0] is None


def test_cta_is_level_or_ahead():
    (sentence,) = [s for s in TARGETS["orders"].sentences if s.claim.startswith(DAT)]
    atc, cta = f"{DAT[:-1]}, atc)", f"{DAT[:-1]}, cta)"
    assert sentence.check([row(atc, 0.88), row(cta, 0.875)]).holds is True
    assert sentence.check([row(atc, 0.88), row(cta, 0.86)]).holds is False


def test_what_merging_changes():
    rows = [row(DSGD, 0.72, merged=0.86), row(DECAYED, 0.87), row(DAT, 0.88, merged=0.885)]
    find = paper.merging_changes_little(paper._settles)
    found, text = find(rows)
    assert found is True
    assert text.endswith(f"in the middle: {DSGD} +14.0%, {DAT} +0.5%, {DECAYED} +0.0%")
    assert find([*rows, row(DAT, 0.85, merged=0.87, nodes=64)])[0] is False


def test_the_best_of_weights_and_query_points():
    other = "dat (averaging fixed(0.9), beta 1)"
    find = paper.level_with_the_best(DAT)
    assert find([row(DAT, 0.88), row(other, 0.86), row(paper.decayed(DAT), 0.99), row(DAT_D2, 0.99)])[0] is True
    assert find([row(DAT, 0.88), row(other, 0.90)])[0] is False
    assert find([row(other, 0.90)])[0] is None


def test_sentences_hold_in_every_panel_and_know_the_worst_node():
    (sentence,) = [s for s in TARGETS["schedules"].sentences if s.claim.endswith("decay, worst node")]
    near = [row(DAT, 0.89, alpha=a, worst=0.885) for a in (0.1, 10.0)]
    server = [row(DECAYED, 0.895, alpha=a, topology="complete") for a in (0.1, 10.0)]
    assert sentence.check([*near, *server]).holds is True
    assert sentence.check([near[0], row(DAT, 0.89, alpha=10.0, worst=0.87), *server]).holds is False
    assert isinstance(sentence, Sentence)


@pytest.mark.parametrize("draw", [figures.final_of_rules, figures.accuracy_of_schedules])
def test_the_figures(draw, tmp_path):
    rules = [DSGD, DECAYED, DAT]
    rows = [
        row(rule, 0.8 + k / 20, nodes=M, alpha=a) for k, rule in enumerate(rules) for M in (8, 16) for a in (0.1, 10.0)
    ]
    rows += [row(DECAYED, 0.9, nodes=M, alpha=a, topology="complete") for M in (8, 16) for a in (0.1, 10.0)]
    figure = draw(rows, "a title")
    assert [axis.get_title() for axis in figure.axes] == [
        f"{M} machines, alpha = {a}" for M in (8, 16) for a in (0.1, 10)
    ]
    figure.savefig(tmp_path / "drawn.png", dpi=100)
    check_picture(tmp_path / "drawn.png")


def test_what_is_shown_of_a_study(run_cli, tmp_path, monkeypatch, in_threads):
    small = {"nodes": [4, 9], "steps": 40, "seeds": 2, "lr": [1e-3, 1e-2], "topologies": "ring"}
    monkeypatch.setitem(TARGETS["fig1"].scales, "quick", small)
    found = {}
    for of in ("mean", "worst"):
        code, out, _ = run_cli("reproduce", "fig1", "--out", tmp_path, "--of", of, "--json")
        assert code == 0
        found[of] = json.loads(out)
    assert "error, worst node" in found["worst"]["header"]
    shown = found["worst"]["header"].index("error, worst node")
    beside = found["mean"]["header"].index("worst")
    assert [line[shown] for line in found["worst"]["table"]] == [line[beside] for line in found["mean"]["table"]]
    assert (
        "Shown is the worst node, at the learning rates that are chosen for the mean of nodes."
        in found["worst"]["facts"]
    )
    assert {file.name for file in tmp_path.glob("*.md")} == {"fig1-quick.md", "fig1-quick-worst.md"}


def test_a_group_reproduces_its_parts(run_cli, tmp_path, monkeypatch, in_threads):
    small = {"nodes": [4, 9], "steps": 40, "seeds": 1, "record": 3, "lr": [1e-3, 1e-2], "topologies": "ring"}
    for part in ("fig1", "fig4"):
        monkeypatch.setitem(TARGETS[part].scales, "quick", small)
    monkeypatch.setitem(GROUPS, "schedule-free", ("fig1", "fig4"))
    code, out, _ = run_cli("reproduce", "schedule-free", "--out", tmp_path, "--json")
    assert code == 0
    assert [page["title"][:8] for page in json.loads(out)["pages"]] == ["Figure 1", "Figure 4"]
    code, out, _ = run_cli("reproduce", "schedule-free", "--out", tmp_path)
    assert (code, out.count("written: ")) == (0, 2)
    assert {file.name for file in tmp_path.glob("*.md")} == {"fig1-quick.md", "fig4-quick.md"}


def test_what_a_group_and_a_table_do_not_take(run_cli, tmp_path):
    assert GROUPS["schedule-free"] == ("averages", "schedules", "beyond")
    code, _, err = run_cli("reproduce", "schedule-free", "--epochs", "3", "--out", tmp_path / "new")
    assert code == 2
    assert "schedule-free is averages, schedules, beyond; leave --epochs and --dtype out" in err
    assert not (tmp_path / "new").exists()
    code, _, err = run_cli("reproduce", "table1", "--of", "worst", "--out", tmp_path / "new")
    assert (code, "leave --epochs, --data and --of out" in err) == (2, True)
    code, _, err = run_cli("reproduce", "fig2", "--of", "best", "--out", tmp_path / "new")
    assert (code, "unknown --of 'best'" in err) == (2, True)


def test_fewer_epochs_than_the_short_runs_have_shorten_these():
    study = study_of("schedules", "paper", epochs=5)
    assert (study.epochs, study.screen.epochs, study.record) == (5, 5, 6)
