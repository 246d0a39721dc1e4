"""Sentences on numbers that are known: comparisons, trends, when runs decide, and mistakes in a study file."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from klatsch.catalogue import GROUPS
from klatsch.clock import Clock
from klatsch.report.figures import StudyFigure
from klatsch.report.pages import Outline
from klatsch.report.selection import best_of, chosen_for, options_of, reaching, timed
from klatsch.report.sentences import STANDING, Sentence, Tolerance, factor, is_behind
from klatsch.study import Row, expand, parse
from klatsch.study.cases import exchange_of
from klatsch.study.choices import place
from klatsch.units import duration
from tests.report.test_installed import thinned

SETTINGS = [{"noise": n, "heterogeneity": h} for n in (1.0, 10.0) for h in (1.0, 10.0)]
FIGURE_OF = {"fig4": "ring", "fig5": "torus", "fig6": "one_peer_exponential"}
SIZES = (4, 9, 16, 25, 36, 49, 64, 81, 100)


def row(rule, topology, nodes, error, setting=SETTINGS[0], spread=0.01, steps=100_000, early=None):
    """A row whose seeds scatter around an error by a share; `early` is the error after 100 rounds."""
    final = error * np.array([1 - spread, 1.0, 1 + spread])
    curves = np.stack([np.full(3, 2.0), np.full(3, early if early is not None else 1.0), final], axis=1)[:, :, None]
    return Row(rule, topology, nodes, (0.1,), (1, 100, steps), curves, curves, 1.0, setting)


def said(**words):
    """A sentence, as a study file has it."""
    (sentence,) = Sentence.read([{"claim": "so", **words}], "sentences").values()
    return sentence


def holds(rows, clocks=None, **words):
    (verdict,) = said(**words).check(rows, clocks)
    return verdict.holds


@cache
def script_of(name, scale="paper"):
    study = thinned(name, scale)
    cases, _ = expand(study)
    return Outline.of(study, cases), {place(case): case for case in cases}


def of_case(case, value, half=None, spread=0.0, beside=None):
    """A row of a run with three seeds, at half time and at the end."""
    ends = np.array([half if half is not None else value, value])[None, :, None]
    curves = ends * (1 + spread * np.array([-1.0, 0.0, 1.0])[:, None, None])
    metric = case.headline.metric
    exchange = exchange_of(case)
    return Row(
        *(case.label, case.graph_label, case.nodes, (0.1,), (case.steps // 2, case.steps), curves, curves, 1.0),
        setting=case.problem_options,
        metric=metric,
        largest=metric == "accuracy",
        epochs=case.epochs,
        others=dict.fromkeys(("merged", "worst"), curves if beside is None else 0 * curves + beside),
        sent=exchange.sent,
        case=case,
        exchange=exchange,
    )


def rows_of(name, value, **options):
    """All rows of an installed study, whose values are a function of the run."""
    return [of_case(case, value(case), **options) for case in script_of(name)[1].values()]


def verdicts(name, rows, scale="paper"):
    return {verdict.claim: verdict for verdict in script_of(name, scale)[0].verdicts(rows)}


# --- trends -----------------------------------------------------------------------------------------------------------


def points(errors, **options):
    return [row("dat", "ring", M, error, **options) for M, error in errors.items()]


NO_GAIN = {"ours": {"nodes": {"above": 4}}, "theirs": {"nodes": 4}, "by": ["nodes"], "is": "not ahead"}


@pytest.mark.parametrize(
    "words, errors, expected",
    [
        ({"trend": "worsens", "from": 9}, {4: 5.0, 9: 1.0, 16: 2.0, 25: 3.0}, True),
        ({"trend": "worsens", "from": 4}, {4: 5.0, 9: 1.0, 16: 2.0, 25: 3.0}, False),
        ({"trend": "worsens"}, {4: 1.0, 9: 1.02, 16: 1.1}, False),  # hardly worsens at all
        ({"trend": "improves"}, {4: 4.0, 9: 2.0, 16: 1.0}, True),
        ({"trend": "improves"}, {4: 4.0, 9: 1.0, 16: 2.0}, False),
        ({"trend": "improves", "to": 9}, {4: 4.0, 9: 1.0, 16: 2.0}, True),
        ({"trend": "improves"}, {4: 4.0, 9: 1.0, 16: 1.04}, True),  # within the tolerance
        ({"trend": "improves", "to": 49}, {4: 4.0, 9: 1.0}, None),  # of another size
        ({"trend": "stays within", "tolerance": "100%"}, {4: 1.0, 9: 1.9}, True),
        ({"trend": "stays within", "tolerance": "100%"}, {4: 1.0, 9: 2.1}, False),
        ({"trend": "turns", "from": 25, "to": 49}, {4: 3.0, 25: 1.0, 49: 1.1, 100: 2.0}, True),
        ({"trend": "turns", "from": 25, "to": 49}, {4: 3.0, 25: 2.0, 49: 1.0, 100: 2.0}, False),
        ({"trend": "turns", "from": 25, "to": 49}, {4: 3.0, 25: 1.0, 49: 1.05, 100: 1.1}, False),
        ({"trend": "no ceiling"}, {4: 3.0, 25: 1.0, 256: 1.2}, True),
        ({"trend": "no ceiling"}, {4: 3.0, 25: 1.0, 256: 1.3}, False),
        ({"trend": "no ceiling"}, {4: 3.0, 25: np.inf, 256: 1.3}, None),
        ({"trend": "no ceiling"}, {4: 3.0}, None),
        (NO_GAIN, {4: 1.0, 9: 2.0}, True),
        (NO_GAIN, {4: 2.0, 9: 1.0, 16: 3.0}, False),
        (NO_GAIN, {4: 1.0, 9: 2.0, 16: np.inf}, None),  # between sizes what diverged decides nothing
        ({"ours": {"nodes": 16}, "theirs": {"nodes": 4}, "is": "behind"}, {4: 1.0, 16: np.inf}, None),
        ({"ours": {"nodes": 16}, "theirs": {"nodes": 4}, "is": "behind"}, {4: 1.0, 9: 9.0, 16: 2.0}, True),
        ({"ours": {"nodes": 16}, "theirs": {"nodes": 4}, "is": "ahead"}, {4: 1.0, 9: 9.0, 16: 2.0}, False),
    ],
)  # fmt: skip
def test_what_is_said_of_errors_over_the_number_of_machines(words, errors, expected):
    assert holds(points(errors), **words) is expected


def test_small_steps_add_up():
    """Each is within the scatter of the seeds, all of them together are not."""
    rows = points({4: 4.0, 9: 1.0, 16: 1.2, 25: 1.45, 36: 1.75}, spread=0.1)
    assert holds(rows, trend="improves") is False
    assert holds(rows, trend="improves", to=16) is True


def test_a_step_within_the_scatter_of_the_seeds_is_forgiven():
    errors = {4: 4.0, 9: 1.0, 16: 1.2}
    assert holds(points(errors, spread=0.01), trend="improves") is False
    assert holds(points(errors, spread=0.2), trend="improves") is True


@pytest.mark.parametrize("accuracies, expected", [((0.9, 0.89, 0.8, 0.79), True), ((0.9, 0.7, 0.65, 0.64), False)])
def test_where_accuracy_drops_most(accuracies, expected):
    rows = [
        replace(row("dat", "ring", M, value), largest=True, metric="accuracy")
        for M, value in zip((4, 8, 16, 32), accuracies, strict=True)
    ]
    words = {"trend": "drops most", "from": 8, "to": 16}
    assert holds(rows, **words) is expected
    assert holds(rows, **words, needs={"nodes": [64]}) is None
    assert holds([replace(r, curves=0 * r.curves + 0.9) for r in rows], **words) is None  # nothing drops


def test_trends_of_accuracies_and_of_other_rounds():
    def course(values, steps=(1, 100, 1000)):
        return {"curves": np.array(values)[None, :, None], "steps": steps, "largest": True, "metric": "accuracy"}

    few, many = row("dat", "ring", 4, 1.0), row("dat", "ring", 16, 1.0)
    slow, fast = course([0.1, 0.3, 0.9]), course([0.1, 0.5, 0.9])
    assert holds([replace(few, **slow), replace(many, **fast)], trend="better early") is True
    assert holds([replace(few, **fast), replace(many, **slow)], trend="better early") is False
    fast = course([0.5, 0.9], (100, 1000))
    assert holds([replace(few, **slow), replace(many, **fast)], trend="better early") is True
    fast = course([0.5, 0.9], (99, 999))
    assert holds([replace(few, **slow), replace(many, **fast)], trend="better early") is None
    for last, expected in ((0.105, True), (0.12, False)):  # by 0.01, not by a hundredth
        ends = [replace(few, **course([0.1, 0.1, 0.1])), replace(many, **course([0.1, 0.1, last]))]
        assert holds(ends, trend="stays within") is expected


def as_the_paper_says():
    """Numbers for which every sentence of the paper holds."""
    rows = []
    for setting in SETTINGS:
        for k, M in enumerate(SIZES):
            early = 1.0 / M
            rows += [
                row("dsgd", "ring", M, 1e-4 * 2**k, setting, early=early),
                row("dsgd", "torus", M, 1e-4 if M == 4 else 1e-5 * 2**k, setting, early=early),
                row("dsgd", "one_peer_exponential", M, 1e-4, setting, early=early),
                row("dat", "torus", M, 1e-5 / M, setting),
                row("dat", "one_peer_exponential", M, 1e-5 / M, setting),
                row("dat", "ring", M, 1e-5 / M if M <= 25 else 1e-8 * M, setting),
            ]
    return rows


def test_numbers_as_the_paper_has_them_pass_every_sentence():
    rows = as_the_paper_says()
    told = verdicts("fig1", rows)
    assert [claim for claim, verdict in told.items() if not verdict.holds] == []
    assert len(told) == 8
    for name, topology in FIGURE_OF.items():
        told = verdicts(name, [r for r in rows if r.topology == topology])
        assert [(claim, verdict.figures) for claim, verdict in told.items() if not verdict.holds] == []


def test_every_sentence_of_the_paper_can_fail():
    """With the sizes in reverse nothing of what the paper says is true, but that a flat line is flat."""
    mirrored = dict(zip(SIZES, reversed(SIZES), strict=True))
    rows = [
        row(r.rule, r.topology, mirrored[r.nodes], r.value, r.setting, early=float(r.curves[0, 1, 0]))
        for r in as_the_paper_says()
        if (r.rule, r.topology) != ("dat", "ring")  # which has a minimum in reverse as well
    ]
    rows += [row("dat", "ring", M, 1e-6 * M, setting) for setting in SETTINGS for M in SIZES]
    for claim, verdict in verdicts("fig1", rows).items():
        if "exponential" not in claim or "DAT" in claim:
            assert verdict.holds is False, claim
    steep = [row("dsgd", "one_peer_exponential", M, 1e-6 * M, s, early=float(M)) for s in SETTINGS for M in SIZES]
    steep += [row("dat", "one_peer_exponential", M, 1e-6 * M, s) for s in SETTINGS for M in SIZES]
    assert {claim: v.holds for claim, v in verdicts("fig6", steep).items() if v.holds is not False} == {
        "D-SGD does not end better with more than 9 machines, on the exponential graph": True
    }


def test_one_panel_of_four_is_enough_to_deny_and_is_named():
    rows = [
        r
        if (r.setting, r.nodes, r.rule, r.topology) != (SETTINGS[1], 100, "dat", "torus")
        else row("dat", "torus", 100, 1.0, SETTINGS[1])
        for r in as_the_paper_says()
    ]
    verdict = verdicts("fig1", rows)["DAT improves steadily with M on the torus"]
    assert (verdict.holds, verdict.word) == (False, "does not hold")
    assert verdict.figures[0] == "yes in 3 of 4 panels"
    assert verdict.figures[2].startswith("noise 1, heterogeneity 10: no, 4: 2.5e-06")


def test_too_few_rounds_or_other_sizes_decide_nothing():
    short = [row(r.rule, r.topology, r.nodes, r.value, r.setting, steps=20_000) for r in as_the_paper_says()]
    told = {claim: verdict.holds for claim, verdict in verdicts("fig1", short).items()}
    assert [holds for claim, holds in told.items() if "ring up to" in claim or "threshold" in claim] == [None, None]
    worse = "D-SGD gets worse with M on the ring from M = 4"
    assert told[worse] is True
    gone = [r if r.setting == SETTINGS[0] else row(r.rule, r.topology, r.nodes, np.inf, r.setting) for r in short]
    assert verdicts("fig1", gone)[worse].holds is None
    few = [r for r in as_the_paper_says() if r.nodes == 4 and r.topology == "ring"]
    assert {v.holds for v in verdicts("fig4", few).values()} == {None}
    assert {v.holds for v in verdicts("fig1", []).values()} == {None}


# --- comparisons ------------------------------------------------------------------------------------------------------


def pair(ours, theirs, spread=0.002, largest=True):
    """Two rows: accuracies, or errors."""
    made = [row(rule, "ring", 8, value) for rule, value in (("dat", ours), ("dsgd", theirs))]
    values = [value + spread * np.array([-1, 0, 1]) for value in (ours, theirs)]
    metric = "accuracy" if largest else "bits"
    return [
        replace(r, curves=v[:, None, None], steps=(50,), largest=largest, metric=metric, epochs=50)
        for r, v in zip(made, values, strict=True)
    ]


DAT_AND_DSGD = {"ours": {"rule": "dat"}, "theirs": {"rule": "dsgd"}, "by": ["topology", "nodes"]}


@pytest.mark.parametrize(
    "relation, ours, spread, expected",
    [
        ("ahead", 0.82, 0.001, True),
        ("ahead", 0.805, 0.001, False),  # by less than a point
        ("ahead", 0.82, 0.05, False),  # by less than the seeds scatter
        ("level", 0.795, 0.001, True),
        ("level", 0.785, 0.05, False),  # whatever the seeds
        ("not behind", 0.785, 0.05, True),
        ("not behind", 0.785, 0.001, False),
        ("behind", 0.785, 0.001, True),
        ("not ahead", 0.82, 0.001, False),
        ("not ahead", 0.82, 0.05, True),
    ],
)
def test_relations_of_accuracies(relation, ours, spread, expected):
    assert holds(pair(ours, 0.8, spread), **DAT_AND_DSGD, **{"is": relation}) is expected
    mirrored = pair(1 - ours, 0.2, spread, largest=False)  # small is good
    assert holds(mirrored, **DAT_AND_DSGD, **{"is": relation}) is expected


def test_errors_are_compared_by_their_ratio():
    rows = [row("dat", "ring", 8, 3e-6), row("dsgd", "ring", 8, 2e-6)]
    (verdict,) = said(**DAT_AND_DSGD, tolerance="100%").check(rows)
    assert (verdict.holds, verdict.figures[0][-11:]) == (True, ", 1.5 times")
    assert holds(rows, **DAT_AND_DSGD, tolerance="40%") is False
    assert holds(rows, **DAT_AND_DSGD) is False  # 5 % by default
    assert is_behind(*rows)
    assert not is_behind(rows[0], replace(rows[1], curves=rows[1].curves * np.array([0.1, 1.0, 1.9])[:, None, None]))


def test_theirs_that_diverged_decide_nothing_and_ours_that_did_are_behind():
    lost, fine = (row("dat", "ring", 8, e) for e in (np.inf, 1e-6))
    assert holds([lost, row("dsgd", "ring", 8, 1e-6)], **DAT_AND_DSGD) is False
    assert holds([fine, row("dsgd", "ring", 8, np.inf)], **DAT_AND_DSGD) is None
    assert holds([lost, fine, row("dsgd", "ring", 8, 1e-6)], **DAT_AND_DSGD) is True  # the best of ours
    assert holds([fine], **DAT_AND_DSGD) is None
    for relation, expected in (("behind", True), ("not ahead", True), ("ahead", False), ("not behind", False)):
        assert holds([lost, row("dsgd", "ring", 8, 1e-6)], **DAT_AND_DSGD, **{"is": relation}) is expected
    assert holds([lost, row("dsgd", "ring", 8, 1e-6)], **DAT_AND_DSGD, over="median") is None
    assert holds([row("dsgd", "ring", 8, 1e-6), row("dat", "torus", 8, 1e-6)], **DAT_AND_DSGD) is None
    (verdict,) = said(**DAT_AND_DSGD | {"claim": "{options} is level", "each": "options"}).check([])
    assert (verdict.claim, verdict.holds, verdict.figures) == ("options is level", None, ("was not run",))


def test_the_median_and_the_mean_of_all_points():
    rows = [row("dsgd", "ring", M, 1.0) for M in (4, 9, 16)]
    rows += [row("dat", "ring", M, error) for M, error in ((4, 0.5), (9, 0.9), (16, 9.0))]
    ahead = {**DAT_AND_DSGD, "is": "ahead", "tolerance": "0%"}
    assert holds(rows, **ahead, over="median") is True
    assert holds(rows, **ahead, over="mean") is False
    assert holds(rows, **ahead) is False
    (verdict,) = said(**ahead, over="median").check(rows)
    assert "0.9 times in the median" in verdict.figures[0]
    assert "from 0.5 times to 9 times" in verdict.figures[0]


@pytest.mark.parametrize("at_half, at_end", [(0.1, 2.0), (10.0, 0.5)])
def test_half_time_is_another_question_than_the_end(at_half, at_end):
    rows = [row("dsgd", "ring", 9, 1e-6, early=1e-3, steps=200)]
    rows.append(row("dat", "ring", 9, at_end * 1e-6, early=at_half * 1e-3, steps=200))
    ahead = {**DAT_AND_DSGD, "is": "ahead", "tolerance": "0%"}
    assert holds(rows, **ahead, at={"share": 0.5}) is (at_half < 1)
    assert holds(rows, **ahead) is (at_end < 1)


@pytest.mark.parametrize("times, text", [(1.128, "1.13"), (99.4, "99.4"), (2293.2, "2,293"), (4.51e6, "4.5e+06")])
def test_factors_are_readable(times, text):
    assert factor(times) == text


def test_no_gap_has_no_sign_of_one():
    assert [Tolerance(0.01).told(gap) for gap in (-1e-9, 0.0, 0.005)] == ["+0", "+0", "+0.005"]


# --- rows by their options --------------------------------------------------------------------------------------------


def test_rows_are_selected_by_options_with_their_defaults():
    rows = rows_of("beyond", lambda case: 1.0)
    sentence = next(s for s in script_of("beyond")[0].sentences if s.claim.startswith("cta costs"))
    plain = {"dat", "dat (cta)"}
    ours = {r.rule for r in rows if options_of(r)["rule"] == "dat" and options_of(r)["order"] == "cta"}
    assert ours == {"dat (cta)"}
    worse = [of_case(r.case, 1.5 if r.rule == "dat (cta)" else 1.0) for r in rows if r.rule in plain]
    assert [v.holds for v in sentence.check(worse)] == [True]
    renamed = [replace(r, rule=f"another name of {r.rule}") for r in worse]
    assert [v.holds for v in sentence.check(renamed)] == [True]  # what a row is called does not matter


def test_which_rule_is_best_at_every_point():
    sentence = next(s for s in script_of("beyond")[0].sentences if s.claim.startswith("A rule without decay"))
    ring = [r for r in rows_of("beyond", lambda case: 1e-8) if r.topology == "ring"]

    def with_error(cosine, constant, spread=0.0):
        errors = {True: cosine, False: constant}
        return [of_case(r.case, errors["schedule" in r.case.rule_options], spread=spread) for r in ring]

    assert sentence.check(with_error(1e-8, 3e-8))[0].holds is False
    assert sentence.check(with_error(1e-8, 5e-9))[0].holds is True
    assert sentence.check(with_error(1e-8, 1.2e-8, spread=0.3))[0].holds is True  # within the scatter of the seeds
    assert sentence.check([r for r in ring if "schedule" in r.case.rule_options])[0].holds is None


@pytest.mark.parametrize("name", ["channels", "images-channels", *GROUPS["language"]])
@pytest.mark.slow
def test_every_sentence_of_ours_can_hold_and_can_fail(name):
    """All values equal, and then such that whatever differs from the plain graph is worse, or everything but it."""
    good, bad = {"accuracy": (0.9, 0.6), "distance": (1e-6, 1e-3), "bits": (2.0, 2.3)}[
        rows_of(name, lambda c: 1.0)[0].metric
    ]

    def plain(case):
        return case.topology == "ring" and not {"every", "late", "wire"} & case.topology_options.keys()

    def rules_differ(case):
        worst = case.rule not in ("dadam", "dat-adam") or "shared" in case.rule_options
        return bad if worst or not plain(case) else good

    level = verdicts(name, rows_of(name, lambda case: good))
    assert [claim for claim, verdict in level.items() if verdict.holds is not True] == []
    tried = [lambda c: good if plain(c) else bad, lambda c: bad if plain(c) else good, rules_differ]
    tried += [lambda c: good if c.topology == "complete" else bad]
    tried += [lambda c: bad if str(c.rule_options.get("schedule")).startswith("constant") else good]
    tried += [lambda c: bad if c.rule_options.get("shared") is True else good]
    tried += [lambda c: bad if c.topology_options.get("wire") else good]
    outline, never = script_of(name)[0], set(level)
    for value in tried:
        rows = rows_of(name, value)
        for sentence in outline.sentences:
            if any(sentence.claim.partition("{")[0] in claim for claim in never):
                never -= {verdict.claim for verdict in sentence.check(rows, outline.clocks) if verdict.holds is False}
    assert all("7 rounds late" in claim for claim in never)  # there both are as bad


def test_gossip_and_all_reduce_at_equal_bytes():
    """Budgets are what plain gossip sends; what costs more does not count."""
    cases = [c for c in script_of("local-steps")[1].values() if c.problem_options["alpha"] == 0.1]

    def check(gossip, of="mean", **options):
        values = {("dat-d2", "ring"): 0.95, ("dsgd", "complete"): 0.885, ("dsgd", "complete/4"): 0.87}
        rows = [
            of_case(c, values.get((c.rule, c.graph_label), gossip if c.topology == "ring" else 0.6), **options)
            for c in cases
        ]
        told = {v.claim: v for v in script_of("local-steps")[0].verdicts(rows)}
        words = {"mean": "mean of nodes", "worst": "worst node"}[of]
        return told[f"At equal bytes gossip is level with local SGD with all-reduce, or ahead: {words}"]

    assert check(0.88).holds is True
    assert "357 MB" in " ".join(check(0.88).figures) or "MB: " in check(0.88).figures[0]
    assert check(0.86).holds is False
    assert check(0.86, "worst", beside=0.5).holds is True  # all are alike
    assert check(0.86, "worst").holds is False


def test_what_local_steps_cost():
    claim = "No rule on the ring loses more than a point with H up to 16"
    cases = script_of("local-steps")[1].values()

    def check(value):
        return script_of("local-steps")[0].verdicts([of_case(c, value(c)) for c in cases if c.topology == "ring"])

    def at(H, accuracy):
        return lambda case: accuracy if case.channel.every == H else 0.9

    for value, expected in ((at(16, 0.895), True), (at(16, 0.88), False), (at(64, 0.5), True), (at(4, 0.0), False)):
        (verdict,) = [v for v in check(value) if v.claim == claim]
        assert verdict.holds is expected
    (verdict,) = [v for v in check(at(1, 0.0)) if v.claim == claim]
    assert verdict.holds is None  # nothing to compare with


def test_the_best_at_equal_cost_counts_what_dear_runs_had_by_then():
    """Plain gossip sends 32 times as much as int8 in every 8th round."""
    cases = script_of("images-channels")[1].values()
    mine = [c for c in cases if c.label == "dat-d2 (beta 0.9)" and c.problem_options["alpha"] == 0.1]
    (seldom,) = [c for c in mine if (c.channel.every, c.channel.late, c.channel.wire) == (8, 0, "int8")]
    (plain,) = [c for c in mine if c.graph_label == "ring"]
    words = {"ours": {"wire": "int8", "every": 8}, "theirs": {}, "at": {"bytes": "doubled"}}

    def check(ours, theirs, half):
        (verdict,) = said(**words).check([of_case(seldom, ours), of_case(plain, theirs, half=half)])
        return verdict.holds, verdict.figures[0]

    assert check(0.88, 0.885, 0.5)[0] is True  # level at the end
    assert check(0.85, 0.88, 0.5)[1].startswith("no, in 5 of 6: ")
    found, text = check(0.85, 0.88, 0.88)
    assert (found, text[:14]) == (False, "no, in 4 of 6:")  # half of its bytes were enough
    assert "65.4 MB: dat-d2 (beta 0.9) on ring/8 (wire int8) 85.0%" in text
    assert "1,047 MB: dat-d2 (beta 0.9) on ring/8 (wire int8) 85.0%" in text
    swapped = said(ours={"wire": "float32"}, theirs={}, at={"bytes": "doubled"})
    (verdict,) = swapped.check([of_case(seldom, 0.85), of_case(plain, 0.95)])
    assert verdict.figures[0].startswith("no, in 2 of 6: 65.4 MB: none of ours has a value by then; 131 MB: none")
    silent = replace(of_case(seldom, 0.85), sent=0.0)  # costs nothing, and counts with all it has
    assert holds([silent, of_case(plain, 0.88)], **words) is False


def test_an_option_that_theirs_fix_may_differ():
    sentence = said(ours={}, theirs={"rule": "dat"}, by=["options"], **{"is": "not ahead"}, tolerance=0.0)
    rows = [row("dat", "ring", 4, 1.0), row("dsgd", "ring", 4, 2.0), row("d2", "ring", 4, 3.0)]
    (verdict,) = sentence.check(rows)
    assert (verdict.holds, verdict.figures[0][:15]) == (True, "yes, in 3 of 3:")
    assert sentence.check([*rows, row("gt", "ring", 4, 0.5)])[0].holds is False


def test_what_merging_changes():
    words = {"ours": {}, "theirs": {"of": "merged"}, "by": ["options", "graph", "nodes"]}
    (low, high) = pair(0.85, 0.88)
    fine = [replace(r, others={"merged": r.curves + 0.005}) for r in (low, high)]
    assert holds(fine, **words) is True
    assert holds([fine[0], replace(high, others={"merged": high.curves + 0.02})], **words) is False
    assert holds([low, high], **words) is None  # was not measured
    assert holds(fine, **DAT_AND_DSGD, of="worst") is None


# --- clocks -----------------------------------------------------------------------------------------------------------


def straggling(value=lambda case: 1.0):
    """A row of each rule and graph with heterogeneity 0, twice as large at the first of two points."""
    script, cases = script_of("stragglers", "quick")
    rows = [of_case(c, value(c), half=2 * value(c)) for c in cases.values() if c.problem_options["heterogeneity"] == 0]
    return script.clocks, [replace(r, steps=(10, 1000)) for r in rows]


def way(row):
    options = options_of(row)
    return (
        "all-reduce"
        if options["topology"] == "complete"
        else options["meets"].split(" ")[0] or f"late {options['late']}"
    )


@pytest.mark.slow
def test_each_clock_has_rows_of_its_own_and_who_waits_takes_longer():
    clocks, rows = straggling()
    for name, clock in clocks.items():
        placed = timed(rows, name, clock)
        assert len(placed) == 2 * 4 + 3 + 1  # dat-d2 does not gossip in pairs
        seconds = {way(r): r.elapsed[-1] for r in placed if r.rule == "dsgd"}
        assert set(seconds) == {"late 0", "late 2", "stale", "pairwise", "all-reduce"}
        assert seconds["pairwise"] < seconds["late 2"] <= seconds["late 0"] <= seconds["all-reduce"] * (1 + 1e-3)
        assert seconds["pairwise"] == pytest.approx(100, rel=0.2)  # 1,000 gradients of 0.1 s each, nobody waits


@pytest.mark.slow
def test_a_clock_is_no_other_whose_times_begin_or_end_alike():
    clocks, rows = straggling()
    alike = Clock("0.4"), Clock(clocks["exponential"].gradient, "wan")
    assert not [r for clock in alike for r in timed(rows, "a", clock) if r.case.meets]


@pytest.mark.slow
def test_the_learning_rate_is_the_best_for_the_moment():
    clocks, rows = straggling()
    row = timed(rows, "exponential", clocks["exponential"])[0]
    curves = np.array([[2.0, 3.0], [1.0, 0.5]])[None]  # the first is better at first, the second in the end
    row = replace(row, lrs=(0.1, 0.2), curves=curves, consensus=curves)
    assert [chosen_for(row, s)[0].lr for s in (0.0, row.elapsed[0], row.elapsed[1])] == [0.1, 0.1, 0.2]
    assert [chosen_for(row, s)[1] for s in (0.0, row.elapsed[0], row.elapsed[1])] == [0, 1, 2]


@pytest.mark.slow
def test_who_is_ahead_at_equal_seconds():
    """Gossip in pairs is done first; what takes longer counts with its first point, which is twice as large."""
    sentence = script_of("stragglers", "quick")[0].sentences[3].model_copy(update={"needs": said(trend="turns").needs})
    clocks, rows = straggling()
    told = sentence.check(rows, clocks)
    assert [v.claim.partition(": ")[2] for v in told] == list(clocks)
    assert told[-1].holds is True
    assert "dsgd on ring (meets pairwise 15*0.08, 0.4 over 10gbe) 1 " in told[-1].figures[0]
    _, worse = straggling(lambda case: 9.0 if case.meets.startswith("pairwise") else 1.0)
    assert sentence.check(worse, clocks)[-1].holds is False
    assert sentence.check([r for r in rows if way(r) != "pairwise"], clocks)[-1].holds is None


@cache
def crossing(ours=0.87, theirs=0.87):
    """A study with gossip, which has so much at half time, and an all-reduce: 0.9 at the end; one seed is behind."""
    study = parse(
        {
            "name": "mine",
            "steps": 100,
            "nodes": 4,
            "rules": ["dsgd"],
            "topologies": ["complete", {"name": "one_peer_exponential", "wire": "int8"}],
            "clocks": {
                "slow": {"gradient": 0.1, "params": 10**6, "network": {"bandwidth": 1e6, "latency": 0.01, "factor": 1}},
                "fast": {"gradient": 0.1, "network": {"bandwidth": 1e9, "latency": 0, "sites": 2, "inside": INSIDE}},
                "dying": {"gradient": 0.1, "deaths": dict.fromkeys(("life", "restart", "write", "notice"), 9.0)},
            },
            "tables": [{"title": "a race", "to": [0.95, 1.0], "families": FAMILIES, "ours": ["gossip"]}],
            "figures": [{"across": "seconds", "clock": ["fast", "slow"], "panels": ["clock"], "lines": ["topology"]}],
        }
    )
    cases = expand(study)[0]
    rows = []
    for case in (case for case in cases if case.seed == 0 and case.lr == cases[0].lr):
        half = theirs if case.topology == "complete" else ours
        made = replace(of_case(case, 0.9, half=half), metric="accuracy", largest=True)
        rows.append(replace(made, curves=made.curves - np.array([0.0, 0.0, 0.06])[:, None, None]))
    return Outline.of(study, cases), rows


INSIDE = {"bandwidth": 1e9, "latency": 0}
FAMILIES = {"all-reduce": {"topology": "complete"}, "gossip": {"wire": "int8"}, "nobody": {"nodes": {"above": 4}}}


def test_seconds_to_an_accuracy():
    """95 % of the best is 0.836, which two seeds have at half time, and the last one at the end."""
    script, rows = crossing()
    reduced, gossip = timed(rows, "slow", script.clocks["slow"])
    assert gossip.elapsed == pytest.approx(
        [50 * (0.1 + 0.01 + 1e-5 + 1.0078125 + 2e-3), 2 * gossip.elapsed[0]], rel=1e-3
    )
    first, other = reaching([reduced, gossip], 0.95)
    assert (other.value, other.low, other.high) == (gossip.elapsed[1], gossip.elapsed[0], gossip.elapsed[1])
    assert first.value / other.value == pytest.approx(reduced.elapsed[0] / gossip.elapsed[0])
    worse = [replace(gossip, curves=gossip.curves - by) for by in (0.01, 0.1)]
    some, never = reaching(worse, 1)
    assert (some.value, some.low, some.high) == (np.inf, gossip.elapsed[1], np.inf)
    assert (never.value, never.low) == (np.inf, np.inf)
    assert some.diverged
    assert best_of([never, some]) is some  # of those that miss a seed, the one whose first is there


def test_of_equal_seconds_those_count_whose_seeds_are_all_there():
    """By their mean both are there at half time: one with all seeds, the other without its last, which is never."""
    script, rows = crossing()
    (gossip,) = (row for row in timed(rows, "slow", script.clocks["slow"]) if row.topology != "complete")
    unsure = replace(gossip, curves=gossip.curves - np.array([0.0, 0.0, 0.4])[:, None, None] + 0.15)
    steady = replace(gossip, curves=np.full_like(gossip.curves, 0.87))
    for order in ([unsure, steady], [steady, unsure]):
        first = best_of(reaching(order, 0.95))
        assert (first.value, first.low) == (gossip.elapsed[0], gossip.elapsed[0])


def test_errors_reach_the_smallest_over_the_share():
    script, rows = crossing()
    errors = [replace(r, largest=False, metric="distance", curves=1 - r.curves) for r in rows]
    ends = [r.value for r in reaching(timed(errors, "slow", script.clocks["slow"]), 0.5)]
    assert ends == [r.elapsed[0] for r in timed(rows, "slow", script.clocks["slow"])]


def test_who_has_an_accuracy_first():
    """A round with an all-reduce takes 5.5 times as long as one with gossip."""

    def first(ours, theirs, by, share=0.95):
        script, rows = crossing(ours, theirs)
        at = {"reach": share, "seconds": "slow"}
        words = {"ours": {"wire": "int8"}, "theirs": {"topology": "complete"}, "is": "ahead", "tolerance": by}
        (told,) = said(at=at, **words).check(rows, script.clocks)
        return told

    assert first(0.87, 0.87, "400%").holds is True
    assert first(0.5, 0.87, "100%").holds is True
    assert first(0.5, 0.87, "500%").holds is False
    text = first(0.87, 0.87, "100%").figures[0]
    assert text.startswith("yes, in 1 of 1: to 95%: dsgd on one_peer_exponential (wire int8) 112 s (from 56 s)")
    assert text.endswith(" times")
    nobody = first(0.87, 0.87, "100%", 1.0)  # the last seed of each never gets there
    assert nobody.holds is False
    assert nobody.figures[0].startswith("no, to 100%: dsgd on one_peer_exponential (wire int8) never (from 112 s)")


def test_who_never_has_an_accuracy_is_behind():
    script, rows = crossing()
    reduced, gossip = rows
    words = {"theirs": {"topology": "complete"}, "ours": {"wire": "int8"}, "is": "ahead", "tolerance": "100%"}
    sentence = said(at={"reach": 0.95, "seconds": "slow"}, **words)
    (won,) = sentence.check([replace(reduced, curves=reduced.curves - 0.2), gossip], script.clocks)
    (lost,) = sentence.check([reduced, replace(gossip, curves=gossip.curves - 0.2)], script.clocks)
    assert (won.holds, lost.holds) == (True, False)
    assert won.figures[0].endswith("against dsgd on complete never, 0 times")


def test_a_table_of_who_is_first():
    script, rows = crossing()
    (race,) = script.races
    standings = race.run(rows, script.clocks)
    header, *lines = race.lines(standings)
    assert header == ("clock", "M", "of the best", *FAMILIES, "others / ours")
    assert [line[:3] for line in lines] == [(name, "4", share) for name in script.clocks for share in ("95%", "100%")]
    seconds = {name: [row.elapsed[1] for row in timed(rows, name, clock)] for name, clock in script.clocks.items()}
    for name, _, share, reduced, gossip, nobody, times in lines:
        assert nobody == "-"
        assert reduced.endswith(", complete")
        assert gossip.endswith(", one_peer_exponential (wire int8)")
        assert times == (factor(seconds[name][0] / seconds[name][1]) if share == "95%" else "-")
        assert gossip.startswith("never (from ") == (share == "100%")
    assert seconds["dying"][0] > 2 * seconds["dying"][1] > 2 * 5.0
    numbers = [dict(zip(STANDING, line, strict=True)) for each in standings for line in each.numbers]
    assert len(numbers) == 2 * len(lines)
    of_gossip = next(line for line in numbers if line["family"] == "gossip")
    assert float(of_gossip["seconds of all seeds"]) == pytest.approx(seconds["slow"][1], rel=1e-3)
    assert numbers[-1]["seconds of all seeds"] == "inf"
    reduced, gossip = (replace(row, curves=row.curves - by) for row, by in zip(rows, (0.2, 0.0), strict=True))
    assert race.lines(race.run([reduced, gossip], script.clocks))[1][-1] == "only ours"
    reduced, gossip = (replace(row, curves=row.curves - by) for row, by in zip(rows, (0.0, 0.2), strict=True))
    assert race.lines(race.run([reduced, gossip], script.clocks))[1][-1] == "only others"
    alone = race.lines(race.run(rows[1:], script.clocks))[1]
    assert alone[3] == "-"


def test_a_race_in_a_figure():
    """A dot when all seeds are there, with its time, and never where a seed is missing."""
    script, rows = crossing()
    words = {"clock": ["fast", "slow"], "race": {"title": "a race", "to": [0.95, 1.0], "families": FAMILIES}}
    (figure,) = StudyFigure.read([words], "figures").values()
    half, whole = figure.draw(rows, "", script.clocks).axes
    assert half.get_title(loc="left") == "95% of the best accuracy, 4 machines"
    ends = sorted(row.elapsed[1] for name in figure.clocks for row in timed(rows, name, script.clocks[name]))
    dots = [line.get_xdata()[0] for line in half.lines if line.get_marker() == "o"]
    assert sorted(dots) == pytest.approx(ends)
    shown = [text.get_text().strip() for text in half.texts]
    assert sorted(shown) == sorted(["fast", "slow", "not run", "not run", *map(duration, ends)])
    assert [text.get_text() for text in whole.texts].count("never") == 4
    assert not [line for line in whole.lines if line.get_marker() == "o"]


def test_a_figure_with_some_of_the_clocks():
    script, rows = crossing()
    ((_, figure),) = script.drawn(rows, "mine", "a title")
    assert [axis.get_title() for axis in figure.axes] == ["fast", "slow"]


# --- a study file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        ({"sentences": [{"trend": "improves"}]}, r"sentences\[0\].claim is missing; give it, as in"),
        ({"sentences": [{"claim": "so"}]}, r"sentences\[0\]: it compares nothing; give theirs, or a trend"),
        ({"sentences": [{"claim": "so", "trend": "rises"}]}, "trend = 'rises'; there are worsens, improves"),
        ({"sentences": [{"claim": "so", "trned": "turns"}]}, r"unknown key 'sentences\[0\].trned'; did you mean trend"),
        ({"sentences": [{"claim": "so", "theirs": {}, "is": "better"}]}, r"sentences\[0\].is = 'better'"),
        ({"sentences": [{"claim": "so", "theirs": {}, "tolerance": "much"}]}, "tolerance = 'much'; give a number"),
        ({"sentences": [{"claim": "so", "theirs": {"rul": "dat"}}]}, "no option of its runs 'rul'; did you mean rule"),
        ({"sentences": [{"claim": "so", "theirs": {"rule": "dsg"}}]}, "study has rule = 'dsg'; there are"),
        ({"sentences": [{"claim": "so", "theirs": {"topology": ["ring", "rnig"]}}]}, "topology = 'rnig'; did you mean"),
        ({"sentences": [{"claim": "{name}", "theirs": {}}]}, "no option of its runs 'name'"),
        ({"sentences": [{"claim": "so", "theirs": {}, "each": "clock"}]}, "no option of its runs 'clock'"),
        ({"sentences": [{"claim": "{}", "theirs": {}}]}, "the claim has a {}; write {most}"),
        ({"sentences": [{"claim": "{rule}", "theirs": {}}]}, "the claim has a {rule}; write {most}"),
        ({"sentences": [{"claim": "{most:9999999999}", "theirs": {}}]}, "the claim has a {most}"),
        ({"sentences": [{"claim": "{", "theirs": {}}]}, r"sentences\[0\]: Single '{'"),
        ({"sentences": [{"claim": "so", "theirs": {"nodes": {"under": 3}}}]}, "nodes = .* for runs with 4; give above"),
        ({"sentences": [{"claim": "so", "theirs": {}, "where": {"rule": {"below": 3}}}]}, "for runs with dat; give"),
        ({"sentences": [{"claim": "so", "theirs": {"of": "wrost"}}]}, "unknown of 'wrost'; did you mean worst"),
        ({"sentences": [{"claim": "so", "theirs": {}, "at": {"seconds": "{clock}"}}]}, "the study has no clock"),
        ({"sentences": [{"claim": "so", "theirs": {}, "at": {"seconds": "wan"}}]}, "the study has no clock 'wan'"),
        ({"sentences": [{"claim": "so", "theirs": {}, "over": "mean", "is": "not ahead"}]}, "for a mean; give level"),
        ({"figures": [{"across": "time"}]}, r"figures\[0\].across = 'time'"),
        ({"figures": [{"lines": ["wires"]}]}, r"figures\[0\]: the study has no option of its runs 'wires'"),
        ({"figures": [{"clock": "mine"}]}, "the study has no clock 'mine'"),
        ({"figures": [{"clock": ["mine"]}]}, "the study has no clock 'mine'"),
        ({"sentences": [{"claim": "so", "theirs": {}, "at": {"reach": 0.9}}]}, "reach = 0.9 needs a clock; give secon"),
        ({"tables": [{"title": "a", "to": [0.9], "families": {"a": {}}, "ours": ["a"]}]}, "seconds need a clock; give"),
        ({"figures": [{"race": {"title": "a", "to": [0.9], "families": {"a": {}}}}]}, "seconds need a clock; give"),
        ({"tables": [{"title": "a", "to": [2.0], "families": {"a": {}}, "ours": ["a"]}]}, r"tables\[0\].to = 2.0; "),
        ({"tables": [{"title": "a", "to": [0.9], "families": {"a": {}}, "ours": ["b"]}]}, "unknown family 'b'"),
        ({"tables": [{"title": "a", "to": [1.0], "families": {"a": {"rul": 1}}, "ours": []}]}, "no option of its runs"),
        ({"clocks": {"a": {"gradient": 0.1, "network": {"sites": 2}}}}, "is no clock"),
        ({"clocks": {"a": {"gradient": 0.1, "deaths": {"life": 9.0}}}}, "is no clock"),
        ({"figures": [{"where": {"nodes": {"starts": 4}}}]}, "for runs with 4; give above"),
        ({"figures": [{"across": "seconds"}]}, "seconds need a clock; give clock = 'all'"),
        ({"figures": [{"first_done": True}]}, "seconds need a clock; give clock = 'all'"),
        ({"figures": [{"wide": 10**9}]}, r"figures\[0\].wide = 1000000000; .* less than or equal to 100"),
        ({"figures": [{"wide": -1}]}, r"figures\[0\].wide = -1"),
        ({"clocks": {"a": {"gradient": 0.1, "speed": 2}}}, "is no clock"),
        ({"clocks": {"a": {"gradient": 0.1, "network": 5}}}, "is no clock"),
        ({"clocks": {"a": {"gradient": "times.csv"}}}, "names a file"),
    ],
)  # fmt: skip
def test_mistakes_in_a_study_file_are_one_line(words, message):
    study = parse({"steps": 5, "nodes": 4, "rules": ["dat"], "topologies": ["ring"], **words})
    with pytest.raises(ValueError, match=message) as refusal:
        Outline.of(study, expand(study)[0])
    assert "\n" not in str(refusal.value)
