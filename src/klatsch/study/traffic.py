"""What nodes say to each other in a run: kept with its results, so that bytes and seconds need none of its parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ConfigDict, Field, TypeAdapter

from klatsch import own, problems, rules
from klatsch.clock import Clock
from klatsch.clock.network import Nodes
from klatsch.clock.rounds import Sending, Talk, scheduled, talk_of
from klatsch.columns import WeightMatrix
from klatsch.files import json_of
from klatsch.rules import Flow, Rule
from klatsch.simulation.record import record_points
from klatsch.study.cases import Case, Channel
from klatsch.study.spec import Count, Options
from klatsch.topology.channel import encoded_bytes

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # or bytes
MOST_LINKS = 1 << 20  # of all rounds of a graph's period: those of a larger one are not kept
MOST_NODES, MOST_ROUNDS = 10**6, 10**8  # that a clock goes through


@dataclass(frozen=True)
class Exchange:
    """What nodes send in a run, as plain data.

    Args:
        numbers: how many a vector has.
        sent: bytes that a node sends over the run, mean over the nodes; None if that is not known.
        messages: of a round with gossip.
        all_reduce: whether nodes use one.
        links: senders and receivers in each round with gossip of the graph's period, as JSON.
        shuffle: the seed by which nodes change places before every round, if they do.
        when: round and seconds of each recorded point, where nodes do not meet in rounds: the run's own clock.
        unknown: why something is not known.
        encoded: bytes of a vector in a custom encoding, whose file is not executed to find them, or of a gradient as a
            hook of an all-reduce sends it.
        grows: the power of the number of parameters with which the bytes of a hook grow.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    numbers: Count
    sent: Seconds | None = None
    messages: tuple[Sending, ...] = ()
    all_reduce: bool = False
    links: str = ""
    shuffle: Annotated[int, Field(ge=0)] | None = None
    when: tuple[tuple[Count, Seconds], ...] = ()
    unknown: str = ""
    encoded: Seconds | None = None
    grows: Seconds = 1.0

    @property
    def text(self) -> str:
        """All but the links, which many runs share, as JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "links"}
        return json.dumps({name: value for name, value in facts.items() if (name, value) != ("grows", 1.0)})

    @classmethod
    def read(cls, text: str, links: str) -> Exchange:
        """From the texts of a store, which are data to be checked: nothing in them is looked up or called."""
        exchange = EXCHANGE.validate_python({**json_of(text), "links": links})
        for k, message in enumerate(exchange.messages):
            if message.vectors < 0 or not all(0 <= needed < k for needed in message.needs):
                raise ValueError(f"message {k} of {message.vectors} vectors needs {message.needs}")
        return exchange


EXCHANGE = TypeAdapter(Exchange)


def exchange_of(case: Case, numbers: int | None = None) -> Exchange:
    """What nodes send in a run, whose vectors have so many numbers; its parts are made for it.

    Messages count as they travel: float32, whatever the simulation computes in, unless the graph has another `wire`.
    A graph that is an all-reduce counts as one along a ring: 2 (M - 1) / M vectors per node. Where that makes all
    nodes equal in every round, one vector is enough, the gradient, whatever else the rule keeps.
    """
    options = {name: value for name, value in case.rule_options.items() if name not in ("lr", "schedule")}
    problem: Options = {"problem": "least-squares", "problem_options": {}, "data": ""}
    alike = replace(case, rule_options={**options, "lr": 1.0}, seed=0, **problem)
    return _exchange(alike, dim_of(case) if numbers is None else numbers, _matrices_of(case))


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
    """Seconds by a clock after which all nodes have done so many rounds; None where that is not known."""
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
        rounds = [(np.array(sender, np.int64), np.array(receiver, np.int64)) for sender, receiver in json_of(text)]
    except (OverflowError, TypeError):
        raise ValueError("a graph has links that are no numbers; restore a copy of the store") from None
    for sender, receiver in rounds:
        if sender.shape != receiver.shape or sender.ndim != 1:
            raise ValueError("a graph has links without two ends; restore a copy of the store")
        ends = np.concatenate([sender, receiver])
        if ends.size and not 0 <= ends.min() <= ends.max() < nodes:
            raise ValueError(f"a graph of {nodes} nodes has links to others; restore a copy of the store")
    if not rounds:
        raise ValueError("a graph has no rounds; restore a copy of the store")
    return rounds


def _matrices_of(case: Case) -> tuple[WeightMatrix, ...]:
    """Of the parameters of a run, where what its rule sends depends on them."""
    direction = None if own.is_own(case.rule) else getattr(rules.kind(case.rule), "direction", None)
    if direction is not rules.Hooked:
        return ()
    return _matrices(case.problem, tuple(case.problem_options.items()), case.nodes)


@cache
def _matrices(problem: str, options: tuple[tuple[str, object], ...], nodes: int) -> tuple[WeightMatrix, ...]:
    return tuple(problems.make(problem, nodes, **dict(options)).matrices or ())


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
