"""What a change of the crew does to the state of a rule, between two rounds: the same in simulation and on ranks.

    newcomer:   its sponsor's state; sums of flows (D2's y, the z of gradient tracking) are 0; push-sum's weight is 1,
                and what it divides is divided by the sponsor's
    then all:   sums of flows less their mean over the new crew;   push-sum's weight, and what it divides, by its mean

Sums of flows are then zero over the crew again, and the weights sum to its number, whoever has come, left or died. All
else, such as iterates, averages, momentum, moments and anchors, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch
from scipy.sparse import csr_array

from klatsch.rules import Rule, State
from klatsch.topology import Topology
from klatsch.wire.rehearsal import Rehearsal


class Handover:
    """The algebra of a change for the state of a rule, of one node or of several along the first axes."""

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
