"""How many machines pay: the theory with measured constants, and a cost model of the network."""

from klatsch.planning.network import NETWORKS, Network, network
from klatsch.planning.plan import Choice, Line, Plan, Task, plan
from klatsch.planning.probe import Estimate, Probe, Stage, probe
from klatsch.planning.rates import CALIBRATION, RULES, UNCALIBRATED, Calibration, predicted

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
