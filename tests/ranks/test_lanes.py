"""Crews whose members' GPUs talk over NCCL: imitated on CPUs, and on one GPU that NCCL takes for several.

Members on one GPU say that each has one of its own, on a host of its own (`tests.support.lanes.use_lanes`): NCCL then
connects them over sockets of the loopback interface.
"""

import os
import signal

import pytest
import torch

from klatsch.ranks.edges import gpu_of
from tests.ranks.test_changes import Crew, simulated
from tests.support.processes import wait_until_stopped
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
    """How a member dies in the middle of the exchange of some batch, the first one being that of the connection."""
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
def test_the_others_go_on_when_one_is_stopped_in_the_middle_of_an_exchange(crew, kind):
    some = crew(kind, rule="dsgd", dim=1000, options={"timeout": 3.0})
    some.serve(3)
    first = [some.join() for _ in range(2)]
    last = some.join(**dies(kind, dies_in=20, dies_of=signal.SIGSTOP))
    wait_until_stopped(last.process)
    for member in first:
        wait_until(lambda member=member: "is late" in member.process.stderr, member.process)
        member.trains(2)
    last.process.send_signal(signal.SIGCONT)  # finds itself out, and comes back as another one
    for member in some.members:
        member.trains(3)
    kept = some.end()
    for member in some.members:
        assert member.process.returncode == 0, member.process.stderr
        assert all(lanes_of(kept, member))
    assert len(kept[last.name]["ids"]) == 2


@KINDS
def test_the_numbers_are_those_over_gloo(crew, kind):
    """The same bits: what arrives is a copy, whatever brings it."""
    paths = []
    for over_lanes, lanes in ((True, {}), (False, {"gpu": "the same for all"})):
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
            assert torch.equal(path[t], paths[1][node][t])


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


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setitem(os.environ, "KLATSCH_NCCL", "0")
    assert gpu_of(torch.device("cuda", 0)) == "" == gpu_of(torch.device("cpu"))


@GPU
def test_a_gpu_has_the_same_name_everywhere():
    assert gpu_of(torch.device("cuda", 0)) == str(torch.cuda.get_device_properties(0).uuid)
