"""The clock: measurements, closed forms, a plain reference, and bad input."""

import math
import pickle
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import klatsch
from klatsch import clock as clocks
from klatsch.clock import Clock, Deaths, Links, Sites, Table, Times, Uneven, times
from klatsch.clock.rounds import messages_of

FREE = Links(1e30, 0.0)  # messages take no time


def rule(name="dsgd", **options):
    return klatsch.rules.make(name, lr=0.1, **options)


def ring(nodes, **channel):
    return klatsch.topology.make("ring", nodes, **channel)


def free(gradient, **options):
    return Clock(gradient, FREE, handling=0.0, per_message=0.0, **options)


class Drawn(Times):
    """Times that a test sets."""

    def __init__(self, rows):
        self.rows, self.mean = np.array(rows, float), float(np.mean(rows))

    def draw(self, rounds, nodes, numbers):
        return self.rows[:rounds]


# --- measurements ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_step_times_of_the_rank_benchmark(monkeypatch):
    """Within 30 % in 70 of 72 cases; the two others are of a row whose gossip took less time than no gossip."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    costs = import_module("costs")
    rows = costs.rows((benchmarks / "README.md").read_text())
    assert len(rows) == 18
    far = [
        (row, method)
        for row in rows
        for method, measured in row.measured.items()
        if not 1 / 1.3 <= costs.predicted(row, method) / measured <= 1.3
    ]
    assert all(row.measured[method] < row.step for row, method in far)
    assert len(far) <= 2


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_equal_times():
    """One link per node: two neighbours share it; what is early hides behind the gradient."""
    one, params = Clock(0.05, Links(1e8, 0.002), handling=1e-9, per_message=1e-5), 1_000_000
    vector = 2 * (4e6 / 1e8 + 1e-5)
    assert one.seconds(rule(), ring(8), params, [100]) == pytest.approx([100 * (0.05 + 0.002 + vector + 4e-3)])
    cta = rule("dat", order="cta")  # both vectors in one message, which takes longer than the gradient
    both = 2 * (8e6 / 1e8 + 1e-5)
    assert one.seconds(cta, ring(8), params, [100]) == pytest.approx([100 * (0.002 + both + 8e-3)])
    assert one.seconds(cta, ring(8), 1000, [100]) == pytest.approx([100 * (0.05 + 8e-6)])  # all of it is hidden
    atc = rule("dat")  # x leaves early, and w when x has left
    assert one.seconds(atc, ring(8), params, [100]) == pytest.approx([100 * (0.002 + 2 * vector + 8e-3)])


def test_silent_rounds_are_gradients_alone():
    one = Clock(0.05, Links(1e8, 0.002), handling=0.0, per_message=0.0)
    found = one.seconds(rule(), ring(8, every=4), 1_000_000, [3, 4, 7, 8])
    talk = 0.002 + 2 * 4e6 / 1e8
    assert found == pytest.approx([0.15, 0.2 + talk, 0.35 + talk, 0.4 + 2 * talk])


def test_late_messages_hide_behind_gradients():
    one, params = Clock(0.05, Links(1e8, 0.002), handling=0.0, per_message=0.0), 1_000_000  # a vector takes 82 ms
    assert one.seconds(rule(), ring(8, late=2), params, [101])[0] == pytest.approx(
        101 * 0.08, rel=0.03
    )  # a link's pace
    assert one.seconds(rule(), ring(8, every=2, late=2), params, [100]) == pytest.approx([100 * 0.05])
    assert one.seconds(rule(), ring(8, every=2, late=1), params, [100])[0] == pytest.approx(
        100 * 0.05 + 50 * 0.032, rel=0.01
    )


def test_small_messages_take_less():
    one = Clock(1e-9, Links(1e8, 0.0), handling=0.0, per_message=0.0)
    full, half, quarter = (
        one.seconds(rule(), ring(8, wire=wire), 1 << 20, [10])[0] for wire in ("float32", "bfloat16", "int8")
    )
    assert full / half == pytest.approx(2, rel=1e-6)
    assert full / quarter == pytest.approx(4 / (1 + 2 / 256), rel=1e-6)


@pytest.mark.parametrize("nodes", [2, 16])
def test_exponential_times_with_an_all_reduce_are_harmonic(nodes):
    found = free("exponential(0.1)").seconds(rule(), klatsch.topology.complete(nodes), 10, [20_000])
    assert found[0] / 20_000 == pytest.approx(0.1 * sum(1 / k for k in range(1, nodes + 1)), rel=0.02)


def test_a_graph_says_whether_it_is_an_all_reduce():
    """Its name does not; and neither a lazy graph nor one over a channel is one."""
    complete, every, lazy = klatsch.topology.complete(4), klatsch.topology.every, klatsch.topology.lazy
    mine = klatsch.topology.from_matrices(complete.matrices[0], name="complete")
    assert mine == complete  # the same weights
    one = Clock(0.05, Links(1e8, 0.002))

    def seconds(graph):
        return one.seconds(rule(), graph, 1_000_000, [8])[0]

    reduced, gossip = seconds(complete), 8 * (0.05 + 0.002 + 3 * (4e6 / 1e8 + 1e-5) + 4e6 * 5e-10)
    assert seconds(pickle.loads(pickle.dumps(complete))) == seconds(replace(mine, all_reduce=True)) == reduced
    for graph in (mine, lazy(complete), replace(lazy(complete), name="complete")):
        assert seconds(graph) == pytest.approx(gossip)
    assert gossip > 1.2 * reduced
    assert every(complete, 4).all_reduce
    assert seconds(every(lazy(complete), 4)) > seconds(every(complete, 4))
    for channel in ({"late": 1}, {"wire": "bfloat16"}, {"loss": 0.1}):
        assert not klatsch.topology.make("complete/4", 4, **channel).all_reduce


@pytest.mark.parametrize("order", ["atc", "cta"])
def test_a_delay_spreads_at_one_hop_per_round(order):
    """Node 0 is slow in round 1. In atc neighbours wait for its message of that round with their gradients done; in
    cta for the one after it, while they compute the next gradient, which hides one second of the delay at every hop."""
    rounds, nodes = 8, 21
    drawn = np.ones((rounds, nodes))
    drawn[0, 0] = 5.0
    done = free(Drawn(drawn)).gossip(rule(order=order), ring(nodes), 10, [*range(1, rounds + 1)])
    hops = np.minimum(np.arange(nodes), nodes - np.arange(nodes))
    for t, row in enumerate(done, 1):
        delays = np.where(hops <= t, 4.0, 0.0) if order == "atc" else np.where(hops < t, np.maximum(0, 4.0 - hops), 0.0)
        assert row == pytest.approx(t + delays)


def test_the_slowest_node_sets_the_pace():
    found = free([1.0] * 7 + [3.0]).seconds(rule(), ring(8), 10, [1000])
    assert found == pytest.approx([3000.0])


def test_nodes_that_are_hosts():
    """Four GPUs average gradients, 3/4 of the vector twice, and put slices together, once."""
    alone, host = (Clock(0.05, "10gbe", gpus=gpus, bus=1e10).seconds(rule(), ring(4), 10**6, [1])[0] for gpus in (1, 4))
    assert host - alone == pytest.approx(3 * 0.75 * 4e6 / 1e10)


def test_local_sgd_waits_in_every_fourth_round():
    drawn = np.random.default_rng(0).random((8, 3)) + 0.5
    one = Clock(Drawn(drawn), Links(1e8, 0.001), handling=0.0, per_message=0.0)
    found = one.seconds(rule(), klatsch.topology.every(klatsch.topology.complete(3), 4), 1_000_000, [4, 8])
    talk = min(4 * (0.001 + 4e6 / 3 / 1e8), 4 * (0.001 + 4e6 / 1e8))
    first, second = (drawn[k : k + 4].sum(0).max() + talk for k in (0, 4))
    assert found == pytest.approx([first, first + second])


def reduced(network, nodes, params):
    """Seconds of an all-reduce, of models, behind which nothing hides."""
    one = Clock(1.0, network, handling=0.0, per_message=0.0)
    graph = klatsch.topology.make("complete", nodes, every=2)
    return one.seconds(rule(), graph, params, [2])[0] - 2.0


@pytest.mark.parametrize("nodes", [2, 6, 16, 64])
@pytest.mark.parametrize("params", [10, 25_000, 25_000_000])
def test_an_all_reduce_is_the_faster_of_a_ring_and_of_halving_and_doubling(nodes, params):
    rate, latency, vector = 1e8, 0.01, 4 * params / 1e8
    ring = 2 * (nodes - 1) * (latency + vector / nodes)
    power = 2 ** int(math.log2(nodes))
    halves = 2 * (math.log2(power) * latency + (1 - 1 / power) * vector)
    halves += 2 * (latency + vector) * (power < nodes)
    assert reduced(Links(rate, latency), nodes, params) == pytest.approx(min(ring, halves), rel=1e-9)
    assert (ring < halves) == ((nodes, params) == (6, 25_000_000))


def test_the_largest_pieces_stay_inside_a_site():
    far, near = Links(1e7, 0.05), Links(1e9, 0.001)
    found = reduced(Sites(*vars(far).values(), sizes=2, inside=near), 16, 25_000_000)
    inside, across = 3 * 0.001 + 7 / 8 * 0.1, 0.05 + 10 / 16  # 100 MB: halves, quarters, eighths, then sixteenths
    assert found == pytest.approx(2 * (inside + across))


@pytest.mark.parametrize("nodes", [3, 8])
def test_a_ring_is_a_plain_reference(nodes):
    """Links of a ring alone: piece after piece, each when its node has the one before and its link is free."""
    numbers, params = np.random.default_rng(nodes), 25_000
    rates, delays = np.zeros((nodes, nodes)), numbers.uniform(0, 0.05, (nodes, nodes))
    for i in range(nodes):
        rates[i, (i + 1) % nodes] = numbers.uniform(1e5, 1e7)
    arrived = {(i, 0): 0.0 for i in range(nodes)}
    left = dict.fromkeys(range(nodes), 0.0)
    for k in range(1, 2 * (nodes - 1) + 1):
        for i in range(nodes):
            j = (i + 1) % nodes
            left[i] = max(left[i], arrived[i, k - 1]) + 4 * params / nodes / rates[i, j]
            arrived[j, k] = left[i] + delays[i, j]
    last = max(arrived[i, 2 * (nodes - 1)] for i in range(nodes))
    assert reduced(Table(1.0, 0.0, rates, delays), nodes, params) == pytest.approx(last)


def test_one_long_link_of_a_ring_is_crossed_twice():
    rates, delays = np.zeros((16, 16)), np.zeros((16, 16))
    rates[np.arange(16), np.roll(np.arange(16), -1)] = 1e12
    delays[3, 4] = 0.5
    assert reduced(Table(1.0, 0.0, rates, delays), 16, 10) == pytest.approx(1.0)


def test_deaths_take_as_long_as_if_they_were_drawn():
    deaths, nodes, numbers = Deaths(8_000.0, restart=100.0, write=45.0, notice=40.0), 8, np.random.default_rng(0)
    total, pieces, work = 0.0, 4_000, deaths.interval(nodes)
    for _ in range(pieces):  # each from one checkpoint to the next, which is lost if a machine dies while it is written
        while (life := numbers.exponential(deaths.life / nodes)) < work + deaths.write:
            total += life + deaths.restart
            while (again := numbers.exponential(deaths.life / nodes)) < deaths.restart:
                total += again  # another one dies in the restart, which begins anew
        total += work + deaths.write
    assert deaths.stretch(nodes, all_reduce=True) == pytest.approx(total / pieces / work, rel=0.05)
    moments = np.cumsum(numbers.exponential(deaths.life / nodes, 100_000))
    waits = np.minimum(np.diff(moments), deaths.notice).sum()  # until the last death is noticed
    worked = moments[-1] - moments[0] - waits
    assert deaths.stretch(nodes, all_reduce=False) == pytest.approx((worked + waits) / worked, rel=0.01)


@pytest.mark.parametrize("write", [0.4, 4.0, 40.0])
def test_checkpoints_are_as_frequent_as_pays_off(write):
    deaths, nodes = Deaths(86_400.0, restart=30.0, write=write, notice=10.0), 64
    each, any_interval = deaths.life / nodes, np.geomspace(1.0, 1350.0, 1000)
    least = (np.exp(deaths.restart / each) * np.expm1((any_interval + write) / each) / (any_interval / each)).min()
    assert least <= deaths.stretch(nodes, all_reduce=True) <= 1.01 * least


def test_a_clock_with_deaths_takes_longer():
    deaths = Deaths(life=1000.0, restart=10.0, write=1.0, notice=5.0)
    for graph, all_reduce in ((klatsch.topology.complete(4), True), (ring(4), False)):
        plain, longer = (Clock(0.1, deaths=some).seconds(rule(), graph, 10, [100])[0] for some in (None, deaths))
        assert longer == pytest.approx(plain * deaths.stretch(4, all_reduce))


# --- a plain reference ----------------------------------------------------------------------------------------------


def plainly(one, rule, topology, params, drawn):
    """Every message of every node by itself, from what the module says."""
    numbers = {"float32": 4, "bfloat16": 2}[topology.wire] * params
    sendings, M = messages_of(rule), topology.size
    done, free_at, flights, rows = [0.0] * M, [0.0] * M, {}, []
    work = sum(sent.vectors for sent in sendings) * 4 * params * one.handling

    def takes(i, j, sent):
        rate, _ = one.network.between(np.array([i]), np.array([j]))
        return sent.vectors * numbers / rate[0] + one.per_message

    def exchanged(t, begin, ready):
        arrived, last = [], [*ready]
        for sent in sendings:
            starts = [max(begin[j] if sent.early else ready[j], free_at[j], *(arrived[k][j] for k in sent.needs))
                      for j in range(M)]  # fmt: skip
            out = [sum(takes(j, int(k), sent) for k in topology.receivers(j, t)) for j in range(M)]
            into = [sum(takes(int(j), i, sent) for j in topology.neighbors(i, t)) for i in range(M)]
            for j in range(M):
                free_at[j] = starts[j] + out[j]
            arrived.append([
                max([-math.inf, *(starts[j] + one.network.between(np.array([j]), np.array([i]))[1][0]
                                  + max(out[j], into[i]) for j in topology.neighbors(i, t))])
                for i in range(M)
            ])  # fmt: skip
            last = [max(a, b) for a, b in zip(last, arrived[-1], strict=True)]
        return last

    for t, gradient in enumerate(drawn, 1):
        ready = [a + b for a, b in zip(done, gradient, strict=True)]
        if topology.speaks(t) and not topology.late:
            done = [v + work for v in exchanged(t, done, ready)]
        else:
            if t in flights:
                ready = [max(a, b) for a, b in zip(ready, flights.pop(t), strict=True)]
            if topology.speaks(t):
                ready = [v + work for v in ready]
                flights[t + topology.late] = exchanged(t, ready, ready)
            done = ready
        rows.append(done)
    return np.array(rows)


GRAPHS = [("ring", {}), ("star", {}), ("one_peer_exponential", {}), ("ring", {"every": 3})]
GRAPHS += [("ring", {"every": 2, "late": 3}), ("random_matching", {"every": 2, "late": 3})]


@pytest.mark.parametrize("name", ["dsgd", "dat", "gt", "dat-gt"])
@pytest.mark.parametrize("graph, channel", GRAPHS)
def test_it_is_the_plain_reference(name, graph, channel):
    nodes, rounds = 8, 12
    drawn = np.random.default_rng(1).lognormal(-3, 1, (rounds, nodes))
    table = np.random.default_rng(2).uniform(1e6, 1e8, (nodes, nodes))
    delays = np.random.default_rng(3).uniform(0, 0.05, (nodes, nodes))
    one = Clock(Drawn(drawn), Table(1.0, 0.0, table, delays), handling=1e-9)
    topology = klatsch.topology.make(graph, nodes, **channel)
    found = one.gossip(rule(name), topology, 10_000, [*range(1, rounds + 1)])
    np.testing.assert_allclose(found, plainly(one, rule(name), topology, 10_000, drawn), rtol=1e-12)


# --- gradients and links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, mean",
    [("0.05", 0.05), ("exponential(0.2)", 0.2), ("lognormal(0.1, 1)", 0.1), ("slow(0.1, 10, 0.05)", 0.145)],
)
def test_times_have_their_mean(text, mean):
    one = times(text)
    assert one.mean == pytest.approx(mean)
    assert one.draw(4000, 50, np.random.default_rng(0)).mean() == pytest.approx(mean, rel=0.02)


def test_a_trace_is_gone_through_in_order(tmp_path, monkeypatch):
    """Also over the pieces in which it is drawn."""
    file = tmp_path / "trace.csv"
    file.write_text("seconds\n" + "\n".join(map(str, range(1, 11))))
    monkeypatch.setattr("klatsch.clock.rounds.CHUNK", 12)
    done = free(str(file)).gossip(rule(), ring(3, every=1000), 10, [*range(1, 26)])
    for column in done.T:
        assert set(np.diff(column, n=2).round(9)) == {1.0, -9.0}


@pytest.mark.parametrize("gradient", [0.05, [0.05, 0.1], "lognormal(0.05, 0.5)"])
def test_equal_clocks(gradient):
    """They are keys of a cache."""
    clock, other = Clock(gradient, "wan"), Clock(0.06, "wan")
    for same in (Clock(gradient, "wan"), replace(clock), pickle.loads(pickle.dumps(clock))):
        assert (same, hash(same)) == (clock, hash(clock))
    assert other != clock


def test_clocks_of_different_tables_are_not_equal(tmp_path):
    for name, rate in (("a", 1e6), ("b", 1e9)):
        (tmp_path / f"{name}.csv").write_text(f"0,{rate}\n{rate},0\n")
    one, other, same = (Clock(0.1, str(tmp_path / f"{name}.csv")) for name in "aba")
    assert (one, hash(one)) == (same, hash(same))
    assert one != other
    sites = [Clock(0.1, Sites(rate, 0.0, (1, 1), Links(1e9, 0.0))) for rate in (1e6, 1e9, 1e6)]
    assert sites[0] == sites[2] != sites[1]


def test_steps_may_come_twice_and_in_any_order():
    one = free(0.1)
    assert one.seconds(rule(), ring(4), 10, [5, 2, 5]) == pytest.approx([0.5, 0.2, 0.5])


def test_sites_and_tables():
    sites = Sites(1e6, 0.05, sizes=(2, 2), inside=Links(1e9, 1e-4))
    pairs = [np.array(v) for v in ([0, 1, 3], [1, 2, 2])]
    assert [*sites.between(*pairs)[0]] == [1e9, 1e6, 1e9]
    assert [*sites.between(*pairs)[1]] == [1e-4, 0.05, 1e-4]
    fast, slow = (Clock(0.01, some).seconds(rule(), ring(4), 10**6, [10])[0] for some in (Links(1e9, 1e-4), sites))
    assert slow > 10 * fast
    alike = Table(1.0, 1e-4, np.full((4, 4), 1e9))
    assert Clock(0.01, alike).seconds(rule(), ring(4), 10**6, [10]) == pytest.approx([fast])


def test_sites_share_any_number_of_nodes():
    some = Sites(1e6, 0.05, sizes=2, inside=Links(1e9, 1e-4))
    assert some.nodes is None
    assert some.of(5) == replace(some, sizes=(3, 2))
    assert some.of(5).of(5) == some.of(5)
    two, halves = (Clock(0.01, each).seconds(rule(), ring(6), 10**6, [10]) for each in (some, some.of(6)))
    assert two == halves


def test_uneven_links_are_those_of_the_slower_node():
    some, pairs = Uneven(1e6, 0.05, factor=4), np.array([*np.ndindex(64, 64)]).T
    rates = some.between(*pairs)[0].reshape(64, 64)
    own = np.diag(rates)
    assert (rates == np.minimum.outer(own, own)).all()
    assert 0.5e6 <= own.min() < 0.55e6 < 1.8e6 < own.max() <= 2e6
    assert (some.between(np.arange(3), np.arange(3))[0] == own[:3]).all()  # as in any number of nodes
    assert (Uneven(1e6, 0.05, factor=1).between(*pairs)[0] == 1e6).all()
    assert (Uneven(1e6, 0.05, 4, seed=1).between(*pairs)[0] != rates.ravel()).any()


def test_a_clock_times_a_model_of_its_own_size():
    problem = klatsch.problems.LeastSquares(nodes=4, dim=5, seed=0)
    larger = Clock(0.05, "wan", params=10**6)
    timed = klatsch.simulate(problem, rule(), ring(4), 5, clock=larger, progress=False)
    assert timed.elapsed == Clock(0.05, "wan").seconds(rule(), ring(4), 10**6, timed.steps)
    assert klatsch.simulate(problem, rule(), ring(4), 5, clock=larger, params=5, progress=False).elapsed < timed.elapsed


def test_the_clock_beside_a_simulation():
    problem = klatsch.problems.LeastSquares(nodes=8, dim=5, seed=0)
    grid = klatsch.rules.make("dat", lr=[0.01, 0.02, 0.03])
    one = Clock("lognormal(0.05, 0.5)", "wan")
    plain = klatsch.simulate(problem, grid, ring(8), 50, 5, progress=False)
    timed = klatsch.simulate(problem, grid, ring(8), 50, 5, progress=False, clock=one)
    assert torch.equal(plain.output, timed.output)  # bits: same call
    assert plain.elapsed == []
    assert timed.elapsed == one.seconds(rule("dat"), ring(8), problem.dim, timed.steps)
    assert all(a < b for a, b in zip(timed.elapsed, timed.elapsed[1:], strict=False))


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gradient, text",
    [
        (0, "gradient = 0; give a positive number of seconds"),
        ("fast", "gradient = 'fast'; give seconds, such as 0.05, or a distribution"),
        ("lognormal", r"gradient = 'lognormal' has 0 numbers; give lognormal\(mean, spread\), in seconds"),
        ("exponential(1, 2)", r"has 2 numbers; give exponential\(mean\), in seconds"),
        ("3*", "give seconds, such as 0.05"),
        ("2*3*0.1", "give seconds, such as 0.05"),
        ("exponential(-1)", "exponential's mean = -1.0; give a positive number of seconds"),
        ("slow(0.1, 0.5, 0.1)", "slow's k = 0.5; give a factor from 1 up"),
        ("0.1,x", "gradient = '0.1,x'; give seconds"),
        ("", "gradient = '' has no number"),
        ([], r"gradient = \[\] has no number"),
        ("exponential(nan)", "exponential's mean = nan"),
    ],
)
def test_gradients_that_are_none(gradient, text):
    with pytest.raises(ValueError, match=text):
        Clock(gradient)


@pytest.mark.parametrize(
    "content, text",
    [
        ("1,2\n3\n", "row 2 has 1 numbers, but row 1 has 2; make them equal"),
        ("1,2\n3,x\n", "row 2: 'x' is not a number"),
        ("1,2\n-3,4\n", "row 2, column 1: -3 bytes per second; give 0 or a positive number"),
        ("1,2,3\n4,5,6\n", "has 2 x 3 bytes per second; give M rows of M"),
        ("1,2\n3,4\n", "is for 2 nodes, but there are 4; make them equal"),
        ("0,1,1,0\n1,0,1,1\n1,1,0,1\n0,1,1,0\n", "ring needs a link from node 3 to node 0, and the network has none"),
        ("", "has no numbers"),
    ],
)
def test_links_that_do_not_fit(tmp_path, content, text):
    file = tmp_path / "links.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=text):
        Clock(0.1, str(file)).seconds(rule(), ring(4), 10, [1])


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Clock(0.1, "lan"), "unknown network 'lan'"),
        (lambda: Clock(0.1, Links(0, 0)), "bandwidth = 0"),
        (lambda: Clock(0.1, Links(1, -1)), "latency = -1"),
        (lambda: Clock(0.1, handling=-1), "handling = -1"),
        (lambda: Clock(0.1, gpus=0), "gpus = 0"),
        (lambda: Clock([0.1, 0.2]).seconds(rule(), ring(4), 10, [1]), "gradient is for 2 nodes, but there are 4"),
        (lambda: Clock(0.1).seconds(rule(), ring(4), 10, []), "steps is empty"),
        (lambda: Clock(0.1).seconds(rule(), ring(4), 10, [0]), "steps = 0"),
        (
            lambda: Clock(0.1, Sites(1e6, 0, (1, 2), Links(1e9, 0))).seconds(rule(), ring(4), 10, [1]),
            "the network is for 3 nodes, but there are 4",
        ),
        (lambda: clocks.links("links.csv", bandwidth=1.0), "leave bandwidth = 1 out"),
        (lambda: Clock(0.1, params=0), "params = 0; give a whole number from 1 up"),
        (lambda: Sites(1e6, 0, 0, Links(1e9, 0)), "sites = 0; give a whole number from 1"),
        (lambda: Sites(1e6, 0, 2, Links(1e9, 0)).between(np.array([0]), np.array([1])), "2 sites of how many nodes"),
        (lambda: Uneven(1e6, 0, factor=0.5), "factor = 0.5; give a factor from 1 up"),
        (lambda: Deaths(0, 1, 1, 1), "life = 0; give a positive number of seconds"),
    ],
)
def test_bad_input(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_links_that_nobody_has_seen_are_as_good_as_the_way_over_others():
    """Nodes 0 and 1 are near, so are 2 and 3, and 1 and 2 are far apart; node 4 talks to nobody."""
    rates, delays = np.zeros((2, 5, 5))
    for one, other, rate, delay in [(0, 1, 1e9, 1e-3), (1, 2, 1e6, 0.05), (2, 3, 1e9, 1e-3), (0, 2, 1e5, 0.2)]:
        rates[[one, other], [other, one]], delays[[one, other], [other, one]] = rate, delay
    links = Table.completed(rates, delays, "the crew")
    found = links.between(np.array([0, 0, 3, 0, 1, 0]), np.array([1, 2, 0, 3, 3, 4]))
    assert found[0] == pytest.approx([1e9, 1e5, 1e6, 1e6, 1e6, 0.0])  # what is known stays, slow as it may be
    assert found[1][:5] == pytest.approx([1e-3, 0.2, 0.052, 0.052, 0.051])


def test_a_link_that_nobody_has_seen_is_one_way_over_others():
    """There is a wide way with long trips and a narrow one with short trips: not the best of both."""
    rates, delays = np.zeros((2, 4, 4))
    for one, other, rate, delay in [(0, 1, 1e9, 0.05), (1, 2, 1e9, 0.05), (0, 3, 1e6, 1e-3), (3, 2, 1e6, 1e-3)]:
        rates[[one, other], [other, one]], delays[[one, other], [other, one]] = rate, delay
    rate, delay = Table.completed(rates, delays, "the crew").between(np.array([0]), np.array([2]))
    assert (*rate, *delay) == pytest.approx((1e9, 0.1))
