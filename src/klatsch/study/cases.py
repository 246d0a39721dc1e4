"""The runs of a study as plain data: the key under which each is stored, and what its nodes send to each other.

What nodes send is kept with the results, so that bytes and seconds need none of a run's parts.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import groupby, product
from typing import Annotated, Any, NamedTuple, Required

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from klatsch import own, problems, rules
from klatsch import topology as topologies
from klatsch.arguments import named, number
from klatsch.clock import Clock
from klatsch.clock.network import Nodes
from klatsch.clock.rounds import Sending, Talk, check_meets, scheduled, talk_of
from klatsch.columns import WeightMatrix, described
from klatsch.files import json_of
from klatsch.problems import Headline
from klatsch.rules import Flow, Rule, averaging
from klatsch.simulation.record import record_points
from klatsch.study.spec import Count, Options, Seed, Study, combinations, make_rule, parse
from klatsch.topology import Topology
from klatsch.topology.channel import CHANNEL, check_channel, encoded_bytes
from klatsch.units import compact, counted, in_words

PARTS = ("problem", "rule", "topology")  # of a run, each with options
REVISION = 1  # raised when the same settings lead to other results than before
MOST_LINKS = 1 << 20  # of all rounds of a graph's period: those of a larger one are not kept
MOST_NODES, MOST_ROUNDS = 10**6, 10**8  # that a clock goes through


class Channel(NamedTuple):
    """How messages travel in a run; see `topology.channel`."""

    every: int
    late: int
    wire: str
    loss: float = 0.0
    one_way: bool = False


Sources = dict[str, Options]  # what a store keeps of custom parts, by name or kind: see `sources_of`
Value = StrictStr | StrictBool | StrictFloat | Annotated[int, Field(strict=True, gt=-(1 << 63), lt=1 << 63)] | None
Values = Annotated[Options, AfterValidator(TypeAdapter(dict[str, Value]).validate_python)]


class Source(TypedDict, total=False):
    """What a store keeps of a custom part."""

    source: Required[str]  # a hash of its file
    headline: Headline  # of a problem
    large_is_good: list[str]


@dataclass(frozen=True)
class Case:
    """One run: everything that determines its result except the device, which only changes rounding."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    problem: str
    problem_options: Values
    rule: str
    rule_options: Values  # with lr
    topology: str
    topology_options: Values
    lazy: bool  # the graph's: all rules mix with (I + P) / 2
    nodes: Count
    seed: Seed
    steps: Count
    record: Count
    dtype: str
    any_graph: bool  # decides whether it may run, not its result
    epochs: Count | None = None  # determine `steps` if given; metrics are then evenly spaced
    sources: Sources = field(default_factory=dict)  # of its problem, rule, topology and wire, if custom
    data: str = ""  # SHA-256 of the problem's data, if its options do not determine them

    @classmethod
    def read(cls, content: Any) -> Case:
        """A run from a store, which may be forged: its content is checked, and nothing in it is called."""
        case = CASE.validate_python(content)
        number("lr", case.rule_options["lr"], lambda lr: lr > 0, "a number above 0")
        check_channel(*case.channel)
        check_meets("a graph", case.meets, *case.channel[:3], case.channel.loss)
        check_sources("problem", case._names, case.sources)
        return case

    @cached_property
    def key(self) -> str:
        """SHA-256 of all settings, including defaults, so that writing one out does not matter."""
        facts = {
            "revision": REVISION,
            **{kind: self._facts(kind) for kind in PARTS},
            "numbers": [self.lazy, self.nodes, self.seed, self.steps, self.record, self.dtype],
            "spacing": "even" if self.epochs is not None else "log",
            "data": self.data,
        }
        exact = json.loads(json.dumps(facts), parse_float=_number)
        return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def _names(self) -> dict[str, str]:
        """What may be custom, by kind."""
        return {kind: vars(self)[kind] for kind in PARTS} | {"wire": self.channel.wire}

    def _facts(self, kind: str) -> tuple[object, Options]:
        """A part in the key: a built-in one with its defaults, a custom one by its file's content, not its path."""
        name, options = vars(self)[kind], vars(self)[f"{kind}_options"]
        if kind == "topology" and own.is_own(wire := self.channel.wire):
            options = options | {"wire": [own.part_of(wire), self.source("wire")]}
        if own.is_own(name):
            return [own.part_of(name), self.source(kind)], options
        settings = defaults(kind, name) | options
        for option in {"average", "averaging"} & settings.keys():  # in their canonical form
            if settings[option] is not None:
                settings[option] = described(averaging.parse(settings[option]))
        return name, settings

    @property
    def problem_settings(self) -> Options:
        """All options of the problem except the seed, including defaults; of a custom one, those given."""
        return self._facts("problem")[1]

    @property
    def lr(self) -> float:
        return float(self.rule_options["lr"])

    @property
    def length(self) -> str:
        """How long it is, in words."""
        return counted(self.steps, "round") if self.epochs is None else counted(self.epochs, "epoch")

    @property
    def points(self) -> int | list[int]:
        """When metrics are taken, as `record` of `simulate`."""
        if self.epochs is None:
            return self.record
        return sorted({max(1, round(k * self.steps / self.record)) for k in range(1, self.record + 1)})

    @property
    def label(self) -> str:
        """The rule's name and given options, such as "dat (cta)"."""
        given = {name: value for name, value in self.rule_options.items() if name != "lr"}
        if given.get("lazy") is True and "rule" not in self.sources:  # the default
            del given["lazy"]
        words = f" ({', '.join(_word(name, value) for name, value in given.items())})" if given else ""
        return own.label(self.rule) + words

    @property
    def graph_label(self) -> str:
        """The graph's name and given options, such as "ring/8" or "base_graph (k 2)"."""
        given = {name: own.label(v) if name == "wire" else v for name, v in self.topology_options.items()}
        every = f"/{given.pop('every')}" if "every" in given else ""
        return "lazy " * self.lazy + own.label(self.topology) + every + (f" ({in_words(given)})" if given else "")

    @property
    def channel(self) -> Channel:
        return Channel(**{name: self.topology_options.get(name, usual) for name, usual in CHANNEL.items()})

    @property
    def meets(self) -> str:
        """How its nodes meet, if not in rounds; see `simulate`."""
        return self.topology_options.get("meets", "")  # type: ignore[no-any-return]

    @property
    def problem_label(self) -> str:
        return own.label(self.problem)

    @property
    def setting(self) -> str:
        """The problem's options, such as "noise 1, heterogeneity 10"."""
        return in_words(self.problem_options)

    @property
    def headline(self) -> Headline:
        """The metric that chooses learning rates."""
        source = self.sources.get("problem")
        return problems.declared(self.problem).headline if source is None else Headline(*source["headline"])

    @property
    def large_is_good(self) -> Collection[str]:
        """The metrics where larger is better."""
        source = self.sources.get("problem")
        return problems.declared(self.problem).worst if source is None else source["large_is_good"]

    def source(self, kind: str) -> str:
        """The hash of the file of a custom problem, rule, topology or wire; empty if it is built in."""
        return str(self.sources.get(kind, {}).get("source", ""))

    def make_rule(self) -> rules.Rule:
        return _rule(self.rule, tuple(sorted(self.rule_options.items())), self.steps, self.source("rule"))

    def make_graph(self) -> Topology:
        options = tuple(sorted((name, v) for name, v in self.topology_options.items() if name != "meets"))
        return _graph(self.topology, options, self.lazy, self.nodes, self.source("topology") + self.source("wire"))

    def check_sources(self) -> None:
        """Refuse custom files that have changed since the study was read."""
        for kind, name in self._names.items():
            if own.is_own(name) and own.digest(name) != self.source(kind):
                raise ValueError(f"{name} has changed since the study was read; run it again")
        content = problems.declared(self.problem).content
        if self.data and content is not None and content(**self.problem_options) != self.data:
            raise ValueError(
                f"the data of {self.problem} have changed since the study was read, or this machine has others; "
                "run it again, on machines with the same"
            )


