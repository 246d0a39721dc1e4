"""Tests compare numbers to rounding, or say why their bits must be the same; else they pass on some machines only."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
import torch

from tests.support.comparisons import assert_same_to_rounding

REASONS = {
    "same call": "the same work with the same shapes and threads: repeated, resumed, or read from a file",
    "a copy": "nothing is computed: it was copied, or must not have been touched",
    "whole numbers": "nothing is rounded",
}
EXACT = {"equal", "array_equal", "assert_array_equal", "assert_equal"}
CLOSE = {"assert_close", "assert_allclose", "allclose", "isclose"}


def compares_bits(node):
    """Whether an expression compares numbers to the last bit and expects them to be the same."""
    if isinstance(node, ast.Compare):
        lists = ["tolist" in {n.attr for n in ast.walk(side) if isinstance(n, ast.Attribute)} for side in sides(node)]
        return isinstance(node.ops[0], ast.Eq) and all(lists)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    zero = {k.arg for k in node.keywords if isinstance(k.value, ast.Constant) and k.value.value == 0}
    return node.func.attr in EXACT or (node.func.attr in CLOSE and {"rtol", "atol"} <= zero)


def sides(node):
    return node.left, *node.comparators


def bit_comparisons(source):
    """The lines of all comparisons to the last bit, each with the reason that stands after it, or None."""
    tree = ast.parse(source)
    denied = {id(n.operand) for n in ast.walk(tree) if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not)}
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(tree):
        if compares_bits(node) and id(node) not in denied:
            said = (re.match(r"# bits: (.+)", comments.get(k, "")) for k in range(node.lineno, node.end_lineno + 1))
            yield node.lineno, next((match[1] for match in said if match), None)


def test_who_compares_bits_says_why():
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        for line, reason in bit_comparisons(path.read_text()):
            assert reason in REASONS, (
                f"{path.name}:{line} compares to the last bit, which holds on some machines only: use "
                f"comparisons.assert_same_to_rounding, or end the line with '# bits: ' and one of {', '.join(REASONS)}"
            )


@pytest.mark.parametrize(
    "line, found",
    [
        ("assert torch.equal(a, b)", [None]),
        ("assert all(torch.equal(p, q) for p, q in pairs)  # bits: same call", ["same call"]),
        ("np.testing.assert_array_equal(a, b)  # bits: I say so", ["I say so"]),
        ("torch.testing.assert_close(a, b, rtol=0, atol=0)", [None]),
        ("np.testing.assert_allclose(\n    a,\n    b,\n    rtol=0,\n    atol=0.0,\n)  # bits: a copy", ["a copy"]),
        ("assert a.tolist() == b.tolist()", [None]),
        ("assert a.equal(b) and np.array_equal(c, d)", [None, None]),
        ("torch.testing.assert_close(a, b, rtol=0, atol=1e-12)", []),
        ("assert not torch.equal(a, b)", []),
        ("assert mask.tolist() == [True, False]", []),
        ("equal(model, other)", []),
    ],
)
def test_bit_comparisons_are_found(line, found):
    assert [reason for _, reason in bit_comparisons(line + "\n")] == found


@pytest.mark.parametrize("dtype, noise, defect", [(torch.float64, 1e-14, 1e-7), (torch.float32, 1e-6, 1e-2)])
def test_rounding_passes_and_a_defect_does_not(dtype, noise, defect):
    expected = torch.tensor([[1e3, 1.0, 0.0, 5.0], [1e-9, 2e-9, 3e-9, torch.inf]], dtype=torch.float64)
    assert_same_to_rounding((expected * (1 + noise)).to(dtype), expected.to(dtype))
    assert_same_to_rounding(expected * (1 + noise), expected, dtype)
    for row in (0, 1):  # the small vector counts as much as the large one
        wrong = expected.clone()
        wrong[row, 1] += defect * expected[row, 0]
        with pytest.raises(AssertionError):
            assert_same_to_rounding(wrong, expected, dtype)
    for other in (torch.nan, 1.0):
        with pytest.raises(AssertionError):
            assert_same_to_rounding(expected.nan_to_num(posinf=other), expected, dtype)
