"""Grids of runs: expand, run on all cores, store, resume, choose learning rates, draw."""

from klatsch.extras import need

need("klatsch.study", "pydantic")

from klatsch.study.cases import Case, expand
from klatsch.study.choices import Row, summarize, timed
from klatsch.study.execute import execute, run_study
from klatsch.study.spec import Study, load, parse
from klatsch.study.store import Store

__all__ = ["Case", "Row", "Store", "Study", "execute", "expand", "load", "parse", "run_study", "summarize", "timed"]
