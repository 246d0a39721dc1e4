"""The study of stragglers: rows beside clocks, and what its sentences compare."""

from dataclasses import replace

import numpy as np
import pytest

from klatsch.report import stragglers
from klatsch.report.stragglers import PAIRWISE, REDUCED, STALE, SYNCHRONOUS, TIMES, timed, way
from klatsch.report.targets import study_of
from klatsch.study import Row, expand
from klatsch.study.traffic import exchange_of


def rows(value=lambda how: 1.0):
    """A row of each rule and graph with heterogeneity 0."""
    cases = {
        (case.label, case.graph_label): case
        for case in expand(study_of("stragglers", "quick"))[0]
        if case.problem_options["heterogeneity"] == 0
    }
    found = []
    for case in cases.values():
        ends = np.array([2.0, 1.0])[None, :, None] * np.ones((1, 1, 1))
        row = Row(
            case.label,
            case.graph_label,
            case.nodes,
            (0.1,),
            (10, 1000),
            ends,
            ends,
            1.0,
            setting=case.problem_options,
            case=case,
            exchange=exchange_of(case),
        )
        found.append(replace(row, curves=ends * value(way(row))))
    return found


def test_each_kind_of_times_has_the_rows_of_its_own():
    for name in TIMES:
        found = timed(rows(), name)
        assert len(found) == 2 * 4 + 3 + 1  # dat-d2 does not run in pairs
        assert {row.topology for row in found} == {SYNCHRONOUS, "late 2", STALE, PAIRWISE, REDUCED}
        assert all(TIMES[name] in row.case.meets for row in found if row.topology in (STALE, PAIRWISE))


def test_who_waits_takes_longer():
    for name in TIMES:
        seconds = {row.topology: row.elapsed[-1] for row in timed(rows(), name) if row.rule == "dsgd"}
        assert seconds[PAIRWISE] < seconds["late 2"] <= seconds[SYNCHRONOUS] <= seconds[REDUCED] * (1 + 1e-3)
        assert seconds[PAIRWISE] == pytest.approx(100, rel=0.2)  # 1,000 gradients of 0.1 s each, nobody waits


def test_the_learning_rate_is_the_best_for_the_moment():
    row = timed(rows(), "exponential")[0]
    curves = np.array([[2.0, 3.0], [1.0, 0.5]])[None]  # the first is better at first, the second in the end
    row = replace(row, lrs=(0.1, 0.2), curves=curves, consensus=curves)
    assert [stragglers.chosen_for(row, s).lr for s in (0.0, row.elapsed[0], row.elapsed[1])] == [0.1, 0.1, 0.2]
    assert stragglers.chosen_for(row, row.elapsed[0]).curve.tolist() == [[2.0, 1.0]]


def test_who_is_ahead_at_equal_seconds():
    """Gossip in pairs is done first; what takes longer counts with its first point, which is twice as large."""
    asked = stragglers.ahead("one slow node", PAIRWISE, SYNCHRONOUS)
    holds, text = asked(rows(lambda how: 1.0))
    assert holds
    assert "dsgd 1 (lr 0.1) against 2 (0.1)" in text
    worse, _ = asked(rows(lambda how: 9.0 if how == PAIRWISE else 1.0))
    assert not worse
    assert asked([row for row in rows() if way(row) != PAIRWISE]) == (None, "was not run")