CASE = TypeAdapter(Case)
SOURCES = TypeAdapter(dict[str, Source | dict[str, str]])


class LeftOut(NamedTuple):
    """What could not be run."""

    nodes: int
    reason: str


def expand(study: Study) -> tuple[list[Case], list[LeftOut]]:
    """The runs of a study, ordered by topology, setting, nodes, rule, learning rate and seed, and what is left out."""
    firsts: list[Case] = []
    left_out: dict[LeftOut, None] = {}
    for first in grid(study, sources_of(study)):
        if (reason := _refusal(first)) is None:
            firsts.append(first)
        else:
            left_out[LeftOut(first.nodes, reason)] = None
    if left_out and (not firsts or not study.leave_out):
        remedy = "; or set leave_out = true to run the rest" if firsts else ""
        raise ValueError(f"{next(iter(left_out)).reason}{remedy}")
    return with_seeds(firsts, study), list(left_out)


def with_seeds(firsts: Iterable[Case], study: Study) -> list[Case]:
    """Runs with all seeds of a study, from those of its first seed; once each."""
    cases = (replace(first, seed=seed) for first in firsts for seed in study.seeds)
    return list({case.key: case for case in cases}.values())


def grid(study: Study, known: Sources) -> Iterator[Case]:
    """The whole grid of a study with its first seed, as plain data: no rule, graph or problem is made.

    `known` is what `sources_of` says of custom parts, or what a store keeps of that.
    """
    for graph, pairs in groupby(study.pairs, key=lambda pair: pair[1]):
        by_rule = [(rule.name, options) for rule, _ in pairs for options in combinations(study.options_of(rule))]
        axes = graph.combinations(), study.problem.combinations(), graph.nodes or study.nodes, by_rule
        for graph_options, setting, nodes, (rule, rule_options) in product(*axes):
            parts = {"problem": study.problem.name, "rule": rule, "topology": graph.name}
            wire = graph_options.get("wire", "")
            yield Case(
                **parts,
                problem_options=setting,
                rule_options={name: v for name, v in rule_options.items() if (name, v) != ("schedule", "constant")},
                topology_options=graph_options,
                lazy=graph.lazy,
                nodes=nodes,
                seed=study.seeds[0],
                steps=study.rounds(nodes, setting),
                record=study.record,
                dtype=study.dtype,
                any_graph=study.any_graph,
                epochs=study.epochs,
                sources={kind: known[name] for kind, name in (parts | {"wire": wire}).items() if name in known},
                data=known.get("data", {}).get(in_words(setting), ""),
            )


