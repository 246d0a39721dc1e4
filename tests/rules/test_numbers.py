"""Rules made of parts compute what the hand-written ones did; `numbers_before` says how those numbers were made."""

import pytest
import torch
from safetensors.torch import load_file

import klatsch
from tests.support.machine import KERNEL
from tests.support.numbers_before import CASES, FILE, numbers, title

BEFORE = load_file(FILE)


def test_the_file_holds_every_case():
    assert set(BEFORE) == {f"{title(*case)} | {part}" for case in CASES for part in ("output", "iterate")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: title(*case))
def test_the_numbers_are_those_of_the_hand_written_rules(case):
    assert_as_before(numbers(case, klatsch.simulate, engine="torch"))


@pytest.mark.slow
@KERNEL
@pytest.mark.parametrize("case", [case for case in CASES if "sgp" not in case[0]], ids=lambda case: title(*case))
def test_the_fused_engine_computes_them_too(case):
    """But for push-sum, which divides: that is no linear step."""
    assert_as_before(numbers(case, klatsch.simulate, engine="fused"))


@pytest.mark.parametrize(
    "size, rules, graph",
    [
        pytest.param(9, sorted({rule for rule, _, _ in CASES}), "ring", marks=pytest.mark.soak),
        (8, ["dat-sgp"], "pushing ring"),
    ],
)
def test_ranks_compute_them_too(size, rules, graph, launch, tmp_path):
    launch(size, "numbers", rules=rules, graph=graph).succeed()
    found = torch.load(tmp_path / "numbers")
    assert len(found) == 2 * sum(case[0] in rules and case[2] == graph for case in CASES)
    assert_as_before(found)


def assert_as_before(found):
    for name, value in found.items():
        expected = BEFORE[name]
        tolerance = 1e-9 if "d2" in name else 1e-12  # which looked back at iterates, now it adds up flows
        assert value.shape == expected.shape
        assert (value - expected).abs().max() <= tolerance * expected.abs().max()
