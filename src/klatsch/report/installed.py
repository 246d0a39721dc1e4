"""The studies that come with klatsch, `studies/*.toml`: study files with several scales."""

from __future__ import annotations

import tomllib

from klatsch import catalogue
from klatsch.arguments import named
from klatsch.study.spec import Options, Study, parse

FOLDER = catalogue.ROOT / "studies"
GROUPS = {  # several at once
    "schedule-free": ("averages", "schedules", "beyond"),
    "slow-networks": ("channels", "images-channels"),
    "language": ("language-rules", "language-links", "language-sizes"),
}


def content_of(name: str, scale: str) -> Options:
    """What an installed study says at one of its scales, as `study.parse` takes it."""
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    chosen = named("scale", scale, content.pop("scales"))
    title = f"{content.pop('title')} ({scale} scale)"
    return {"name": f"{name}-{scale}", "title": title, **content, **chosen}


def _points(epochs: int) -> int:
    """How many points are recorded of so many epochs, where a study has no number of its own."""
    return max(3, min(epochs, 10))


def study_of(name: str, scale: str, device: str = "cpu", dtype: str | None = None, epochs: int | None = None) -> Study:
    """An installed study; in float32 on a CPU, where that is twice as fast, and in float64 on a GPU, unless it says so.

    Args:
        name: of `catalogue.STUDIES`.
        scale: "quick" or "paper".
        device: see `Study`.
        dtype: another one than usual.
        epochs: another number, of studies that count them.
    """
    content = content_of(name, scale) | {"device": device}
    if epochs is not None:
        if "epochs" not in content:
            raise ValueError(f"epochs = {epochs}, but {name} has no data set to go through; leave epochs out")
        if content["record"] == _points(content["epochs"]):
            content["record"] = _points(epochs)
        content["epochs"] = epochs
        if short := content.get("screen", {}).get("epochs"):
            content["screen"] |= {"epochs": min(epochs, short)}
    if dtype is not None:
        if content.get("dtype", dtype) != dtype:
            raise ValueError(f"dtype = {dtype!r}; {name} trains in {content['dtype']}, leave dtype out")
        content["dtype"] = dtype
    return parse({"dtype": "float32" if device == "cpu" else "float64"} | content)
