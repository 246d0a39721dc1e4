"""Shared by all tests: processes and how they end, marks, and the topologies that every property is checked on."""

import contextlib
import functools
import math
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for every process: there are as many as cores

import numpy as np
import pytest

from klatsch import topology as tp
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


# All small ones; then primes, squares, cubes, powers of two and their neighbours.
SIZES = (*range(1, 18), 20, 23, 24, 25, 27, 31, 32, 33, 36, 49, 60, 63, 64)

REFUSED = {name: {n for n in range(1, 65) if family.refusal(n)} for name, family in tp.FAMILIES.items()}


def build_or_skip(name, n, **options):
    """A topology, or None where the family refuses this n, and must (its errors are read in test_bad_input)."""
    try:
        graph = tp.make(name, n, **options)
    except ValueError:
        assert n in REFUSED[name]
        return None
    assert n not in REFUSED[name]
    return graph


@functools.cache
def all_topologies(n):
    """Every named topology that exists for n nodes, and a few options of those that have any."""
    graphs = [graph for name in tp.TOPOLOGIES if (graph := build_or_skip(name, n)) is not None]
    graphs += [tp.base_graph(n, 3), tp.erdos_renyi(n, p=0.7, seed=5), tp.lazy(tp.ring(n))]
    return graphs + ([tp.random_regular(n, degree=2, seed=1)] if n > 3 else [])


def product(graph):
    """P_tau ... P_1 as a dense matrix, the simple reference."""
    result = np.eye(graph.size)
    for P in graph.matrices:
        result = P.toarray() @ result
    return result


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
        marked = request.node.get_closest_marker("processes") is not None
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