def parts_of(study: Study) -> set[str]:
    """The names of all parts of a study that may be custom."""
    wires = {options["wire"] for _, graph in study.pairs for options in graph.combinations() if "wire" in options}
    return {entry.name for pair in study.pairs for entry in pair} | {study.problem.name} | wires


def sources_of(study: Study) -> Sources:
    """What a store keeps of custom parts, by name: a hash of the file, and how a problem chooses learning rates.

    Under "data" it keeps the hashes of data by the problem's options, where these do not determine them.
    """
    names = sorted(name for name in parts_of(study) if own.is_own(name))
    sources: Sources = {name: {"source": own.digest(name)} for name in names}
    if (name := study.problem.name) in sources:
        problem = problems.declared(name)
        sources[name] |= {"headline": list(problem.headline), "large_is_good": list(problem.worst)}
    elif content := problems.declared(name).content:
        sources["data"] = {in_words(setting): content(**setting) for setting in study.problem.combinations()}
    return sources


@dataclass(frozen=True)
class Remembered:
    """A study as a store remembers it: to be shown, never to be run."""

    study: Study
    command: str  # that ran it
    sources: Sources  # of its custom parts
    left_out: tuple[LeftOut, ...] = ()
    refused: frozenset[str] = frozenset()  # the keys of what is left out, with the first seed

    @classmethod
    def of(cls, study: Study, command: str, expanded: tuple[list[Case], list[LeftOut]] | None) -> Remembered:
        """A study that is run now; `expanded` is the result of `expand`, if there is one."""
        cases, left_out = expanded or expand(study)
        sources, keys = sources_of(study), {case.key for case in cases}
        refused = (case.key for case in grid(study, sources) if case.key not in keys) if left_out else ()
        return cls(study, command, sources, tuple(left_out), frozenset(refused))

    @classmethod
    def read(cls, content: Any, command: str) -> Remembered:
        """A study from a store, which may be forged."""
        sources, left_out, refused = (content.pop(name) for name in ("sources", "left_out", "refused"))
        study = parse(content, stored=True)
        check_sources(study.problem.name, {name: name for name in parts_of(study)}, sources)
        if not all(isinstance(text, str) for text in sources.get("data", {}).values()):
            raise ValueError("data are no texts")
        reasons = tuple(LeftOut(nodes, str(reason)) for nodes, reason in left_out)
        remembered = cls(study, command, sources, reasons, frozenset(refused))
        _ = remembered.cases
        return remembered

    @property
    def text(self) -> str:
        """What a store keeps of it, as JSON."""
        beside = {"sources": self.sources, "left_out": self.left_out, "refused": sorted(self.refused)}
        return json.dumps({**self.study.model_dump(mode="json"), **beside})

    @cached_property
    def cases(self) -> list[Case]:
        """Its runs, whether or not the store has them."""
        firsts = (case for case in grid(self.study, self.sources) if case.key not in self.refused)
        return with_seeds(firsts, self.study)


