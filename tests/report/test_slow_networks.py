"""Slow networks: what a channel costs on a link, the sentences, the figures, and the size of the studies."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from klatsch.clock import Clock, Links
from klatsch.report import link_costs
from klatsch.report import slow_networks as paper
from klatsch.report.targets import TARGETS, study_of
from klatsch.study import Row, Store, expand, parse, run_study
from klatsch.study.cases import Channel
from klatsch.study.traffic import exchange_of
from tests.support.pictures import check_picture

LENET = 4 * 44_470  # bytes of its parameters
EIGHTH = 14 / 117  # of the rounds of an epoch on 16 nodes, 14 are an 8th one
LINK = Clock(0.01, Links(bandwidth=1e7, latency=0.02), handling=1e-9, per_message=1e-3)
DAT_D2, DSGD = "dat-d2 (beta 0.9)", "dsgd (momentum 0.9, cosine)"


@cache
def cases_of(target, scale="paper"):
    """One run of each row of a study, by rule, graph and setting."""
    return {(case.label, case.graph_label, case.setting): case for case in expand(study_of(target, scale))[0]}


def row(case, value, half=None, spread=0.0):
    """A row of three seeds, at half time and at the end."""
    ends = np.array([half if half is not None else value, value])[None, :, None]
    curves = ends * (1 + spread * np.array([-1.0, 0.0, 1.0])[:, None, None])
    images = case.epochs is not None
    return Row(
        *(case.label, case.graph_label, case.nodes, (0.1,), (case.steps // 2, case.steps), curves, curves, 1.0),
        setting=case.problem_options,
        metric="accuracy" if images else "distance",
        largest=images,
        epochs=case.epochs,
        sent=exchange_of(case).sent,
        case=case,
        exchange=exchange_of(case),
    )


def rows_of(target, value, **options):
    """All rows of a study, whose values are a function of the run."""
    return [row(case, value(case), **options) for case in cases_of(target).values()]


def on_ring(rule, value, every=1, late=0, wire="float32", **options):
    """A row of the image study at alpha = 0.1."""
    known = {(case.label, case.topology, case.channel, case.problem_options["alpha"]): case for case in images()}
    return row(known[rule, "ring", Channel(every, late, wire), 0.1], value, **options)


def images():
    return cases_of("images-channels").values()


# --- costs ------------------------------------------------------------------------------------------------------------


def seconds_per_round(rule, **graph):
    content = {"epochs": 1, "nodes": 16, "seeds": 1, "lr": 0.1, "rules": rule, "topologies": {"name": "ring", **graph}}
    (case, *_), _ = expand(parse(content | {"problem": {"name": "fashion-mnist"}}))
    return link_costs.seconds_on(LINK)(row(case, 0.9)) / case.steps


def test_seconds_are_those_of_the_clock():
    message, work = 0.02 + 2e-3, LENET * 1e-9
    assert seconds_per_round("dsgd") == pytest.approx(0.01 + message + 2 * LENET / 1e7 + work)
    assert seconds_per_round("dsgd", every=8) == pytest.approx(0.01 + (message + 2 * LENET / 1e7 + work) * EIGHTH)
    int8 = 44_470 + 2 * 174  # and a scale for each 256
    assert seconds_per_round("dsgd", wire="int8") == pytest.approx(0.01 + message + 2 * int8 / 1e7 + work)
    hidden = seconds_per_round("dsgd", every=8, late=7, wire="int8")
    assert hidden == pytest.approx(0.01 + work * EIGHTH)  # 31 ms travel behind seven gradients
    assert seconds_per_round("dat") > seconds_per_round("dsgd")  # two vectors


def test_seconds_of_an_all_reduce():
    tree = 2 * 4 * (0.02 + 1e-3 + LENET / 1e7)  # faster than a ring of 30 messages
    each = 0.01 + tree + LENET * 1e-9
    assert seconds_per_round("dsgd", name="complete") == pytest.approx(each)
    assert seconds_per_round("dat", name="complete") == pytest.approx(each)  # of the gradient
    assert seconds_per_round("dsgd", name="complete", every=8) == pytest.approx(0.01 + (each - 0.01) * EIGHTH)
    both = 2 * 4 * (0.02 + 1e-3 + 2 * LENET / 1e7) + 2 * LENET * 1e-9  # vectors at once
    assert seconds_per_round("dat", name="complete", every=8) == pytest.approx(0.01 + both * EIGHTH)


def test_rows_know_their_channel(tmp_path):
    graph = {"name": "ring", "every": 4, "late": [0, 3], "wire": "int8"}
    study = {"steps": 8, "nodes": 4, "seeds": 1, "lr": 1e-3, "record": 2, "rules": "dsgd", "topologies": graph}
    with Store(tmp_path / "s.sqlite") as store:
        rows = run_study(parse(study), store).rows
    assert list(map(link_costs.channel, rows)) == [Channel(4, 0, "int8"), Channel(4, 3, "int8")]
    assert not any(map(link_costs.at_server, rows))


def test_of_a_custom_part_seconds_are_not_known():
    nowhere = replace(on_ring(DSGD, 0.8), case=None)
    assert np.isnan(link_costs.seconds_on(LINK)(nowhere))


# --- sentences --------------------------------------------------------------------------------------------------------


def test_a_row_is_compared_with_the_one_that_differs_in_one_option():
    rows = rows_of("channels", lambda case: 1.0)
    for option, others in (("wire", 2 * 4), ("late", 2 * 3), ("every", 3)):
        mine = [(a, b) for a, b in paper.pairs(rows, option) if a.rule == DAT_D2]
        assert len(mine) == others
        for a, b in mine:
            changed = {
                name for name, v in link_costs.channel(a)._asdict().items() if v != getattr(b.case.channel, name)
            }
            assert changed == {option}


@pytest.mark.parametrize("int8, holds", [(0.876, True), (0.874, False), (0.90, True)])
def test_what_an_encoding_costs(int8, holds):
    rows = [on_ring(DAT_D2, 0.88), on_ring(DAT_D2, int8, wire="int8"), on_ring(DAT_D2, 0.5, late=1)]
    found, text = paper.costs(0.005, "wire")(rows)
    assert found is holds
    assert text.startswith(f"in {int(holds)} of 1: every round, int8: {int8:.1%}")
    assert text.endswith(f"against 88.0% (88.0% to 88.0%), {100 * (int8 - 0.88):+.2f} points")
    assert paper.costs(0.005, "every")(rows)[0] is None


def test_errors_are_compared_by_their_ratio():
    plain, late = (
        next(c for c in cases_of("channels").values() if c.channel[:3] == (1, late, "float32")) for late in (0, 1)
    )
    found, text = paper.costs(1.0, "late")([row(plain, 2e-6), row(late, 3e-6)])
    assert (found, text[-8:]) == (True, ", +50.0%")
    found, text = paper.costs(1.0, "late")([row(plain, 2e-6), row(late, 5e-6)])
    assert (found, text[-9:]) == (False, "2.5 times")


def test_a_run_that_diverges_is_a_loss():
    rows = [on_ring(DAT_D2, 0.88), on_ring(DAT_D2, 0.0, late=1)]
    found, text = paper.costs(0.01, "late")(rows)
    assert (found, "diverged against 88.0%" in text, text[-6:]) == (False, True, ", lost")
    assert paper.costs(0.01, "late")([on_ring(DAT_D2, 0.0), rows[1]])[0] is None  # nothing to compare with


def test_int8_on_average():
    rows = [on_ring(rule, 0.88) for rule in (DAT_D2, DSGD)]
    ours = [on_ring(DAT_D2, 0.87, wire="int8"), on_ring(DSGD, 0.884, wire="int8")]
    bfloat = on_ring(DSGD, 0.5, wire="bfloat16")  # is not asked
    assert paper.int8_on_average([*rows, *ours, bfloat]) == (True, "-0.30 points in the mean of 2, from -1.00 to +0.40")
    assert paper.int8_on_average([*rows, on_ring(DAT_D2, 0.87, wire="int8")])[0] is False
    assert paper.int8_on_average(rows)[0] is None


def test_the_best_at_equal_bytes():
    """Plain gossip sends 32 times as much as int8 in every 8th round, and counts with what it had by then."""

    def found(seldom, plain, half, ours=paper._small_and_seldom):
        rows = [on_ring(DAT_D2, seldom, every=8, wire="int8"), on_ring(DAT_D2, plain, half=half)]
        return paper.best_at_equal(link_costs.megabytes, "MB", ours)(rows)

    holds, text = found(0.88, 0.885, 0.5)
    assert holds is True  # level at the end
    assert text.startswith("at 6 of 6 budgets; the best is from 65.")
    assert found(0.85, 0.88, 0.5)[1].startswith("at 5 of 6")
    holds, text = found(0.85, 0.88, 0.88)
    assert (holds, text[:9]) == (False, "at 4 of 6")  # half of its bytes were enough
    assert "from 65.4 MB dat-d2 (beta 0.9) on ring/8 (wire int8) 85.0%" in text
    assert "from 1,047 MB dat-d2 (beta 0.9) on ring 88.0%" in text
    assert found(0.85, 0.88, 0.88, lambda row: False) == (None, "was not run")


def test_within_a_budget_are_recorded_rounds_only():
    whole = on_ring(DAT_D2, 0.9, half=0.7)
    assert paper.within(whole, 5.0).value == pytest.approx(0.9)
    assert paper.within(whole, 0.8).value == pytest.approx(0.7)
    assert paper.within(whole, 0.4) is None


@pytest.mark.slow
@pytest.mark.parametrize("target", ["channels", "images-channels"])
def test_every_sentence_can_hold_and_can_fail(target):
    """All values equal, and then such that whatever differs from the plain ring is worse."""
    good, bad = (0.9, 0.6) if target == "images-channels" else (1e-6, 1e-3)
    plain = Channel(1, 0, "float32")

    def value(case):
        return good if case.channel == plain and case.topology == "ring" else bad

    sentences = TARGETS[target].sentences
    level = [sentence.check(rows_of(target, lambda case: good)) for sentence in sentences]
    assert [v.claim for v in level if v.holds is not True] == []
    worse = [sentence.check(rows_of(target, value)) for sentence in sentences]
    assert all("7 rounds late" in v.claim for v in worse if v.holds is not False)  # there both are as bad
    assert len({v.claim for v in level}) == len(level)


def test_few_rounds_do_not_decide_what_local_steps_cost():
    short = [replace(each, steps=(500, 1_000)) for each in rows_of("channels", lambda case: 1.0)]
    verdicts = [sentence.check(short) for sentence in TARGETS["channels"].sentences]
    assert {v.holds for v in verdicts if "late" in v.claim or "gossip in every" in v.claim.partition("At")[0]} == {None}
    assert {v.holds for v in verdicts if "float32" in v.claim} == {True}


# --- figures and sizes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_figures_of_images(tmp_path):
    rows = rows_of("images-channels", lambda case: 0.8 + 0.05 * (case.rule != "dsgd"), half=0.7, spread=0.01)
    target = TARGETS["images-channels"]
    for name, draw in {"bytes": target.figure, "course": target.more["course"]}.items():
        figure = draw(rows, "a title")
        figure.savefig(tmp_path / f"{name}.png", dpi=80)
        check_picture(tmp_path / f"{name}.png")
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        captions = [axis.get_title().partition("\n")[0] for axis in figure.axes]
        if name == "course":
            assert captions == [f"alpha = {alpha}, {link}" for link in link_costs.LINKS for alpha in (0.1, 10)]
            assert len(labels) == 4 + 2
        else:
            rules = ("dat", "dat-d2", "dsgd")
            assert captions == [f"{rule}, alpha = {alpha}" for alpha in (0.1, 10) for rule in rules]
            assert labels[:2] == ["every round", "every round, late 1"]
            assert labels[-2:] == ["all-reduce", "all-reduce every 8th round"]


def test_points_lie_at_what_they_cost():
    ends = [on_ring(DAT_D2, 0.88), on_ring(DAT_D2, 0.87, wire="int8")]
    (axis,) = link_costs.final_against(ends, "t", link_costs.megabytes, "MB").axes
    line = max(axis.lines, key=lambda line: len(line.get_xdata()))
    assert list(line.get_xdata()) == pytest.approx([ends[1].sent / 1e6, ends[0].sent / 1e6])
    assert list(line.get_ydata()) == pytest.approx([0.87, 0.88])


def test_the_studies_fit_their_budgets():
    study = study_of("images-channels", "paper", "cuda")
    cases, left_out = expand(study)
    full = len(cases_of("images-channels")) * len(study.seeds) * study.epochs
    short = len(cases) // len(study.seeds) * study.screen.epochs
    assert not left_out
    assert 400e6 < 60_000 * (full + short) < 500e6  # samples
    assert {case.label for case in cases} == set(paper.OF_IMAGES)
    assert len({case.channel for case in cases if case.label == DAT_D2}) == 3 * 4  # encodings; often and late or not
    assert len(cases_of("images-channels", "quick")) == 20
    squares = cases_of("channels")
    assert {label for label, _, _ in squares} == set(paper.OF_SQUARES)
    assert len(squares) == 5 * 12 + 2
