"""klatsch: train models over a network of machines that talk only to their neighbours."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from klatsch.extras import VERSION

if TYPE_CHECKING:
    from klatsch import clock, columns, optim, planning, problems, rules, simulation, theory, topology
    from klatsch.optim import Checkpointer, Gossip, average_, merged, recalibrate
    from klatsch.optim.sampler import ElasticSampler
    from klatsch.ranks.failures import LinkError, NonFiniteError, QuorumError
    from klatsch.rules import anytime as averaging
    from klatsch.simulation import Result, simulate
    from klatsch.topology import Topology

__version__ = VERSION

__all__ = ["Checkpointer", "Gossip", "LinkError", "NonFiniteError", "QuorumError", "Result", "Topology", "__version__"]
__all__ += ["average_", "averaging", "clock", "columns", "merged", "optim", "planning", "problems", "recalibrate"]
__all__ += ["ElasticSampler", "rules", "simulate", "simulation", "theory", "topology"]

_OWNERS = {
    **dict.fromkeys(("Result", "simulate"), "simulation"),
    **dict.fromkeys(("Checkpointer", "Gossip", "LinkError", "NonFiniteError", "QuorumError"), "optim"),
    **dict.fromkeys(("average_", "merged", "recalibrate"), "optim"),
    "ElasticSampler": "optim.sampler",
    "Topology": "topology",
    "averaging": "rules",
}


def __getattr__(name: str) -> object:
    """Load a room on first use: `klatsch --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'klatsch' has no attribute {name!r}")
    module = importlib.import_module(f"klatsch.{_OWNERS.get(name, name)}")
    globals()[name] = vars(module)[name] if name in _OWNERS else module  # asked for once
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
