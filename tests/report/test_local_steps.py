"""Local steps: what a node sends, verdicts at equal bytes, the figure, and the size of the study."""

from dataclasses import replace

import numpy as np
import pytest

from klatsch.report import figures
from klatsch.report import local_steps as paper
from klatsch.report.targets import study_of
from klatsch.study import Row, Store, expand, parse, run_study
from klatsch.study.traffic import exchange_of
from tests.support.pictures import check_picture

pytestmark = pytest.mark.slow

LENET = 44_470  # parameters


def case(rule, topology, nodes=16, steps=100, **problem):
    study = {"steps": steps, "nodes": nodes, "seeds": 1, "lr": 0.1, "rules": rule, "topologies": topology}
    ((found,), _) = expand(parse(study | ({"problem": problem} if problem else {})))
    return found


@pytest.mark.parametrize(
    "rule, topology, vectors",
    [
        ("dsgd", "ring", 100 * 2),
        ("dat", "ring", 100 * 2 * 2),  # w and x
        ("dat-gt", "ring", 100 * 3 * 2),
        ("dsgd", "ring/16", 6 * 2),  # in rounds 16, 32, ..., 96
        ("dat", "ring/64", 1 * 2 * 2),
        ("dsgd", "one_peer_exponential", 100),
        ("dsgd", "star", 100 * 30 / 16),  # the mean over the nodes
        ("dsgd", "complete", 100 * 2 * 15 / 16),  # an all-reduce
        ("dat", "complete", 100 * 2 * 15 / 16),  # of gradients: all nodes are equal
        ("gt", "complete", 100 * 2 * 15 / 16),
        ("dat-d2", "complete", 100 * 2 * 15 / 16),  # its nodes' w differ, but not their x, where they take gradients
        ({"name": "dat-d2", "beta": 0.9}, "complete", 100 * 2 * 2 * 15 / 16),  # gradients are taken between w and x
        ({"name": "dat", "order": "cta"}, "complete", 100 * 2 * 2 * 15 / 16),  # nodes differ by their last step
        ("dat", {"name": "complete", "lazy": True}, 100 * 2 * 2 * 15 / 16),  # and by half of it
        ("dat", "complete/4", 25 * 2 * 2 * 15 / 16),  # of w and of x
        ({"name": "diloco", "outer_lr": 0.5, "schedule": "cosine"}, "complete/4", 25 * 2 * 15 / 16),
    ],
)
def test_what_a_node_sends(rule, topology, vectors):
    assert exchange_of(case(rule, topology)).sent == pytest.approx(4 * 50 * vectors)
    assert exchange_of(case(rule, topology, name="least-squares", dim=7)).sent == pytest.approx(4 * 7 * vectors)
    assert exchange_of(case(rule, topology, name="logistic")).sent == pytest.approx(4 * 20 * vectors)
    assert exchange_of(case(rule, topology, name="fashion-mnist")).sent == pytest.approx(4 * LENET * vectors)


def test_parts_of_ones_own_send_what_built_in_ones_do(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from klatsch import rules, topology\n\n\ndef mine(lr):\n    return rules.make('dat', lr=lr)\n\n\n"
        "def line(n):\n    return topology.ring(n)\n"
    )
    theirs, ours = exchange_of(case("dat", "ring")), exchange_of(case(f"{file}:mine", f"{file}:line"))
    assert ours == theirs


def test_rows_know_what_was_sent(tmp_path):
    study = {"steps": 12, "nodes": 4, "seeds": 1, "lr": [1e-4, 1e-3], "record": 2}
    with Store(tmp_path / "s.sqlite") as store:
        rows = run_study(parse({**study, "rules": ["dsgd", "dat"], "topologies": ["ring/4"]}), store).rows
    assert [row.sent for row in rows] == [4 * 50 * 3 * 2, 4 * 50 * 3 * 4]


