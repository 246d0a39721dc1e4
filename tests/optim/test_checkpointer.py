"""Checkpoints of a network: kill -9 under torchrun, and the result is that of a calm run, bit for bit."""

import os
import random
import re
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import klatsch
from klatsch import sealed
from klatsch.optim.post import packed, unpacked
from klatsch.ranks.membership import lag
from klatsch.ranks.saved import FORMAT

SCRIPT = Path(__file__).parents[1] / "support" / "rank_training.py"
RANKS, ROUNDS = 3, 50


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


@pytest.mark.soak
def test_kill_9_under_torchrun_and_the_result_is_identical(tmp_path, prepared):
    calm = train(prepared, tmp_path / "calm")
    wild = train(prepared, tmp_path / "wild", restarts=2, deaths=["0 1 18", "1 2 38"])  # attempt, rank, round
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
        assert sorted(rounds) == [35, 42, 49]  # two that all ranks have, and the one that some may not have yet


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


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(alone, tmp_path_factory):
    """Checkpoints of rounds 4, 6 and 8, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    advance(*make(folder)[:3], 9)
    return folder


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
        return launch(4, "rank_hardships.poison", harm="nan", every=3, at=(), rounds=rounds)

    def file(rank, rounds):
        return tmp_path / "checkpoints" / f"rank{rank:05d}-round{rounds:010d}.safetensors"

    train(12).succeed()
    file(0, 12).unlink()  # it was not as far as the others
    file(3, 9).write_bytes(file(3, 9).read_bytes()[:-1])
    again = train(15)
    again.succeed()
    for rank in range(4):
        assert again.wait_for(f"resumed-{rank}") == "6"
        assert again.warnings(rank)[-1] == (
            "going on from round 6: rank 0 has round 6, 9; ranks 1, 2 have round 6, 9, 12; "
            "rank 3 has round 6, 9 (damaged), 12"
        )
    for rounds in (9, 12, 15):
        file(3, rounds).unlink()
    lost = train(18)
    assert lost.codes() == [1] * 4
    for rank in range(4):
        assert (
            f"ValueError: the ranks have no checkpoint in common in {tmp_path / 'checkpoints'}: ranks 0, 1, 2 have "
            "round 9, 12, 15; rank 3 has none; use a folder that outlives the machine"
        ) in lost.errors(rank)


def held(folder):
    """The rounds of every rank's files."""
    found = {}
    for path in sorted(folder.glob("rank*")):
        found.setdefault(int(path.name[4:9]), []).append(int(path.stem[-10:]))
    return found


def ends(folder, size):
    return [torch.load(folder / f"end-{rank}", weights_only=True) for rank in range(size)]


def check_optimum(folder, size, field):
    """All are at the mean of their numbers, and what must be zero over them is."""
    found, optimum = ends(folder, size), torch.full((1, 300), (size - 1) / 2)
    torch.testing.assert_close(sum(end["x"] for end in found) / size, optimum, rtol=0, atol=2e-3)
    for end in found:  # plain gossip leaves nodes a little apart, by the learning rate
        torch.testing.assert_close(end["x"], optimum, rtol=0, atol=0.1 if field is None else 2e-3)
    if field is not None:
        assert float(sum(end["sums"][field] for end in found).abs().max()) < 1e-4  # float32, of numbers up to 10


# By rule: the graph and the channel, the learning rate and the rounds that it needs, and what sums to zero.
CREWS = {
    "d2": ({"graph": "complete", "lr": 0.2, "rounds": 88}, "y"),
    "gt": ({"graph": "ring", "wire": "int8", "lr": 0.2, "rounds": 88}, "z"),
    "sgp": ({"graph": "exponential", "lr": 0.08, "rounds": 116}, None),
}


