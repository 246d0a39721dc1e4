"""What a rule's state goes through: a channel, in simulation, and changes of the crew.

Over a channel flows are rounded, and arrive late, as between ranks. What is on its way, and what neighbours hold, are
fields of the state, so they are in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count

import torch
from scipy.sparse import csr_array
from torch import Tensor

from klatsch import encodings
from klatsch.columns import Number
from klatsch.encodings import Encoding
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import Tensors, of
from klatsch.topology import Topology
from klatsch.wire.rehearsal import Rehearsal


def carried(rule: Rule, topology: Topology, meets: str = "") -> Rule:
    """The rule with its flows over the channel of a graph; the rule itself if they arrive at once and as they are."""
    plain = topology.late == 0 and topology.wire == "float32"
    travel = topology.late, topology.wire, topology.audiences if topology.encoding.remembers else ()
    return rule if plain else Carried(rule, rule.lr, *travel, meets.startswith("stale"))


def bare(rule: Rule) -> Rule:
    """The rule itself, for engines that have real channels."""
    return rule.rule if isinstance(rule, Carried) else rule


@dataclass(frozen=True, eq=False)
class Carried(Rule):
    """A rule whose flows travel over a channel.

    Those on their way are in queues. If stale, they arrive link by link, as soon as messages are there: queues hold
    then what was sent, and the engine finds flows of all ages in that.
    """

    rule: Rule
    lr: Number
    late: int
    wire: str
    audiences: tuple[int, ...] = ()  # of the graph, where nodes hold copies of what their neighbours have said
    stale: bool = False

    name = of("rule.name")
    iterate, query, output = of("rule.iterate"), of("rule.query"), of("rule.output")

    @cached_property
    def encoding(self) -> Encoding:
        """Of the messages, made once: a user's own may take long to load, and remember something."""
        return encodings.of(self.wire)

    def init(self, x: Tensor) -> State:
        state, rehearsal = dict(self.rule.init(x)), Rehearsal(self.rule, x)
        sizes = [rehearsal.full(like).numel() for _, _, like in rehearsal.sent if rehearsal.is_wide(like)]
        copies = len({*self.audiences})
        encodings.check_memory(f"wire = {self.wire!r}", copies, sum(sizes) * x.element_size(), x.device)
        for c, n, like in rehearsal.sent:
            nothing = x.new_zeros(rehearsal.full(like))
            if rehearsal.is_wide(like):
                state |= {f"held@{c}.{n}.{k}": nothing for k in self.audiences}
            state |= {f"flight@{c}.{n}.{k}": nothing for k in range(self.late)}
        return state

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        kept: State = {name: v for name, v in s.items() if name.startswith("held@")}
        calls, encoding = count(), self.encoding

        def sent(place: str, v: Tensor) -> Tensor:
            """What neighbours know of v after this round."""
            # First: the fused engine traces late flows with symbols, which have no shape.
            if self.wire == "float32" or v.shape[-1] != grad.shape[-1]:
                return v
            if not encoding.remembers:
                return encoding.arrives(v)
            copy = f"held@{place}.{flow.audience}"
            if not flow.silent:
                kept[copy] = s[copy] + encoding.arrives(v - s[copy])
            return kept[copy]

        def queue(place: str, last: Tensor) -> list[Tensor]:
            """What is on its way, the last one first, of which all but the oldest stay so."""
            waiting = [last, *(s[f"flight@{place}.{k}"] for k in range(self.late))]
            kept.update({f"flight@{place}.{k}": waiting[k] for k in range(self.late)})
            return waiting

        def travel(mixed: bool, *tensors: Tensor) -> Tensors:
            c = next(calls)
            known = [sent(f"{c}.{n}", v) for n, v in enumerate(tensors)]
            if self.stale:
                arrived = flow(*(torch.stack(queue(f"{c}.{n}", v)) for n, v in enumerate(known)))
            else:
                arrived = tuple(queue(f"{c}.{n}", f)[-1] for n, f in enumerate(flow(*known)))
            return tuple(v + f for v, f in zip(tensors, arrived, strict=True)) if mixed else arrived

        own = {name: v for name, v in s.items() if "@" not in name}
        channel = Flow(partial(travel, False), partial(travel, True), flow.silent)
        return self.rule.update(own, grad, channel, t, lr) | kept


# --- a change of the crew, between two rounds: the same in simulation and on ranks ------------------------------------


