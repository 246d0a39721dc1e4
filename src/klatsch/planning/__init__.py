"""How many machines pay: a race of ways to train beside a clock, and the constants of a problem, measured."""

from klatsch.planning.measurement import Estimate, Probe, Stage, probe
from klatsch.planning.race import Answer, Task, Trial
from klatsch.planning.ways import Way

__all__ = ["Answer", "Estimate", "Probe", "Stage", "Task", "Trial", "Way", "probe"]
