"""The planner over channels: bytes, time and gap of a round against numbers by hand."""

import json
from dataclasses import replace

import pytest

from klatsch import topology as tp
from klatsch.planning import Network, Task, graphs, network, plan, words
from klatsch.planning.verify import verify
from klatsch.theory import Constants

pytestmark = pytest.mark.slow

NOISY = Constants(L=210.0, D1=0.83, sigma=10.0, zeta=62.0)
# 1 MB takes a second, a message starts after 0.1 s, a gradient takes 2 s.
SLOW = Network(bandwidth=1e6, latency=0.1, gradient=2.0, handling=0.0, per_message=0.0)


def task(**more):
    return Task(NOISY, 1_000_000, network("wan", 0.2), 1e6, machines=40, **more)


@pytest.mark.parametrize(
    "vectors, every, delay, seconds",
    [
        ((0, 1), 1, 0, 2 + 4.1),  # two neighbours, 2 MB each
        ((0, 1), 4, 0, 2 + 4.1 / 4),
        ((0, 1), 4, 1, 2 + (4.1 - 2) / 4),  # one gradient hides 2 s of it
        ((0, 1), 4, 3, 2.0),  # three hide all of it
        ((1, 1), 4, 0, 2 + (2.1 + 4.1) / 4),  # the eager vector hides behind the gradient of its round as well
        ((1, 1), 4, 3, 2 + (2.1 + 4.1 - 6) / 4),
        ((0, 1), 1, 1, 4.1),  # the next round must be as long as the message
        ((0, 1), 1, 100, 4.0),  # 4 MB per round take 4 s
        ((0, 1), 2, 100, 2.0),
    ],
)
def test_only_what_gradients_do_not_hide_takes_time(vectors, every, delay, seconds):
    assert SLOW.gossip_seconds(2e6, 2, *vectors, every, delay) == pytest.approx(seconds)


def test_waiting_for_several_messages_on_their_way_is_shared():
    """A message takes 10.1 s from start to end, 0.1 s of the link: with 2 rounds to travel a round takes 5.05 s."""
    far = replace(SLOW, latency=10.0)
    assert far.gossip_seconds(5e4, 2, 0, 1, every=1, delay=2) == pytest.approx(10.1 / 2)
    assert far.gossip_seconds(5e4, 2, 0, 1, every=1, delay=6) == pytest.approx(2.0)


def test_encoded_bytes_travel_and_all_are_handled():
    costly = replace(SLOW, handling=1e-6)
    assert costly.gossip_seconds(4e6, 1, 0, 1, encoded=1e6) == pytest.approx(2 + 0.1 + 1 + 4)
    assert costly.gossip_seconds(4e6, 0, 0, 1, encoded=1e6) == 2.0  # nobody to talk to


def test_a_choice_knows_bytes_and_gap_of_its_channel():
    plain, small = (plan(task(wire=wire), rules=["dat"], families=["ring/8"]) for wire in ("float32", "int8"))
    for one, other in zip(plain.line("dat", "ring/8").choices, small.line("dat", "ring/8").choices, strict=True):
        assert (one.machines, one.rho, one.rounds) == (other.machines, other.rho, other.rounds)
        assert other.bytes_per_node == pytest.approx(one.bytes_per_node * 1_007_814 / 4_000_000)  # 3907 scales
        assert other.seconds_per_round <= one.seconds_per_round
    late = plan(task(late=9), rules=["dat"], families=["ring/8", "ring"])
    for name in ("ring/8", "ring"):
        for choice in late.line("dat", name).choices[1:]:
            assert choice.rho == pytest.approx(tp.make(name, choice.machines, late=9).spectral_gap)
            assert choice.rho < tp.make(name, choice.machines).spectral_gap


@pytest.mark.parametrize("name", ["ring", "complete", "torus"])
def test_a_late_message_below_every_keeps_the_gap_in_closed_form(name):
    assert graphs.graph(f"{name}/8", 16, 7) == graphs.graph(f"{name}/8", 16)
    assert not graphs.is_built(f"{name}/8", 7)
    assert graphs.is_built(f"{name}/8", 8)
    assert graphs.sizes(f"{name}/8", 1000, 8)[-1] <= graphs.LARGEST_BUILT


def test_an_all_reduce_has_no_channel():
    plain, late = (plan(task(**channel), rules=["all-reduce"]) for channel in ({}, {"late": 3, "wire": "int8"}))
    assert plain.line("all-reduce").choices == late.line("all-reduce").choices


def test_a_plan_says_how_messages_travel():
    found = plan(task(late=7, wire="int8"), rules=["dat"], families=["ring/8", "base_graph"])
    assert found.left_out.keys() == {"dat on base_graph"}
    assert "the graph changes" in found.left_out["dat on base_graph"]
    assert "machines, messages 7 rounds late, as int8: " in words.recommendation(found)
    assert any("communication hides behind it" in reason for reason in words.reasons(found))
    assert len(verify(plan(replace(found.task, samples=2000.0), rules=["dat"], families=["ring/8"])).trials) > 0


@pytest.mark.parametrize(
    "wrong, reason",
    [({"late": -1}, "late = -1; give a whole"), ({"wire": "int4"}, "unknown wire 'int4'; did you mean")],
)
def test_a_wrong_channel_is_refused(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        task(**wrong)


def test_the_command_takes_a_channel(run_cli):
    given = ["--samples", "1e6", "--sigma", 10, "--zeta", 62, "--L", 210, "--D1", 1, "--network", "wan", "-n", 40]
    given += ["--topologies", "ring/8", "--rules", "dat,dat-d2", "--set", "late=7", "--set", "wire=int8"]
    code, out, _ = run_cli("plan", *given, "--json")
    found = json.loads(out)
    assert (code, found["late"], found["wire"]) == (0, 7, "int8")
    code, out, _ = run_cli("plan", *given)
    assert code == 0
    assert "messages 7 rounds late, as int8" in " ".join(out.split())
    code, _, err = run_cli("plan", *given[:-1], "wire=int4")
    assert code == 2
    assert "unknown wire 'int4'; did you mean int8?" in err
