"""What stores of klatsch 0.1 say, in today's words: `lazy` on a rule meant the graph that this rule mixed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klatsch.study.grids import Options


def settings_of(stored: Mapping[str, Any]) -> Options:
    """The settings of a stored run, as `Case` takes them; its key stays the same."""
    if "lazy_rule" not in stored:
        return dict(stored)
    settings = dict(stored)
    lazy_rule, lazy_graph = settings.pop("lazy_rule"), settings.pop("lazy_graph")
    if settings["rule"] == "d2":
        settings["lazy"] = lazy_graph
        if lazy_graph or not lazy_rule:
            settings["rule_options"] = {**settings["rule_options"], "lazy": False}
        return settings
    settings["lazy"] = lazy_rule or lazy_graph
    return settings


def study_of(stored: Mapping[str, Any]) -> Options:
    """The content of a stored study, as `Study` takes it.

    Raises:
        ValueError: a rule that is not D2 had a lazy graph to itself, which cannot be said any more.
    """
    graphs = [bool(graph.get("lazy")) for graph in stored["topologies"]]
    rules = []
    for entry in stored["rules"]:
        entry = dict(entry)
        lazy = entry.pop("lazy", False)
        if entry["name"] == "d2":  # what was lazy where it had to be is found in one of two ways
            entry["lazy"] = [True, False] if lazy == "auto" or (lazy and any(graphs)) else bool(lazy)
        elif lazy is True and not all(graphs):
            raise ValueError(
                f"study {stored['name']}: lazy = true on {entry['name']} is for klatsch 0.1; klatsch results shows it"
            )
        rules.append(entry)
    return {**stored, "rules": rules}
