"""How long runs would take on machines and links: computed when they are shown, from what their nodes send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from klatsch.clock import Clock
from klatsch.study.choices import Row
from klatsch.study.traffic import elapsed


def timed(rows: Sequence[Row], clock: Clock | None) -> list[Row]:
    """Rows that know how long they take by a clock, if there is one."""
    if clock is None:
        return list(rows)
    return [
        row if row.case is None else replace(row, elapsed=elapsed(row.case, row.exchange, clock, row.steps))
        for row in rows
    ]
