"""klatsch: train models over a network of machines that talk only to their neighbours."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from klatsch.version import VERSION

if TYPE_CHECKING:
    from klatsch import columns, optim, planning, problems, rules, simulation, theory, topology
    from klatsch.optim import Checkpointer, Gossip, LinkError, NonFiniteError, QuorumError, average_, recalibrate
    from klatsch.rules import anytime as averaging
    from klatsch.simulation import Result, simulate
    from klatsch.topology import Topology

__version__ = VERSION

__all__ = [
    "Checkpointer",
    "Gossip",
    "LinkError",
    "NonFiniteError",
    "QuorumError",
    "Result",
    "Topology",
    "__version__",
    "average_",
    "averaging",
    "columns",
    "optim",
    "planning",
    "problems",
    "recalibrate",
    "rules",
    "simulate",
    "simulation",
    "theory",
    "topology",
]

_OWNERS = {
    "Checkpointer": "optim",
    "Gossip": "optim",
    "LinkError": "optim",
    "NonFiniteError": "optim",
    "QuorumError": "optim",
    "Result": "simulation",
    "Topology": "topology",
    "averaging": "rules",
    "average_": "optim",
    "recalibrate": "optim",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for, when it is asked for: `klatsch --help` need not wait for torch."""
    if name not in (*__all__, "algorithms"):  # the former name of rules, which says so itself
        raise AttributeError(f"module 'klatsch' has no attribute {name!r}")
    if name in _OWNERS:
        found = getattr(importlib.import_module(f"klatsch.{_OWNERS[name]}"), name)
    else:
        found = importlib.import_module(f"klatsch.{name}")
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
