"""The runs of a study: each one as plain data, and the key that it is stored under."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from klatsch import own, problems, rules
from klatsch import topology as topologies
from klatsch.problems import Headline
from klatsch.study import keys
from klatsch.study.grids import Options, combinations, counted, shown
from klatsch.study.spec import Study
from klatsch.topology import Topology

Sources = dict[str, Options]  # what is kept of parts of one's own, by name or kind: see `sources_of`


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
    lazy: bool  # asked for by the graph: all rules mix with (I + P) / 2
    nodes: int
    seed: int
    steps: int
    record: int
    dtype: str
    any_graph: bool
    epochs: int | None = None  # of which `steps` follows; metrics are taken evenly then
    sources: Sources = field(default_factory=dict)  # of its problem, rule and topology, where those have any

    @cached_property
    def key(self) -> str:
        """SHA-256 of all settings, defaults included: written out or left out, it is the same run."""
        source = {kind: facts["source"] for kind, facts in self.sources.items()}
        rule, lazy = keys.rule(self.rule, self.rule_options, self.lazy, source.get("rule"))
        graph = self.topology_options
        if "topology" not in source:
            graph = keys.defaults(topologies.TOPOLOGIES[self.topology]) | graph
        facts: dict[str, Any] = {
            "revision": keys.REVISION,
            "problem": keys.named_part(self.problem, self.problem_settings, source.get("problem")),
            "rule": rule,
            "topology": keys.named_part(self.topology, graph, source.get("topology")),
            "numbers": [lazy, self.nodes, self.seed, self.steps, self.record, self.dtype],
        }
        if self.epochs is not None:
            facts["spacing"] = "even"
        return keys.digest(facts)

    @property
    def problem_settings(self) -> Options:
        """All options of the problem, defaults included, but for the seed; of one of one's own, those given."""
        if "problem" in self.sources:
            return self.problem_options
        defaults = keys.defaults(problems.kind(self.problem))
        return {name: value for name, value in defaults.items() if name != "seed"} | self.problem_options

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
        if given.get("lazy") is True and self.rule in keys.FIELDS:  # which it is anyway
            del given["lazy"]
        words = [_word(name, value) for name, value in given.items()]
        return _called(own.label(self.rule), words)

    @property
    def graph_label(self) -> str:
        """What to call the graph, such as "ring/8" or "base_graph (k 2)"."""
        given = self.topology_options
        words = [f"{name} {shown(value)}" for name, value in given.items() if name != "every"]
        name = ("lazy " if self.lazy else "") + own.label(self.topology)
        return _called(f"{name}/{given['every']}" if "every" in given else name, words)

    @property
    def problem_label(self) -> str:
        """What to call the problem."""
        return own.label(self.problem)

    @property
    def setting(self) -> str:
        """What to call the problem's options, such as "noise 1, heterogeneity 10"."""
        return ", ".join(f"{name} {shown(value)}" for name, value in self.problem_options.items())

    @property
    def headline(self) -> Headline:
        """The metric by which learning rates are chosen."""
        return headline_of(self.problem, self.sources.get("problem"))

    @property
    def large_is_good(self) -> Collection[str]:
        """The metrics that are good when large."""
        if "problem" not in self.sources:
            return problems.large_is_good(self.problem)
        return list(self.sources["problem"]["large_is_good"])

    def source(self, kind: str) -> str:
        """The hash of the file that its problem, rule or topology is from; nothing for those of klatsch."""
        return str(self.sources.get(kind, {}).get("source", ""))

    @property
    def per_column(self) -> tuple[str, ...]:
        """Options of the rule that may differ between the columns of one run."""
        return ("lr",) if own.is_own(self.rule) else rules.PER_COLUMN

    def make_rule(self) -> Any:
        """The update rule."""
        return rules.make(self.rule, **self.rule_options)

    def make_graph(self) -> Topology:
        """The topology."""
        options = tuple(sorted(self.topology_options.items()))
        return _graph(self.topology, options, self.lazy, self.nodes, self.source("topology"))

    def check_sources(self) -> None:
        """Check that files of one's own are still what they were when the study was read.

        Raises:
            ValueError: one has changed or is gone.
        """
        for kind, name in (("problem", self.problem), ("rule", self.rule), ("topology", self.topology)):
            if own.is_own(name) and own.digest(name) != self.source(kind):
                raise ValueError(f"{name} has changed since the study was read; run it again")


