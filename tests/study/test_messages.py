"""What nodes send in a run, how long that takes on a link, and what rows know of it."""

import numpy as np
import pytest

from klatsch.clock import Clock, Links
from klatsch.study import Row, Store, expand, parse, run_study
from klatsch.study.cases import Channel, elapsed, exchange_of

pytestmark = pytest.mark.slow

EIGHTH = 14 / 117  # of the rounds of an epoch on 16 nodes, 14 are an 8th one
LINK = Clock(0.01, Links(bandwidth=1e7, latency=0.02), handling=1e-9, per_message=1e-3)
LENET = 44_470  # parameters


def case(rule, topology, nodes=16, steps=100, **problem):
    study = {"steps": steps, "nodes": nodes, "seeds": 1, "lr": 0.1, "rules": rule, "topologies": topology}
    ((found,), _) = expand(parse(study | ({"problem": problem} if problem else {})))
    return found


@pytest.mark.parametrize(
    "rule, topology, vectors",
    [
        ("dsgd", "ring", 100 * 2),
        ("dat", "ring", 100 * 2 * 2),  # w and x
        ("dat-gt", "ring", 100 * 3 * 2),
        ("dsgd", "ring/16", 6 * 2),  # in rounds 16, 32, ..., 96
        ("dat", "ring/64", 1 * 2 * 2),
        ("dsgd", "one_peer_exponential", 100),
        ("dsgd", "star", 100 * 30 / 16),  # the mean over the nodes
        ("dsgd", "complete", 100 * 2 * 15 / 16),  # an all-reduce
        ("dat", "complete", 100 * 2 * 15 / 16),  # of gradients: all nodes are equal
        ("gt", "complete", 100 * 2 * 15 / 16),
        ("dat-d2", "complete", 100 * 2 * 15 / 16),  # its nodes' w differ, but not their x, where they take gradients
        ({"name": "dat-d2", "beta": 0.9}, "complete", 100 * 2 * 2 * 15 / 16),  # gradients are taken between w and x
        ({"name": "dat", "order": "cta"}, "complete", 100 * 2 * 2 * 15 / 16),  # nodes differ by their last step
        ("dat", {"name": "complete", "lazy": True}, 100 * 2 * 15),  # no all-reduce: nodes differ by half of it
        ("dat", "complete/4", 25 * 2 * 2 * 15 / 16),  # of w and of x
        ({"name": "diloco", "outer_lr": 0.5, "schedule": "cosine"}, "complete/4", 25 * 2 * 15 / 16),
    ],
)
def test_what_a_node_sends(rule, topology, vectors):
    assert exchange_of(case(rule, topology)).sent == pytest.approx(4 * 50 * vectors)
    assert exchange_of(case(rule, topology, name="least-squares", dim=7)).sent == pytest.approx(4 * 7 * vectors)
    assert exchange_of(case(rule, topology, name="logistic")).sent == pytest.approx(4 * 20 * vectors)
    assert exchange_of(case(rule, topology, name="fashion-mnist")).sent == pytest.approx(4 * LENET * vectors)


def test_parts_of_ones_own_send_what_built_in_ones_do(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from klatsch import rules, topology\n\n\ndef mine(lr):\n    return rules.make('dat', lr=lr)\n\n\n"
        "def line(n):\n    return topology.ring(n)\n"
    )
    theirs, ours = exchange_of(case("dat", "ring")), exchange_of(case(f"{file}:mine", f"{file}:line"))
    assert ours == theirs


def test_rows_know_what_was_sent(tmp_path):
    study = {"steps": 12, "nodes": 4, "seeds": 1, "lr": [1e-4, 1e-3], "record": 2}
    with Store(tmp_path / "s.sqlite") as store:
        rows = run_study(parse({**study, "rules": ["dsgd", "dat"], "topologies": ["ring/4"]}), store).rows
    assert [row.sent for row in rows] == [4 * 50 * 3 * 2, 4 * 50 * 3 * 4]


