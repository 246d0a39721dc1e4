"""The paper's least-squares experiments as studies (Section 5.1 and its appendix), at full scale and at a quick one."""

from __future__ import annotations

from typing import Any

from klatsch.study.spec import PAPER_GRID, Study, parse

TOPOLOGIES = ("ring", "torus", "one_peer_exponential")
FIGURE_OF = {"fig4": "ring", "fig5": "torus", "fig6": "one_peer_exponential"}
SETTINGS = {"name": "least-squares", "noise": [1.0, 10.0], "heterogeneity": [1.0, 10.0]}
SCALES: dict[str, dict[str, Any]] = {
    "quick": {"nodes": (4, 9, 16, 25, 49, 100), "steps": 20_000, "seeds": 3},
    "paper": {"nodes": (4, 9, 16, 25, 36, 49, 64, 81, 100), "steps": 100_000, "seeds": 3},
}

# Beyond the paper: below its grid, whose smallest learning rate is too large for D-SGD here, and sizes up to 256.
SMALLER = (1e-6, 5e-6, 1e-5, 5e-5)
BEYOND_SCALES: dict[str, dict[str, Any]] = {
    "quick": {"nodes": (4, 25, 100, 256), "steps": 4_000, "seeds": 1},
    "paper": {"nodes": (4, 9, 25, 49, 100, 256), "steps": 100_000, "seeds": 3},
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "dsgd"},
    {"name": "dsgd", "average": "constant"},
    {"name": "gt"},
    {"name": "gt", "average": "constant"},
    {"name": "d2", "lazy": True},
    {"name": "dat"},
    {"name": "dat", "order": "cta"},
    {"name": "dat-gt"},
    {"name": "dat-d2"},
)


def study_of(target: str, scale: str, device: str = "cpu", dtype: str | None = None) -> Study:
    """The runs behind a figure; figures 4 to 6 show the course of what figure 1 shows the end of.

    Args:
        target: "fig1", "fig4", "fig5", "fig6" or "beyond".
        scale: "quick" or "paper".
        device: "cpu", "cuda", ...
        dtype: by default float32 on a CPU, where it is twice as fast, and float64 on a GPU.
    """
    common: dict[str, Any] = {
        "name": f"{target}-{scale}",
        "problem": SETTINGS,
        "topologies": TOPOLOGIES,
        "rules": ("dat", "dsgd"),
        "lr": PAPER_GRID,
        "device": device,
        "dtype": dtype or ("float32" if device == "cpu" else "float64"),
    }
    if target == "beyond":
        own = {"rules": VARIANTS, "lr": (*SMALLER, *PAPER_GRID), "leave_out": True}
        return parse(common | own | BEYOND_SCALES[scale])
    if target in FIGURE_OF:
        common["topologies"] = (FIGURE_OF[target],)
    return parse(common | SCALES[scale])
