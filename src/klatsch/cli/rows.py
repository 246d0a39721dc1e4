"""Rows of a study on the terminal and as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from klatsch.cli import terminal

if TYPE_CHECKING:
    from klatsch.study.cases import LeftOut
    from klatsch.study.choices import Row

EXPENDABLE = ("Gamma", "to", "from", "nodes")  # what a narrow terminal loses first


def print_rows(rows: Sequence[Row], left_out: Sequence[LeftOut], title: str, device: str = "cpu") -> None:
    """Print one line per row, and what it does not say by itself."""
    from klatsch.simulation import native
    from klatsch.study.grids import shown

    if not rows:
        raise ValueError("no run is finished yet")

    def setting(name: str, row: Row) -> str:
        return shown(row.setting.get(name, "-"))

    console = terminal.console()
    settings = dict.fromkeys(name for row in rows for name in row.setting)
    varying = [name for name in settings if len({row.setting.get(name) for row in rows}) > 1]
    columns: dict[str, Callable[[Row], str]] = {
        "topology": lambda row: row.topology,
        **{name: partial(setting, name) for name in varying},
        "nodes": lambda row: str(row.nodes),
        "rule": lambda row: row.rule,
        rows[0].title: lambda row: "diverged" if row.diverged else short(row.value),
        "lr": lambda row: f"{row.lr:g}" + ("*" if row.at_edge else ""),
        "from": lambda row: short(row.low),
        "to": lambda row: short(row.high),
        "Gamma": lambda row: short(float(row.consensus[:, -1, row.best].mean())),
    }
    kept = terminal.print_table(console, title, columns, rows, EXPENDABLE, lambda row: row.topology)
    counts = sorted({len(row.curves) for row in rows})
    seeds = " or ".join(map(str, counts)) + (" seed" if counts == [1] else " seeds")
    notes = {
        "from": f"from, to: smallest and largest of {seeds}",
        "Gamma": "Gamma: consensus distance of the points where gradients are taken",
    }
    said = [note for name, note in notes.items() if name in kept]
    if len(kept) < len(columns):
        said.append(terminal.WIDER)
    console.print("; ".join(said), style="dim")
    if any(row.at_edge for row in rows):
        console.print("* the smallest or largest learning rate tried: a better one may lie beyond", style="dim")
    for reason in dict.fromkeys(item.reason for item in left_out):
        sizes = ", ".join(str(item.nodes) for item in left_out if item.reason == reason)
        terminal.note(console, f"left out at {sizes} nodes: {reason}")
    if native.why_not() is not None and device == "cpu":
        terminal.note(console, f"slower than it could be: {native.why_not()}")


def plain(row: Row) -> dict[str, object]:
    """A row as JSON can hold it."""
    return {
        "rule": row.rule,
        "topology": row.topology,
        "nodes": row.nodes,
        "setting": dict(row.setting),
        "lr": row.lr,
        "lr_at_edge": row.at_edge,
        row.title: finite(row.value),
        "low": finite(row.low),
        "high": finite(row.high),
        "Gamma": finite(row.consensus[:, -1, row.best].mean()),
        "seconds": row.seconds,
        "steps": list(row.steps),
        "curve": [finite(value) for value in row.curve.mean(axis=0)],
        "final_by_lr": {f"{lr:g}": finite(value) for lr, value in zip(row.lrs, row.final.mean(axis=0), strict=True)},
    }


def short(value: float) -> str:
    """A number for a table."""
    return f"{value:.3g}" if math.isfinite(value) else "diverged"


def finite(value: float) -> float | None:
    """A number for JSON, which has no infinity."""
    return float(value) if math.isfinite(value) else None
