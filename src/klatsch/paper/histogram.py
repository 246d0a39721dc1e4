"""How classes are spread over nodes, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(counts: NDArray[np.int64], classes: Sequence[str], title: str) -> Figure:
    """A bar per node, made of its classes; counts are (nodes, classes)."""
    from matplotlib import colormaps
    from matplotlib import figure as figures

    nodes = np.arange(len(counts))
    figure = figures.Figure(
        figsize=(7.5, 1.6 + (0.26 if len(counts) <= 24 else 0.14) * len(counts)), layout="constrained"
    )
    axis = figure.subplots()
    left = np.zeros(len(counts))
    for k, name in enumerate(classes):
        axis.barh(nodes, counts[:, k], left=left, height=0.72, color=colormaps["tab10"](k % 10), label=name)
        left = left + counts[:, k]
    axis.set_yticks(nodes, [str(node) for node in nodes], fontsize=8 if len(counts) <= 24 else 5)
    axis.set_ylim(len(counts) - 0.5, -0.5)
    axis.set_xlim(0, float(left.max()))
    axis.set_xlabel("images")
    axis.set_ylabel("node")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure
