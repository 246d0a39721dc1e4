"""Pictures of a topology: one panel per round of its period."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from klatsch.files import write_atomically
from klatsch.topology.core import Topology

if TYPE_CHECKING:  # drawing libraries are only loaded by those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
LARGEST = 2000  # nodes that can still be told apart
NODE, LINK = "#c2410c", "#334155"

Positions = NDArray[np.float64]


def draw(topology: Topology, path: str | Path) -> Path:
    """Draw every round of the period to an SVG, PNG or PDF file.

    Raises:
        ValueError: the file has another ending, its folder does not exist, or the graph is too large to be seen.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw to {path}: the file name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw to {path}: the folder {path.parent} does not exist; make it first")
    if topology.size > LARGEST:
        raise ValueError(f"cannot draw {topology.size} nodes so that one sees anything; choose {LARGEST} or fewer")
    import matplotlib

    # A fixed salt and no date: the same graph gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "klatsch"}):
        buffer = io.BytesIO()
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure(topology).savefig(
            buffer, format=path.suffix.lower()[1:], dpi=150, bbox_inches="tight", facecolor="white", metadata=metadata
        )
    write_atomically(path, buffer.getvalue())
    return path


def figure(topology: Topology) -> Figure:
    """The same picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    columns = min(5, topology.period)
    rows = math.ceil(topology.period / columns)
    side = 4.5 if topology.period == 1 else 3.0
    high, wide = topology.lattice or (1, 1)
    height = side * min(2.0, max(0.3, high / wide))
    result = Figure(figsize=(side * columns, height * rows + 0.5), layout="constrained")
    panels = result.subplots(rows, columns, squeeze=False).ravel()
    where = _positions(topology)
    for t, panel in enumerate(panels, 1):
        panel.set_axis_off()
        if t > topology.period:
            continue
        panel.set_aspect("equal")
        panel.margins(0.12)
        _draw_links(panel, topology, where, t)
        _draw_nodes(panel, topology.size, where)
        if topology.period > 1:
            panel.set_title(f"round {t} of {topology.period}", fontsize=10)
    rho = f"ρ = {topology.spectral_gap:.4g}"
    result.suptitle(f"{topology.name}, {topology.size} nodes, {rho}", fontsize=12)
    return result


def _positions(topology: Topology) -> Positions:
    nodes = np.arange(topology.size)
    if topology.lattice is not None:
        return np.stack([nodes % topology.lattice[1], -(nodes // topology.lattice[1])], axis=1).astype(np.float64)
    hub = topology.size > 3 and topology.edges == topology.size - 1 == len(topology.neighbors(0))
    angle = np.pi / 2 - 2 * np.pi * (nodes - hub) / (topology.size - hub)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if hub or topology.size == 1:
        circle[0] = 0
    return circle


def _draw_nodes(panel: Axes, size: int, where: Positions) -> None:
    labels = size <= 32
    panel.scatter(where[:, 0], where[:, 1], s=max(6, min(220, 6000 / size)), color=NODE, zorder=3, linewidths=0)
    for i in range(size if labels else 0):
        panel.annotate(str(i), where[i], color="white", fontsize=8, ha="center", va="center", zorder=4)


def _draw_links(panel: Axes, topology: Topology, where: Positions, t: int) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import FancyArrowPatch

    P = topology.matrix(t).tocoo()
    hears, speaks = P.row, P.col
    apart = hears != speaks
    links = {(int(j), int(i)): float(w) for i, j, w in zip(hears[apart], speaks[apart], P.data[apart], strict=True)}
    arrows = {pair for pair in links if pair[::-1] not in links}
    lines = [pair for pair in links if pair not in arrows and pair[0] < pair[1]]
    thickness = 0.6 if topology.size > 64 else 1.2
    if topology.size > 200:  # too many for single patches
        panel.add_collection(LineCollection([where[list(p)] for p in [*lines, *arrows]], colors=LINK, linewidths=0.3))
        panel.autoscale_view()
        return
    heaviest = max(links.values(), default=1.0)
    for pair in [*lines, *sorted(arrows)]:
        a, b = where[list(pair)]
        # A link that wraps around a lattice would run through the nodes between its ends: bend it.
        wraps = topology.lattice is not None and np.abs(a - b).max() > 1.5
        patch = FancyArrowPatch(
            tuple(a),
            tuple(b),
            arrowstyle="-|>" if pair in arrows else "-",
            connectionstyle="arc3,rad=0.18" if wraps else "arc3",
            mutation_scale=9,
            shrinkA=0,
            shrinkB=8 if pair in arrows and topology.size <= 64 else 0,
            linewidth=thickness * (0.4 + links[pair] / heaviest),
            color=LINK,
            alpha=0.8,
        )
        panel.add_patch(patch)
