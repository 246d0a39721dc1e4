"""Times, sizes, counts and options as people say them."""

from __future__ import annotations

import math
from collections.abc import Mapping

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86_400, "years": 31_557_600}
UP_TO = (1e-3, 1, 120, 7200, 172_800, 86_400_000, math.inf)  # seconds, for each unit


def duration(seconds: float) -> str:
    """A time."""
    if not math.isfinite(seconds):
        return "forever" if seconds == math.inf else "unknown"
    shown = float(f"{seconds:.3g}")  # 0.9999 s are not 1e+03 ms
    unit, size = next(pair for pair, most in zip(UNITS.items(), UP_TO, strict=True) if shown < most)
    return f"{seconds / size:,.3g} {unit}"


def size(count: float) -> str:
    """Bytes."""
    steps = min(5, max(0, math.floor(math.log10(max(count, 1)) / 3)))
    return f"{count / 1000**steps:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[steps]}"


def counted(number: int, word: str) -> str:
    """A number of things."""
    return f"1 {word}" if number == 1 else f"{number:,} {word}s"


def ordinal(number: int) -> str:
    """As in 1st, 2nd, 11th."""
    return f"{number}{'th' if number % 100 // 10 == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def compact(value: object) -> str:
    """A value for a table."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def in_words(options: Mapping[str, object]) -> str:
    """Options for a table, such as "noise 1, heterogeneity 10"."""
    return ", ".join(f"{name} {compact(value)}" for name, value in options.items())
