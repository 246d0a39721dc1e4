"""A Dask cluster for the tests: a real scheduler and two worker processes."""

import re

import pytest

from tests.support.waiting import wait_until


class Cluster:
    """A scheduler and two workers with one thread each, as processes."""

    def __init__(self, prepared, folder):
        self.prepared, self.folder = prepared, folder
        self.scheduler = self._start("scheduler", "--port", "0", "--no-dashboard", "--host", "127.0.0.1")
        self.address = self._line(self.scheduler, r"Scheduler at:\s+(\S+)")
        self.workers = [self._worker() for _ in range(2)]
        for worker in self.workers:
            self._line(worker, r"Registered to:\s+(\S+)")

    def _worker(self):
        return self._start("worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard")

    def _start(self, *words):
        return self.prepared.python("-m", "dask", *words, cwd=self.folder, preload=["distributed", "distributed.cli"])

    def _line(self, process, pattern):
        return wait_until(lambda: re.search(pattern, process.stderr), process)[1]


def impatient(monkeypatch):
    """Have clients wait for an answer no longer than a moment: nobody is there who could give one."""
    distributed = pytest.importorskip("distributed", reason="needs Dask: pip install 'klatsch[dask]'")
    usual = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda *words, **options: usual(*words, **options | {"timeout": 0.2}))
