"""Pictures of a topology: one panel for each round in which nodes talk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from klatsch import pictures
from klatsch.extras import need
from klatsch.topology.graph import Topology, check_topology

if TYPE_CHECKING:  # loaded only to draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 2000  # nodes; more cannot be told apart
MOST_LINKS = 100_000  # per round, for files of a few megabytes
MOST_PATCHES = 1000  # links per round that have arrows and bends; more are plain lines
FEW_ROUNDS = 5  # of a graph that never repeats
NODE, LINK = "#c2410c", "#334155"

Positions = NDArray[np.float64]


def draw(topology: Topology, path: str | Path) -> Path:
    """Draw a topology to an SVG, PNG or PDF file, with one panel for each round in which nodes talk."""
    check_topology("draw", topology)
    path = Path(path)
    pictures.check_path(path)
    if topology.size > LARGEST:
        raise ValueError(f"{topology.size} nodes are too many to draw; choose {LARGEST} or fewer")
    links = max(P.nnz - topology.size for P in topology.speaking) // (1 if topology.directed else 2)
    if links > MOST_LINKS:
        raise ValueError(f"{links:,} links are too many to draw; take fewer nodes or a sparser graph")
    pictures.save(figure(topology), path, dpi=150, bbox_inches="tight")
    return path


def figure(topology: Topology) -> Figure:
    """The picture as a matplotlib figure."""
    need("a figure", "matplotlib")
    from matplotlib.figure import Figure

    graphs = len(topology.speaking) if topology.shuffle is None else FEW_ROUNDS
    columns = min(5, graphs)
    rows = math.ceil(graphs / columns)
    side = 3.0 if topology.changes else 4.5
    high, wide = topology.lattice or (1, 1)
    height = side * min(2.0, max(0.3, high / wide))
    result = Figure(figsize=(side * columns, height * rows + 0.5), layout="constrained")
    panels = result.subplots(rows, columns, squeeze=False).ravel()
    where = _positions(topology)
    for panel in panels:
        panel.set_axis_off()
    for k, panel in enumerate(panels[:graphs], 1):
        t = k * topology.every
        panel.set_aspect("equal")
        _draw_links(panel, topology, where, t)
        size = max(6, min(220, 6000 / len(where))) * (0.6 if topology.changes else 1)
        panel.scatter(where[:, 0], where[:, 1], s=size, color=NODE, zorder=3, linewidths=0, clip_on=False)
        font = {"color": "white", "fontsize": 6.5 if topology.changes else 8, "ha": "center", "va": "center_baseline"}
        for i, place in enumerate(where if len(where) <= 32 else ()):
            panel.annotate(str(i), place, **font, zorder=4)
        # Room for whole nodes and bent links, even around a flat graph.
        span = max(float(np.ptp(where, axis=0).max()), 1.0)
        low, high = where.min(axis=0) - 0.14 * span, where.max(axis=0) + 0.14 * span
        panel.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        if topology.changes:
            of = f" of {topology.period}" if topology.shuffle is None else ""
            panel.set_title(f"round {t}{of}", fontsize=10)
    result.suptitle(f"{topology.name}, {topology.size} nodes, ρ = {topology.spectral_gap:.4g}", fontsize=12)
    return result


def _positions(topology: Topology) -> Positions:
    """A lattice as it is, a star around its hub, any other graph on a circle."""
    nodes = np.arange(topology.size)
    if topology.lattice is not None:
        return np.stack([nodes % topology.lattice[1], -(nodes // topology.lattice[1])], axis=1).astype(np.float64)
    hub = topology.size > 3 and topology.edges == topology.size - 1 == len(topology.neighbors(0, topology.every))
    angle = np.pi / 2 - 2 * np.pi * (nodes - hub) / (topology.size - hub)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if hub or topology.size == 1:
        circle[0] = 0
    return circle


def _draw_links(panel: Axes, topology: Topology, where: Positions, t: int) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import FancyArrowPatch

    P = topology.matrix(t).tocoo()
    apart = P.row != P.col
    links = set(zip(P.col[apart].tolist(), P.row[apart].tolist(), strict=True))
    arrows = {pair for pair in links if pair[::-1] not in links}
    pairs = [*sorted(pair for pair in links - arrows if pair[0] < pair[1]), *sorted(arrows)]
    if len(pairs) > MOST_PATCHES:
        panel.add_collection(LineCollection([where[list(pair)] for pair in pairs], colors=LINK, linewidths=0.3))
        return
    for pair in pairs:
        a, b = where[list(pair)]
        # Bend a link that wraps around a lattice, so that it misses the nodes between its ends.
        wraps = topology.lattice is not None and np.abs(a - b).max() > 1.5
        patch = FancyArrowPatch(
            tuple(a),
            tuple(b),
            arrowstyle="-|>" if pair in arrows else "-",
            connectionstyle="arc3,rad=0.18" if wraps else "arc3",
            mutation_scale=9,
            shrinkA=0,
            shrinkB=8 if pair in arrows and topology.size <= 64 else 0,
            linewidth=0.8 if topology.size > 64 else 1.4,
            color=LINK,
            alpha=0.8,
        )
        panel.add_patch(patch)
