"""Crews whose members' GPUs talk over NCCL: imitated on CPUs, and on one GPU that NCCL takes for several.

Members on one GPU say that each has one of its own, on a host of its own (`tests.support.lanes.use_lanes`): NCCL then
connects them over sockets of the loopback interface.
"""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import klatsch
from klatsch.ranks import edges
from klatsch.ranks.edges import MACHINE, Edges, Passage, gpu_of
from tests.ranks.test_changes import Crew, simulated
from tests.support.lanes import Imitation
from tests.support.processes import wait_until_stopped
from tests.support.rank_changes import problem, rate
from tests.support.table import RULES
from tests.support.waiting import wait_until

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = pytest.mark.parametrize("kind", ["imitated", pytest.param("nccl", marks=GPU)])


@pytest.fixture
def crew(prepared, tmp_path):
    def of(kind, **options):
        lanes = {"kind": kind} | options.pop("lanes", {})
        device = "cuda" if kind == "nccl" else "cpu"
        return Crew(prepared, tmp_path, lanes=lanes, device=device, **options)

    return of


def dies(kind, **how):
    """How a member dies in the middle of the exchange of some passage; the first one is that of the connection."""
    return {"lanes": {"kind": kind} | how}


def lanes_of(kept, member):
    """How many lanes it had in each epoch."""
    return [*kept[member.name]["lanes"].values()]


@KINDS
@pytest.mark.parametrize(
    "rule, graph, travel",
    [
        ("dat, momentum", "ring", {}),
        ("sgp", "tests/support/graphs.py:uneven", {}),  # some edges go one way only
        ("dsgd", "ring", {"wire": "int8"}),
        ("d2", "ring", {"every": 2, "wire": "topk(0.5)"}),
        ("dsgd", "one_peer_exponential", {}),
    ],
)
def test_members_join_and_leave_as_in_simulation(crew, kind, rule, graph, travel):
    some = crew(kind, rule=rule, graph=graph, options=travel)
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
        assert "Warning" not in member.process.stderr
        assert all(lanes_of(kept, member))
    (steps,) = {max(kept[m.name]["path"]) for m in (first[0], first[2], late)}
    expected = simulated([*kept.values()], rule, graph, steps, **travel)
    for one in (kept[m.name] for m in (first[0], first[2], late)):
        torch.testing.assert_close(one["path"][steps], expected[one["node"]], rtol=1e-7, atol=1e-7)


@KINDS
@pytest.mark.parametrize("size", [3, 4])
def test_the_others_go_on_when_one_is_killed_in_the_middle_of_an_exchange(crew, kind, size):
    some = crew(kind, rule="dsgd", dim=1000)
    some.serve(size)
    first = [some.join() for _ in range(size - 1)]
    last = some.join(**dies(kind, dies_in=20))
    assert last.process.done().returncode == -signal.SIGKILL
    for member in first:
        member.trains(size - 1)
    late = some.join(node=3)
    for member in (*first, late):
        member.trains(size)
    kept = some.end()
    for member in (*first, late):
        assert member.process.returncode == 0, member.process.stderr
        assert all(lanes_of(kept, member))
    for member in first:
        starts = [epoch[3] for epoch in kept[member.name]["epochs"].values()]
        path = kept[member.name]["path"]
        assert [*path] == [*range(max(path) + 1)]  # it has done every round, also that one
        assert len(starts) == 3
    told = [member.process.stderr for member in first if "is gone" in member.process.stderr]
    assert len(told) == 2  # its neighbours
    assert all("going on without it: this rank takes over its weight" in text for text in told)