def test_after_a_kill_the_rest_go_on_stop_and_resume_without_the_dead_rank_or_with_a_fresh_one(
    tmp_path, launch, run_cli
):
    cases = [options | {"rule": rule} for rule, (options, _) in CREWS.items()]
    folders, fields = [tmp_path / str(k) for k in range(len(cases))], [field for _, field in CREWS.values()]
    first = launch(4, "rank_hardships.crew", cases=[case | {"rounds": 50, "die": [(2, 30)]} for case in cases])
    assert first.codes() == [0, 0, -signal.SIGKILL, 0]
    before = []
    for folder in folders:
        files = held(folder / "checkpoints")
        assert max(files.pop(2)) == 28
        assert all({44, 48} <= {*rounds} for rounds in files.values())
        before.append(float(ends(folder, 2)[0]["x"].mean()))
        shutil.copytree(folder / "checkpoints", folder / "copy")
    for size, files in ((3, "checkpoints"), (4, "copy")):
        again = launch(size, "rank_hardships.crew", cases=cases, files=files)
        again.succeed()
        rest = "takes the file of rank 3" if size == 3 else "starts from"
        gone = f"what rank 2 held is written off, rank 2 {rest}"
        assert f"going on from round 48 with {size} ranks: {gone}" in again.warnings(0)[0]
        for folder, field, was in zip(folders, fields, before, strict=True):
            for rank in range(size):
                done, at = again.wait_for(f"{folder.name}/resumed-{rank}").split()
                assert int(done) == 48
                assert abs(float(at) - was) < 0.5  # and not at 9, where training began
            check_optimum(folder, size, field)
            assert run_cli("checkpoint", folder / files, "--export", tmp_path / "model.safetensors")[0] == 0
            expected = sum(end["x"] for end in ends(folder, size)) / size
            found = load_file(tmp_path / "model.safetensors")
            torch.testing.assert_close(found, {"weight": expected}, rtol=1e-6, atol=1e-6)  # means, one in double
            kept = {rank: len(rounds) for rank, rounds in held(folder / files).items()}
            assert kept == dict.fromkeys(range(size), 3)


def test_ranks_that_left_do_not_count_and_a_dead_one_is_replaced_after_a_failure(tmp_path, launch):
    """Rank 0 leaves, later rank 2 dies, and the others stop: under "raise", with a folder for each rank."""
    options = {"files": "checkpoints-{}", "on_failure": "raise", "graph": "ring", "lr": 0.2}
    first = launch(4, "rank_hardships.crew", rounds=40, leave=[(0, 10)], die=[(2, 30)], **options)
    assert first.codes() == [0, 1, -signal.SIGKILL, 1]
    shutil.rmtree(tmp_path / "checkpoints-2")  # with its machine
    for rank, lives in enumerate([1, 3, None]):  # rank 1 becomes rank 0, and a new machine is rank 2
        shutil.rmtree(tmp_path / f"checkpoints-{rank}", ignore_errors=True)
        if lives is not None:
            (tmp_path / f"checkpoints-{lives}").rename(tmp_path / f"checkpoints-{rank}")
    refused = launch(3, "rank_hardships.crew", rounds=100, **options)
    assert refused.codes() == [1] * 3
    assert re.search(r"ranks 0, 2 have none; ranks 1, 3 have round [\d, ]*28; use a folder", refused.errors(0))
    assert "let the others begin from their mean (Checkpointer(..., fresh=True))" in refused.errors(2)
    for rank in (0, 1):
        shutil.copytree(tmp_path / f"checkpoints-{rank}", tmp_path / f"copy-{rank}")
    fresh = launch(3, "rank_hardships.crew", rounds=80, fresh=True, **options | {"files": "copy-{}"})
    fresh.succeed()
    assert fresh.wait_for("resumed-2").startswith("28 ")
    check_optimum(tmp_path, 3, "y")
    two = launch(2, "rank_hardships.crew", rounds=48, **options)
    two.succeed()
    assert two.wait_for("resumed-0").startswith("28 ")
    three = launch(3, "rank_hardships.crew", rounds=88, **options)
    three.succeed()
    assert three.wait_for("resumed-2").startswith("48 ")
    check_optimum(tmp_path, 3, "y")


