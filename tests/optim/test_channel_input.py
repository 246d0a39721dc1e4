"""Channels that do not fit: one clear error, before anything is sent."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch import encodings
from klatsch import topology as tp
from klatsch.ranks.mailbox import Mailbox
from klatsch.wire.rehearsal import Rehearsal


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"wire": "int9"}, r"unknown wire 'int9'; did you mean int8\? There are float32, bfloat16, int8"),
        ({"wire": 8}, "unknown wire 8"),
        ({"late": -1}, "late = -1; give a whole number from 0"),
        ({"late": 2.5}, "late = 2.5; give a whole number from 0"),
        ({"every": 0}, "every = 0; give a whole number from 1"),
        ({"catch_up": True}, "catch_up = True on ring: neighbours wait .* such as every=8, late=7"),
        ({"catch_up": "yes", "late": 2}, "catch_up = 'yes'; give True or False"),
        (
            {"rule": klatsch.rules.make("decentlam", 0.1), "topology": tp.make("complete", 1, loss=0.1)},
            "lost, late or silent by now, and diverges",
        ),
        ({"rule": klatsch.rules.make("decentlam", 0.1), "late": 2}, "decentlam on .*use d2 or dat-d2"),
    ],
    ids=str,
)
def test_a_channel_that_does_not_fit(options, message):
    parameter = nn.Parameter(torch.ones(3))
    given = {"rule": klatsch.rules.make("dsgd", 0.1), "topology": "ring"} | options
    with pytest.raises(ValueError, match=message):
        klatsch.Gossip([parameter], **given)
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_a_late_graph_gets_no_other_delay():
    late = tp.channel(tp.ring(4), every=2, late=1)
    for more in ({"late": 1}, {"every": 2}):
        with pytest.raises(ValueError, match="ring/2 late 1 is late already; give every and late together"):
            tp.channel(late, **more)
    assert tp.channel(late, wire="int8").late == 1


def test_differences_need_neighbours_that_come_back():
    with pytest.raises(ValueError, match=r"random_matching with wire = 'int8': the graph is drawn anew .* 'bfloat16'"):
        tp.make("random_matching", 8, wire="int8")
    assert tp.make("random_matching", 8, wire="bfloat16").wire == "bfloat16"
    assert tp.make("exponential/4", 8, wire="int8").audiences == (0,)  # silent rounds are no change
    assert tp.make("one_peer_exponential/4", 8, wire="int8").audiences == (0, 1, 2)
    graph = tp.from_matrices([tp.ring(5).matrix(1), tp.star(5).matrix(1), tp.ring(5).matrix(1)])
    assert graph.audiences == (0, 1, 0)  # who hears the same in several rounds needs one copy
    assert [tp.every(graph, 2).audience(t) for t in range(1, 8)] == [0, 0, 1, 1, 0, 0, 0]


def test_copies_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    """Of one_peer_exponential, four of its own and four of neighbours, of dat for w and x; in simulation its own."""
    monkeypatch.setattr(encodings, "free_bytes", lambda device: 50_000)
    graph, rule = tp.make("one_peer_exponential", 16, wire="int8"), klatsch.rules.make("dat", 0.1)
    told = r"4 copies of what neighbours hold take 512 kB on cpu, where 50 kB are free; use wire = 'bfloat16'"
    with pytest.raises(ValueError, match=told):
        klatsch.simulate(klatsch.problems.LeastSquares(16, dim=500), rule, graph, 9)
    links = SimpleNamespace(topology=graph, rank=0, tail=8)
    told = r"one_peer_exponential int8: 8 copies of what neighbours hold take 64 kB on cpu, where 50 kB are free"
    with pytest.raises(ValueError, match=told):
        Mailbox(Rehearsal(rule, torch.zeros(1000)).traffic, torch.zeros(1000), links, True)
    Mailbox(Rehearsal(rule, torch.zeros(700)).traffic, torch.zeros(700), links, True)
