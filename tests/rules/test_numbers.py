"""Rules made of parts compute what the hand-written ones did; `numbers_before` says how those numbers were made."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

import klatsch
from tests.support.numbers_before import CASES, FILE, numbers, title

BEFORE = load_file(FILE)
VARIANTS = [[*cases] for _, cases in itertools.groupby(CASES, lambda case: title(*case).partition(" | ")[0])]
# Every rule and option with its learning rates, each on some of its graphs: graphs have tests of their own.
SOME = [case for k, cases in enumerate(VARIANTS) for case in cases[k % min(3, len(cases)) :: 3]]


def test_the_file_holds_every_case():
    assert set(BEFORE) == {f"{title(*case)} | {part}" for case in CASES for part in ("output", "iterate")}


@pytest.mark.parametrize("case", SOME, ids=lambda case: title(*case))
def test_the_numbers_are_those_of_the_hand_written_rules(case):
    assert_as_before(numbers(case, klatsch.simulate, engine="torch"))


@pytest.mark.soak
def test_ranks_compute_them_too(launch, tmp_path):
    """Where weights differ; on other graphs ranks are compared with the simulation."""
    rules, graph = ["sgp", "dat-sgp"], "pushing ring"
    launch(8, "numbers", rules=rules, graph=graph).succeed()
    found = torch.load(tmp_path / "numbers")
    assert len(found) == 2 * sum(case[0] in rules and case[2] == graph for case in CASES)
    assert_as_before(found)


def assert_as_before(found):
    for name, value in found.items():
        expected = BEFORE[name]
        tolerance = 1e-9 if "d2" in name else 1e-12  # which looked back at iterates, now it adds up flows
        assert value.shape == expected.shape
        assert (value - expected).abs().max() <= tolerance * expected.abs().max()
