"""Times and sizes in words."""

import math

import pytest

from klatsch.units import duration, ordinal, size


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.0, "0 us"),
        (2.5e-5, "25 us"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (119, "119 s"),
        (121, "2.02 min"),
        (7200, "2 h"),
        (200_000, "2.31 days"),
        (1e10, "317 years"),
        (math.inf, "forever"),
    ],
)
def test_times(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    "count, words", [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4e6, "4 MB"), (1.5e9, "1.5 GB"), (2e16, "20 PB")]
)
def test_sizes(count, words):
    assert size(count) == words


def test_ordinals():
    assert [*map(ordinal, (1, 2, 3, 4, 11, 12, 13, 21, 102, 111))] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "102nd",
        "111th",
    ]
