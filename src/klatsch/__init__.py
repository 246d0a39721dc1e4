"""klatsch: train models over a network of machines that talk only to their neighbours."""

from klatsch import theory, topology
from klatsch.topology import Topology

__version__ = "0.1.0"

__all__ = ["Topology", "__version__", "theory", "topology"]
