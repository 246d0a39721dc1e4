"""The paper and beyond: its figures, tables and sentences, from the results in a store."""

from klatsch.extras import need

need("klatsch.report", "pydantic", "matplotlib", "jinja2")
