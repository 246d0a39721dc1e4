"""Rules made of parts compute what the hand-written ones did; `numbers_before` says how those numbers were made."""

import pytest
import torch
from safetensors.torch import load_file

import klatsch
from tests.support.machine import ENGINES
from tests.support.numbers_before import CASES, FILE, numbers, title

BEFORE = load_file(FILE)


def test_the_file_holds_every_case():
    assert set(BEFORE) == {f"{title(*case)} | {part}" for case in CASES for part in ("output", "iterate")}


@pytest.mark.slow
@ENGINES
@pytest.mark.parametrize("case", CASES, ids=lambda case: title(*case))
def test_the_numbers_are_those_of_the_hand_written_rules(case, engine):
    if "sgp" in case[0] and engine == "fused":
        engine = "auto"  # it divides, which is no linear step
    assert_as_before(numbers(case, klatsch.simulate, engine=engine))


@pytest.mark.parametrize("size, graphs", [pytest.param(9, ["ring"], marks=pytest.mark.soak), (8, ["pushing ring"])])
def test_ranks_compute_them_too(size, graphs, launch, tmp_path):
    launch(size, "numbers", graphs=graphs).succeed()
    found = torch.load(tmp_path / "numbers")
    assert len(found) == 2 * sum(graph in graphs for _, _, graph in CASES)
    assert_as_before(found)


def assert_as_before(found):
    for name, value in found.items():
        expected = BEFORE[name]
        tolerance = 1e-9 if "d2" in name else 1e-12  # which looked back at iterates, now it adds up flows
        assert value.shape == expected.shape
        assert (value - expected).abs().max() <= tolerance * expected.abs().max()
