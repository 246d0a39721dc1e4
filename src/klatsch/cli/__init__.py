"""The command line, one file per group of commands.

A command loads what it works with when it is called, so that help and the version do not wait for torch.
"""

from klatsch.extras import need

need("the command klatsch", "typer", "rich")

# Importing a file adds its commands.
from klatsch.cli import parts, plan, results, run, training
from klatsch.cli.app import main

__all__ = ["main", "parts", "plan", "results", "run", "training"]