def check_sources(problem: str, parts: Mapping[str, str], sources: Mapping[str, Any]) -> None:
    """Refuse custom parts that `sources`, by these keys, says too little of; `problem` is the problem's key."""
    SOURCES.validate_python(sources)
    for key, name in parts.items():
        if own.is_own(name):
            _ = own.part_of(name), sources[key]["source"]
    if own.is_own(name := parts[problem]):
        _ = Headline(*sources[problem]["headline"]), sources[problem]["large_is_good"]
    else:
        named("problem", name, problems.PROBLEMS)


def _refusal(case: Case) -> str | None:
    """Why a run is not possible, or None."""
    try:
        _check_problem(case.problem, tuple(case.problem_options.items()), case.nodes, case.source("problem"))
        graph, rule = case.make_graph(), case.make_rule()
        if case.meets:
            scheduled(rule, graph, 1, case.meets)
        if not case.any_graph:
            rule.check_graph(graph)
    except ValueError as reason:
        return str(reason)
    return None


@lru_cache(maxsize=256)
def _check_problem(name: str, options: tuple[tuple[str, Any], ...], nodes: int, source: str) -> None:
    """Check a problem that does not allow every size, or is custom."""
    if source or problems.declared(name).check:
        problems.check(name, nodes, **dict(options))


@lru_cache(maxsize=256)
def _graph(name: str, options: tuple[tuple[str, Any], ...], lazy: bool, nodes: int, source: str) -> Topology:
    with own.explained(name):
        graph = topologies.make(name, nodes, **dict(options))
    if graph.size != nodes:
        raise ValueError(f"{own.label(name)} has {graph.size} nodes instead of {nodes}; build it from n")
    return topologies.lazy(graph) if lazy else graph


@lru_cache(maxsize=4096)
def _rule(name: str, options: tuple[tuple[str, Any], ...], steps: int, source: str) -> rules.Rule:
    return make_rule(name, dict(options), steps)


def _word(option: str, value: object) -> str:
    if option == "lazy" and value is False:
        return "not lazy"
    return str(value) if option in ("order", "schedule") else f"{option} {compact(value)}"


@cache
def defaults(kind: str, name: str) -> Options:
    """The options of a built-in part that have a default; seeds come from the study."""
    makers = {"problem": problems.kind, "rule": rules.kind, "topology": topologies.TOPOLOGIES.__getitem__}
    options = inspect.signature(makers[kind](name)).parameters.values()
    known = {option.name: option.default for option in options if option.default is not option.empty}
    return {name: value for name, value in known.items() if (kind, name) != ("problem", "seed")}


def _number(text: str) -> float:
    """A number; 1.0 is read as 1."""
    return int(value) if (value := float(text)).is_integer() else value


# --- what nodes say to each other -----------------------------------------------------------------------------------

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # or bytes


