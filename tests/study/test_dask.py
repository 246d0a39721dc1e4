"""Studies on a Dask cluster: a real scheduler and two worker processes."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from klatsch.study import Store, parse, run_study, workers
from tests.support.comparisons import assert_same_to_rounding
from tests.support.waiting import HANG, wait_until

Client = pytest.importorskip("distributed", reason="needs Dask: pip install 'klatsch[dask]'").Client

STUDY = """
steps = 20000
nodes = [9, 16]
seeds = 2
record = 5
dtype = "float32"
rules = ["dat", "dsgd"]
topologies = ["ring"]
problem = { noise = [1.0, 10.0] }
"""


class Cluster:
    """A scheduler and two workers with one thread each, as processes."""

    def __init__(self, folder):
        self.folder = folder
        self.scheduler = self._start("scheduler", "--port", "0", "--no-dashboard", "--host", "127.0.0.1")
        self.address = self._line(self.scheduler, r"Scheduler at:\s+(\S+)")
        self.workers = [self.worker() for _ in range(2)]

    def worker(self):
        process = self._start("worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard")
        self._line(process, r"Registered to:\s+(\S+)")
        return process

    def _start(self, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )

    def _line(self, process, pattern):
        for line in process.stderr:
            if found := re.search(pattern, line):
                return found.group(1)
        raise AssertionError(f"{process.args} ended")

    def close(self):
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.communicate()


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def start(file, address):
    command = [sys.executable, "-m", "klatsch", "run", str(file), "--dask", address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def errors(store):
    with Store(store) as opened:
        runs = opened.runs()
        found = opened.outcomes(facts["key"] for _, facts in runs)
        return {key: outcome.metrics["distance"] for key, outcome in found.items()}


def test_a_study_on_a_cluster_of_which_a_worker_is_killed(cluster, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(STUDY)
    process = start(file, cluster.address)
    store = tmp_path / "s.sqlite"
    wait_until(lambda: len(_done(store)) >= 14, process)  # the first batch is back
    os.kill(cluster.workers[0].pid, signal.SIGKILL)  # with a batch in its hands
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    assert "112 runs new" in out
    run_study(parse(_content(file)), tmp_path / "here.sqlite", executor=workers.threads)
    found, expected = errors(store), errors(tmp_path / "here.sqlite")
    assert found.keys() == expected.keys()
    for key in expected:
        assert_same_to_rounding(found[key], expected[key], torch.float32)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_scheduler_that_is_gone_ends_the_study_with_one_line(cluster, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(STUDY)
    process = start(file, cluster.address)
    store = tmp_path / "s.sqlite"
    wait_until(lambda: _done(store), process)
    cluster.scheduler.kill()
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, out) == (2, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("klatsch: error: ")
    assert _done(store)


def test_ctrl_c_ends_it_at_once(cluster, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(STUDY.replace("20000", "400000"))
    process = start(file, cluster.address)
    with Client(cluster.address, set_as_default=False) as client:
        wait_until(lambda: any(client.processing().values()), process)  # with minutes of work ahead
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("stopped; ")
    assert err.count("\n") == 1


def _done(store):
    try:
        with Store(store, read_only=True) as opened:
            return opened.done()
    except ValueError:  # it is being made just now
        return set()


def _content(file):
    import tomllib

    return tomllib.loads(file.read_text())


def test_a_scheduler_that_does_not_answer_is_one_line(tmp_path, run_cli):
    file = tmp_path / "s.toml"
    file.write_text(STUDY)
    code, out, err = run_cli("run", file, "--dask", "tcp://127.0.0.1:1")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("klatsch: error: no Dask scheduler answers at tcp://127.0.0.1:1")
    assert "--workers" in run_cli("run", file, "--dask", "tcp://127.0.0.1:1", "--workers", 2)[2]


def test_without_dask_it_says_what_to_install(tmp_path, run_cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    file = tmp_path / "s.toml"
    file.write_text(STUDY)
    code, _, err = run_cli("run", file, "--dask", "tcp://127.0.0.1:1")
    assert code == 2
    assert "pip install 'klatsch[dask]'" in err
