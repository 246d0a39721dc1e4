"""Shared by all tests: processes and how they end, marks, and the command line."""

import functools
import gc
import math
import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for every process: there are as many as cores

import pytest

from tests.support.browser import BROWSER, Tab
from tests.support.prepared import DIE_WITH_PARENT, Prepared, end_children, forked_workers, no_workers, prctl
from tests.support.processes import Ranks
from tests.support.waiting import LONGEST


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.pluginmanager.unregister(name="logging-plugin")  # no test asks for logs, and torch has 43 loggers to watch
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        prctl(DIE_WITH_PARENT, signal.SIGKILL)


def pytest_collection_modifyitems(items):
    """Mark tests by what they use."""
    for item in items:
        if "prepared" in item.fixturenames:
            item.add_marker("processes")
        if {"browse", "tab"} & {*item.fixturenames}:
            item.add_marker("browser")


def pytest_collection_finish():
    """Keep what was imported out of the garbage collector, which optimizers also ask for all live objects."""
    gc.collect()
    gc.freeze()


@functools.cache
def shares_fixtures(file):
    """Whether tests of a file share something that takes long to make."""
    return 'scope="module"' in (Path(__file__).parents[1] / file).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file on one core where they share fixtures; its groups do nothing in pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if shares_fixtures(file) else nodeid

    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """End a test that hangs in this process, such as one that waits for a thread of its own."""

    def hangs(*_):
        pytest.fail(f"it has not ended in {LONGEST} s")

    usual = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LONGEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, usual)


@pytest.fixture(scope="session")
def prepared():
    """The process from which all others are forked; it starts with the first test that needs one."""
    process = Prepared()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def nothing_outlives_a_test(request):
    """End every process that a test has started, and all that those have started; not those of larger fixtures."""
    marked = any(request.node.get_closest_marker(mark) for mark in ("processes", "documents"))
    prepared = request.getfixturevalue("prepared") if "prepared" in request.fixturenames else None
    before = list(prepared.started) if prepared else []
    with forked_workers() if marked else no_workers():
        yield
    if prepared:
        prepared.end(but=before)
    end_children()


@pytest.fixture
def launch(prepared, tmp_path):
    """Start ranks that run a scenario: `launch(SIZE, SCENARIO, ...)`."""
    return lambda size, scenario, **options: Ranks(prepared, tmp_path, size, scenario, **options)


@pytest.fixture
def python(prepared):
    """Start `python WORDS...`; see `tests.support.prepared.Prepared.python`."""
    return prepared.python


@pytest.fixture
def start(prepared):
    """Start `klatsch ARGUMENTS...` as a process of its own."""
    return prepared.klatsch


@pytest.fixture
def torchrun(prepared):
    """Run `torchrun --nproc-per-node SIZE WORDS...` to its end."""
    return lambda *words, **options: prepared.torchrun(*words, **options).done()


@pytest.fixture
def tab(tmp_path):
    """A page in a real browser: see `tests.support.browser.Tab`."""
    if BROWSER is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    opened = Tab(tmp_path / "profile")
    yield opened
    opened.close()
    assert opened.errors == []


@pytest.fixture
def in_threads(monkeypatch):
    """Studies run in threads, not in processes that load torch first: for tests of what they are asked, not of how."""
    from klatsch.study import workers

    monkeypatch.setattr(workers, "processes", workers.threads)


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """Run the command line in this process; gives the exit code, stdout and stderr."""
    from klatsch.cli import main

    monkeypatch.setattr("klatsch.cli.run.LONG", math.inf)  # else slow machines tell of progress on stderr

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["klatsch", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run
