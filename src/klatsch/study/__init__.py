"""Grids of runs: several rules on several topologies, with the learning rate chosen for each."""

from klatsch.study.compare import Plan, Row, compare

__all__ = ["Plan", "Row", "compare"]