class LeftOut(NamedTuple):
    """What could not be run."""

    nodes: int
    reason: str


def expand(study: Study, sources: Sources | None = None) -> tuple[list[Case], list[LeftOut]]:
    """The runs of a study, ordered by topology, setting, nodes, rule, learning rate and seed, and what is left out.

    Args:
        study: of `load(file)`, or made in Python.
        sources: what was kept of parts of one's own when the study was run; then their files are not looked at.

    Raises:
        ValueError: something does not fit and the study does not leave it out, or nothing is left; with the reason.
    """
    known = sources_of(study) if sources is None else sources
    cases: dict[str, Case] = {}
    left_out: list[LeftOut] = []
    for graph in study.topologies:
        for graph_options in graph.combinations():
            for setting in study.problem.combinations():
                for nodes in study.nodes:
                    for rule in study.rules:
                        parts = {"problem": study.problem.name, "rule": rule.name, "topology": graph.name}
                        for rule_options in combinations({"lr": study.lr, **(rule.model_extra or {})}):
                            first = Case(
                                problem=study.problem.name,
                                problem_options=setting,
                                rule=rule.name,
                                rule_options=rule_options,
                                topology=graph.name,
                                topology_options=graph_options,
                                lazy=graph.lazy,
                                nodes=nodes,
                                seed=study.seeds[0],
                                steps=study.rounds(nodes, setting),
                                record=study.record,
                                dtype=study.dtype,
                                any_graph=study.any_graph,
                                epochs=study.epochs,
                                sources={kind: known[name] for kind, name in parts.items() if name in known},
                            )
                            stored = sources is not None and bool(first.sources)
                            if not stored and (reason := refusal(first)) is not None:
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


def sources_of(study: Study) -> Sources:
    """What is to be kept of the parts of one's own in a study, by name: without it their runs would mean nothing.

    That is the hash of the file, and of problems the metric by which learning rates are chosen.
    """
    names = [entry.name for entry in (*study.rules, *study.topologies, study.problem) if own.is_own(entry.name)]
    found: Sources = {name: {"source": own.digest(name)} for name in names}
    if (name := study.problem.name) in found:
        found[name] |= {"headline": list(problems.headline(name)), "large_is_good": list(problems.large_is_good(name))}
    return found


def headline_of(problem: str, source: Options | None = None) -> Headline:
    """The metric of a problem by which learning rates are chosen; `source` where its file may be gone."""
    return problems.headline(problem) if source is None else Headline(*source["headline"])


def refusal(case: Case) -> str | None:
    """Why a run is not possible, or None."""
    try:
        _check_problem(case.problem, tuple(case.problem_options.items()), case.nodes, case.source("problem"))
        graph, rule = case.make_graph(), case.make_rule()
        if not case.any_graph:
            rule.check_graph(graph)
    except ValueError as reason:
        return str(reason)
    return None


@lru_cache(maxsize=256)
def _check_problem(name: str, options: tuple[tuple[str, Any], ...], nodes: int, source: str) -> None:
    """Check a problem that cannot have any size, or is somebody's own."""
    if source or problems.declared(name).check:
        problems.check(name, nodes, **dict(options))


@lru_cache(maxsize=256)
def _graph(name: str, options: tuple[tuple[str, Any], ...], lazy: bool, nodes: int, source: str) -> Topology:
    with own.explained(name):
        graph = topologies.make(name, nodes, **dict(options))
    if graph.size != nodes:
        raise ValueError(f"{own.label(name)} has {graph.size} nodes where {nodes} were asked for; build it from n")
    return topologies.lazy(graph) if lazy else graph


def _called(name: str, words: list[str]) -> str:
    return f"{name} ({', '.join(words)})" if words else name


def _word(option: str, value: Any) -> str:
    if option == "lazy" and value is False:
        return "not lazy"
    return str(value) if option == "order" else f"{option} {shown(value)}"
