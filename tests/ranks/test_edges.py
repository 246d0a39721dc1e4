"""Edges between neighbours, both ends in this process: each waits for the other in a thread."""

import os
import queue
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from klatsch.ranks import waiting
from klatsch.ranks.agreement import Everyone
from klatsch.ranks.edges import (
    DESCRIPTORS,
    PASSWORD,
    PASSWORD_TAG,
    TELLING,
    Edges,
    Flown,
    _connections,
    _devices,
    links_of,
    rates,
)
from klatsch.ranks.links import GlooLinks
from klatsch.topology import ring
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


def test_nobody_waits_at_the_end_for_one_that_is_out():
    """It was stopped, and takes nothing: what was sent to it never leaves."""
    store, asked = dist.HashStore(), []

    def linked(rank):
        edges = Edges(store, rank, HANG, "127.0.0.1", optional=True)
        return GlooLinks(edges, ring(2), torch.device("cpu"), 1.0, "continue")

    with ThreadPoolExecutor(2) as threads:
        one, stopped = threads.map(linked, (0, 1))
    one.is_out = lambda peer: asked.append(peer) or True
    one.send(0, 1, torch.zeros(one.tail, dtype=torch.uint8))
    one.drain()
    assert (asked, one.unsure) == ([1], {1})
    stopped.close()
    one.close()


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


@pytest.mark.parametrize("together, expected", [(True, [20e6, 4e6, 0.0]), (False, [10e6, 10e6 / 3, 0.0])])
def test_links_that_are_used_together_share_the_way_out(together, expected):
    """In the first second two messages leave, in the other two seconds one alone; the third has hardly begun."""
    seen = {2: Flown(0.0, 10_000_000, 3.0), 1: Flown(0.0, 10_000_000, 1.0), 3: Flown(0.0, TELLING - 1, 0.0)}
    found = rates(seen, {}, together)
    assert [found[peer] for peer in (1, 2, 3)] == pytest.approx(expected)


def test_a_link_is_not_slow_because_its_trips_are_long():
    """After its last byte a message takes a trip to be known to be there; many on the way at once take fewer."""
    seen = {1: Flown(0.05, 10_000_000, 3.0), 2: Flown(0.05, 10_000_000, 3.0)}
    assert rates(seen, {1: 20, 2: 1000}, together=False) == pytest.approx({1: 10e6 / 2, 2: 10e6 / 1.5})


def row(member, state="trains", **links):
    return {"member": member, "state": state, "links": links}


def test_links_between_those_who_train():
    """a sends to b, b to both, c only hears, and d does not train yet."""
    rows = [row("a", b=(0.02, 5e6)), row("b", a=(0.02, 0.0), c=(0.1, 1e6)), row("d", "waits", a=(0.1, 1e3)), row("c")]
    links = links_of(rows, "the crew")
    found = links.between(np.array([0, 1, 1, 2, 0]), np.array([1, 0, 2, 1, 2]))  # of a, b and c
    assert (links.nodes, *found[0]) == (3, 5e6, 5e6, 1e6, 1e6, 1e6)
    assert found[1] == pytest.approx([0.01, 0.01, 0.05, 0.05, 0.06])


@pytest.mark.parametrize(
    "rows, message",
    [
        ([row("a"), row("b", "waits")], "the crew has 1 that train; links are between two or more"),
        ([row("a", b=(0.1, 0.0)), row("b")], "the crew knows no links: members on Linux see one when 262 kB have gone"),
    ],
)
def test_a_crew_may_know_no_links(rows, message):
    with pytest.raises(ValueError, match=message):
        links_of(rows, "the crew")


def test_a_look_at_sockets_leaves_them_as_they_are():
    """Also where a script has given sockets a default timeout, which would set them to answer at once."""
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        socket.setdefaulttimeout(30.0)
        try:
            found = _connections()
        finally:
            socket.setdefaulttimeout(before)
        assert (one.fileno() in found.values(), os.get_blocking(one.fileno())) == (DESCRIPTORS.is_dir(), True)


class Watched(dist.HashStore):
    """A store of which a test knows that somebody waits until all have read, and for which one reader has to wait."""

    def __init__(self, store, may_read):
        super().__init__()
        self.store, self.may_read, self.lingers = store, may_read, threading.Event()
        self.set = store.set

    def multi_get(self, keys):
        assert self.may_read.wait(HANG)
        return self.store.multi_get(keys)

    def wait(self, keys, timeout):
        if keys[0].endswith("/read"):
            self.lingers.set()
        self.store.wait(keys, timeout)


def test_the_first_rank_does_not_end_while_others_read():
    """The store may lie in its process."""
    store, at_once, later = dist.HashStore(), threading.Event(), threading.Event()
    at_once.set()
    stores = [Watched(store, at_once), Watched(store, later)]
    with ThreadPoolExecutor(2) as threads:
        told = [threads.submit(Everyone(stores[k], k, 2, HANG).told, "ab"[k]) for k in range(2)]
        lingered = stores[0].lingers.wait(20)
        early = told[0].done()
        later.set()
        assert (lingered, early) == (True, False)
        assert [each.result(HANG) for each in told] == [["a", "b"]] * 2
    assert not stores[1].lingers.is_set()
