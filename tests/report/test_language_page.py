"""The language study: its verdicts, its figures, and its size."""

import email
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from klatsch import problems
from klatsch.report import language as paper
from klatsch.report.claims import at_its_best
from klatsch.report.targets import GROUPS, TARGETS, study_of
from klatsch.study import Row, expand
from klatsch.study.batches import most_numbers, pack
from klatsch.study.choices import place
from klatsch.study.traffic import exchange_of
from tests.support.pictures import check_picture

PARTS = GROUPS["language"]
TINY = {"name": "language", "alpha": 0.1, "batch": 2, "context": 16, "width": 8, "depth": 1, "heads": 2, "test": 10}
RATE, MINUTES = 4.2e6, 25  # bytes per second that three processes train on an H200, start and evaluation included


@cache
def cases_of(target, scale="paper"):
    cases, left_out = expand(study_of(target, scale, "cuda"))
    assert not left_out
    return cases


@cache
def rows_of(target):
    """A row for every place of a study, all with the same bits."""
    return [row(case) for case in {place(case): case for case in cases_of(target)}.values()]


def row(case, bits=2.0):
    curves = bits + np.array([0.5, 0.0])[None, :, None] + np.array([-0.002, 0.0, 0.002])[:, None, None]
    return Row(
        *(case.label, case.graph_label, case.nodes, (0.1,), (1, case.steps), curves, curves * 0, 1.0),
        setting=case.problem_options,
        metric="bits",
        merged=curves - 0.01,
        worst=curves + 0.01,
        sent=exchange_of(case).sent,
        case=case,
    )


def with_bits(target, bits):
    """The rows of a study, with other bits where a function of the row says so."""
    return [row(each.case, bits(each)) for each in rows_of(target)]


def verdicts(target, bits):
    return {v.claim: v for v in (s.check(with_bits(target, bits)) for s in TARGETS[target].sentences)}


# --- sentences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", PARTS)
def test_where_all_are_level_every_sentence_holds(target):
    found = verdicts(target, lambda row: 2.0)
    assert {claim for claim, verdict in found.items() if verdict.holds is not True} == set()
    assert len(found) == len(TARGETS[target].sentences)


@pytest.mark.parametrize("target", PARTS)
def test_every_sentence_can_fail(target):
    """First everything on the ring is behind; then rules are behind in every way that a sentence asks about."""

    def behind(row):
        return 2.0 if row.topology.startswith("complete") else 2.1

    def worse(row):
        plain = row.rule == paper.OF_PLAIN, row.rule == paper.OF_FREE
        seldom_or_small = 0.2 * (row.topology != "ring") + 0.1 * ("int8" in row.topology)
        return 2.0 + 0.1 * (not any(plain)) + 0.05 * plain[1] + seldom_or_small

    found = [verdicts(target, bits) for bits in (behind, worse, lambda row: 4.1 - worse(row))]
    assert [claim for claim in found[0] if all(each[claim].holds is not False for each in found)] == []


def test_the_best_of_both_sides_are_compared_at_every_size():
    bits = {("ring", 8): 2.02, ("complete", 8): 2.0, ("ring", 16): 2.04, ("complete", 16): 2.0}
    rows = with_bits("language-sizes", lambda row: bits.get((row.topology, row.nodes), 3.0))
    ask = paper.level(paper.on("ring"), paper.on("complete"), paper.NEAR)
    held, text = ask(rows)
    assert held is False
    assert "M = 8: " in text
    assert "on ring 2.020 (2.018 to 2.022) against" in text
    assert text.endswith(", +0.040")
    assert ask([each for each in rows if each.nodes == 8])[0] is True
    assert ask([each for each in rows if each.topology == "ring"]) == (None, "these were not both run")


@pytest.mark.parametrize("bits, holds", [(2.003, True), (2.01, False), (1.9, True)])
def test_ahead_of_all_within_the_spread(bits, holds):
    rows = with_bits("language-rules", lambda row: bits if row.rule == paper.OF_PLAIN else 2.0)
    found, text = paper.leads(paper.on("ring", paper.OF_PLAIN), paper.on("ring"))(rows)
    assert found is holds
    assert f"{paper.OF_TRACKED} {2.0 - bits:+.3f}" in text


