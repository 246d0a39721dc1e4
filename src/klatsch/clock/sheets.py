"""Tables of numbers in CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from klatsch.files import text_of


def table(path: Path) -> NDArray[np.float64]:
    """The numbers of a CSV file, (rows, columns); a first row of names is left out."""
    try:
        text = text_of(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a CSV file with rows of numbers") from None
    rows = [row for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    if rows and not any(_is_number(cell) for cell in rows[0]):
        rows = rows[1:]
    if not rows:
        raise ValueError(f"{path} has no numbers; give rows of numbers with commas between them")
    for k, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(f"{path}, row {k} has {len(row)} numbers, but row 1 has {len(rows[0])}; make them equal")
        for cell in row:
            if not _is_number(cell):
                raise ValueError(f"{path}, row {k}: {cell.strip()!r} is not a number; put one in its place")
    return np.array([[float(cell) for cell in row] for row in rows])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
