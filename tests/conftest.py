"""Shared by all tests: processes and how they end, marks, and the command line."""

import contextlib
import math
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for every process: there are as many as cores

import pytest

from tests.support.prepared import DIE_WITH_PARENT, Prepared, end_children, no_workers, prctl
from tests.support.processes import Ranks


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        prctl(DIE_WITH_PARENT, signal.SIGKILL)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items):
    """Mark tests by what they use, and keep those on one core that share a fixture of their file."""
    for item in items:
        if "prepared" in item.fixturenames:
            item.add_marker("processes")
        if "browse" in item.fixturenames:
            item.add_marker("browser")
        fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
        if any(fixture.scope == "module" for fixture in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.fixture(scope="session")
def prepared():
    """The process from which all others are forked; it starts with the first test that needs one."""
    process = Prepared()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def nothing_outlives_a_test(request):
    """End every process that a test has started, and all that those have started; not those of larger fixtures."""
    if "prepared" not in request.fixturenames:
        marked = any(request.node.get_closest_marker(mark) for mark in ("processes", "documents"))
        with contextlib.nullcontext() if marked else no_workers():
            yield
        end_children()
        return
    prepared = request.getfixturevalue("prepared")
    before = list(prepared.started)
    yield
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
def run_cli(monkeypatch, capsys):
    """Run the command line in this process; gives the exit code, stdout and stderr."""
    from klatsch.cli import main

    monkeypatch.setattr("klatsch.cli.narration.LONG", math.inf)  # else slow machines tell of progress on stderr

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["klatsch", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run