def test_every_late_wire_and_the_topology_may_change_on_resume(tmp_path, launch):
    """And a rank that dies on the new graph is taken out of the corrections that came along with the checkpoint."""
    launch(4, "rank_hardships.crew", rounds=40, lr=0.1).succeed()
    before = ends(tmp_path, 4)
    channel = {"graph": "ring", "every": 4, "late": 3, "wire": "int8"}
    again = launch(4, "rank_hardships.crew", rounds=200, lr=0.1, die=[(3, 44)], **channel)
    assert again.codes() == [0, 0, 0, -signal.SIGKILL]
    for rank in range(4):
        done, at = again.wait_for(f"resumed-{rank}").split()
        assert int(done) == 40
        assert abs(float(at) - float(before[rank]["x"].mean())) < 1e-3
    scale = float(before[0]["sums"]["y"].abs().max())  # each of them is far from zero
    assert scale > 0.01
    after = ends(tmp_path, 3)
    assert float(sum(end["sums"]["y"] for end in after).abs().max()) < 1e-3 * scale
    for end in after:
        torch.testing.assert_close(end["x"], torch.ones(1, 300), rtol=0, atol=2e-3)
    other = launch(3, "rank_hardships.crew", rounds=204, rule="gt")
    assert other.codes() == [1] * 3
    assert "rule is d2 there and gt here; make it the same" in other.errors(1)


def test_a_file_of_another_training_is_not_resumed(tmp_path, launch):
    launch(3, "rank_hardships.crew", rounds=20, cases=[{}, {}]).succeed()
    name = "rank00001-round0000000020.safetensors"
    shutil.copy(tmp_path / "1" / "checkpoints" / name, tmp_path / "0" / "checkpoints" / name)
    again = launch(3, "rank_hardships.crew", rounds=24, files="0/checkpoints")
    again.succeed()
    for rank in range(3):
        assert again.wait_for(f"resumed-{rank}").startswith("16 ")
        listed = "ranks 0, 2 have round 12, 16, 20; rank 1 has round 12, 16, 20 (of another training)"
        assert again.warnings(rank) == [f"going on from round 16: {listed}"]


def test_two_trainings_in_one_folder_are_refused(tmp_path, alone):
    for folder, rounds in (("one", 5), ("two", 9)):
        advance(*make(tmp_path / folder)[:3], rounds)
    for path in (tmp_path / "two").iterdir():
        shutil.copy(path, tmp_path / "one")
    with pytest.raises(ValueError, match=r"one holds checkpoints of several trainings; move those of the others away"):
        make(tmp_path / "one")


NEWEST = "rank00000-round0000000008.safetensors"


def forge(**changes):
    """Change the header, or the tensors, of the newest file, which gets a sound checksum."""

    def change(path):
        header, tensors = sealed.read(path, FORMAT)
        tensors = {name: v for name, v in tensors.items() if not name.startswith(changes.get("without", ("-",)))}
        sealed.write(path, header | {key: v for key, v in changes.items() if key != "without"}, tensors)

    return change