@KINDS
@pytest.mark.parametrize("noticed_by", ["registry", "neighbours"])
def test_the_others_go_on_when_one_is_stopped_in_the_middle_of_an_exchange(crew, kind, noticed_by):
    some = crew(kind, rule="dsgd", dim=1000, options={} if noticed_by == "registry" else {"timeout": 10.0})
    some.serve(3, timeout=20 if noticed_by == "registry" else 300)
    first = [some.join() for _ in range(2)]
    last = some.join(**dies(kind, dies_in=20, dies_of=signal.SIGSTOP))
    wait_until_stopped(last.process)
    if noticed_by == "registry":
        for member in first:
            member.trains(2)
        last.process.send_signal(signal.SIGCONT)  # finds itself out, and comes back as another one
        for member in some.members:
            member.trains(3)
    else:
        for member in first:
            wait_until(lambda member=member: "is late" in member.process.stderr, member.process)
            member.trains(3)  # without an epoch of their own
        last.process.kill()
    kept = some.end()
    for member in first:
        assert member.process.returncode == 0, member.process.stderr
        assert all(lanes_of(kept, member))
    assert noticed_by == "neighbours" or len(kept[last.name]["ids"]) == 2


@KINDS
def test_the_numbers_are_those_over_gloo(crew, kind):
    """The same bits: what arrives is a copy, whatever brings it."""
    paths = []
    for over_lanes, lanes in ((True, {}), (False, {"gpu": "here/the same for all"})):
        some = crew(kind, rule="dat, momentum", dim=1000, lanes=lanes)
        members = some.begin(3)
        kept = some.end()
        assert [any(lanes_of(kept, member)) for member in members] == [over_lanes] * 3
        paths.append({kept[member.name]["node"]: kept[member.name]["path"] for member in members})
        some.registry.kill()
        some.registry.done()
        for path in (some.folder / "stop", *some.folder.glob("m*-*")):
            path.unlink()
    for node, path in paths[0].items():
        for t in path.keys() & paths[1][node].keys():
            assert torch.equal(path[t], paths[1][node][t])  # bits: same call


@KINDS
@pytest.mark.parametrize("travel", [{"late": 1}, {"catch_up": True, "late": 2, "every": 2}])
def test_without_lanes_where_neighbours_do_not_wait_for_each_other(crew, kind, travel):
    some = crew(kind, rule="dsgd", options=travel)
    members = some.begin(3)
    kept = some.end()
    for member in members:
        assert member.process.returncode == 0, member.process.stderr
        assert not any(lanes_of(kept, member))


@KINDS
def test_status_says_what_goes_over_nccl(crew, kind):
    some = crew(kind, rule="dsgd")
    members = some.begin(3)
    words = ("crew", "status", some.where, "--token-file", some.token_file)
    wait_until(lambda: some.prepared.klatsch(*words).done().stdout.count("(NCCL)") == 6)
    some.end()
    assert {member.process.returncode for member in members} == {0}


def test_lanes_between_own_gpus_of_one_machine_alone(crew):
    """Two of four members share a GPU, so there is one lane; all other edges of these two go on as they are."""
    some = crew("imitated", rule="dat, momentum", graph="complete")
    some.serve(4)
    members = [some.join(**dies("imitated", gpu=f"here/{gpu}")) for gpu in (1, 2, 3, 3)]
    for member in members:
        member.trains(4)
    kept = some.end()
    for member, lanes in zip(members, (1, 1, 0, 0), strict=True):
        assert member.process.returncode == 0, member.process.stderr
        assert lanes_of(kept, member) == [lanes]
    (steps,) = {max(kept[m.name]["path"]) for m in members}
    rule, graph = RULES["dat, momentum"](rate(5)), klatsch.topology.make("complete", 4)
    expected = klatsch.simulate(problem(), rule, graph, steps, record=[steps]).output[:, 0]
    for one in kept.values():
        torch.testing.assert_close(one["path"][steps], expected[one["node"]], rtol=1e-7, atol=1e-7)


def test_ranks_that_go_on_without_others_have_lanes_too(tmp_path, launch):
    ranks = launch(4, "rank_hardships.apart", victims=(2,), lanes="imitated")
    assert ranks.codes() == [0, 0, -signal.SIGKILL, 0], [ranks.errors(rank) for rank in (0, 1, 3)]
    ends = [torch.load(tmp_path / f"end-{rank}") for rank in (0, 1, 3)]
    assert [end["lanes"] for end in ends] == [[1, 3], [0, 2], [0, 2]]
    assert {end["rounds"] for end in ends} == {30}
    for rank in (1, 3):
        assert "neighbour 2 is gone" in ranks.warnings(rank)[0]


CPU = torch.device("cpu")


