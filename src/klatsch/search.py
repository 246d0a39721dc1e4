"""Search by doubling and bisection."""

from collections.abc import Callable


def last(holds: Callable[[int], bool], low: int = 0) -> int:
    """The last whole number from `low` up at which `holds` is true; it must be true up to there and false beyond."""
    high = max(1, 2 * low)
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
