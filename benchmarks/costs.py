"""The clock against the step times that benchmarks/ranks.py measured, side by side.

Run: .venv/bin/python benchmarks/costs.py            (the table in benchmarks/README.md)
     .venv/bin/python benchmarks/costs.py rows.json  (what ranks.py --json rows.json wrote just now)

The local step is taken as the time of a gradient. All ranks share one machine of two cores, so a message takes some two
milliseconds to be noticed, and handling a byte takes longer with more ranks per core; loopback moves about 1 GB/s.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from klatsch import rules, topology
from klatsch.clock import Clock, Links

CORES = 2
STEPS = 800
RATES = {"1gbit": 1e9, "200mbit": 2e8, "50mbit": 5e7}
LATENCY, HANDLING = 2e-3, 1e-9  # seconds; seconds per byte and rank of a core
BANDWIDTH = {"loopback": 1e9} | {name: 0.94 * bits / 8 for name, bits in RATES.items()}  # bytes per second
METHODS = {
    "dsgd": "dsgd",
    "dat": "dat atc",
    "dat (cta)": "dat cta",
    "all-reduce": "ddp",
    "dat/8 int8": "dat/8 int8",
    "dat/8 int8, late": "dat/8 int8 late",
}  # and what ranks.py calls them
CHANNELS = {"dat/8 int8": 0, "dat/8 int8, late": 7}  # rounds late
ROW = re.compile(r"(\w+)\s+(\d+)\s+(\w+)\s+([\d,]+) \|" + r"\s+([\d.]+)" * 5 + r" \|")


class Row(NamedTuple):
    """A row of the table."""

    network: str
    ranks: int
    model: str
    params: int
    step: float  # seconds of local SGD
    measured: dict[str, float]  # seconds of METHODS, as far as they were run


def read(text: str) -> list[Row]:
    """The rows that ranks.py wrote."""
    return [
        Row(
            *(row["network"], row["ranks"], row["model"], row["parameters"], row["step"]["local"]),
            {name: row["step"][method] for name, method in METHODS.items() if method in row["step"]},
        )
        for row in json.loads(text)
    ]


def rows(text: str) -> list[Row]:
    """The rows of the table in the README."""
    found = []
    for match in map(ROW.match, text.splitlines()):
        if match and match[1] in BANDWIDTH:
            step, *times = (float(number) for number in match.groups()[4:])
            params = int(match[4].replace(",", ""))
            measured = dict(zip(METHODS, (step / 1e3 * ratio for ratio in times), strict=False))
            found.append(Row(match[1], int(match[2]), match[3], params, step / 1e3, measured))
    return found


def predicted(row: Row, method: str) -> float:
    """Seconds per step, over many steps."""
    clock = Clock(row.step, Links(BANDWIDTH[row.network], LATENCY), HANDLING * max(1.0, row.ranks / CORES))
    if method == "all-reduce":
        return float(clock.all_reduce(row.ranks, row.params, [STEPS])[0, 0]) / STEPS
    name, _, order = method.partition("/")[0].partition(" ")
    rule = rules.make(name, lr=1.0, order=order.strip("()") or "atc")
    channel = {"every": 8, "late": CHANNELS[method], "wire": "int8"} if method in CHANNELS else {}
    return clock.seconds(rule, topology.make("ring", row.ranks, **channel), row.params, [STEPS])[0] / STEPS


def main() -> None:
    table = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("README.md")
    print("milliseconds per step, measured / predicted (their ratio; * more than 30 % off)\n")
    print(f"{'network':9} ranks {'model':6} | " + " | ".join(f"{method:^26}" for method in METHODS))
    good = total = 0
    for row in (read if table.suffix == ".json" else rows)(table.read_text()):
        cells = []
        for method in METHODS:
            if method not in row.measured:
                cells.append(" " * 26)
                continue
            seconds, guess = row.measured[method], predicted(row, method)
            ratio = guess / seconds
            within = 1 / 1.3 <= ratio <= 1.3
            good, total = good + within, total + 1
            cells.append(f"{seconds * 1e3:8.1f} /{guess * 1e3:8.1f} ({ratio:.2f}{' ' if within else '*'})")
        print(f"{row.network:9} {row.ranks:5} {row.model:6} | " + " | ".join(cells))
    print(f"\nwithin 30 %: {good} of {total}")


if __name__ == "__main__":
    main()
