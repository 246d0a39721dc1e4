"""`klatsch checkpoint`: what is there, and the merged model by its names, without the script that trained it."""

import json
import os
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import klatsch


class Tied(nn.Module):
    """Weights of two dtypes, one of them under two names, a frozen one, and statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.out.weight
        self.small = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)

    def forward(self, v):
        images = self.first(torch.ones(1, 3, 2, 2)).square().mean()
        return self.again(self.norm(self.out(v))).square().mean() + self.small.float().square().sum() + images


@pytest.fixture
def trained(tmp_path):
    """A folder of checkpoints, and the model that they hold."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = Tied()
    optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.1, beta=0.9)
    checkpointer = klatsch.Checkpointer(tmp_path / "checkpoints", every=2)
    checkpointer.resume(optimizer, model=model)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).backward()
        optimizer.step()
        checkpointer.step()
    checkpointer.save()
    klatsch.recalibrate(model, [torch.randn(8, 4)])  # no warning of statistics, and others than those that are saved
    with optimizer.averaged():
        expected = {name: v.clone() for name, v in model.state_dict().items()}
    del optimizer
    dist.destroy_process_group()
    return tmp_path / "checkpoints", expected


def test_it_shows_the_rounds_and_exports_a_model_that_loads(trained, tmp_path, run_cli):
    folder, expected = trained
    code, out, _ = run_cli("checkpoint", folder)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "complete" in line]
    assert [row[1] for row in rows] == ["6", "8", "9"]
    assert rows[-1][2:5] == ["dat", "base_graph(k=1)", "0"]
    assert rows[-1][-1] == "(newest)"
    model = tmp_path / "model.safetensors"
    code, out, _ = run_cli("checkpoint", folder, "--export", model)
    assert code == 0
    assert "11 tensors" in out
    assert "the mean of 1 ranks after round 9" in out
    found = load_file(model)
    Tied().load_state_dict(found)  # names, shapes and dtypes
    for name, value in found.items():
        if not name.startswith("norm.") or "weight" in name or "bias" in name:
            assert value.dtype == expected[name].dtype
            torch.testing.assert_close(value, expected[name])
    assert int(found["norm.num_batches_tracked"]) == 9
    (described,) = [json.loads(run_cli("checkpoint", folder, "--json")[1])]
    assert described["newest"] == 9


def test_it_needs_no_torch_to_look(trained, prepared):
    done = prepared.program(sys.executable, "-X", "importtime", "-m", "klatsch", "checkpoint", trained[0]).done()
    assert done.returncode == 0, done.stderr
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "klatsch.ranks.saved" in names
    assert not names & {"torch", "numpy", "scipy", "safetensors"}


def test_bad_input_is_one_line(trained, tmp_path, run_cli):
    folder, _ = trained
    (tmp_path / "empty").mkdir()
    picture = tmp_path / "picture.safetensors"
    picture.write_bytes(b"\x89PNG\r\n")
    newest = folder / "rank00000-round0000000009.safetensors"
    for words, message in [
        ((tmp_path / "none",), "none is not a folder; give the one that klatsch.Checkpointer writes to"),
        ((newest,), "is not a folder"),
        (
            (tmp_path / "empty",),
            "empty holds no checkpoints of klatsch.Checkpointer, such as rank00000-round0000000100",
        ),
        ((folder, "--export", tmp_path / "model.pt"), "give a name that ends in .safetensors"),
        ((folder, "--export", picture), "it holds PNG, and would become safetensors; give another name"),
        ((folder, "--export", newest), "that file is an input, or another output; give another name"),
        ((folder, "--export", tmp_path / "no" / "model.safetensors"), "a file in a folder that exists"),
    ]:
        code, out, error = run_cli("checkpoint", *words)
        assert (code, out) == (2, "")
        assert message in error
        assert error.count("\n") == 1


def test_damaged_files_are_named_and_not_exported(trained, tmp_path, run_cli):
    folder, _ = trained
    newest, before = (folder / f"rank00000-round000000000{rounds}.safetensors" for rounds in (9, 8))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    code, _, error = run_cli("checkpoint", folder, "--export", tmp_path / "model.safetensors")
    assert code == 2
    assert f"{newest} is damaged: its content does not match its checksum" in error
    assert not (tmp_path / "model.safetensors").exists()
    newest.write_bytes(content[:-1])
    before.unlink()
    os.mkfifo(before)
    code, out, _ = run_cli("checkpoint", folder)
    assert code == 0
    shown = " ".join(out.split())
    assert "is damaged or not a checkpoint (it is cut off, or too long)" in shown
    assert "is a folder, a pipe or a device, and not a checkpoint" in shown
    assert "6 dat base_graph(k=1) 0" in shown