@pytest.fixture
def three(monkeypatch):
    """Three ends of edges to each other, in this process, and what makes lanes between them."""
    monkeypatch.setattr(edges, "Lane", Imitation)
    store = dist.HashStore()
    ends = [Edges(store, rank, 20.0, "127.0.0.1", optional=True) for rank in range(3)]

    def paved(*may):
        with ThreadPoolExecutor(3) as threads:
            return [
                *threads.map(lambda end: end.pave({0, 1, 2} - {end.rank}, CPU, may[end.rank], lambda _: False), ends)
            ]

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(lambda end: end.open({0, 1, 2} - {end.rank}), ends)] == [{}, {}, {}]
    yield ends, paved
    for end in ends:
        end.close_all()


def room():
    return torch.zeros(1000, dtype=torch.uint8)


def test_a_lane_ends_with_its_edge_and_takes_no_other_with_it(three):
    ends, paved = three
    lanes = paved(True, True, True)
    begun, expected = lanes[0][1].expect(room()), lanes[0][1].expect(room())
    lanes[0][1].post(begun, room())  # the other end does not: it would wait for ever
    ends[1].close(0)  # as if it were gone
    for passage in (begun, expected):
        with pytest.raises(RuntimeError, match="closed"):
            passage.wait()
    later = Passage(lanes[0][1])
    lanes[0][1].post(later, room())
    with pytest.raises(RuntimeError, match="closed"):
        later.wait()
    there, back = lanes[0][2].expect(room()), lanes[2][0].expect(room())
    lanes[0][2].post(there, room() + 1)
    lanes[2][0].post(back, room() + 2)
    for passage in (there, back):
        passage.wait()
    assert (int(there.room[0]), int(back.room[0])) == (2, 1)


def test_both_ends_part_when_neither_needs_the_lane(three):
    ends, paved = three
    lanes = paved(True, True, True)
    with ThreadPoolExecutor(3) as threads:
        parted = threads.map(lambda end: end.part(lanes[end.rank]), ends)
        assert [*parted] == [set(), set(), set()]


def test_who_is_gone_is_not_waited_for(three):
    ends, paved = three
    lanes = paved(True, True, True)
    ends[2].close_all()
    with ThreadPoolExecutor(2) as threads:
        parted = threads.map(lambda end: end.part(lanes[end.rank]), ends[:2])
        assert [*parted] == [{2}, {2}]


def test_no_lane_where_an_end_may_not_have_one(three):
    _, paved = three
    assert [[peer for peer, lane in lanes.items() if lane] for lanes in paved(True, True, False)] == [[1], [0], []]


def no_network(self):
    raise RuntimeError("no interface")


def fails_at_the_first_end(self, invitation, usual=Imitation.connect):
    usual(self, invitation)
    if self.end_of_pair == 0:
        self.broken = "no way"


@pytest.mark.parametrize("name, instead", [("invitation", no_network), ("connect", fails_at_the_first_end)])
def test_no_lane_where_an_end_cannot_connect(three, monkeypatch, name, instead):
    """Both ends go on over gloo, and say so."""
    _, paved = three
    monkeypatch.setattr(Imitation, name, instead)
    with pytest.warns(RuntimeWarning, match="NCCL does not connect this GPU with that of neighbour") as told:
        assert [{*lanes.values()} for lanes in paved(True, True, True)] == [{None}] * 3
    assert len(told) == 6


def test_the_environment_switches_it_on(monkeypatch):
    monkeypatch.delenv("KLATSCH_NCCL", raising=False)
    assert gpu_of(torch.device("cuda", 0)) == gpu_of(torch.device("cpu")) == ""


@GPU
def test_gpus_are_known_by_their_machine_and_their_name(monkeypatch):
    name = str(torch.cuda.get_device_properties(0).uuid)
    monkeypatch.setenv("KLATSCH_NCCL", "1")
    assert gpu_of(torch.device("cuda", 0)).split("/") == [MACHINE.read_text().strip(), name]
    monkeypatch.setenv("KLATSCH_NCCL", "everywhere")
    assert gpu_of(torch.device("cuda", 0)) == f"any/{name}"
