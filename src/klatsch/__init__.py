"""klatsch: train models over a network of machines that talk only to their neighbours."""

from klatsch import algorithms, averaging, problems, theory, topology
from klatsch.engine import Result, simulate
from klatsch.topology import Topology
from klatsch.version import VERSION

__version__ = VERSION

__all__ = ["Result", "Topology", "__version__", "algorithms", "averaging", "problems", "simulate", "theory", "topology"]
