"""Restarts by torchrun: where its store would lead ranks to dead ones they are refused, elsewhere they work."""

import os
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parents[1] / "support" / "rank_training.py"
DOCUMENT = ROOT / "docs" / "cluster.md"
RANKS, ROUNDS = 3, 40


@pytest.fixture
def train(prepared):
    """Start a training under torchrun, by a rendezvous that is static unless told otherwise."""

    def start(folder, restarts, how=None, script=SCRIPT, deaths=()):
        folder.mkdir(exist_ok=True)
        unset = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        how = how or ("--master-port", prepared.free_port())
        words = ("--max-restarts", restarts, *how, script, folder, ROUNDS, *deaths)
        return prepared.torchrun(RANKS, *words, env=environment)

    return start


def finals(folder):
    return [torch.load(folder / f"final-{rank}", weights_only=True)["model"] for rank in range(RANKS)]


@pytest.mark.parametrize("how", [None, ["--standalone"]], ids=["static", "c10d with a shared store"])
def test_restarts_that_would_meet_dead_ranks_are_refused_at_once(tmp_path, train, how):
    done = train(tmp_path / "run", 1, how).done()
    assert done.returncode != 0
    refusal = (
        r"ValueError: torchrun may restart ranks \(1 times\) but keeps .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.*c10d"
    )
    assert len(re.findall(refusal, done.stderr)) >= 2  # torchrun tries it again, and that does not hang
    assert list((tmp_path / "run").iterdir()) == []  # nothing was trained or written


def test_a_static_rendezvous_without_restarts_works(tmp_path, train):
    done = train(tmp_path / "run", 0).done()
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("begins", ["a store for each attempt", "nothing"])
def test_kill_9_under_a_static_rendezvous(tmp_path, train, begins):
    """As the document says, or without init_process_group; with messages on their way when a rank dies."""
    (recipe,) = (some for some in re.findall(r"```py\n(.*?)```", DOCUMENT.read_text(), re.S) if "TCPStore" in some)
    plain = SCRIPT.read_text()
    assert plain.count('dist.init_process_group("gloo")\n') == plain.count("dist.get_rank()") == 1
    if begins == "nothing":
        recipe, plain = "", plain.replace("dist.get_rank()", 'int(os.environ["RANK"])')
    graph = '"one_peer_exponential"'
    assert graph in plain
    plain = plain.replace(graph, f'{graph}, every=2, late=3, wire="int8"')
    script, without = tmp_path / "train.py", tmp_path / "calm.py"
    script.write_text(plain.replace('dist.init_process_group("gloo")\n', recipe))
    without.write_text(plain)
    calm = train(tmp_path / "calm", 0, None, without)
    wild = train(tmp_path / "wild", 2, None, script, ["0 1 13", "1 2 30"])  # attempt, rank, round
    assert calm.done().returncode == 0, calm.stderr
    assert wild.done().returncode == 0, wild.stderr
    assert (tmp_path / "wild" / "log-0").read_text().splitlines()[-1].startswith(f"2 {ROUNDS} ")  # begun three times
    for expected, found in zip(finals(tmp_path / "calm"), finals(tmp_path / "wild"), strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)  # bits: same call
