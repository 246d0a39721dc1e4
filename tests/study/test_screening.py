"""A study with `screen`: short runs choose the learning rates, and only those run in full."""

import json

import pytest

from klatsch.report.pages import page_of
from klatsch.study import parse, run_study
from klatsch.study.cases import expand
from klatsch.study.store import Store

pytestmark = pytest.mark.slow

CONTENT = {
    "name": "screened",
    "nodes": [4, 9],
    "rules": ["dat", "dsgd"],
    "topologies": ["ring"],
    "steps": 60,
    "seeds": 3,
    "lr": [1e-3, 3e-2, 0.3],
    "problem": {"name": "least-squares", "dim": 5, "heterogeneity": [1.0, 10.0]},
}
PLACES, RATES, SEEDS = 2 * 2 * 2, 3, 3  # sizes, rules, settings


@pytest.fixture
def store(tmp_path, in_threads):
    with Store(tmp_path / "store.sqlite") as opened:
        yield opened


def test_the_best_of_the_short_runs_runs_in_full_and_nothing_else(store):
    study = parse({**CONTENT, "screen": {"steps": 20}})
    found = run_study(study, store)
    assert found.progress.runs_done == PLACES * RATES + PLACES * SEEDS
    lengths = [(case.steps, case.seed) for _, case in store.runs()]
    assert lengths.count((20, 0)) == PLACES * RATES
    assert [lengths.count((60, seed)) for seed in range(SEEDS)] == [PLACES] * SEEDS
    short = run_study(parse({**CONTENT, "name": "short", "steps": 20, "seeds": 1}), store).rows
    assert [(row.rule, row.nodes, row.setting, row.lr) for row in found.rows] == [
        (row.rule, row.nodes, row.setting, row.lr) for row in short
    ]
    assert [row.at_edge for row in found.rows] == [row.at_edge for row in short]
    assert {row.at_edge for row in found.rows} == {True, False}


def test_a_full_run_is_the_same_with_and_without_screening(store):
    screened = run_study(parse({**CONTENT, "screen": {"steps": 20}}), store).rows
    whole = run_study(parse({**CONTENT, "name": "whole"})).rows
    for row, other in zip(screened, whole, strict=True):
        column = other.curves[:, :, other.lrs.index(row.lr)]
        assert row.curve == pytest.approx(column, rel=1e-6)  # other columns beside it may round it differently


def test_short_runs_of_the_full_length_are_not_repeated(store):
    found = run_study(parse({**CONTENT, "screen": {"seeds": 1}}), store)
    assert found.progress.runs_done == PLACES * RATES + PLACES * (SEEDS - 1)
    again = run_study(parse({**CONTENT, "screen": {"seeds": 1}}), store)
    assert again.progress.runs_done == 0
    assert [row.value for row in again.rows] == [row.value for row in found.rows]


def test_several_seeds_may_choose_and_record_may_differ(store):
    run_study(parse({**CONTENT, "screen": {"steps": 20, "seeds": [5, 6], "record": 1}}), store)
    assert {(case.seed, case.record) for _, case in store.runs() if case.steps == 20} == {(5, 1), (6, 1)}


def test_its_page_says_what_chose_and_counts_all_runs(store):
    study = parse({**CONTENT, "screen": {"steps": 20}})
    run_study(study, store)
    page = page_of(store.studies()[0], store)
    assert "smallest mean final error of short runs (20 rounds and 1 seed) is chosen" in page.facts[0]
    assert f"{PLACES * (RATES + SEEDS)} runs on" in page.facts[-1]
    assert any("smallest or largest of the grid" in note for note in page.notes)


def test_a_page_before_the_short_runs_are_done_shows_no_numbers(store):
    store.remember(study := parse({**CONTENT, "screen": {"steps": 20}}))
    page = page_of(store.studies()[0], store)
    assert page.table == ()
    assert f"None of its {PLACES * RATES} runs" in page.facts[-1]
    assert len(expand(study)[0]) == PLACES * RATES * SEEDS


@pytest.mark.parametrize(
    ("screen", "error"),
    [
        ({"epochs": 2}, "screen.epochs = 2, but the study counts steps; give steps or leave it out"),
        ({"steps": 61}, "screen.steps = 61, more than the study's 60; give at most that many"),
        ({"steps": [5]}, r"screen.steps = \[5\]; give a whole number"),
        ({"record": 10**8}, "screen.record = 100000000; give a whole number from 1 to 10000"),
        ({"seeds": 100_000}, r"a grid of 2,400,000 runs; the limit is 100,000"),
        ({"step": 20}, "unknown key 'screen.step'; did you mean steps. There are steps, epochs, seeds, record"),
        ({"seeds": 0}, "screen.seeds = 0; give a whole number"),
        (20, r"screen = 20; give a table such as \{ seeds = 1 \}"),
    ],
)
def test_bad_screens_are_refused(screen, error):
    with pytest.raises(ValueError, match=f"^{error}"):
        parse({**CONTENT, "screen": screen})


def test_two_rules_of_one_name_are_chosen_for_by_themselves(store, tmp_path):
    for folder, momentum in (("a", 0.0), ("b", 0.5)):
        (tmp_path / folder).mkdir()
        code = f"from klatsch import rules\n\n\ndef mine(lr):\n    return rules.make('dsgd', lr, momentum={momentum})\n"
        (tmp_path / folder / "mine.py").write_text(code)
    both = [str(tmp_path / folder / "mine.py:mine") for folder in "ab"]
    found = run_study(parse({**CONTENT, "rules": both, "nodes": 4, "screen": {"steps": 20}}), store)
    assert len(found.rows) == 2 * 2  # settings
    assert len({row.rule for row in found.rows}) == 2
    assert page_of(store.studies()[0], store).table


def test_results_show_the_full_runs_with_what_the_short_ones_tried(tmp_path, in_threads, run_cli):
    file = tmp_path / "s.sqlite"
    rows = run_study(parse({**CONTENT, "screen": {"steps": 20}}), file).rows
    code, out, _ = run_cli("results", file, "--json")
    shown = json.loads(out)["rows"]
    assert code == 0
    assert [row["steps"][-1] for row in shown] == [60] * PLACES
    assert sorted(row["lr_at_edge"] for row in shown) == sorted(row.at_edge for row in rows)
    code, out, _ = run_cli("results", file, "--all", "--json")
    assert len(json.loads(out)["runs"]) == PLACES * (RATES + SEEDS)  # every run
    code, out, _ = run_cli("results", file, "--where", "schedule=constant", "--json")
    assert len(json.loads(out)["rows"]) == PLACES
