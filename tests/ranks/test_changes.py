"""Crews that change while they train: real processes that join, leave, are killed and stopped."""

import json
import os
import random
import re
import signal
import socket
import warnings
from contextlib import ExitStack, suppress
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch

import klatsch
from klatsch.files import token_of
from klatsch.optim.hosts import Host
from klatsch.optim.post import Post, graphs_of
from klatsch.ranks.registry import Epoch, address_of, ask
from tests.support.processes import say, wait_until_stopped
from tests.support.rank_changes import LR, problem, rate
from tests.support.table import RULES
from tests.support.waiting import wait_until

MODULE = "tests.support.rank_changes"
HOSTS = pytest.param(2, 300, marks=pytest.mark.soak)
MEMBERS = pytest.mark.parametrize("ranks, dim", [(1, 5), HOSTS], ids=["ranks", "hosts"])
UNEVEN = "tests/support/graphs.py:uneven"  # where push-sum's weights differ


class Crew:
    """A registry, and members that train."""

    def __init__(self, prepared, folder, **options):
        self.prepared, self.folder, self.options, self.members = prepared, folder, options, []
        self.token_file, self.port = folder / "token", prepared.free_port()
        self.where = f"127.0.0.1:{self.port}"

    def serve(self, least, timeout=30):
        words = ("--host", "127.0.0.1", "--port", self.port, "--token-file", self.token_file, "--least", least)
        self.registry = self.prepared.klatsch("crew", "serve", *words, "--timeout", timeout)
        wait_until(lambda: "klatsch crew join" in self.registry.stdout, self.registry)

    def join(self, name=None, **options):
        name = name or f"m{len(self.members)}"
        environment = {"KLATSCH_CREW_TOKEN_FILE": str(self.token_file)}
        if "crew" not in options.get("options", {}):
            environment |= {"KLATSCH_CREW": self.where}
        module = self.options.get("module", MODULE)
        words = ("-m", module, self.folder, name, json.dumps(self.options | options))
        ranks, processes = self.options.get("ranks", 1), []
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.prepared.free_port())}
        for rank in range(ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            everything = dict(os.environ) | environment | place
            processes.append(self.prepared.python(*words, env=everything, preload=(module,)))
        self.members.append(member := Member(self.folder, name, *processes))
        return member

    def begin(self, size, timeout=30):
        self.serve(size, timeout)
        members = [self.join() for _ in range(size)]
        for member in members:
            member.trains(size)
        return members

    def end(self, stop=None):
        """What those who are left have kept, by name; nobody passes the last round before all can know of it."""
        living = [member.process for member in self.members if member.process.poll() is None]
        for process in living if stop is None else ():
            process.send_signal(signal.SIGSTOP)
        say(self.folder, "stop", stop or max(member.at()[2] for member in self.members) + 5)
        for process in living:
            process.send_signal(signal.SIGCONT)
        for member in self.members:
            for process in (member.process, *member.beside):
                process.done()
        return {m.name: torch.load(m.kept) for m in self.members if m.kept.exists()}

    def begin_again(self, names, stop=None, **options):
        """Other processes, one after the other, and another registry; they stop after a round, if it is given."""
        self.registry.kill()
        self.registry.done()
        for path in (self.folder / "stop", *self.folder.glob("m*-*")):
            path.unlink(missing_ok=True)
        self.members = []
        if stop is not None:
            say(self.folder, "stop", stop)
        self.serve(len(names))
        for k, name in enumerate(names, 1):
            self.join(name=name, **options.get(name, options))
            wait_until(lambda k=k: self.registry.stdout.count(" joins") == k, self.registry)
        return self.members


class Member:
    def __init__(self, folder, name, process, *beside):
        self.folder, self.name, self.process, self.beside = folder, name, process, beside
        self.kept = folder / f"{name}-kept"

    def at(self):
        """Its epoch, its members, its round, and which node it is."""
        path = self.folder / f"{self.name}-at"
        return [int(word) for word in path.read_text().split()] if path.exists() else [0, 0, 0, 0]

    def trains(self, size, rounds=5):
        """Wait until it has done some rounds in an epoch of so many members."""
        wait_until(lambda: self.at()[1] == size, self.process)
        before = self.at()[2]
        wait_until(lambda: self.at()[2] >= before + rounds, self.process)


@pytest.fixture
def crew(prepared, tmp_path):
    return lambda **options: Crew(prepared, tmp_path, **options)


def simulated(kept, rule, graph, steps, dim=5, **options):
    """The same by simulation: the nodes' outputs after some rounds, by node."""
    ids = {member: node for one in kept for member, node in one["ids"].items()}
    epochs = {}
    for one in kept:
        epochs |= one["epochs"]
    events, before = [], None
    for _, (_, members, newcomers, start) in sorted(epochs.items()):
        if before is not None and start <= steps:
            events += [(start, "leave", ids[member]) for member in before if member not in members]
            events += [(start, "join", ids[member]) for member in newcomers]
        before = members
    make = partial(klatsch.topology.make, graph, **options)
    result = klatsch.simulate(problem(dim), RULES[rule](rate(dim)), make, steps, record=[steps], crew=events)
    return dict(zip(result.members, result.output[:, 0], strict=True))


JOURNEYS = [  # `test_table_of_changes.py` has every rule without a channel
    ("sgp", UNEVEN, {}),
    ("d2", "ring", {"every": 2, "wire": "int8"}),
    ("dat, momentum", "ring", {"every": 2, "late": 3, "wire": "bfloat16"}),
    ("dsgd", "ring", {"late": 1, "wire": "int8"}),
]


@pytest.mark.parametrize("rule, graph, travel", JOURNEYS)
def test_members_join_and_leave_as_in_simulation(crew, rule, graph, travel):
    some = crew(rule=rule, graph=graph, options=travel)
    first = some.begin(3)
    late = some.join(node=3)
    for member in (*first, late):
        member.trains(4)
    first[1].process.send_signal(signal.SIGTERM)
    assert first[1].process.done().returncode == 0, first[1].process.stderr
    for member in (first[0], first[2], late):
        member.trains(3)
    kept = some.end()
    for member in some.members:
        assert member.process.returncode == 0, member.process.stderr
        assert "RuntimeWarning" not in member.process.stderr
    (steps,) = {max(kept[m.name]["path"]) for m in (first[0], first[2], late)}
    expected = simulated([*kept.values()], rule, graph, steps, **travel)
    for one in (kept[m.name] for m in (first[0], first[2], late)):
        torch.testing.assert_close(one["path"][steps], expected[one["node"]], rtol=1e-7, atol=1e-7)


def test_hosts_join_die_and_leave_whole(crew):
    """A member is a host of two ranks, each with a slice of the model: the numbers are those of one rank per member."""
    rule, travel, dim = "d2", {"every": 2, "wire": "int8"}, 300  # the second slice begins at 256
    some = crew(rule=rule, options=travel, ranks=2, dim=dim)
    first = some.begin(3)
    late = some.join(node=3)
    for member in (*first, late):
        member.trains(4)
    for process in (first[1].process, *first[1].beside):  # as torchrun does
        process.send_signal(signal.SIGTERM)
    for process in (first[1].process, *first[1].beside):
        assert process.done().returncode == 0, process.stderr
    for member in (first[0], first[2], late):
        member.trains(3)
    first[2].beside[0].kill()  # the other one ends, too
    assert first[2].process.done().returncode == 1
    assert "a rank of this host is gone" in first[2].process.stderr
    for member in (first[0], late):
        member.trains(2)
    kept = some.end()
    ends = [kept[member.name] for member in (first[0], late)]
    for member, end in zip((first[0], late), ends, strict=True):
        assert member.process.returncode == 0, member.process.stderr
        beside = torch.load(some.folder / f"{member.name}.1-kept")
        assert beside["path"].keys() == end["path"].keys()
        for t, x in end["path"].items():
            assert torch.equal(x, beside["path"][t])  # bits: a copy
    assert_kept(kept, (first[0], late), rule)
    whole = [kept[member.name] for member in (first[0], first[2], late)]
    steps = max(whole[1]["path"])  # before it died
    expected = simulated([*kept.values()], rule, "ring", steps, dim, **travel)
    for one in whole:
        torch.testing.assert_close(one["path"][steps], expected[one["node"]], rtol=1e-7, atol=1e-7)


def test_hosts_that_shard_the_model_join_and_leave_whole(crew):
    """FSDP2 inside: a newcomer takes over the pieces of its twins, also of what is frozen."""
    some = crew(rule="dsgd", ranks=2, module="tests.support.rank_hosted")
    first = some.begin(2)
    late = some.join()
    for member in (*first, late):
        member.trains(3)
    first[0].beside[0].kill()
    for member in (first[1], late):
        member.trains(2, rounds=10)
    kept = some.end()
    for member in (first[1], late):
        assert member.process.returncode == 0, member.process.stderr
    ends = [kept[member.name] for member in (first[1], late)]
    frozen = 1
    assert torch.equal(ends[0][frozen], ends[1][frozen])  # bits: a copy
    for one, two in zip(*ends, strict=True):  # two that meet in every round agree after it, to rounding
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def assert_kept(kept, members, rule):
    """In every round that all of them did in their last epoch: sums of flows are 0, push-sum's weights sum to n."""
    ends = [kept[member.name] for member in members]
    (last,) = {max(one["epochs"]) for one in ends}
    start = ends[0]["epochs"][last][3]
    rounds = set.intersection(*({t for t in one["state"] if t >= start} for one in ends))
    assert len(rounds) >= 5
    assert rule != "sgp" or any(abs(one["state"][t]["weight"] - 1.0).max() > 0.1 for one in ends for t in rounds)
    sums = {"d2": "y", "gt": "z", "sgp": "weight"}[rule]
    for t in rounds:
        total = torch.stack([one["state"][t][sums] for one in ends]).sum(0)
        expected = torch.full_like(total, float(len(members)) if rule == "sgp" else 0.0)
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule, graph, dead", [("d2", "ring", (0, 1)), ("sgp", UNEVEN, (0, 2))])
def test_two_are_killed_at_once_and_two_take_their_places(crew, rule, graph, dead):
    """Node 0 is nothing special."""
    some = crew(rule=rule, graph=graph)
    first = sorted(some.begin(4), key=lambda member: member.at()[3])
    assert [member.at()[3] for member in first] == [0, 1, 2, 3]
    for node in dead:
        first[node].process.kill()
    members = [*(some.join(node=node) for node in dead), *(first[node] for node in {*range(4)} - {*dead})]
    for member in members:
        member.trains(4, rounds=8)
    kept = some.end()
    for member in members:
        assert member.process.returncode == 0, member.process.stderr
    assert_kept(kept, members, rule)


def test_one_dies_and_no_epoch_settles_its_sums(crew):
    """Its neighbours know what it held when the crew changed, and what it has added since: the others do not drift."""
    some = crew(rule="gt")
    first = some.begin(4)
    for member in (*first, some.join(node=2)):
        member.trains(5, rounds=8)
    for process in (some.registry, first[1].process):
        process.kill()
        process.done()
    left = [first[0], *first[2:], some.members[-1]]
    for member in left:
        member.trains(5, rounds=10)
    kept = some.end()
    states = [kept[member.name]["state"] for member in left]
    sums = torch.stack([each[min(map(max, states))]["z"] for each in states])
    assert sums.sum(0).abs().max() < 1e-6 * sums.abs().max()


def test_a_newcomer_dies_while_sums_are_settled(crew):
    some = crew(rule="d2")
    first = some.begin(3)
    assert some.join(dies_at="settling").process.done().returncode == -signal.SIGKILL
    for member in first:
        wait_until(lambda member=member: member.at()[0] == 3, member.process)
        member.trains(3, rounds=8)
    kept = some.end()
    assert {len(kept[member.name]["ids"]) for member in first} == {1}
    assert_kept(kept, first, "d2")


CUTS = {
    "one edge of four": (4, {1: [2]}),
    "two and two": (4, {1: [2], 0: [3]}),
    "one of three": (3, {1: [0, 2]}),
}


@pytest.mark.parametrize("cut", CUTS)
def test_edges_that_break_between_living_members_are_made_anew(crew, cut):
    """All of them go on with what they hold, in an epoch of the same members."""
    size, cuts = CUTS[cut]
    some = crew(rule="d2")
    some.serve(size)
    for _ in range(size):
        some.join(cuts={node: [15, *peers] for node, peers in cuts.items()})
    for member in some.members:
        wait_until(lambda member=member: member.at()[0] == 2, member.process)
        member.trains(size)
    kept = some.end()
    for member in some.members:
        assert member.process.returncode == 0, member.process.stderr
        assert len(kept[member.name]["ids"]) == 1  # none of them is a newcomer
        epochs = kept[member.name]["epochs"]
        assert [*epochs] == [1, 2]
        assert epochs[1][1] == epochs[2][1]
    assert_kept(kept, some.members, "d2")


def test_one_that_was_stopped_finds_itself_out_and_joins_as_a_newcomer(crew):
    some = crew(rule="d2")
    first = some.begin(3, timeout=20)
    first[1].process.send_signal(signal.SIGSTOP)
    for member in (first[0], first[2]):
        member.trains(2)
    before = first[1].at()[2]
    first[1].process.send_signal(signal.SIGCONT)
    for member in first:
        member.trains(3)
    kept = some.end()
    for member in first:
        assert member.process.returncode == 0, member.process.stderr
    assert len(kept[first[1].name]["ids"]) == 2  # it came back as another one
    assert first[1].at()[2] > before
    assert "this member is out of the crew" in first[1].process.stderr
    assert_kept(kept, first, "d2")


def test_garbage_on_the_ports_of_edges_disturbs_nobody(crew):
    """Before one joins, and while it does: its edges are made, and no other one breaks."""
    some, draw = crew(rule="d2"), random.Random(1)
    first = some.begin(2)

    def attack(member, silent, times):
        listening = (c.laddr.port for c in psutil.Process(member.process.pid).net_connections() if c.status == "LISTEN")
        for port in {*listening}:
            for k in range(times):
                with suppress(ConnectionError):
                    end = silent.enter_context(socket.create_connection(("127.0.0.1", port)))
                    end.sendall(draw.randbytes(draw.choice((1, 8, 500))))
                    if k % 2:
                        end.close()
            yield port

    with ExitStack() as silent:
        assert all([*attack(member, silent, 60)] for member in first)
        late = some.join(node=2)
        while late.at()[2] == 0:
            with ExitStack() as brief:
                for member in (*first, late):
                    list(attack(member, brief, 4))
        for member in (*first, late):
            member.trains(3)
    kept = some.end()
    for member in (*first, late):
        assert member.process.returncode == 0, member.process.stderr
        assert "RuntimeWarning" not in member.process.stderr
        assert max(kept[member.name]["epochs"]) == 2
    assert_kept(kept, [*first, late], "d2")


@MEMBERS
def test_one_dies_while_the_first_ones_begin(crew, ranks, dim):
    some = crew(rule="d2", ranks=ranks, dim=dim)
    some.serve(3)
    dies, *rest = [some.join(dies_at="start" if k == 0 else "") for k in range(3)]
    for member in rest:
        member.trains(2)
    kept = some.end()
    assert dies.process.returncode == -signal.SIGKILL
    assert_kept(kept, rest, "d2")


@MEMBERS
def test_the_last_one_that_holds_anything_dies_while_it_hands_it_over(crew, ranks, dim):
    """Newcomers are then the first ones, and start from the same parameters."""
    some = crew(rule="d2", apart=True, ranks=ranks, dim=dim)
    some.serve(1)
    last = some.join(dies_at="handover")
    last.trains(1)
    last.process.send_signal(signal.SIGSTOP)
    rest = [some.join(node=node) for node in (1, 2)]
    wait_until(lambda: some.registry.stdout.count(" joins") == 3, some.registry)
    last.process.send_signal(signal.SIGCONT)
    for member in rest:
        member.trains(2)
    one, two = (kept["path"][0] for kept in some.end().values())
    assert torch.equal(one, two)  # bits: a copy


def test_a_newcomer_whose_neighbours_are_gone_joins_once_more(crew):
    some = crew(rule="d2")
    first = some.begin(2)
    late = some.join(node=2, asks_in_vain=True)
    for member in (*first, late):
        member.trains(3)
    kept = some.end()
    for member in (*first, late):
        assert member.process.returncode == 0, member.process.stderr
    assert some.registry.stdout.count(" joins") == 4
    assert_kept(kept, [*first, late], "d2")


@pytest.mark.parametrize("registry", ["is there", "is gone"])
def test_one_that_is_told_to_leave_while_it_is_out_does_not_join_again(crew, registry):
    some = crew(rule="d2")
    first = some.begin(3, timeout=20)
    first[1].process.send_signal(signal.SIGSTOP)
    for member in (first[0], first[2]):
        member.trains(2)
    if registry == "is gone":
        some.registry.kill()
        some.registry.done()
    first[1].process.send_signal(signal.SIGTERM)
    first[1].process.send_signal(signal.SIGCONT)
    assert first[1].process.done().returncode == 0, first[1].process.stderr
    kept = some.end()
    assert len(kept[first[1].name]["ids"]) == 1


@MEMBERS
def test_training_goes_on_without_the_registry_and_changes_again_with_a_new_one(crew, ranks, dim):
    some = crew(rule="dsgd", ranks=ranks, dim=dim)
    first = some.begin(2)
    some.registry.kill()
    some.registry.done()
    for member in first:
        member.trains(2, rounds=8)
    some.serve(0)
    late = some.join(node=2)
    for member in (*first, late):
        member.trains(3)
    some.end()
    for member in some.members:
        assert member.process.returncode == 0, member.process.stderr


@MEMBERS
def test_leaving_and_being_alone(crew, ranks, dim):
    """One leaves by itself; the one that is left trains alone, and another, with more data, takes over from it."""
    some = crew(rule="dsgd", options={"weight": 1.0}, ranks=ranks, dim=dim)
    some.serve(2)
    first = [some.join(), some.join(leave=30)]
    first[0].trains(1)
    assert first[1].process.done().returncode == 0, first[1].process.stderr
    late = some.join(node=2, options={"weight": 3.0, "crew": some.where})
    for member in (first[0], late):
        member.trains(2)
    first[0].process.send_signal(signal.SIGINT)
    assert first[0].process.done().returncode != 0
    assert "KeyboardInterrupt" in first[0].process.stderr
    late.trains(1)
    kept = some.end()
    assert late.process.returncode == 0, late.process.stderr
    weights = [[*dict.fromkeys(kept[member.name]["weight"].values())] for member in (first[0], late)]
    assert weights == [[1.0, 0.5], [1.5, 1.0]]  # over the mean of those who are there


def test_members_that_do_not_fit_are_refused_by_name(crew):
    some = crew(rule="dsgd")
    first = some.begin(2)
    wrong = {
        "rule is dat, the crew's dsgd": {"rule": "dat"},
        "wire=int8": {"options": {"wire": "int8"}},
        "shapes is [[1, 5]], the crew's [[5]]": {"wrong": "shape"},
        "dtypes is ['torch.float32']": {"wrong": "dtype"},
        f"version of klatsch is 0.1.0, the crew's {klatsch.__version__}": {"wrong": "version"},
    }
    for member, name in [(some.join(node=2, **options), name) for name, options in wrong.items()]:
        assert member.process.done().returncode == 1
        (error,) = re.findall("ValueError: this member's (.*); make them the same", member.process.stderr)
        assert name in error
    for member in first:
        member.trains(2)
        assert member.at()[0] == 1
    asked = [address_of(some.where)], token_of(some.token_file), {"op": "status"}
    wait_until(lambda: all("loss" in row for row in ask(*asked)["members"]), *(member.process for member in first))


def test_hosts_that_do_not_fit_are_refused_whole(crew):
    some = crew(rule="dsgd", ranks=2, dim=300)
    (first,) = some.begin(1)
    for options, errors in (
        (
            {"rule": "dat"},
            ["this member's rule is dat, the crew's dsgd; make", "the first rank of this host has stopped"],
        ),
        ({"second": {"rule": "dat"}}, ["agree on the rule: rank 0 has dsgd; rank 1 has dat; make them the same"] * 2),
    ):
        wrong = some.join(**options)
        for process, error in zip((wrong.process, *wrong.beside), errors, strict=True):
            assert process.done().returncode == 1
            assert error in process.stderr
    first.trains(1)
    assert first.at()[0] == 1


def test_one_that_is_refused_keeps_no_connection():
    closed = []

    def join(facts):
        raise ValueError("make them the same")

    store = torch.distributed.HashStore()
    refused = SimpleNamespace(store=store, join=join, leaving=False, close=lambda: closed.append(True))
    with pytest.raises(ValueError, match="make them the same"):
        Post(refused, lambda size: None, {}, 30.0, None, Host())
    assert closed


def test_a_crew_and_a_group_are_not_both_taken(monkeypatch):
    parameters, options = torch.nn.Linear(1, 1).parameters(), {"group": object()}
    with pytest.raises(ValueError, match="crew = 'a:1' and a group are given; give one of them"):
        klatsch.Gossip(parameters, RULES["dsgd"](LR), crew="a:1", **options)
    with pytest.raises(ValueError, match="mesh is a object; give a DeviceMesh"):
        klatsch.Gossip(parameters, RULES["dsgd"](LR), crew="a:1", mesh=object())
    monkeypatch.setenv("KLATSCH_CREW", "b:1")
    with pytest.raises(ValueError, match="KLATSCH_CREW = 'b:1' says to join a crew, but a group is given"):
        klatsch.Gossip(parameters, RULES["dsgd"](LR), **options)


@pytest.mark.parametrize(
    "quorum, near, size, waits",
    [
        (0.5, [0], 2, False),
        (0.5, [1], 2, True),  # exactly half, and the other half has the first one
        (0.5, [0, 3], 4, False),
        (0.5, [1, 2], 4, True),
        (0.5, [2, 3, 4], 5, False),
        (0.0, [4], 9, False),
        (0.75, [0, 1, 2], 4, False),
        (0.75, [1, 2, 3], 4, True),
        (0.8, [0, 1, 2], 4, True),
    ],
)
def test_members_count_a_quorum_as_their_registry_does(quorum, near, size, waits):
    waited = []
    facts = {
        "member": "a",
        "leaving": False,
        "quorum": quorum,
        "join": lambda facts: Epoch(1, ("a",), (), 1),
        "close": lambda: None,
    }
    member = SimpleNamespace(store=torch.distributed.HashStore(), **facts)
    member.expects_change = lambda seconds: waited.append(seconds) or True
    member.before = lambda t: f"round {t}"
    post = Post(member, lambda _: SimpleNamespace(size=size), {}, 30.0, None, Host())
    links = SimpleNamespace(membership=SimpleNamespace(within_reach=lambda: near))
    assert post.next_epoch(links, 7) == "round 8"
    assert bool(waited) == waits
    post.close()


def test_a_newcomer_that_reaches_no_neighbour_joins_ever_more_rarely():
    waited, newcomer = [], Epoch(2, ("b", "a"), ("a",), 9)
    member = SimpleNamespace(store=torch.distributed.HashStore(), member="a", leaving=False, close=lambda: None)
    member.join, member.expects_change = lambda facts, rounds=0: newcomer, waited.append
    links = SimpleNamespace(lost={0: None}, hang_up=lambda: None)
    post = Post(member, klatsch.topology.ring, {}, 30.0, None, Host())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(7):
            assert post.handed_over(links, None) is None
            post.begin_again()
    assert waited == [4, 8, 16, 32, 64, 64]
    assert "no neighbour could be asked for its state; joining again in 4 s; members must reach" in str(told[0].message)
    post.close()


SIGNALS = """
import os, signal
from types import SimpleNamespace
from torch.distributed import HashStore
from klatsch.optim.hosts import Host
from klatsch.optim.post import Post
from klatsch.ranks.registry import Epoch

asked = []
member = {"join": lambda facts: Epoch(1, ("a",), (), 1), "leave": lambda: asked.append(True), "close": lambda: None}
fake = SimpleNamespace(store=HashStore(), member="a", leaving=False, **member)
post = Post(fake, lambda size: None, {}, 30.0, None, Host())
if (child := os.fork()) == 0:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(asked))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.raise_signal(signal.SIGINT)
post.close()
print(post.signal, len(asked), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT).__name__)
"""


def test_signals_are_for_the_member_alone_and_the_scripts_own_handlers_stay(python):
    """A worker that it has forked ends at SIGTERM, and leaves Ctrl-C to it."""
    done = python("-c", SIGNALS).done()
    assert done.stdout.splitlines() == [f"{-signal.SIGTERM} 0", "2 1 1 default_int_handler"], done.stderr


def test_graphs_for_every_number(recwarn):
    def made(name, size):
        return klatsch.topology.make(name, size)

    graph = graphs_of("hypercube/2", RULES["d2"](LR), made)
    assert [graph(size).name for size in (4, 5, 6, 8)] == ["hypercube/2", "ring/2", "ring/2", "hypercube/2"]
    (warning,) = recwarn
    assert re.match(
        r"hypercube/2 has no graph of 5 nodes \(.*\); such crews train on ring instead", str(warning.message)
    )
    with pytest.raises(ValueError, match="topology 'rng'"):
        graphs_of("rng", RULES["d2"](LR), made)
    with pytest.raises(ValueError, match="give its name, say 'ring'"):
        graphs_of(klatsch.topology.ring(4), RULES["d2"](LR), made)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folders, travel", [("all", {"wire": "int8"}), ("own-{}", {"every": 2, "late": 3})])
def test_killed_crews_resume_to_the_bit(crew, folders, travel):
    """All are killed, and start again in another order, with a folder for all or for each."""
    some = crew(rule="dat-d2", options=travel, checkpoints=folders)
    some.serve(3)
    first = [some.join(stops_at=27) for _ in range(3)]
    for member in first:
        wait_until_stopped(member.process)
    for member in first:
        member.process.kill()
        member.process.done()
    again = some.begin_again(["m2", "m0", "m1"], stop=60)
    kept = some.end(60)
    some.begin_again(["m0", "m1", "m2"], stop=60, checkpoints="calm")
    calm = some.end(60)
    for member in again:
        assert member.process.returncode == 0, member.process.stderr
        assert min(kept[member.name]["path"]) == 20
    for one in kept.values():
        (other,) = (other for other in calm.values() if other["node"] == one["node"])
        for t, w in one["path"].items():
            assert torch.equal(w, other["path"][t])  # bits: same call


@MEMBERS
def test_a_crew_stops_and_goes_on_with_another_number(crew, ranks, dim):
    """Three, then two, then four: the numbers are those of a crew of which one left, and then two came."""
    some = crew(rule="d2", checkpoints="all", ranks=ranks, dim=dim)
    some.begin(3)
    events, kept = [], some.end()
    for size, kind, nodes in ((2, "leave", [2]), (4, "join", [2, 3])):
        (steps,) = {max(one["path"]) for one in kept.values()}
        events += [(steps + 1, kind, node) for node in nodes]
        members = some.begin_again([f"m{k}" for k in range(size)])
        for member in members:
            member.trains(size)
        kept = some.end()
        for member in members:
            assert member.process.returncode == 0, member.process.stderr
            assert (some.folder / f"{member.name}-resumed").read_text() == str(steps)
        assert f"going on from round {steps} with {size} ranks" in members[0].process.stderr
    (steps,) = {max(one["path"]) for one in kept.values()}
    result = klatsch.simulate(problem(dim), RULES["d2"](rate(dim)), "ring", steps, record=[steps], crew=events)
    expected = dict(zip(result.members, result.output[:, 0], strict=True))
    for one in kept.values():
        torch.testing.assert_close(one["path"][steps], expected[one["node"]], rtol=1e-7, atol=1e-7)


def test_changes_between_two_checkpoints_and_a_death_before_one_is_read(crew, run_cli):
    some = crew(rule="gt", checkpoints="all")
    first = some.begin(3)
    late = some.join(node=3)
    for member in (*first, late):
        member.trains(4, rounds=8)
    first[1].process.kill()
    rest = [first[0], first[2], late]
    for member in rest:
        member.trains(3, rounds=60)
    kept = some.end()
    (steps,) = {max(one["path"]) for one in kept.values()}
    held = sorted({path.stem for path in (some.folder / "all").iterdir()})
    assert {name.partition("-")[0] for name in held} == {"rank00000", "rank00001", "rank00002"}  # not of the four
    assert len(held) <= 12  # of each the last one, two that all have, and one that some may not have yet
    code, out, _ = run_cli("checkpoint", some.folder / "all", "--json")
    assert code == 0
    assert json.loads(out)["newest"] == steps
    again = some.begin_again(["m0", "m1", "m2"], m2={"dies_first": True})[:2]
    for member in again:
        member.trains(2)
    kept = some.end()
    for member in again:
        assert member.process.returncode == 0, member.process.stderr
        assert (some.folder / f"{member.name}-resumed").read_text() == str(steps)
    assert_kept(kept, again, "gt")
