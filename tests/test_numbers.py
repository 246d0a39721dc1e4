"""Rules made of parts compute what the hand-written ones did; `numbers_before` says how those numbers were made."""

import pytest
from safetensors.torch import load_file

from tests.numbers_before import CASES, FILE, numbers, title
from tests.test_engine import ENGINES

BEFORE = load_file(FILE)


def test_the_file_holds_every_case():
    assert set(BEFORE) == {f"{title(*case)} | {part}" for case in CASES for part in ("output", "iterate")}


@ENGINES
@pytest.mark.parametrize("case", CASES, ids=lambda case: title(*case))
def test_the_numbers_are_those_of_the_hand_written_rules(case, engine):
    rule = case[0]
    if "sgp" in rule and engine == "fused":
        engine = "auto"  # it divides, which is no linear step
    tolerance = 1e-9 if "d2" in rule else 1e-12  # which looked back at iterates, now it adds up flows
    for part, found in numbers(*case, engine).items():
        expected = BEFORE[f"{title(*case)} | {part}"]
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()
