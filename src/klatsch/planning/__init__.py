"""How many machines pay: the theory with measured constants, and a cost model of the network."""

from klatsch.clock import NETWORKS
from klatsch.planning.hardware import Network, network
from klatsch.planning.measurement import Estimate, Probe, Stage, probe
from klatsch.planning.planner import Choice, Line, Plan, Task, plan
from klatsch.planning.predictions import CALIBRATION, CANDIDATES, UNCALIBRATED, Calibration, Candidate, predicted

__all__ = ["CALIBRATION", "CANDIDATES", "NETWORKS", "UNCALIBRATED", "Calibration", "Candidate", "Choice", "Estimate"]
__all__ += ["Line", "Network", "Plan", "Probe", "Stage", "Task", "network", "plan", "predicted", "probe"]