@dataclass(frozen=True)
class Exchange:
    """What nodes send in a run, as plain data."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    numbers: Count  # of a vector
    sent: Seconds | None = None  # bytes of a node over the run, mean over the nodes, if known
    messages: tuple[Sending, ...] = ()  # of a round with gossip
    all_reduce: bool = False
    links: str = ""  # senders and receivers in each round with gossip of the graph's period, as JSON
    shuffle: Annotated[int, Field(ge=0)] | None = None  # the seed by which nodes change places before every round
    # Round and seconds of each recorded point, where nodes do not meet in rounds: the run's own clock.
    when: tuple[tuple[Count, Seconds], ...] = ()
    unknown: str = ""  # why something is not known
    # Bytes of a vector in a custom encoding, whose file is not executed to find them, or of a gradient in a hook.
    encoded: Seconds | None = None
    grows: Seconds = 1.0  # the power of the number of parameters with which the bytes of a hook grow

    @property
    def text(self) -> str:
        """All but the links, which many runs share, as JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "links"}
        return json.dumps({name: value for name, value in facts.items() if (name, value) != ("grows", 1.0)})

    @classmethod
    def read(cls, text: str, links: str) -> Exchange:
        """From the texts of a store, which may be forged: they are checked, and nothing in them is called."""
        exchange = EXCHANGE.validate_python({**json_of(text), "links": links})
        for k, message in enumerate(exchange.messages):
            if message.vectors < 0 or not all(0 <= needed < k for needed in message.needs):
                raise ValueError(f"message {k} of {message.vectors} vectors needs {message.needs}")
        return exchange


EXCHANGE = TypeAdapter(Exchange)
Ends = list[Annotated[int, Field(ge=0)]]
LINKS = TypeAdapter(Annotated[list[tuple[Ends, Ends]], Field(min_length=1)])  # senders and receivers of each round


def exchange_of(case: Case, numbers: int | None = None) -> Exchange:
    """What nodes send in a run with vectors of so many numbers; makes its rule and graph.

    Messages count as they travel: float32, whatever the simulation computes in, unless the graph has another `wire`.
    A graph that is an all-reduce counts as one along a ring: 2 (M - 1) / M vectors per node. Where that makes all
    nodes equal in every round, one vector is enough, the gradient, whatever else the rule keeps.
    """
    options = {name: value for name, value in case.rule_options.items() if name not in ("lr", "schedule")}
    problem: Options = {"problem": "least-squares", "problem_options": {}, "data": ""}
    alike = replace(case, rule_options={**options, "lr": 1.0}, seed=0, **problem)
    matrices = _matrices(case.rule, case.problem, tuple(case.problem_options.items()), case.nodes)
    return _exchange(alike, dim_of(case) if numbers is None else numbers, matrices)


