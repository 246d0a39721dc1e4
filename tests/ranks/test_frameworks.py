"""The recipes of docs/frameworks.md, and what Lightning and Hugging Face do with gossip; real processes."""

import csv
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "frameworks"
# By name: the package it is for, the processes, and where it saves the model.
WITH = {
    "plain": (None, 2, "model.pt"),
    "with_lightning": ("lightning", 2, "model.ckpt"),
    "with_accelerate": ("accelerate", 2, "model.pt"),
    "with_trainer": ("transformers", 2, "model/model.safetensors"),
    "with_fsdp2": (None, 4, "model.pt"),
}
LOADS = """
import sys
sys.modules["klatsch"] = None  # its import fails
import torch
from safetensors.torch import load_file
from spirals import network, spirals
path = sys.argv[1]
state = load_file(path) if path.endswith("safetensors") else torch.load(path, weights_only=True)
state = state.get("state_dict", state)
model = network()
model.load_state_dict({name.removeprefix("net."): v for name, v in state.items()})
inputs, labels = spirals(1000)[:]
print(float((model(inputs).argmax(1) == labels).float().mean()))
"""

pytestmark = pytest.mark.soak


def needs(package):
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return [package] if package is not None else []


def found(ranks, size):
    return [json.loads(ranks.wait_for(f"found-{rank}")) for rank in range(size)]


@pytest.mark.parametrize("name", WITH)
def test_recipes(prepared, tmp_path, name):
    """Consensus is above 0 and falls, the loss falls, and a plain script loads the model."""
    package, size, saved = WITH[name]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ("--standalone", RECIPES / f"{name}.py")
    done = prepared.torchrun(size, *words, cwd=tmp_path, env=environment, preload=needs(package)).done()
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace("'", "")
    losses = [float(loss) for loss in re.findall(r"\b(?:eval_)?loss:? ([\d.]+(?:e-\d+)?)", printed)]
    consensus = [float(some) for some in re.findall(r"consensus\W+([\d.]+(?:e-\d+)?)", printed)]
    consensus = consensus[1:] if consensus[0] == 0 else consensus  # before the first step
    assert len(losses) >= 5
    assert len(consensus) >= 5
    assert losses[-1] < losses[0] / 4
    assert 0 < consensus[-1] < consensus[0] / 4
    assert "the point at which gradients are taken" not in done.stderr  # it evaluates and saves x
    alone = prepared.python("-c", LOADS, tmp_path / saved, cwd=RECIPES).done()
    assert float(alone.stdout) > 0.95, alone.stderr


@pytest.mark.parametrize("name", WITH)
def test_the_document_shows_them(name):
    recipe = (RECIPES / f"{name}.py").read_text()
    assert recipe in (ROOT / "docs" / "frameworks.md").read_text()
    assert len([line for line in recipe.splitlines() if line]) <= 30


@pytest.mark.parametrize(
    "package, scenario, recipe",
    [
        ("lightning", "lightning", "strategy=klatsch.frameworks.lightning.GossipStrategy()"),
        ("accelerate", "accelerate", "accelerator.prepare_model(model, evaluation_mode=True)"),
        ("transformers", "trainer", "klatsch.frameworks.huggingface.GossipTrainer"),
    ],
)
def test_ddp_of_a_framework_is_refused_and_its_recipe_named(launch, package, scenario, recipe):
    ranks = launch(3, f"rank_frameworks.{scenario}", preload=needs(package))
    ranks.succeed()
    for answer in found(ranks, 3):
        assert answer.startswith("DistributedDataParallel is around this model on ranks that gossip")
        assert recipe in answer
        assert answer.endswith("see docs/frameworks.md")


def test_every_exporter_saves_all_weights_whatever_the_model_holds(launch):
    for package in ("accelerate", "lightning", "transformers"):
        needs(package)
    ranks = launch(2, "rank_exports.exports")
    ranks.succeed()
    first, _ = found(ranks, 2)
    assert len(first) == 3 * 13
    assert {way: lost for way, lost in first.items() if lost} == {}