def row(rule, topology, megabytes, accuracy, merged=0.9, worst=0.5, alpha=0.1, spread=0.002):
    """A row of two learning rates, of which the second is the better for the mean of nodes only."""
    final = accuracy + np.array([-spread, 0.0, spread])

    def curves(values, other):
        ends = np.stack([np.full(3, other), values], axis=1)
        return np.stack([np.full((3, 2), 0.1), ends], axis=1)

    return Row(
        rule,
        topology,
        16,
        (0.1, 0.2),
        (5, 50),
        curves(final, 0.2),
        curves(final, 0.2),
        1.0,
        {"alpha": alpha},
        "accuracy",
        True,
        50,
        merged=curves(merged + 0 * final, 0.99),
        worst=curves(worst + 0 * final, 0.99),
        sent=1e6 * megabytes,
    )


def found(gossip=0.88, **options):
    """Plain gossip, a better and dearer rule on the ring, and two rules with all-reduce, for H = 1 and 4."""
    return [
        row("dsgd (momentum 0.9)", "ring", 200, 0.70, **options),
        row("dsgd (momentum 0.9, cosine)", "ring", 200, 0.80, **options),
        row("dsgd (momentum 0.9, cosine)", "ring/4", 50, 0.795, **options),
        row("dat-d2 (beta 0.9)", "ring", 400, 0.95, **options),
        row("dat-d2 (beta 0.9)", "ring/4", 100, gossip, **options),
        row("dat-d2 (beta 0.9)", "ring/16", 25, gossip, **options),
        row("dsgd (momentum 0.9)", "complete", 190, 0.885),
        row("dsgd (momentum 0.9)", "complete/4", 47, 0.87),
        row("diloco (outer_lr 0.7)", "complete/4", 47, 0.91),
        row("diloco (outer_lr 1)", "complete/4", 47, 0.60),
    ]


def test_a_row_can_show_the_merged_model_or_the_worst_node():
    shown = row("dsgd", "ring", 1, 0.8, merged=0.87).showing("merged")
    assert (shown.value, shown.lr, shown.metric) == (pytest.approx(0.87), 0.2, "accuracy, merged model")
    assert shown.at_edge  # of the learning rates that were tried
    assert row("dsgd", "ring", 1, 0.8, worst=0.3).showing("worst").low == pytest.approx(0.3)
    with pytest.raises(ValueError, match="'merged' was not measured"):
        shown.showing("merged")


def test_gossip_and_all_reduce_at_equal_bytes():
    level, best = paper.level_at_equal_bytes(["dsgd"]), paper.level_at_equal_bytes()
    holds, text = level(found())
    assert holds is True
    assert "200 MB (H = 1): dat-d2 (beta 0.9) on ring/4 88.0%" in text  # not the 95% that 400 MB buy
    assert "50 MB (H = 4): dat-d2 (beta 0.9) on ring/16 88.0%" in text
    assert level(found(gossip=0.85))[0] is False
    holds, text = best(found())
    assert (holds, text[:12]) == (False, "yes in 0 of ")
    assert "against diloco (outer_lr 0.7) on complete/4 91.0% (90.8% to 91.2%, merged 90.0%" in text
    assert best(found(gossip=0.905))[0] is True
    assert level(found()[6:])[0] is None


def test_verdicts_of_the_merged_model_and_of_the_worst_node():
    rows = found(merged=0.95, worst=0.2)
    verdicts = [sentence.check(rows).holds for sentence in paper.LOCAL_STEPS.sentences[:6]]
    assert verdicts == [True, True, False, False, True, False]
    before = [replace(row, merged=None) for row in rows]  # of a version that did not measure it
    assert [sentence.check(before).holds for sentence in paper.LOCAL_STEPS.sentences[:3]] == [True, None, False]


