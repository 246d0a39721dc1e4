"""Ways to train: what they are called, how long a round takes, and which of them a clock leaves a chance."""

import math
from functools import cache

import pytest

from klatsch import problems, simulate
from klatsch.clock import Clock, Links
from klatsch.planning.ways import ALL_REDUCE, BETWEEN, FASTER, HARDLY, KINDS, Way, round_seconds, ways_of

FAR = Clock(0.05, Links(1e7, 0.05))
NEAR = Clock(1.0, "100gbe")


@cache
def found_by(clock, machines=4, params=100_000):
    """The ways, and the seconds of a round of one machine."""
    alone = round_seconds(clock, Way(1), params)
    return ways_of(clock, machines, params, alone), alone


def silences(found):
    """By rule and graph: the fastest round of each H."""
    by = {}
    for way, each in found.items():
        mine = by.setdefault((way.kind, way.graph), {})
        mine[way.every] = min(each, mine.get(way.every, math.inf))
    return by


# --- one way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way, words",
    [
        (Way(1), "one machine, dsgd"),
        (Way(1, "dat"), "one machine, dat (beta=0.9)"),
        (Way(1024), "1,024 machines with an all-reduce, dsgd"),
        (Way(2, "momentum"), "2 machines with an all-reduce, dsgd (momentum=0.9)"),
        (
            Way(4, "shared-momentum", "one_peer_exponential"),
            "4 machines, dsgd (momentum=0.9, shared=True) on one_peer_exponential",
        ),
        (Way(8, "dat", every=16), "8 machines with an all-reduce, dat (beta=0.9), in every 16th round"),
        (Way(4, "dat-d2", "ring", wire="int8"), "4 machines, dat-d2 (beta=0.9) on ring, as int8"),
        (Way(2, "dat", "ring", 4, 3), "2 machines, dat (beta=0.9) on ring, in every 4th round, late 3"),
    ],
)
def test_a_way_in_words(way, words):
    assert str(way) == words


def test_what_a_way_makes():
    rule, graph = Way(8, "dat", "ring", 4, 3, "int8").made([0.1, 0.2])
    assert rule.name == "dat"
    assert (graph.size, graph.every, graph.late, graph.wire) == (8, 4, 3, "int8")
    assert Way(8).reduces
    assert not Way(8, "dsgd", "ring").reduces


def test_a_machine_alone_takes_the_mean():
    """Whatever the draws."""
    for gradient in ("exponential(0.05)", "lognormal(0.05, 1)", "slow(0.02, 10, 0.05)"):
        clock = Clock(gradient)
        assert round_seconds(clock, Way(1), 10) == pytest.approx(clock.times.mean)


def test_the_seconds_of_a_round():
    """By hand: 1 MB/s, 2 MB of parameters, two neighbours on a ring of four."""
    clock = Clock(2.0, Links(1e6, 0.5), handling=0.0, per_message=0.0)
    assert round_seconds(clock, Way(1), 500_000) == pytest.approx(2.0)
    assert round_seconds(clock, Way(4, "dsgd", "ring"), 500_000) == pytest.approx(2 + 0.5 + 2 * 2.0)
    assert round_seconds(clock, Way(4, "dsgd", "ring", 4), 500_000) == pytest.approx(2 + (0.5 + 2 * 2.0) / 4)
    assert round_seconds(clock, Way(4, "dsgd", "ring", 4, 3), 500_000) == pytest.approx(2.0)  # three gradients hide it


# --- which have a chance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params, wires", [(10, {"float32"}), (100_000, {"int8"}), (10_000_000, {"int4"})])
def test_fewer_bytes_only_where_a_round_is_faster(params, wires):
    """All else as it is: with 10 parameters a message takes its latency, with 10 million its bytes.

    With 100,000 most of what int4 could save has been saved by int8.
    """
    found, _ = found_by(FAR, params=params)
    assert {way.wire for way in found if not way.reduces} == wires
    for way, each in found.items():
        assert each == round_seconds(FAR, way, params)
        if way.wire != "float32":
            assert not way.reduces
            plain = way._replace(wire="float32", late=0)
            assert round_seconds(FAR, way._replace(late=0), params) < FASTER * round_seconds(FAR, plain, params)


@pytest.mark.slow
def test_no_encoding_with_which_a_rule_needs_more_rounds():
    found, _ = found_by(FAR, 8, 10_000_000)
    assert {way.wire for way in found if way.kind == "kgt"} == {"int8"}


@pytest.mark.slow
def test_late_messages_only_where_a_round_is_faster():
    found, _ = found_by(FAR)
    late = [way for way in found if way.late]
    assert late
    for way in late:
        assert way.late == way.every - 1
        assert not way.reduces
        assert found[way] < FASTER * round_seconds(FAR, way._replace(late=0), 100_000)
    assert not any(way.late for way in found_by(NEAR)[0])
    # A latency of 50 gradients: three of them hide little of it, and fifteen enough.
    found, _ = found_by(Clock(1e-4, Links(1e12, 5e-3)), 64, 10)
    ring = Way(64, "dsgd", "ring")
    assert ring._replace(every=4) in found
    assert ring._replace(every=4, late=3) not in found
    assert ring._replace(every=16, late=15) in found


def test_longer_silence_only_where_messages_cost_time():
    found, alone = found_by(NEAR)
    assert {way.every for way in found} == {1}
    assert all(each <= HARDLY * alone for each in found.values())
    found, alone = found_by(FAR)
    assert max(way.every for way in found) > 1
    for (kind, _), mine in silences(found).items():
        assert min(mine) == KINDS[kind].least
        assert sorted(mine) == [H for H in BETWEEN if min(mine) <= H <= max(mine)]
        assert all(mine[H] > HARDLY * alone for H in sorted(mine)[:-1])


def test_gossip_that_cannot_be_faster_is_left_out_but_an_all_reduce_is_not():
    slow = Clock(1e-4, Links(1e6, 0.5))
    found, alone = found_by(slow, params=1_000_000)
    assert {way.graph for way in found} == {ALL_REDUCE}
    assert all(each > 4 * alone for each in found.values())
    assert {way.kind for way in found} == {name for name, kind in KINDS.items() if ALL_REDUCE in kind.graphs}
    for clock in (FAR, NEAR):
        found, alone = found_by(clock)
        assert all(way.reduces or each < 4 * alone for way, each in found.items())


@pytest.mark.parametrize("machines", [2, 4, 8])
def test_graphs_that_differ_from_others(machines):
    found, _ = found_by(NEAR, machines)
    expected = {
        (name, graph)
        for name, kind in KINDS.items()
        for graph, fewest in kind.graphs.items()
        if machines >= fewest and kind.least == 1  # messages cost no time
    }
    assert {(way.kind, way.graph) for way in found} == expected
    assert {way.machines for way in found} == {machines}


@pytest.mark.slow
def test_every_way_can_run():
    problem = problems.LeastSquares(8, dim=3)
    found, _ = found_by(FAR, 8, 1_000_000)
    assert len({way[3:] for way in found}) > 6  # channels
    for way in found:
        rule, graph = way.made([1e-3, 1e-2])
        result = simulate(problem, rule, graph, 9, [9], progress=False, any_graph=way.reduces)
        assert result.metrics["distance"].isfinite().all(), way