def test_lightning_goes_on_from_a_checkpoint_and_leaves_the_merged_model(launch):
    ranks = launch(2, "rank_frameworks.lightning_goes_on", preload=needs("lightning"))
    ranks.succeed()
    answers = found(ranks, 2)
    for answer in answers:
        assert answer["rounds"] == [20, 20]
        assert answer["x"][0] == answer["x"][1]  # bits: same call, resumed
        assert answer["saved"] < 1e-6  # float32, averaged once more
        # Lightning keeps the last one and the one that it went on from; the others are gone, those of rank 1, too.
        assert answer["files"] == ["epoch=1.ckpt", "epoch=1.ckpt.rank1", "epoch=3.ckpt", "epoch=3.ckpt.rank1"]
        assert answer["from x"]["validation"] < 1e-6 < answer["from x"]["training"]
        assert answer["validated"][0] == pytest.approx(answer["validated"][1], rel=1e-5)  # without optimizer states
        assert "configure_optimizers() returns SGD, with which every process would train alone" in answer["alone"]
    assert answers[0]["merged"] == pytest.approx(answers[1]["merged"], abs=1e-6)
    assert answers[0]["x"][0] != answers[1]["x"][0]
    rows = [*csv.DictReader(next(ranks.folder.rglob("metrics.csv")).read_text().splitlines())]
    sent = [(int(row["step"]), float(row["gossip/bytes"])) for row in rows if row["gossip/bytes"]]
    assert [step for step, _ in sent] == [5, 10, 15]
    assert 0 < sent[0][1] < sent[1][1] < sent[2][1]
    assert "epoch=3.ckpt.rank1 is missing, the state of this process's optimizer; copy it" in answers[1]["missing"]


def test_lightning_waits_for_processes_with_more_batches_and_refuses_other_averages(launch):
    ranks = launch(2, "rank_frameworks.lightning_ends_unevenly", preload=needs("lightning"))
    ranks.succeed()
    answers = found(ranks, 2)
    assert [answer["steps"] for answer in answers] == [15, 24]
    for answer in answers:
        assert answer["rounds"] == answers[0]["rounds"]
        assert answer["rounds"][0] == answer["rounds"][1] >= 24
        assert answer["x"][0] == answer["x"][1]  # bits: same call, resumed
        assert answer["merged"] == pytest.approx(answers[0]["merged"], abs=1e-6)  # float32, each computes the mean
        assert answer["files"] == ["epoch=2-step=15.ckpt", "epoch=2-step=15.ckpt.rank1"]
        for which, name in (("ema", "EMAWeightAveraging"), ("swa", "StochasticWeightAveraging")):
            assert answer[which].startswith(f"{name} averages the weights of one process")


def test_hugging_face_goes_on_from_a_checkpoint_and_leaves_the_merged_model(launch):
    ranks = launch(2, "rank_frameworks.trainer_goes_on", preload=needs("transformers"))
    ranks.succeed()
    answers = found(ranks, 2)
    for answer in answers:
        assert answer["rounds"] == [20, 20]
        assert answer["x"][0] == answer["x"][1]  # bits: same call, resumed
        assert answer["saved"] < 1e-6
        assert {"optimizer.pt", "optimizer-1.pt", "model.safetensors"} <= set(answer["files"])
        assert answer["consensus"][-1] > 0
        assert answer["evaluated"][0] == pytest.approx(answer["evaluated"][1], rel=0.1)  # merged, or the mean of two x
        assert "the optimizer is SGD, with which every process would train alone" in answer["alone"]
    assert len(answers[0]["logged"]) == 4
    assert answers[0]["logged"] == sorted(set(answers[0]["logged"]))
    assert not answers[0]["thrifty"]  # consensus="off"
    assert answers[0]["own"] == answers[0]["own x"] != answers[1]["own x"]  # bits: a copy; merge=False
    for which in ("merged", "best"):
        assert answers[0][which] == pytest.approx(answers[1][which], abs=1e-6)
    assert answers[0]["x"][0] != answers[1]["x"][0]
    assert "optimizer-1.pt is missing, the state of this process's optimizer; copy it" in answers[1]["missing"]
