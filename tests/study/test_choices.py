"""What a row says of its runs."""

import numpy as np
import pytest

from klatsch.study import Row


def test_what_one_has_after_a_share_of_the_rounds():
    """At the learning rate that is best at the end, here the second, and at the recorded round that is nearest."""
    first, second = [[1.0, 9.0], [1.0, 8.0], [1.0, 2.0], [1.0, 0.5]], [[1.0, 7.0], [1.0, 6.0], [1.0, 4.0], [1.0, 0.1]]
    curves = np.array([first, second])
    row = Row("dat", "ring", 4, (0.1, 0.2), (1, 10, 45, 100), curves, curves, 1.0)
    assert [row.stopped(share).value for share in (0.5, 0.1, 0.01, 1)] == [3.0, 7.0, 8.0, row.value]
    for share in (0, 1.5, np.nan):
        with pytest.raises(ValueError, match=f"share = {share}; give a number above 0 and up to 1"):
            row.stopped(share)


@pytest.mark.parametrize("best, at_edge", [(0, True), (1, False), (2, True)])
def test_a_better_rate_may_lie_beyond_the_smallest_and_the_largest(best, at_edge):
    curves = np.ones((1, 1, 3))
    curves[..., best] = 0.5
    assert Row("dat", "ring", 4, (0.1, 0.2, 0.3), (10,), curves, curves, 1.0).at_edge == at_edge
