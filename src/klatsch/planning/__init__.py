"""How many machines pay: the theory with measured constants, and a cost model of the network."""

from klatsch.planning.hardware import NETWORKS, Network, network
from klatsch.planning.measurement import Estimate, Probe, Stage, probe
from klatsch.planning.planner import Choice, Line, Plan, plan
from klatsch.planning.predictions import CALIBRATION, RULES, UNCALIBRATED, Calibration, predicted
from klatsch.planning.task import Task

__all__ = [
    "CALIBRATION",
    "NETWORKS",
    "RULES",
    "UNCALIBRATED",
    "Calibration",
    "Choice",
    "Estimate",
    "Line",
    "Network",
    "Plan",
    "Probe",
    "Stage",
    "Task",
    "network",
    "plan",
    "predicted",
    "probe",
]
