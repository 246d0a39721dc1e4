"""Edges between neighbours, both ends in this process: each waits for the other in a thread."""

import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from klatsch.ranks import waiting
from klatsch.ranks.edges import PASSWORD, PASSWORD_TAG, TELLING, Edges, Traffic, _devices, rates
from tests.support.waiting import HANG


def test_guarded_ends_recognise_each_other():
    store = dist.HashStore()
    ends = [Edges(store, rank, 20.0, "127.0.0.1", guarded=True) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda end: end.open([1 - end.rank]), ends)) == [{}, {}]
    sent, heard = torch.arange(4.0), torch.zeros(4)
    works = [ends[0].post(False, sent, 1, 7), ends[1].post(True, heard, 0, 7)]
    for work in works:
        work.wait()
    assert torch.equal(sent, heard)  # bits: a copy


COUNTED = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch.distributed as dist
from klatsch.ranks.edges import Edges

def ring(size):
    store = dist.HashStore()
    ends = [Edges(store, rank, 600.0, "127.0.0.1") for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        for failed in threads.map(lambda end: end.open({(end.rank + 1) % size, (end.rank - 1) % size}), ends):
            assert not failed
    return ends

made = [ring(2)]  # with what all edges share
for size in (3, 8):
    before = len([*Path("/proc/self/fd").iterdir()])
    made.append(ring(size))
    print(len([*Path("/proc/self/fd").iterdir()]) - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
def test_an_edge_takes_one_descriptor_at_each_end():
    """Whatever number of nodes there is: a mesh would take one for each of them."""
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=HANG, check=True)
    assert done.stdout.split() == ["6", "16"]


def test_nobody_waits_for_an_edge_to_one_that_is_out():
    """It was stopped while the edge was made; gloo would wait for it, but need not be waited for."""
    store = dist.HashStore()
    PrefixStore("edge/0-1", store).set("end/1", "ab" * PASSWORD)
    looks = iter((False, True))
    failures = Edges(store, 0, HANG, "127.0.0.1", optional=True).open([1], lambda peer: next(looks))
    assert str(failures[1]) == "it does not connect"
    assert next(looks, None) is None  # it was out before the time was


def test_a_stranger_at_a_guarded_port_is_refused():
    """It knows where gloo listens, and what gloo says first, but not what only the store says."""
    store = dist.HashStore()
    edge = PrefixStore("edge/0-1", store)
    edge.set("end/1", "ab" * PASSWORD)  # of the neighbour that it is not

    def stranger() -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads = _devices("127.0.0.1"), 0
        group = dist.ProcessGroupGloo(edge, 1, 2, options)
        group.send([torch.zeros(PASSWORD, dtype=torch.uint8)], 0, PASSWORD_TAG).wait()
        group.recv([torch.zeros(PASSWORD, dtype=torch.uint8)], 0, PASSWORD_TAG).wait()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(stranger)
        failures = Edges(store, 0, 20.0, "127.0.0.1", guarded=True).open([1])
    assert "a stranger has connected" in str(failures[1])


def test_nobody_waits_for_a_store_that_has_failed(monkeypatch):
    """That of a crew fails at once when its registry is gone."""
    heard = []

    class Answers(queue.SimpleQueue):
        def get(self, timeout):
            heard.append(super().get(timeout=timeout))
            return heard[-1]

    class Gone(dist.HashStore):
        def set(self, *words):
            raise RuntimeError("the registry is gone")

        check = set

    monkeypatch.setattr(waiting, "queue", SimpleNamespace(SimpleQueue=Answers, Empty=queue.Empty))
    monkeypatch.setattr(waiting, "ANSWER_WITHIN", HANG)
    assert waiting.Notes(Gone(), 0).of(1) is None
    assert heard == [None, None]


@pytest.mark.parametrize(
    "together, expected", [(True, {1: 20e6, 2: 4e6, 3: 0.0}), (False, {1: 10e6, 2: 10e6 / 3, 3: 0.0})]
)
def test_links_that_are_used_together_share_the_way_out(together, expected):
    """In the first second two messages leave, in the other two seconds one alone; the third has hardly begun."""
    seen = {2: Traffic(0.1, 10_000_000, 3.0), 1: Traffic(0.1, 10_000_000, 1.0), 3: Traffic(0.1, TELLING - 1, 0.0)}
    found = rates(seen, together)
    assert [found[peer] for peer in (1, 2, 3)] == pytest.approx(expected)
