"""The table of results that `klatsch run` and `klatsch results` print, and the same rows as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from klatsch.cli import terminal

if TYPE_CHECKING:
    from klatsch.report.sentences import Verdict
    from klatsch.study.cases import Case, LeftOut
    from klatsch.study.choices import Row
    from klatsch.study.traffic import Exchange

COLOURS = {"holds": "green", "does not hold": "red", "not decided": "yellow"}
EXPENDABLE = ("Gamma", "worst", "merged", "to", "from", "nodes")  # what a narrow terminal loses first


def print_rows(
    rows: Sequence[Row], left_out: Sequence[LeftOut], title: str, device: str = "cpu", clocked: bool = False
) -> None:
    """Print one line per row, then notes; with what it takes and sends where there is a clock."""
    from klatsch import native

    lines, counts = _lines(rows, clocked), sorted({len(row.curves) for row in rows})
    kept = terminal.print_table(title, lines, EXPENDABLE, section="topology")
    notes = {
        "from": f"from, to: smallest and largest of {' or '.join(map(str, counts))} seeds",
        "merged": "merged: mean of all models",
        "worst": "worst: worst node",
        "Gamma": "Gamma: consensus distance of the points where gradients are taken",
        "time": "time: by the clock, until all nodes are done",
        "sent": "sent: by a node",
    }
    wider = [terminal.WIDER] if len(kept) < len(lines[0]) else []
    terminal.note("; ".join([note for name, note in notes.items() if name in kept] + wider))
    if clocked:
        say_unknown((row.case, row.exchange) for row in rows if row.case is not None)
    if any(row.at_edge for row in rows):
        terminal.note("* the smallest or largest learning rate tried: a better one may lie beyond")
    for reason in dict.fromkeys(item.reason for item in left_out):
        sizes = ", ".join(str(item.nodes) for item in left_out if item.reason == reason)
        terminal.note(f"left out at {sizes} nodes: {reason}")
    if native.why_not() is not None and device == "cpu":
        terminal.note(f"slower than it could be: {native.why_not()}")


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print sentences, whether they hold, and the numbers that decide."""
    for verdict in verdicts:
        terminal.console().print(Text.assemble((verdict.word, COLOURS[verdict.word]), f": {verdict.claim}"))
        for line in verdict.figures:
            terminal.note(f"    {line}")


def _lines(rows: Sequence[Row], clocked: bool) -> list[dict[str, str]]:
    """The cells of a table by their headings."""
    from klatsch.study.choices import BESIDE
    from klatsch.units import compact, duration, size

    if not rows:
        raise ValueError("no run is finished yet")

    settings = dict.fromkeys(name for row in rows for name in row.setting)
    varying = [name for name in settings if len({row.setting.get(name) for row in rows}) > 1]
    spread = {len(row.curves) for row in rows} != {1}  # of the seeds
    measured = [name for name in BESIDE if not all(math.isnan(row.beside(name)) for row in rows)]
    return [
        {
            "topology": row.topology,
            **{name: compact(row.setting.get(name, "-")) for name in varying},
            "nodes": str(row.nodes),
            "rule": row.rule,
            row.title: "diverged" if row.diverged else short(row.value),
            "lr": f"{row.lr:g}" + ("*" if row.at_edge else ""),
            **({"from": short(row.low), "to": short(row.high)} if spread else {}),
            **{name: "-" if math.isnan(v := row.beside(name)) else short(v) for name in measured},
            "Gamma": short(float(row.consensus[:, -1, row.best].mean())),
            **({"time": "-" if row.elapsed is None else duration(row.elapsed[-1])} if clocked else {}),
            **({"sent": "-" if row.sent is None else size(row.sent)} if clocked else {}),
        }
        for row in rows
    ]


def as_latex(rows: Sequence[Row], clocked: bool = False) -> str:
    """The same table for LaTeX."""
    lines = _lines(rows, clocked)
    columns = "".join("l" if heading in terminal.LEFT else "r" for heading in lines[0])
    table = [list(lines[0]), *(list(line.values()) for line in lines)]
    head, *body = (" & ".join(map(_in_latex, cells)) + r" \\" for cells in table)
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    )


def _in_latex(text: str) -> str:
    """A text whose characters LaTeX prints as they are, and numbers as 10^-3."""
    power = re.fullmatch(r"(-?[\d.]+)e([+-]\d+)(\*?)", text)
    if power:
        return rf"${power[1]} \cdot 10^{{{int(power[2])}}}${power[3]}"
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def say_unknown(runs: Iterable[tuple[Case, Exchange | None]]) -> None:
    """Say of which runs bytes or seconds are not known, and why."""
    from klatsch.study.traffic import why_unknown

    reasons = {(case.label, case.graph_label): why_unknown(case, exchange) for case, exchange in runs}
    for (rule, graph), reason in reasons.items():
        if reason:
            terminal.note(f"no time of {rule} on {graph}: {reason}")


def plain(row: Row) -> dict[str, object]:
    """A row as JSON can hold it."""
    from klatsch.study.choices import BESIDE

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
        **{name: finite(row.beside(name)) for name in BESIDE},
        "Gamma": finite(row.consensus[:, -1, row.best].mean()),
        "bytes_sent": row.sent,
        "seconds": row.seconds,
        "steps": list(row.steps),
        "elapsed": None if row.elapsed is None else list(row.elapsed),
        "curve": [finite(value) for value in row.curve.mean(axis=0)],
        "final_by_lr": {f"{lr:g}": finite(value) for lr, value in zip(row.lrs, row.final.mean(axis=0), strict=True)},
    }


def short(value: float) -> str:
    """A number for a table."""
    return f"{value:.3g}" if math.isfinite(value) else "diverged"


def finite(value: float) -> float | None:
    """A number for JSON, which has no infinity."""
    return float(value) if math.isfinite(value) else None
