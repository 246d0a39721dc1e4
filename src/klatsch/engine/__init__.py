"""Where rules run: the simulator."""

from klatsch.engine.record import Result
from klatsch.engine.stacked import simulate

__all__ = ["Result", "simulate"]