def replace(make_another):
    def change(path):
        path.unlink()
        make_another(path)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (replace(os.mkfifo), "is a folder, a pipe or a device, and not a checkpoint; move the file away"),
        (replace(os.mkdir), "is a folder, a pipe or a device, and not a checkpoint; move the file away"),
        (
            lambda path: shutil.copy(path.with_name(NEWEST.replace("8.", "6.")), path),
            "holds rounds 6, and its name says 8; give it its own name back, or move it away",
        ),
        (forge(rank=1), "holds rank 1, and its name says 0"),
        (forge(rounds="8"), "its header has rounds = '8'"),
        (forge(training=[]), "its training or its crew are none"),
        (forge(crew=[0, 7]), "its training or its crew are none"),
        (forge(size=2_000_000_000), "its training or its crew are none"),
        (forge(topology="ring\x1b[2J 0"), "is no name"),
        (forge(run=None), "its header has run = None"),
        (forge(without="vectors."), r"does not hold what a checkpoint holds \('vectors\.0\.w'\)"),
        (forge(vectors={"list": [{"dict": []}]}), r"\(the vectors w, x are missing or unknown\)"),
        (forge(groups={"list": []}), r"does not hold what a checkpoint holds \(zip"),
        (forge(groups=3), "does not hold what a checkpoint holds"),
        (forge(others={"dict": [[[], 1]]}), "does not hold what a checkpoint holds"),
        (forge(generators={"tensor": "none"}), "does not hold what a checkpoint holds"),
        (forge(counted=[1]), r"does not hold what a checkpoint holds \(counted is \[1\]\)"),
        (forge(memories={"list": []}), r"\(the memory of the channel is missing\)"),
    ],
)
def test_what_is_no_checkpoint_is_one_line_that_names_the_file(tmp_path, trained, change, message):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    change(tmp_path / NEWEST)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert make(tmp_path)[3] == 6
    first, second = (str(warning.message) for warning in said)
    assert re.search(f"{NEWEST} .*{message}", first)
    assert "\n" not in first
    assert second == "going on from round 6: rank 0 has round 4, 6, 8 (damaged)"


@pytest.mark.parametrize("change", [{"memories": {"list": [{"dict": [["held", 3]]}]}}, {"generators": None}])
def test_what_only_loading_finds_is_one_line_too(tmp_path, trained, change):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    wrong = {"dict": [["torch", 1], ["python", 2], ["numpy", 3]]}
    forge(**change | ({"generators": wrong} if "generators" in change else {}))(tmp_path / NEWEST)
    with pytest.raises(
        sealed.CheckpointError, match=rf"{NEWEST} (cannot be loaded|holds no random generators) .*; move"
    ):
        make(tmp_path)


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


def test_random_generators_go_on_where_they_were(tmp_path, alone):
    def draws():
        return [float(torch.rand(())), random.random(), float(np.random.random())]

    advance(*make(tmp_path)[:3], 2)
    after = draws()
    assert draws() != after
    assert make(tmp_path)[3] == 2
    assert draws() == after


def test_a_kill_during_the_first_save_does_no_harm(tmp_path, alone):
    (tmp_path / ".rank00000-round0000000000.safetensors.1a2b3c4d").write_bytes(b"half")
    assert make(tmp_path)[3] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rank00000-round0000000000.safetensors"]


def test_a_model_with_other_buffers_is_refused(tmp_path, alone):
    torch.manual_seed(0)
    for norm in (nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)):
        model = nn.Sequential(nn.Linear(3, 3), norm)
        optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1)
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
    assert found == {"workers.py"}


def test_checkpoints_of_another_version_are_refused_and_stay(tmp_path, alone):
    advance(*make(tmp_path)[:3], 3)
    for path in tmp_path.iterdir():
        header, tensors = sealed.read(path, FORMAT)
        sealed.write(path, header | {"format": "klatsch ranks 1"}, tensors)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        pytest.warns(RuntimeWarning, match=r"'klatsch ranks 1' of klatsch '.* reads 'klatsch ranks .*; go on with the"),
        pytest.raises(ValueError, match=r"no checkpoint in common in .*\(of another version\)"),
    ):
        make(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_simulation_of_another_version_is_refused_and_stays(tmp_path):
    path = tmp_path / "run.safetensors"
    sealed.write(path, {"format": "klatsch simulation 1"}, {"state.w": torch.ones(2)})
    before = path.read_bytes()
    rule, problem = klatsch.rules.make("dat", lr=0.1), klatsch.problems.LeastSquares(4)
    with pytest.raises(ValueError, match=r"'klatsch simulation 1' of klatsch '.*or move the file away"):
        klatsch.simulate(problem, rule, klatsch.topology.ring(4), 5, checkpoint=path)
    assert path.read_bytes() == before
