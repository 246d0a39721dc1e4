"""Shared by all tests: the sizes and topologies that every property is checked on."""

import math

import numpy as np
import pytest

from klatsch import topology as tp

SIZES = range(1, 65)


PRIMES = {n for n in SIZES if n > 1 and all(n % d for d in range(2, n))}
REFUSED = {name: set() for name in tp.TOPOLOGIES} | {
    "torus": PRIMES,
    "grid": PRIMES,
    "near_complete": {2},
    "hypercube": {n for n in SIZES if n & (n - 1)},
}


def build_or_skip(name, n, **options):
    """A topology, or None where the family refuses this n, and must (its errors are read in test_bad_input)."""
    try:
        graph = tp.make(name, n, **options)
    except ValueError:
        assert n in REFUSED[name]
        return None
    assert n not in REFUSED[name]
    return graph


def all_topologies(n):
    """Every named topology that exists for n nodes, and a few options of those that have any."""
    for name in tp.TOPOLOGIES:
        if (graph := build_or_skip(name, n)) is not None:
            yield graph
    yield tp.base_graph(n, 3)
    yield tp.erdos_renyi(n, p=0.7, seed=5)
    if n > 3:
        yield tp.random_regular(n, degree=2, seed=1)
    yield tp.lazy(tp.ring(n))


def product(graph):
    """P_tau ... P_1 as a dense matrix, the simple reference."""
    result = np.eye(graph.size)
    for P in graph.matrices:
        result = P.toarray() @ result
    return result


@pytest.fixture
def launch(tmp_path):
    """Start ranks that run a scenario; none of them outlives the test."""
    from tests.support.processes import Ranks

    started = []

    def start(size, scenario, **options):
        started.append(Ranks(tmp_path, size, scenario, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.end()


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
