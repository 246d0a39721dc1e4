"""Checkpoints of a network: kill -9 under torchrun, and the result is that of a calm run, bit for bit."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch import sealed
from klatsch.optim.checkpointer import FORMAT
from klatsch.optim.state import packed, unpacked
from klatsch.ranks.membership import lag

SCRIPT = Path(__file__).parents[1] / "support" / "rank_training.py"
RANKS, ROUNDS = 3, 100


def train(prepared, folder, restarts=0, deaths=()):
    folder.mkdir(exist_ok=True)
    # Without this, restarted workers read addresses of dead ones from the store that torchrun shares with them.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ("--max-restarts", restarts, "--standalone", SCRIPT, folder, ROUNDS, *deaths)
    return prepared.torchrun(RANKS, *words, env=environment)


def lines(folder, rank):
    file = folder / f"log-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def finals(folder):
    return [torch.load(folder / f"final-{rank}", weights_only=True) for rank in range(RANKS)]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)  # bits: same call
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


def test_kill_9_under_torchrun_and_the_result_is_identical(tmp_path, prepared):
    calm = train(prepared, tmp_path / "calm")
    wild = train(prepared, tmp_path / "wild", restarts=2, deaths=["0 1 33", "1 2 70"])  # attempt, rank, round
    for process in (calm, wild):
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    for expected, found in zip(finals(tmp_path / "calm"), finals(tmp_path / "wild"), strict=True):
        assert same(expected, found)
        assert found["optimizer"]["gossip"]["rounds"] == ROUNDS
    for rank in range(RANKS):
        attempt, last, _ = lines(tmp_path / "wild", rank)[-1].split()
        assert (attempt, last) == ("2", str(ROUNDS))  # it was begun three times
        rounds = [int(path.stem[-10:]) for path in tmp_path.glob(f"wild/checkpoints/rank{rank:05d}-*")]
        assert sorted(rounds) == [84, 91, 98]  # two that all ranks have, and the one that some may not have yet


@pytest.mark.parametrize(
    "graph, expected",
    [
        (klatsch.topology.ring(8), 4),
        (klatsch.topology.complete(8), 1),
        (klatsch.topology.directed_ring(8), 7),
        (klatsch.topology.one_peer_exponential(8), 3),
        (klatsch.topology.ring(1), 0),
    ],
)
def test_how_far_ranks_may_be_apart(graph, expected):
    assert lag(graph) == expected


def test_plain_data_survive():
    from collections import Counter

    value = {"a": [1, 2.5, None, True], "b": (1, "x"), "c": Counter({3: 2}), 4: {"t": torch.arange(3)}}
    tensors = {}
    found = unpacked(packed(value, tensors, "state"), tensors)
    assert same(found, value)
    assert isinstance(found["c"], Counter)
    assert isinstance(found["b"], tuple)
    with pytest.raises(ValueError, match=r"state\.f is a function, which a checkpoint cannot hold"):
        packed({"f": same}, {}, "state")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(folder, rule="dat", size=3, every=2, momentum=0.0, **others):
    x = nn.Parameter(torch.ones(size))
    optimizer = klatsch.Gossip([x], klatsch.rules.make(rule, lr=0.1, momentum=momentum))
    checkpointer = klatsch.Checkpointer(folder, every=every)
    return x, optimizer, checkpointer, checkpointer.resume(optimizer, **others)


def advance(x, optimizer, checkpointer, rounds):
    for _ in range(rounds):
        x.grad = torch.randn_like(x)
        optimizer.step()
        checkpointer.step()


def test_the_last_ones_are_kept_and_a_damaged_one_is_passed_over(tmp_path, alone):
    x, optimizer, checkpointer, done = make(tmp_path)
    assert done == 0
    advance(x, optimizer, checkpointer, 9)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"rank00000-round000000000{rounds}.safetensors" for rounds in (4, 6, 8)]
    path = tmp_path / files[2]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with (
        pytest.warns(RuntimeWarning, match=r"round0000000008.safetensors is damaged"),
        pytest.warns(RuntimeWarning, match=r"going on from round 6: rank 0 has round 4, 6, 8 \(damaged\)"),
    ):
        _, other, _, done = make(tmp_path)
    assert done == other.rounds == 6
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == files[:2]
    )  # the damaged one is of a future that comes again


def test_a_damaged_or_missing_file_of_one_rank_costs_rounds_and_not_the_training(tmp_path, launch):
    def train(rounds):
        return launch(5, "rank_hardships.poison", harm="nan", every=3, at=(), rounds=rounds)

    def file(rank, rounds):
        return tmp_path / "checkpoints" / f"rank{rank:05d}-round{rounds:010d}.safetensors"

    train(12).succeed()
    file(0, 12).unlink()  # it was not as far as the others
    file(3, 9).write_bytes(file(3, 9).read_bytes()[:-1])
    again = train(15)
    again.succeed()
    for rank in range(5):
        assert again.wait_for(f"resumed-{rank}") == "6"
        assert again.warnings(rank)[-1] == (
            "going on from round 6: rank 0 has round 6, 9; ranks 1, 2, 4 have round 6, 9, 12; "
            "rank 3 has round 6, 9 (damaged), 12"
        )
    for rounds in (9, 12, 15):
        file(3, rounds).unlink()
    lost = train(18)
    assert lost.codes() == [1] * 5
    for rank in range(5):
        assert (
            f"ValueError: the ranks have no checkpoint in common in {tmp_path / 'checkpoints'}: ranks 0, 1, 2, 4 have "
            "round 9, 12, 15; rank 3 has none; use a folder that outlives the machine"
        ) in lost.errors(rank)


def test_a_state_that_is_not_finite_is_neither_saved_nor_resumed(tmp_path, alone, monkeypatch):
    x, optimizer, checkpointer, _ = make(tmp_path)
    advance(x, optimizer, checkpointer, 8)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    optimizer.vectors()[0]["w"][1] = torch.nan
    with pytest.raises(klatsch.NonFiniteError, match=r"rank 0, round 8: the state is not finite; not saved; resume"):
        checkpointer.save()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    monkeypatch.setattr("klatsch.optim.checkpointer._is_finite", lambda tensors: True)  # as 0.1.0 did
    checkpointer.save()
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match=r"holds a state that is not finite|going on from round 6"):
        assert make(tmp_path)[3] == 6


def test_checkpoints_of_another_training_are_refused(tmp_path, alone):
    advance(*make(tmp_path)[:3], 2)
    with pytest.raises(ValueError, match=r"rule is dat there and dsgd here; make it the same, or choose"):
        make(tmp_path, rule="dsgd")
    with pytest.raises(ValueError, match=r"parameters is \[\[\[3\], 'torch.float32'\]\] there"):
        make(tmp_path, size=4)
    with pytest.raises(ValueError, match=r"rule is direction momentum=0\.0 there and direction momentum=0\.9 here"):
        make(tmp_path, momentum=0.9)
    assert make(tmp_path)[3] == 2  # all is still there


def test_a_kill_during_the_first_save_does_no_harm(tmp_path, alone):
    (tmp_path / ".rank00000-round0000000000.safetensors.1a2b3c4d").write_bytes(b"half")
    assert make(tmp_path)[3] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rank00000-round0000000000.safetensors"]


def test_a_model_with_other_buffers_is_refused(tmp_path, alone):
    torch.manual_seed(0)
    for norm in (nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)):
        model = nn.Sequential(nn.Linear(3, 3), norm)
        optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.1)
        checkpointer = klatsch.Checkpointer(tmp_path, every=1)
        if norm.track_running_stats:
            assert checkpointer.resume(optimizer, model=model) == 0
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            checkpointer.step()
        else:
            with pytest.raises(ValueError, match=r"model has other buffers than its checkpoint: .*running_mean"):
                checkpointer.resume(optimizer, model=model)


def test_bad_input(tmp_path, alone):
    with pytest.raises(ValueError, match="every = 0; give a whole number from 1 up"):
        klatsch.Checkpointer(tmp_path, every=0)
    with pytest.raises(ValueError, match="keep = 1; give a whole number from 2 up"):
        klatsch.Checkpointer(tmp_path, keep=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot use .*file/folder for checkpoints: Not a directory; choose another"):
        klatsch.Checkpointer(tmp_path / "file" / "folder")
    with pytest.raises(ValueError, match=r"nothing to save yet; call resume"):
        klatsch.Checkpointer(tmp_path / "new").step()
    with pytest.raises(ValueError, match=r"optimizer is a SGD; give one of klatsch"):
        klatsch.Checkpointer(tmp_path / "new").resume(torch.optim.SGD([torch.ones(1)]))
    with pytest.raises(ValueError, match=r"scheduler is a int without state_dict"):
        make(tmp_path / "other", scheduler=3)


def test_nothing_from_outside_is_ever_unpickled():
    """Workers of a study are our own processes, at the other ends of our own pipes."""
    source, unsafe = Path(klatsch.__file__).parent, r"\bpickle\.load|torch\.load\((?!.*weights_only=True)|_object\("
    found = {path.name for path in source.rglob("*.py") if re.search(unsafe, path.read_text())}
    assert found == {"crew.py"}


def test_checkpoints_of_an_earlier_version_are_refused_by_name(tmp_path, alone):
    advance(*make(tmp_path)[:3], 3)
    for path in tmp_path.iterdir():
        header, tensors = sealed.read(path, FORMAT)
        sealed.write(path, header | {"format": "klatsch ranks 1"}, tensors)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        ValueError, match=r"were written by klatsch 0\.1\.0; that version reads them\. Go on with it, or"
    ):
        make(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("number, version", [(1, r"0\.1\.0"), (2, r"0\.2\.0 before its release")])
def test_a_simulation_of_an_earlier_version_is_refused_by_name(tmp_path, number, version):
    path = tmp_path / "run.safetensors"
    sealed.write(path, {"format": f"klatsch simulation {number}"}, {"state.w": torch.ones(2)})
    before = path.read_bytes()
    rule, problem = klatsch.rules.make("dat", lr=0.1), klatsch.problems.LeastSquares(4)
    with pytest.raises(
        ValueError, match=rf"was written by klatsch {version}, .*; that version reads it\. Go on with it"
    ):
        klatsch.simulate(problem, rule, klatsch.topology.ring(4), 5, checkpoint=path)
    assert path.read_bytes() == before
