"""`Target`: an entry of the table behind `klatsch reproduce`; and what the entries share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from klatsch.report.claims import OfRows, Sentence
from klatsch.study.choices import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sentences = tuple[Sentence, ...]
Said = tuple[str, OfRows] | tuple[str, OfRows, int]  # a claim, how to check it, and the rounds it needs
Content = Mapping[str, object]  # of a study, as in a TOML file
Draw = Callable[[Sequence[Row], str], "Figure"]

PAPER_ROUNDS = 100_000  # sentences about the network's error term need this many: it shrinks like 1 / T
ALPHA_MIDDLE = 1.0  # data are heterogeneous below, nearly homogeneous above


@dataclass(frozen=True)
class Target:
    """A figure: its title, what to run, how to draw it, and sentences about it."""

    title: str
    study: Content
    scales: Mapping[str, Content]
    figure: Draw
    sentences: Sentences
    notes: tuple[str, ...] = ()
    more: Mapping[str, Draw] = field(default_factory=dict)  # figures beside it, by what is added to its name


def images(nodes: object, alpha: object = 0.1, topologies: object = "ring", epochs: int = 50) -> Content:
    """The size of an image study; with few epochs (quick scale), one seed and fewer test images."""
    quick = epochs < 50
    problem = {"name": "fashion-mnist", "alpha": alpha, "test": 2_000 if quick else 10_000}
    seeds = 1 if quick else 3
    return {"nodes": nodes, "topologies": topologies, "seeds": seeds, "epochs": epochs, "problem": problem}


def said(source: str, *sentences: Said, about: Callable[[Row], bool] = lambda row: True) -> Sentences:
    """Sentences of one source."""
    return tuple(Sentence(claim, find, source, rounds[0] if rounds else 1, about) for claim, find, *rounds in sentences)


def skewed(row: Row) -> bool:
    """Whether its data are heterogeneous."""
    return bool(row.setting["alpha"] < ALPHA_MIDDLE)
