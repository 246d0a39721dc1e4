"""Where rules run: the simulator."""

from klatsch.engine.record import Result
from klatsch.engine.stacked import simulate
from klatsch.engine.together import simulate_together

__all__ = ["Result", "simulate", "simulate_together"]