def test_what_local_steps_cost():
    cheap = paper.cheap(4, "ring")
    holds, text = cheap(found(gossip=0.945))
    assert holds is True
    beside = "merged 90.0%, worst 50.0%"
    assert f"dsgd 80.0% (79.8% to 80.2%, {beside}) for H = 1, -0.5% for 4" in text
    assert f"dat-d2 95.0% (94.8% to 95.2%, {beside}) for H = 1, -0.5% for 4, -0.5% for 16" in text
    assert cheap(found())[0] is False
    holds, text = paper.cheap(16, "complete")(found())
    assert (holds, "diloco" in text) == (False, False)  # which has no H = 1


def test_a_run_that_diverges_under_local_steps_is_a_loss():
    rows = [row("dsgd", "ring", 200, 0.8), row("dsgd", "ring/4", 50, 0.0, spread=0.0)]
    assert paper.cheap(4, "ring")([rows[0], replace(rows[1], curves=0 * rows[1].curves)]) == (
        False,
        "dsgd 80.0% (79.8% to 80.2%, merged 90.0%, worst 50.0%) for H = 1, diverged for 4",
    )
    diverged = replace(rows[0], curves=0 * rows[0].curves)
    assert paper.cheap(4, "ring")([diverged, rows[1]])[0] is None  # nothing to compare with


def test_no_loss_has_no_sign_of_one():
    alone = row("dsgd", "ring", 200, 0.8)
    holds, text = paper.cheap(4, "ring")([alone])
    assert (holds, text[-9:]) == (None, "for H = 1")
    for accuracy in (0.8, 0.79999):
        holds, text = paper.cheap(4, "ring")([alone, row("dsgd", "ring/4", 50, accuracy)])
        assert (holds, text[-18:]) == (True, "H = 1, +0.0% for 4")


def test_corrections_under_local_steps():
    (corrected,) = [s for s in paper.LOCAL_STEPS.sentences if "corrections" in s.claim]
    rows = [row("dat", f"ring{H}", 1, 0.8) for H in ("", "/4", "/16")]
    better = [row("dat-d2", f"ring{H}", 1, a) for H, a in (("", 0.7), ("/4", 0.85), ("/16", 0.82))]
    assert corrected.check([*rows, *better]).holds is True  # H = 1 is not asked
    assert corrected.check([*rows, *better[:2], row("dat-d2", "ring/16", 1, 0.8)]).holds is False


@pytest.mark.parametrize("which", ["mean", "merged", "worst"])
def test_the_figure(tmp_path, which):
    rows = found(merged=0.93) + found(alpha=10.0)
    rows = rows if which == "mean" else [row.showing(which) for row in rows]
    figure = figures.accuracy_against_bytes(rows, "bytes")
    figure.savefig(tmp_path / "f.png")
    check_picture(tmp_path / "f.png")
    first = figure.axes[0]
    assert first.get_xlabel() == "MB sent per node"
    names = {"mean": "mean over nodes", "merged": "merged model", "worst": "worst node"}
    assert first.get_ylabel().endswith(names[which])
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [
        "dat-d2, ring",
        "diloco, all-reduce",
        "dsgd, all-reduce",
        "dsgd, ring",
        "H = 1",
        "H = 4",
        "H = 16",
    ]
    if which == "mean":
        (line,) = [line for line in first.lines if line.get_label() == "dsgd, ring"]
        assert list(line.get_xdata()) == [50, 200]
        assert list(line.get_ydata()) == pytest.approx([0.795, 0.80])  # with its best schedule


def test_the_study_fits_its_budget():
    study = study_of("local-steps", "paper", "cuda")
    cases, left_out = expand(study)
    rows = {(case.graph_label, case.setting, case.label) for case in cases}
    assert not left_out
    assert len(cases) / len(study.seeds) < 420  # short runs
    assert len(rows) * len(study.seeds) < 250  # full ones
    assert {case.topology_options.get("every", 1) for case in cases} == {1, 4, 16, 64}
    assert {case.graph_label for case in cases if case.rule == "diloco"} == {"complete/4", "complete/16", "complete/64"}
    quick, left_out = expand(study_of("local-steps", "quick"))
    assert not left_out
    assert len(quick) < 30
