"""Figures as SVG, PNG or PDF files, with the same bytes for the same figure."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klatsch import files

if TYPE_CHECKING:  # drawing libraries are loaded only to draw
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")


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