class Handover:
    """What a change of the crew does to the state of a rule, of one node or of several along the first axes.

        newcomer:   its sponsor's state; sums of flows (D2's y, the z of gradient tracking) are 0; push-sum's weight is
                    1, and what it divides is divided by the sponsor's
        then all:   sums of flows less their mean over the new crew;   push-sum's weight, and what it divides, by its
                    mean

    Sums of flows are then zero over the crew again, and the weights sum to its number, whoever has come, left or died.
    All else, such as iterates, averages, momentum, moments and anchors, stays as it is.
    """

    def __init__(self, rule: Rule, rehearsal: Rehearsal) -> None:
        if rule.push and not rule.pushed:
            raise ValueError(
                f"{rule.name} keeps sums (push = True), and the crew changes: say which, such as "
                "pushed = ('weight', 'w'), the weight first and then what it divides"
            )
        self.sums, self.pushed = tuple(dict.fromkeys(entry.field for entry in rehearsal.sums)), rule.pushed

    @property
    def means(self) -> tuple[str, ...]:
        """The fields of which `settled` needs the mean over the new crew."""
        return *self.sums, *self.pushed[:1]

    def begun(self, sponsor: State) -> State:
        """The state of a newcomer, from that of its sponsor."""
        divided = {name: sponsor[name] / sponsor[self.pushed[0]] for name in self.pushed}
        return self.zeroed(sponsor) | divided

    def zeroed(self, state: State) -> State:
        """The state of a member that does not know the means: it adds nothing to the sums."""
        return state | {name: torch.zeros_like(state[name]) for name in self.sums}

    def settled(self, state: State, means: State) -> State:
        """The state of a member of the new crew, newcomer or not, from the means over all of them."""
        less = {name: state[name] - means[name] for name in self.sums}
        return state | less | {name: state[name] / means[self.pushed[0]] for name in self.pushed}


def sponsors(graph: Topology, newcomers: int) -> dict[int, list[int]]:
    """By newcomer, the last nodes of a graph: the neighbours that it can ask for their state, in this order.

    Neighbours that are not new come first. One among newcomers only asks those who have asked others before, and so
    the order of the newcomers is one in which a simulation can serve them.
    """
    links = csr_array(graph.union + graph.union.T)  # whichever way messages go
    beside = {node: links.indices[slice(*links.indptr[node : node + 2])] for node in range(graph.size)}
    turn = dict.fromkeys(range(graph.size - newcomers), 0)
    asked = dict[int, list[int]]()
    while turn and len(turn) < graph.size:
        known = {node: [int(j) for j in beside[node] if j in turn] for node in range(graph.size) if node not in turn}
        reached = {node: sorted(some, key=lambda j: (turn[j], j)) for node, some in known.items() if some}
        asked, turn = asked | reached, turn | dict.fromkeys(reached, 1 + max(turn.values()))
    return asked


def kept_copies(
    old: Topology,
    before: Sequence[Hashable],
    new: Topology,
    members: Sequence[Hashable],
    newcomers: Collection[Hashable],
) -> set[tuple[int, Hashable]]:
    """Audiences and speakers of which channels go on with the copies of what was said: those with the same hearers.

    Where messages are late, some that are on their way are dropped, and so there are none.
    """
    if new.late:
        return set()
    earlier = _hearers(old, before)
    return {
        (audience, speaker)
        for (audience, speaker), hearers in _hearers(new, members).items()
        if earlier.get((audience, speaker)) == hearers and not {speaker, *hearers} & {*newcomers}
    }


def _hearers(graph: Topology, members: Sequence[Hashable]) -> dict[tuple[int, Hashable], set[Hashable]]:
    """By audience and speaker: who hears it."""
    hearers: dict[tuple[int, Hashable], set[Hashable]] = {}
    for audience, P in zip(graph.audiences, graph.speaking, strict=True):
        for hearer, speaker in zip(*(coords.tolist() for coords in P.tocoo().coords), strict=True):
            heard_by = hearers.setdefault((audience, members[speaker]), set())
            heard_by.update({members[hearer]} if hearer != speaker else ())
    return hearers


def begun_anew(fresh: State, last: State, kept: Sequence[tuple[int, int, int]]) -> State:
    """The channel's part of a fresh state after the crew has changed: nothing is on its way, and few copies stay.

    Of those that stay, (audience, row of the speaker now, row before).
    """
    memory = {name: v for name, v in fresh.items() if "@" in name}
    for name in [name for name in memory if name.startswith("held@") and name in last]:
        audience = int(name.rpartition(".")[2])
        now, before = ([place[k] for place in kept if place[0] == audience] for k in (1, 2))
        memory[name] = memory[name].index_copy(0, memory[name].new_tensor(now).long(), last[name][before])
    return memory
