"""The runs of a study: each one as plain data, and the key that it is stored under."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from klatsch import problems, rules
from klatsch import topology as topologies
from klatsch.columns import described
from klatsch.study.grids import Options, combinations, counted
from klatsch.study.spec import Study
from klatsch.topology import Topology

REVISION = 1  # raised when the same settings give other results than before


@dataclass(frozen=True)
class Case:
    """One run: everything that determines its result but the device, which changes rounding only.

    `any_graph` decides whether it may run, not what comes out.
    """

    problem: str
    problem_options: Options
    rule: str
    rule_options: Options  # with lr
    topology: str
    topology_options: Options
    lazy_rule: bool  # asked for by the rule: this rule alone mixes with (I + P) / 2
    lazy_graph: bool  # asked for by the graph: all rules do
    nodes: int
    seed: int
    steps: int
    record: int
    dtype: str
    any_graph: bool
    epochs: int | None = None  # of which `steps` follows; metrics are taken evenly then

    @cached_property
    def key(self) -> str:
        """SHA-256 of all settings, defaults included: written out or left out, it is the same run."""
        facts: dict[str, Any] = {
            "revision": REVISION,
            "problem": [self.problem, self.problem_settings],
            "rule": [self.rule, described(self.make_rule())],
            "topology": [self.topology, _defaults(topologies.TOPOLOGIES[self.topology]) | self.topology_options],
            "numbers": [self.lazy, self.nodes, self.seed, self.steps, self.record, self.dtype],
        }
        if self.epochs is not None:
            facts["spacing"] = "even"
        return hashlib.sha256(json.dumps(_plain(facts), sort_keys=True).encode()).hexdigest()

    @property
    def problem_settings(self) -> Options:
        """All options of the problem, defaults included, but for the seed."""
        defaults = _defaults(problems.PROBLEMS[self.problem])
        return {name: value for name, value in defaults.items() if name != "seed"} | self.problem_options

    @property
    def lazy(self) -> bool:
        """Whether it mixes with (I + P) / 2."""
        return self.lazy_rule or self.lazy_graph

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.rule_options["lr"])

    @property
    def length(self) -> str:
        """How long it is, in words."""
        return counted(self.steps, "round") if self.epochs is None else counted(self.epochs, "epoch")

    @property
    def points(self) -> int | list[int]:
        """When metrics are taken, as `simulate` wants it."""
        if self.epochs is None:
            return self.record
        return sorted({max(1, round(k * self.steps / self.record)) for k in range(1, self.record + 1)})

    @property
    def label(self) -> str:
        """What to call the rule: its name and the options that were given, such as "dat (cta)"."""
        given = {name: value for name, value in self.rule_options.items() if name != "lr"}
        words = [str(v) if name == "order" else f"{name} {_short(v)}" for name, v in given.items()]
        words += ["lazy"] if self.lazy_rule else []
        return f"{self.rule} ({', '.join(words)})" if words else self.rule

    @property
    def graph_label(self) -> str:
        """What to call the graph, such as "ring/8" or "base_graph (k 2)"."""
        given = self.topology_options
        words = [f"{name} {_short(value)}" for name, value in given.items() if name != "every"]
        name = f"lazy {self.topology}" if self.lazy_graph else self.topology
        name = f"{name}/{given['every']}" if "every" in given else name
        return f"{name} ({', '.join(words)})" if words else name

    @property
    def setting(self) -> str:
        """What to call the problem's options, such as "noise 1, heterogeneity 10"."""
        return ", ".join(f"{name} {_short(value)}" for name, value in self.problem_options.items())

    def make_rule(self) -> Any:
        """The update rule."""
        return rules.make(self.rule, **self.rule_options)

    def make_graph(self) -> Topology:
        """The topology."""
        return _graph(self.topology, tuple(sorted(self.topology_options.items())), self.lazy, self.nodes)


class LeftOut(NamedTuple):
    """What could not be run."""

    nodes: int
    reason: str


def expand(study: Study) -> tuple[list[Case], list[LeftOut]]:
    """The runs of a study, ordered by topology, setting, nodes, rule, learning rate and seed, and what is left out.

    Raises:
        ValueError: something does not fit and the study does not leave it out, or nothing is left; with the reason.
    """
    cases: dict[str, Case] = {}
    left_out: list[LeftOut] = []
    for graph in study.topologies:
        for graph_options in graph.combinations():
            for setting in study.problem.combinations():
                for nodes in study.nodes:
                    for rule in study.rules:
                        own = {"lr": study.lr, **(rule.model_extra or {})}
                        for rule_options in combinations(own):
                            first = Case(
                                problem=study.problem.name,
                                problem_options=setting,
                                rule=rule.name,
                                rule_options=rule_options,
                                topology=graph.name,
                                topology_options=graph_options,
                                lazy_rule=rule.lazy is True,
                                lazy_graph=graph.lazy,
                                nodes=nodes,
                                seed=study.seeds[0],
                                steps=study.rounds(nodes, setting),
                                record=study.record,
                                dtype=study.dtype,
                                any_graph=study.any_graph,
                                epochs=study.epochs,
                            )
                            if rule.lazy == "auto" and _must_be_lazy(first):
                                first = replace(first, lazy_rule=True)
                            if (reason := refusal(first)) is not None:
                                left_out.append(LeftOut(nodes, reason))
                                continue
                            for seed in study.seeds:
                                case = replace(first, seed=seed)
                                cases[case.key] = case
    left_out = list(dict.fromkeys(left_out))
    if left_out and (not cases or not study.leave_out):
        remedy = "; or set leave_out = true to run the rest" if cases else ""
        raise ValueError(f"{left_out[0].reason}{remedy}")
    return list(cases.values()), left_out


def _must_be_lazy(case: Case) -> bool:
    """Whether a rule takes the lazy form of a graph, and not the graph itself."""
    strict = replace(case, any_graph=False)
    return refusal(strict) is not None and refusal(replace(strict, lazy_rule=True)) is None


def refusal(case: Case) -> str | None:
    """Why a run is not possible, or None."""
    check = getattr(problems.PROBLEMS[case.problem], "check", None)  # of problems that cannot have any size
    try:
        if check is not None:
            check(case.nodes, **case.problem_options)
        graph = case.make_graph()
        check = getattr(case.make_rule(), "check_graph", None)
        if check is not None and not case.any_graph:
            check(graph)
    except ValueError as reason:
        return str(reason)
    return None


@lru_cache(maxsize=256)
def _graph(name: str, options: tuple[tuple[str, Any], ...], lazy: bool, nodes: int) -> Topology:
    graph = topologies.make(name, nodes, **dict(options))
    return topologies.lazy(graph) if lazy else graph


@cache
def _defaults(function: Any) -> Options:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def _plain(value: Any) -> Any:
    """Plain data in which 1.0 and 1 are the same, while large whole numbers stay exact."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
