"""What a node makes of its neighbours' messages, and how far news travels: without any process."""

from types import SimpleNamespace

import pytest
import torch

from klatsch import encodings, rules
from klatsch import topology as tp
from klatsch.ranks.mailbox import Heard, Mailbox
from klatsch.ranks.membership import lag
from klatsch.ranks.message import Part, as_it_is
from klatsch.ranks.node import Ledger
from klatsch.wire.rehearsal import Rehearsal


@pytest.mark.parametrize("mixed, wanted", [(False, 0.25 * 1 + 0.5 * 4), (True, 1 + 0.25 * 1 + 0.5 * 4)])
def test_every_neighbour_pulls_with_its_own_weight(mixed, wanted):
    voices = {1: [as_it_is(torch.tensor([2.0]))], 2: [as_it_is(torch.tensor([5.0]))]}
    heard = Heard(voices, {1: 0.25, 2: 0.5}, None, None, torch.float32)
    assert heard.pull(torch.tensor([1.0]), 0, None, mixed).item() == wanted


def test_codes_are_sound_if_their_scales_are():
    codes = torch.ones(300, dtype=torch.int8)
    for scale, sound in ((0.5, True), (torch.inf, False), (torch.nan, False)):
        scales = torch.tensor([0.5, scale]).bfloat16()
        assert Part([scales, codes], 300, encodings.of("int8")).is_sound == sound


def test_news_of_a_late_graph_takes_longer():
    assert lag(tp.channel(tp.ring(6), every=2)) == 3 * 2
    assert lag(tp.channel(tp.ring(6), every=2, late=1)) == 3 * (2 + 1)


@pytest.mark.parametrize("every, late", [(1, 0), (1, 2), (3, 0), (4, 3), (2, 5)])
@pytest.mark.parametrize("name", ["base_graph", "one_peer_exponential"])
def test_news_of_a_changing_graph_takes_as_long_as_messages_do(name, every, late):
    """From every round on: what a rank knows before a round travels in it, and is known to others `late` rounds on."""
    graph = tp.make(name, 5, every=every, late=late)
    longest = 0
    for start in range(1, graph.period + 1):
        knows, t = {(start - 1, node): {node} for node in range(5)}, start
        while any(len(knows[t - 1, node]) < 5 for node in range(5)):
            for node in range(5):
                sent = t - late
                talks = sent >= start and graph.speaks(sent)
                heard = [knows[sent - 1, peer] for peer in graph.neighbors(node, sent)] if talks else []
                knows[t, node] = knows[t - 1, node].union(*heard)
            t += 1
        longest = max(longest, t - start)
    assert lag(graph) == longest


@pytest.mark.parametrize("name", ["ring", "exponential", "one_peer_exponential", "base_graph"])
def test_copies_at_both_ends_of_links_are_compared(name):
    """By numbers that sum to zero over the ranks, for each round of a period; silent rounds are none."""
    graph, x = tp.make(name, 6, wire="int8", every=2), torch.zeros(300)
    traffic = Rehearsal(rules.make("dat", 0.1), x).traffic
    ranks = [SimpleNamespace(topology=graph, rank=rank, tail=8, lost={}) for rank in range(6)]
    boxes = [Mailbox(traffic, x, links, by_rows=True) for links in ranks]
    torch.manual_seed(0)
    for t in range(2, graph.period + 1, 2):
        for node in range(6):
            v = torch.randn(300)
            for rank in (node, *graph.receivers(node, t)):
                boxes[rank]._held_of(0, node, graph.audience(t))[0].copy_(v)
    assert not sum(box.checks() for box in boxes).any()
    held = boxes[1]._held_of(0, int(graph.neighbors(1, 2)[0]), graph.audience(2))[0]
    held[7] += 1
    assert sum(box.checks() for box in boxes).count_nonzero() == 1


def test_what_is_owed_is_loaded_to_where_the_state_is():
    """A newcomer gets it on the CPU, also where it trains on a GPU."""
    ledger = Ledger([], torch.zeros(3, device="meta"))
    ledger.load({"ledger": {"1 y": torch.ones(3)}, "last": {"1": 7}})
    assert (ledger.entries[1, "y"].device.type, ledger.last) == ("meta", {1: 7})