def row(rule, topology, megabytes, accuracy, merged=0.9, worst=0.5, alpha=0.1, spread=0.002):
    """A row of two learning rates, of which the second is the better for the mean of nodes only."""
    final = accuracy + np.array([-spread, 0.0, spread])

    def curves(values, other):
        ends = np.stack([np.full(3, other), values], axis=1)
        return np.stack([np.full((3, 2), 0.1), ends], axis=1)

    return Row(
        rule,
        topology,
        16,
        (0.1, 0.2),
        (5, 50),
        curves(final, 0.2),
        curves(final, 0.2),
        1.0,
        {"alpha": alpha},
        "accuracy",
        True,
        50,
        others={"merged": curves(merged + 0 * final, 0.99), "worst": curves(worst + 0 * final, 0.99)},
        sent=1e6 * megabytes,
    )


def test_a_row_can_show_the_merged_model_or_the_worst_node():
    shown = row("dsgd", "ring", 1, 0.8, merged=0.87).showing("merged")
    assert (shown.value, shown.lr, shown.metric) == (pytest.approx(0.87), 0.2, "accuracy, merged model")
    assert shown.at_edge  # of the learning rates that were tried
    assert row("dsgd", "ring", 1, 0.8, worst=0.3).showing("worst").low == pytest.approx(0.3)
    with pytest.raises(ValueError, match="'merged' was not measured"):
        shown.showing("merged")


def seconds_per_round(rule, **graph):
    content = {"epochs": 1, "nodes": 16, "seeds": 1, "lr": 0.1, "rules": rule, "topologies": {"name": "ring", **graph}}
    (case, *_), _ = expand(parse(content | {"problem": {"name": "fashion-mnist"}}))
    return elapsed(case, exchange_of(case), LINK, (case.steps,))[0] / case.steps


def test_seconds_are_those_of_the_clock():
    message, work = 0.02 + 2e-3, 4 * LENET * 1e-9
    assert seconds_per_round("dsgd") == pytest.approx(0.01 + message + 2 * 4 * LENET / 1e7 + work)
    assert seconds_per_round("dsgd", every=8) == pytest.approx(0.01 + (message + 2 * 4 * LENET / 1e7 + work) * EIGHTH)
    int8 = 44_470 + 2 * 174  # and a scale for each 256
    assert seconds_per_round("dsgd", wire="int8") == pytest.approx(0.01 + message + 2 * int8 / 1e7 + work)
    hidden = seconds_per_round("dsgd", every=8, late=7, wire="int8")
    assert hidden == pytest.approx(0.01 + work * EIGHTH)  # 31 ms travel behind seven gradients
    assert seconds_per_round("dat") > seconds_per_round("dsgd")  # two vectors


def test_seconds_of_an_all_reduce():
    halving = 2 * (4 * (0.02 + 1e-3) + 15 / 16 * 4 * LENET / 1e7)  # and doubling: faster than a ring of 30 messages
    each = 0.01 + halving + 4 * LENET * 1e-9
    assert seconds_per_round("dsgd", name="complete") == pytest.approx(each)
    assert seconds_per_round("dat", name="complete") == pytest.approx(each)  # of the gradient
    assert seconds_per_round("dsgd", name="complete", every=8) == pytest.approx(0.01 + (each - 0.01) * EIGHTH)
    both = 2 * (4 * (0.02 + 1e-3) + 15 / 16 * 8 * LENET / 1e7) + 8 * LENET * 1e-9  # vectors at once
    assert seconds_per_round("dat", name="complete", every=8) == pytest.approx(0.01 + both * EIGHTH)


def test_rows_know_their_channel(tmp_path):
    graph = {"name": "ring", "every": 4, "late": [0, 3], "wire": "int8"}
    study = {"steps": 8, "nodes": 4, "seeds": 1, "lr": 1e-3, "record": 2, "rules": "dsgd", "topologies": graph}
    with Store(tmp_path / "s.sqlite") as store:
        rows = run_study(parse(study), store).rows
    assert [row.case.channel for row in rows] == [Channel(4, 0, "int8"), Channel(4, 3, "int8")]
