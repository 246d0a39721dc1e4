"""The paper's experiments as studies (Section 5 and its appendix), at full scale and at a quick one."""

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
    {"name": "d2"},
    {"name": "dat"},
    {"name": "dat", "order": "cta"},
    {"name": "dat-gt"},
    {"name": "dat-d2"},
)


# Section 5.2: LeNet on Fashion-MNIST. Learning rates and momentum are the paper's; batch, epochs and schedule are ours.
IMAGE_RULES: tuple[dict[str, Any], ...] = (
    {"name": "dat", "averaging": "fixed(0.9)", "momentum": 0.9},
    {"name": "dsgd", "momentum": 0.9},
    {"name": "d2"},
)
MORE_IMAGE_RULES: tuple[dict[str, Any], ...] = (
    {"name": "dat", "averaging": "fixed(0.9)", "momentum": 0.9, "order": "cta"},
    {"name": "gt"},
    {"name": "dat-gt", "averaging": "fixed(0.9)"},
    {"name": "dat-d2", "averaging": "fixed(0.9)"},
)
IMAGE_GRID = (0.001, 0.01, 0.1)
IMAGE_TARGETS = ("fig2", "fig3", "images-beyond")
IMAGES: dict[tuple[str, str], dict[str, Any]] = {
    ("fig2", "quick"): {"nodes": 8, "topologies": "ring", "alpha": 0.1, "seeds": 1, "epochs": 3, "test": 2_000},
    ("fig2", "paper"): {"nodes": (8, 16), "topologies": ("ring", "base_graph"), "alpha": [0.1, 10.0]},
    ("fig3", "quick"): {
        "nodes": (2, 4, 8, 16),
        "topologies": "ring",
        "alpha": 0.1,
        "seeds": 1,
        "epochs": 2,
        "test": 2_000,
    },
    ("fig3", "paper"): {"nodes": (2, 4, 8, 16, 32), "topologies": "ring", "alpha": 0.1},
    ("images-beyond", "quick"): {
        "nodes": 8,
        "topologies": "ring",
        "alpha": 0.1,
        "seeds": 1,
        "epochs": 2,
        "test": 2_000,
    },
    ("images-beyond", "paper"): {"nodes": (8, 16), "topologies": "ring", "alpha": [0.1, 10.0]},
}


def image_study(target: str, scale: str, device: str = "cpu", epochs: int | None = None) -> Study:
    """The runs behind figures 2 and 3, and other rules on the same axes ("images-beyond").

    Args:
        target: "fig2", "fig3" or "images-beyond".
        scale: "quick" or "paper".
        device: "cpu", "cuda", ...
        epochs: how often to go through the data; 50 at paper scale by default.
    """
    own = {"seeds": 3, "epochs": 50, "test": 10_000} | IMAGES[target, scale]
    problem = {"name": "fashion-mnist", "alpha": own.pop("alpha"), "test": own.pop("test")}
    own |= {} if epochs is None else {"epochs": epochs}
    return parse(
        {
            "name": f"{target}-{scale}",
            "problem": problem,
            "rules": IMAGE_RULES + (MORE_IMAGE_RULES if target == "images-beyond" else ()),
            "lr": IMAGE_GRID,
            "record": max(3, min(own["epochs"], 10)),
            "device": device,
            "dtype": "float32",
            "any_graph": True,  # the paper runs D2 on the Base-2 graph, for which it is not defined
        }
        | own
    )


def study_of(
    target: str, scale: str, device: str = "cpu", dtype: str | None = None, epochs: int | None = None
) -> Study:
    """The runs behind a figure; figures 4 to 6 show the course of what figure 1 shows the end of.

    Args:
        target: "fig1" to "fig6", "beyond" or "images-beyond".
        scale: "quick" or "paper".
        device: "cpu", "cuda", ...
        dtype: by default float32 on a CPU, where it is twice as fast, and float64 on a GPU; float32 for images.
        epochs: of the image studies only.

    Raises:
        ValueError: epochs or dtype do not go with the target.
    """
    if target in IMAGE_TARGETS:
        if dtype not in (None, "float32"):
            raise ValueError(f"dtype = {dtype!r}; {target} trains in float32, leave dtype out")
        return image_study(target, scale, device, epochs)
    if epochs is not None:
        raise ValueError(f"epochs = {epochs}, but {target} has no data set to go through; leave epochs out")
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
