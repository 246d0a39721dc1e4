"""klatsch: train models over a network of machines that talk only to their neighbours."""

from klatsch import algorithms, averaging, optim, planning, problems, theory, topology
from klatsch.engine import Result, simulate
from klatsch.optim import Checkpointer, Gossip, LinkError, NonFiniteError, QuorumError, average_
from klatsch.topology import Topology
from klatsch.version import VERSION

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
    "algorithms",
    "average_",
    "averaging",
    "optim",
    "planning",
    "problems",
    "simulate",
    "theory",
    "topology",
]
