"""Figures as SVG, PNG or PDF files, with the same bytes for the same figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klatsch import files
from klatsch.extras import need

if TYPE_CHECKING:  # drawing libraries are loaded only to draw
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike, NDArray

FORMATS = (".svg", ".png", ".pdf")
PARTS = {"all nodes": (0, 100), "middle half": (25, 75)}  # of the nodes, in percent


def check_path(path: Path) -> None:
    """Refuse a name for a figure that cannot be written, before the work."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw to {path}: the file name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw to {path}: there is no folder {path.parent}; make it first")
    files.check_output(path, path.suffix[1:].upper())


def save(figure: Figure, path: Path, **style: Any) -> None:
    """Write a figure to a file that is whole or absent; `style` are options of savefig, such as dpi."""
    check_path(path)
    files.save(path, render(figure, path.suffix.lower(), **style), path.suffix[1:].upper())


def render(figure: Figure, kind: str, **style: Any) -> bytes:
    """A figure as the content of a file of this kind (".svg", ".png" or ".pdf")."""
    import matplotlib

    dates: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "klatsch"}):  # a fixed salt and no date: the same file every time
        figure.savefig(data, format=kind[1:], facecolor="white", metadata=dates.get(kind), **style)
    figure.set_layout_engine("none")  # what is in place stays there: to lay it out again takes as long as to draw it
    return data.getvalue()


def spread(steps: Sequence[int], values: ArrayLike, label: str = "") -> Figure:
    """How a metric differs between nodes: the median, the middle half and all of them, of values (len(steps), M)."""
    need("a figure", "matplotlib")
    import numpy as np
    from matplotlib.figure import Figure

    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or len(values) != len(steps):
        raise ValueError(f"values have shape {values.shape}; give one row per step and one column per node")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, share in PARTS.items():
        low, high = np.percentile(values, share, axis=1)
        axes.fill_between(steps, low, high, alpha=0.25, color="C0", linewidth=0, label=name)
    axes.plot(steps, np.median(values, axis=1), color="C0", label="median")
    axes.set(xlabel="round", ylabel=label, xscale="log", yscale="log" if (values > 0).all() else "linear")
    axes.legend()
    return figure


def classes_of_nodes(counts: NDArray[np.int64], classes: Sequence[str], title: str) -> Figure:
    """A bar per node, made of its classes; counts are (nodes, classes)."""
    need("a figure", "matplotlib")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    nodes, few = range(len(counts)), len(counts) <= 24
    figure = Figure(figsize=(7.5, 1.6 + (0.26 if few else 0.14) * len(counts)), layout="constrained")
    axis, ends = figure.subplots(), counts.cumsum(axis=1)
    for k, name in enumerate(classes):
        colour, left = colormaps["tab10"](k % 10), ends[:, k] - counts[:, k]
        axis.barh(nodes, counts[:, k], left=left, height=0.72, color=colour, label=name)
    axis.set_yticks(nodes, [str(node) for node in nodes], fontsize=8 if few else 5)
    axis.set(xlim=(0, float(ends.max())), ylim=(len(counts) - 0.5, -0.5), xlabel="images", ylabel="node")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure
