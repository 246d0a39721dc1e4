"""Where rules run: the simulator."""

from klatsch.simulation.record import Result
from klatsch.simulation.simulator import simulate
from klatsch.simulation.together import simulate_together

__all__ = ["Result", "simulate", "simulate_together"]
