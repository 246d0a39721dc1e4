"""The command line, one file per group of commands."""

from klatsch.cli import data, names, plan, probe, reproduce, results, run, topology
from klatsch.cli.app import main

__all__ = [
    "data",
    "main",
    "names",
    "plan",
    "probe",
    "reproduce",
    "results",
    "run",
    "topology",
]  # importing a file of commands adds them
