"""A crew that changes while it trains, in simulation: who takes part from which round on, and what they then hold."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.arguments import shown, whole
from klatsch.problems import Problem, checked
from klatsch.rules import State
from klatsch.rules.base import each
from klatsch.simulation.record import Facts
from klatsch.simulation.stack import Stack
from klatsch.topology import Topology, make
from klatsch.wire.carried import Handover, bare, begun_anew, kept_copies, sponsors

Graphs = str | Callable[[int], Topology]  # the name of a topology, or a function of the number of nodes
Event = tuple[int, str, int | Graphs]  # from this round on, "join" or "leave" and which node, or "graph" and which one


class Shift(NamedTuple):
    """Rounds in which the same nodes take part."""

    start: int  # the first one
    members: tuple[int, ...]  # by place in the graph; newcomers are last
    newcomers: tuple[int, ...] = ()
    graphs: Graphs | None = None  # the one of the start, unless another has been given since


class Roster:
    """The shifts of a run; each has a graph and a stack of its own."""

    def __init__(
        self,
        crew: Sequence[Event],
        problem: Problem,
        graphs: Topology | Graphs,
        steps: int,
        made: Callable[[list[Problem], list[Topology]], Stack],
    ) -> None:
        self.problem, self._made = checked(problem), made
        self.shifts = shifts(crew, problem.nodes, steps)
        if isinstance(graphs, Topology):
            raise ValueError(
                f"the crew changes, and {graphs.name} is a graph of {graphs.size} nodes; give the name of one, such as "
                "'ring', or a function of the number of nodes, such as lambda n: topology.make('ring', n, wire='int8')"
            )
        graph_of = cache(_graph)
        self.graphs = [graph_of(shift.graphs or graphs, len(shift.members)) for shift in self.shifts]
        if not any(shift.graphs for shift in self.shifts):
            return
        # On another graph the rule may keep other vectors, and nobody could say what they begin with.
        kept = [{name for name in self.stack(k).start if "@" not in name} for k in range(len(self.shifts))]
        for graph, before, after in zip(self.graphs[1:], kept, kept[1:], strict=False):
            if others := ", ".join(sorted(before ^ after)):
                raise ValueError(
                    f"crew: on {graph.name} the rule keeps other vectors than before ({others}); "
                    "change to a graph on which it keeps the same, or take a rule such as dsgd"
                )

    def number(self, t: int) -> int:
        """The number of the shift of round t."""
        return bisect([shift.start for shift in self.shifts], max(t, 1)) - 1

    def facts(self, number: int) -> Facts:
        """What tells the shifts up to this one from others."""
        told = zip(self.shifts[: number + 1], self.graphs, strict=False)
        return {"crew": [[shift.start, [*shift.members], graph.fingerprint] for shift, graph in told]}

    def stack(self, number: int) -> Stack:
        """The nodes of a shift."""
        members, whole_problem = self.shifts[number].members, self.problem
        stack, told = self._made([whole_problem.among(members)], [self.graphs[number]]), whole_problem.fingerprint()
        network = stack.networks[0]
        fact: Facts = {"problem": None if told is None else f"{whole_problem!r} {told}"}
        stack.networks[0] = network._replace(members=members, origin=network.origin | fact | self.facts(number))
        return stack

    def changed(self, number: int, state: State) -> tuple[Stack, State]:
        """The nodes of a shift, and their state, from that of the nodes of the shift before."""
        stack, before, graph = self.stack(number), self.shifts[number - 1].members, self.graphs[number]
        _, members, newcomers, _ = self.shifts[number]
        stay = [before.index(member) for member in members[: len(members) - len(newcomers)]]
        handover = Handover(bare(stack.rule), stack.parts.rehearsal)
        own = {name: v for name, v in state.items() if "@" not in name}
        if scales := bare(stack.rule).scales:  # by what its graph says
            earlier = bare(self.stack(number - 1).rule).scales
            own |= {name: own[name] * (scale / earlier[name]) for name, scale in scales.items()}
        own = each(lambda v: torch.cat([v[stay], v.new_zeros(len(newcomers), *v.shape[1:])]), own)
        for newcomer, (sponsor, *_) in sponsors(graph, len(newcomers)).items():
            for name, v in handover.begun({name: v[sponsor] for name, v in own.items()}).items():
                own[name][newcomer] = v
        own = handover.settled(own, {name: own[name].mean(0) for name in handover.means})
        kept = kept_copies(self.graphs[number - 1], before, graph, members, newcomers)
        places = [(audience, members.index(member), before.index(member)) for audience, member in kept]
        return stack, own | begun_anew(stack.start, state, places)

    def by_node(self, number: int, v: Tensor) -> Tensor:
        """Numbers of the members of a shift, (members, C), as those of all nodes; nan where one is absent."""
        everyone = v.new_full((self.problem.nodes, *v.shape[1:]), torch.nan)
        return everyone.index_copy(0, torch.tensor(self.shifts[number].members), v)


def _graph(graphs: Graphs, size: int) -> Topology:
    graph = make(graphs, size) if isinstance(graphs, str) else graphs(size)
    if not isinstance(graph, Topology) or graph.size != size:
        raise ValueError(f"topology made {shown(graph)} for {size} nodes; let it return a Topology of that size")
    return graph


def shifts(crew: Sequence[Event], nodes: int, steps: int) -> list[Shift]:
    """The shifts of a schedule: survivors keep their order, newcomers follow in the order of their events."""
    events = [_event(event, nodes, whole(steps, "steps", 1)) for event in crew]
    events.sort(key=lambda event: event[0])
    late = {node for node in range(nodes) if next((kind for _, kind, of in events if of == node), "") == "join"}
    result = [Shift(1, tuple(node for node in range(nodes) if node not in late))]
    if not result[0].members:
        raise ValueError("crew: nobody is there at the start; let at least one node take part from round 1")
    for start, group in groupby(events, key=lambda event: event[0]):
        members, newcomers, graphs = [*result[-1].members], list[int](), result[-1].graphs
        for _, kind, node in group:
            if not isinstance(node, int):
                graphs = node
                continue
            takes_part = node in members or node in newcomers
            if takes_part == (kind == "join"):
                state, remedy = ("already there", "leave") if takes_part else ("not there", "join")
                raise ValueError(
                    f"crew: node {node} is to {kind} in round {start}, but is {state}; let it {remedy} first"
                )
            if kind == "join":
                newcomers.append(node)
            else:
                (newcomers if node in newcomers else members).remove(node)
        if not members:
            raise ValueError(f"crew: nobody who was there before is left in round {start}; let at least one node stay")
        result.append(Shift(start, (*members, *newcomers), tuple(newcomers), graphs))
    return result


def _event(event: object, nodes: int, steps: int) -> Event:
    kinds = "join", "leave", "graph"
    if not isinstance(event, tuple | list) or len(event) != 3 or event[1] not in kinds:
        raise ValueError(
            f"crew has {shown(event)}; give (round, 'join' or 'leave', node), such as (100, 'leave', 3), or "
            "(round, 'graph', topology), such as (100, 'graph', 'ring/4')"
        )
    where = f"crew has {shown(event)} with"
    start, kind, what = whole(event[0], f"{where} round", 2, max(steps, 2)), event[1], event[2]
    if kind != "graph":
        return start, kind, whole(what, f"{where} node", 0, nodes - 1)
    if not isinstance(what, str) and (not callable(what) or isinstance(what, Topology)):
        raise ValueError(f"{where} topology {shown(what)}; give a name, or a function of the number of nodes")
    return start, kind, what
