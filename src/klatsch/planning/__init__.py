"""How many machines pay: a race of ways to train beside a clock, and the constants of a problem, measured."""

from klatsch.planning.measurement import Estimate, Probe, Spread, gradient_seconds, probe
from klatsch.planning.race import Answer, Task, Trial
from klatsch.planning.ways import Way, of_any_size, problem_of

__all__ = ["Answer", "Estimate", "Probe", "Spread", "Task", "Trial", "Way", "gradient_seconds"]
__all__ += ["of_any_size", "probe", "problem_of"]