def test_few_rounds_decide_nothing():
    short = [row(case) for case in {place(case): case for case in cases_of("language-rules", "quick")}.values()]
    assert {sentence.check(short).holds for sentence in TARGETS["language-rules"].sentences} == {None}


def test_sentences_name_rules_that_are_run():
    named = {value for name, value in vars(paper).items() if name.startswith("OF_") and isinstance(value, str)}
    run = {each.rule for target in PARTS for each in rows_of(target)}
    assert named <= run
    assert any("diloco" in rule for rule in run)


def test_of_options_the_best_is_shown():
    rows = with_bits("language-rules", lambda row: 1.9 if row.rule == paper.OF_SHARED else 2.0)
    (best,) = (each for each in at_its_best(rows) if (each.rule[:6], each.topology) == ("dadam ", "ring"))
    assert best.rule == paper.OF_SHARED


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale, parameters", [("quick", (0.25e6, 0.4e6)), ("paper", (3e6, 10e6))])
@pytest.mark.parametrize("target", PARTS)
def test_models_have_the_size_that_is_promised(target, scale, parameters):
    study = study_of(target, scale, "cuda")
    (setting,), (least, most) = study.problem.combinations(), parameters
    assert least <= problems.Language.dim_of(8, **setting) <= most
    assert study.dtype == "float32"


def test_the_study_fits_its_budget():
    done, trained = set(), 0
    for target in PARTS:
        study = study_of(target, "paper", "cuda")
        chosen = {place(case): case.lr for case in cases_of(target)}  # any one: all seeds run it
        needed = [c for c in cases_of(target) if c.seed in study.screen.seeds or c.lr == chosen[place(c)]]
        missing = [case for case in needed if case.key not in done]
        done |= {case.key for case in missing}
        options = missing[0].problem_settings
        trained += sum(case.nodes * case.steps for case in missing) * options["batch"] * options["context"]
        models = max(sum(case.nodes for case in batch.cases) for batch in pack(missing, "cuda"))
        numbers = 12 * models * problems.Language.dim_of(8, **missing[0].problem_options)
        assert numbers <= most_numbers(missing[0], "cuda")
    assert trained / RATE < 60 * MINUTES


def test_every_grid_has_an_inside():
    for target in PARTS:
        grids = {}
        for case in cases_of(target):
            grids.setdefault(place(case), set()).add(case.lr)
        assert min(map(len, grids.values())) >= 3


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", PARTS)
def test_figures(target, tmp_path):
    figure = TARGETS[target].figure(with_bits(target, lambda row: 2.0 + 0.1 * row.rule.startswith("dat")), "a title")
    figure.savefig(tmp_path / "figure.png", dpi=80)
    check_picture(tmp_path / "figure.png")
    axis, labels = figure.axes[0], [text.get_text() for text in figure.legends[0].get_texts()]
    if target == "language-links":
        assert axis.get_yscale() == "linear"
        assert [each.get_title() for each in figure.axes] == ["dadam\ndashed: reduced True", "dat-adam"]
        assert {"diloco-adam, all-reduce every 16th round", "dadam, all-reduce every 16th round"} <= set(labels)
        assert axis.get_ylabel() == "final bits per byte"
    else:
        names = [text.get_text() for text in axis.get_yticklabels()]
        assert names[0].startswith("dat")  # the worst at the bottom
        assert not names[-1].startswith("dat")
        assert figure.axes[-1].get_xlabel() == "bits per byte"


@pytest.mark.slow
def test_it_is_drawn_and_told(tmp_path, monkeypatch, run_cli, in_threads):
    folder = str(Path(email.__file__).parent)
    for target in PARTS:
        quick = TARGETS[target].scales["quick"]
        tiny = {"nodes": 3, "steps": 5, "record": 2, "problem": TINY | {"folder": folder}}
        monkeypatch.setitem(TARGETS[target].scales, "quick", {**quick, **tiny})
    code, out, err = run_cli("reproduce", "language", "--out", tmp_path)
    assert code == 0, err
    assert out.count("not decided: ") == sum(len(TARGETS[target].sentences) for target in PARTS)
    for target in PARTS:
        for suffix in (".png", ".svg"):
            check_picture(tmp_path / f"{target}-quick{suffix}")
    assert paper.OF_CORRECTED in (tmp_path / "language-rules-quick.csv").read_text()