@lru_cache(maxsize=4096)
def _exchange(case: Case, numbers: int, matrices: tuple[WeightMatrix, ...]) -> Exchange:
    """Found once for all learning rates, seeds and settings of the problem."""
    every, links, unknown = case.channel.every, "", ""
    when: tuple[tuple[int, float], ...] = ()
    try:
        rule, graph = case.make_rule().shaped(matrices), case.make_graph()
        talk = talk_of(rule, graph)
        if case.meets:
            meetings = scheduled(rule, graph, numbers, case.meets)
            when = tuple((step, meetings.seconds(step)) for step in record_points(case.points, case.steps))
    except ValueError as reason:
        return Exchange(numbers, unknown=str(reason))
    if graph.all_reduce:
        links = json.dumps([])
    elif (count := sum(len(sender) for sender, _ in talk.links)) <= MOST_LINKS:
        links = json.dumps([(sender.tolist(), receiver.tolist()) for sender, receiver in talk.links])
    else:
        unknown = f"{graph.name} has {count:,} links in a period; seconds are known up to {MOST_LINKS:,}"
    all_reduce = graph.all_reduce and not case.meets
    copies = 2 * (case.nodes - 1) / case.nodes if all_reduce else graph.messages * every
    if case.meets.startswith("pairwise"):
        copies = 2.0 * (case.nodes > 1)  # to the neighbour that it asks, and to the one that asks it, on average
    equal = all_reduce and every == 1 and stay_equal(rule)
    vectors = 1 if equal else sum(message.vectors for message in talk.messages)
    hook = rule.hook if equal else None
    encoded = float(hook.bytes(numbers) if hook else encoded_bytes(case.channel.wire, numbers))
    sent, custom = encoded * vectors * copies * (case.steps // every), own.is_own(case.channel.wire)
    facts = numbers, sent, tuple(talk.messages), all_reduce, links, graph.shuffle, when, unknown
    return Exchange(*facts, encoded if custom or hook else None, hook.grows if hook else 1.0)


def sent_by(case: Case, step: int, total: float) -> float:
    """What a node has sent after some rounds, of a total over the run: silent rounds send nothing."""
    every = case.channel.every
    return total * (step // every) / max(1, case.steps // every)


def elapsed(case: Case, exchange: Exchange | None, clock: Clock, steps: Sequence[int]) -> tuple[float, ...] | None:
    """Seconds by a clock until all nodes have done so many rounds; None if that is not known."""
    if exchange is None:
        return None
    if case.meets:
        own_clock = dict(exchange.when)
        return tuple(own_clock[step] for step in steps) if own_clock.keys() >= set(steps) else None
    if not exchange.messages or not exchange.links or case.nodes > MOST_NODES or max(steps) > MOST_ROUNDS:
        return None
    if own.is_own(case.channel.wire) and (exchange.encoded is None or clock.params is not None):
        return None
    return _elapsed(exchange, case.graph_label, case.nodes, case.channel, clock, tuple(steps))


def why_unknown(case: Case, exchange: Exchange | None) -> str:
    """Why bytes or seconds of a run are not known, for a note; empty if they are."""
    if exchange is None:
        return "nothing is stored of its messages"
    large = case.nodes > MOST_NODES or case.steps > MOST_ROUNDS
    return exchange.unknown or (f"more than {MOST_NODES:,} nodes or {MOST_ROUNDS:,} rounds" if large else "")


@lru_cache(maxsize=4096)
def _elapsed(
    exchange: Exchange, name: str, nodes: int, channel: Channel, clock: Clock, steps: tuple[int, ...]
) -> tuple[float, ...]:
    """Computed once for all learning rates and seeds."""
    links = () if exchange.all_reduce else _pairs(exchange.links, nodes)
    talk = Talk(name, nodes, *channel[:3], exchange.all_reduce, exchange.messages, links, exchange.shuffle)
    params = clock.params or exchange.numbers
    if exchange.encoded is not None:  # a hook's bytes grow with the model; a custom encoding is timed at its own size
        talk = talk._replace(encoded=exchange.encoded * (params / exchange.numbers) ** exchange.grows)
    return tuple(clock.seconds_of(talk, params, steps))


def _pairs(text: str, nodes: int) -> list[tuple[Nodes, Nodes]]:
    """The links of a graph from JSON."""
    try:
        rounds = [
            (np.array(sender, np.int64), np.array(receiver, np.int64)) for sender, receiver in LINKS.validate_json(text)
        ]
        are_pairs = all(len(sender) == len(receiver) for sender, receiver in rounds)
    except (OverflowError, ValidationError):
        are_pairs = False
    if not are_pairs or max(ends.max(initial=0) for pair in rounds for ends in pair) >= nodes:
        raise ValueError(f"a graph has links that are not pairs of its {nodes} nodes; restore a copy of the store")
    return rounds


@cache
def _matrices(rule: str, problem: str, options: tuple[tuple[str, object], ...], nodes: int) -> tuple[WeightMatrix, ...]:
    """The weight matrices of a run, if what its rule sends depends on them."""
    direction = None if own.is_own(rule) else getattr(rules.kind(rule), "direction", None)
    return tuple(problems.make(problem, nodes, **dict(options)).matrices or ()) if direction is rules.Hooked else ()


def dim_of(case: Case) -> int:
    """How many numbers a vector of a run has."""
    return _dim(case.problem, tuple(case.problem_options.items()), case.nodes, case.source("problem"))


@cache
def _dim(problem: str, options: tuple[tuple[str, Any], ...], nodes: int, source: str) -> int:
    """Counted once: a model is built for it."""
    known = problems.declared(problem).dim_of
    return int(known(nodes, **dict(options)) if known else problems.make(problem, nodes, **dict(options)).dim)


def stay_equal(rule: Rule) -> bool:
    """Whether an average over all nodes in every round leaves them with one model, where they take their gradients."""
    nodes, rounds = 2, 3
    rule = rule.shaped(())  # matrices do not fit one number
    state = rule.init(torch.zeros(nodes, 1, dtype=torch.float64))
    flow = Flow(lambda *tensors: tuple(v.mean(0) - v for v in tensors))
    for t in range(1, rounds + 1):
        gradients = torch.tensor([[1.0], [t]], dtype=torch.float64) - 5.0  # of nodes whose data differ
        state = rule.update(state, gradients, flow, t, 1.0)
    return all(torch.allclose(point[0], point[1]) for point in (rule.query(state), rule.output(state)))
