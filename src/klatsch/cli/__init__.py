"""The command line, one file per group of commands.

A command loads what it works with when it is called, so that help and the version do not wait for torch.
"""

# Importing a file adds its commands.
from klatsch.cli import checkpoints, data, plan, results, run, topology
from klatsch.cli.app import main

__all__ = ["checkpoints", "data", "main", "plan", "results", "run", "topology"]
