"""Studies on a Dask cluster: a real scheduler and two worker processes."""

import os
import signal
import sys

import pytest
import torch

from klatsch.study import Store, parse, run_study, workers
from tests.support.cluster import Cluster, impatient
from tests.support.comparisons import assert_same_to_rounding
from tests.support.waiting import wait_until

Client = pytest.importorskip("distributed", reason="needs Dask: pip install 'klatsch[dask]'").Client

STUDY = """
steps = 2000
nodes = [9, 16]
seeds = 2
record = 5
dtype = "float32"
rules = ["dat", "dsgd"]
topologies = ["ring"]
problem = { noise = 10.0 }
"""


@pytest.fixture
def cluster(prepared, tmp_path):
    return Cluster(prepared, tmp_path)


def errors(store):
    with Store(store) as opened:
        found = opened.outcomes(opened.done())
        return {key: outcome.metrics["distance"] for key, outcome in found.items()}


def test_a_study_on_a_cluster_of_which_a_worker_is_killed(cluster, start, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(STUDY)
    process = start("run", file, "--dask", cluster.address)
    store = tmp_path / "s.sqlite"
    wait_until(lambda: len(_done(store)) >= 14, process)  # the first batch is back
    os.kill(cluster.workers[0].pid, signal.SIGKILL)  # with a batch in its hands
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "56 runs new" in out
    run_study(parse(_content(file)), tmp_path / "here.sqlite", executor=workers.threads)
    found, expected = errors(store), errors(tmp_path / "here.sqlite")
    assert found.keys() == expected.keys()
    for key in expected:
        assert_same_to_rounding(found[key], expected[key], torch.float32)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.soak
def test_a_scheduler_that_is_gone_ends_the_study_with_one_line(cluster, start, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(STUDY)
    process = start("run", file, "--dask", cluster.address)
    store = tmp_path / "s.sqlite"
    wait_until(lambda: _done(store), process)
    cluster.scheduler.kill()
    out, err = process.communicate()
    assert (process.returncode, out) == (2, ""), err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("klatsch: error: ")
    assert _done(store)


@pytest.mark.soak
def test_ctrl_c_ends_it_at_once(cluster, start, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(STUDY.replace("2000", "400000"))
    process = start("run", file, "--dask", cluster.address)
    with Client(cluster.address, set_as_default=False) as client:
        wait_until(lambda: any(client.processing().values()), process)  # with minutes of work ahead
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
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


def test_a_scheduler_that_does_not_answer_is_one_line(tmp_path, run_cli, monkeypatch):
    impatient(monkeypatch)
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
