"""Where rules run: all nodes of a network as one stack of tensors."""

from klatsch.simulation.record import Result
from klatsch.simulation.simulator import simulate, simulate_together

__all__ = ["Result", "simulate", "simulate_together"]
