"""Going on after a kill: the same call ends with the same bits; a damaged or foreign file is refused and left alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open

import klatsch
from klatsch import algorithms, problems
from klatsch import topology as tp
from klatsch.engine import checkpoint as checkpoints
from klatsch.engine import native
from tests.test_engine import KERNEL

PROGRAM = """
import sys, klatsch
from klatsch import algorithms, problems
path, engine, rule, steps, every = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
result = klatsch.simulate(
    problems.LeastSquares(6, dim=8, heterogeneity=3.0), algorithms.make(rule, lr=[0.0005, 0.001, 1e300]),
    klatsch.topology.lazy(klatsch.topology.ring(6)), steps, record=40,
    checkpoint=None if path == "-" else path, checkpoint_every=every, engine=engine,
)
import torch
torch.save({"output": result.output, **result.metrics}, sys.argv[6])
"""


def run(path, engine, rule, steps, every, out):
    return [sys.executable, "-c", PROGRAM, str(path), engine, rule, str(steps), str(every), str(out)]


@pytest.mark.parametrize(
    "engine, rule, steps", [("torch", "dat", 6000), pytest.param("fused", "dat-d2", 400_000, marks=KERNEL)]
)
def test_killed_and_started_again_it_ends_with_the_same_bits(engine, rule, steps, tmp_path):
    subprocess.run(run("-", engine, rule, steps, 1, tmp_path / "straight"), check=True)
    saved = tmp_path / "run.safetensors"
    stops = []
    for _ in range(3):
        process = subprocess.Popen(run(saved, engine, rule, steps, 0.01, tmp_path / "killed"))
        before, deadline = rounds_in(saved), time.monotonic() + 60
        while rounds_in(saved) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        stops.append(rounds_in(saved))
    assert 0 < stops[0] < stops[1] < stops[2] < steps, stops
    subprocess.run(run(saved, engine, rule, steps, 1, tmp_path / "resumed"), check=True)
    straight, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    for name, values in straight.items():
        assert torch.equal(values, resumed[name]), name
    assert straight["output"][:, 2].isposinf().all()


def rounds_in(path):
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["klatsch"])["rounds"]


class Watched(problems.LeastSquares):
    """Counts gradients, and stops where it is told to."""

    stop_at = None
    rounds = 0

    def gradient(self, x, drawn):
        self.rounds += 1
        if self.rounds == self.stop_at:
            raise KeyboardInterrupt
        return super().gradient(x, drawn)


def simulate(tmp_path, **changes):
    call = {
        "problem": problems.LeastSquares(5, dim=4),
        "algorithm": algorithms.DAT([0.001, 0.002]),
        "topology": tp.ring(5),
        "steps": 60,
        "record": [10, 60],
        "checkpoint": tmp_path / "run.safetensors",
        "engine": "torch",
    }
    return klatsch.simulate(**{**call, **changes})


def test_interrupted_by_the_keyboard_nothing_is_lost(tmp_path):
    problem = Watched(5, dim=4)
    problem.to = lambda *_: problem
    problem.stop_at = 37
    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path, problem=problem)
    saved = rounds_in(tmp_path / "run.safetensors")
    assert saved >= 10
    problem.stop_at = None
    problem.rounds = 0
    result = simulate(tmp_path, problem=problem)
    assert problem.rounds == 60 - saved
    whole = simulate(tmp_path, checkpoint=None)
    assert torch.equal(result.output, whole.output)


def test_a_finished_run_is_read_and_not_run_again(tmp_path):
    first = simulate(tmp_path)
    problem = Watched(5, dim=4)
    problem.to = lambda *_: problem
    again = simulate(tmp_path, problem=problem)
    assert problem.rounds == 0
    assert torch.equal(first.output, again.output)
    assert all(torch.equal(first.metrics[name], again.metrics[name]) for name in first.metrics)
    assert again.rounds == 60


CHANGES = {
    "problem": {"problem": problems.LeastSquares(5, dim=4, seed=1)},
    "algorithm": {"algorithm": algorithms.DAT([0.001, 0.003])},
    "lr": {"algorithm": algorithms.DAT(lambda t: 0.001 * (1 + (t > 20)))},
    "topology": {"topology": tp.complete(5)},
    "steps": {"steps": 70},
    "record": {"record": [20, 60]},
    "dtype": {"dtype": torch.float32},
}
if native.why_not() is None:
    CHANGES["engine"] = {"engine": "fused"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_foreign_checkpoint_is_refused_by_name_and_left_alone(name, tmp_path):
    simulate(tmp_path, **({"algorithm": algorithms.DAT(lambda t: 0.001)} if name == "lr" else {}))
    path = tmp_path / "run.safetensors"
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=rf"run\.safetensors belongs to another run: {name} is .* there and .* here; move"
    ):
        simulate(tmp_path, **CHANGES[name])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "text", "other"])
def test_a_damaged_checkpoint_is_refused_by_name_and_left_alone(damage, tmp_path):
    simulate(tmp_path)
    path = tmp_path / "run.safetensors"
    whole = path.read_bytes()
    if damage == "other":
        from safetensors.torch import save

        content = save({"weights": torch.zeros(3)})
    else:
        content = {"cut": whole[:-9], "empty": b"", "noise": os.urandom(500), "text": b"hello"}[damage]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.safetensors is (damaged|no checkpoint).*move the file away"):
        simulate(tmp_path)
    assert path.read_bytes() == content


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    simulate(tmp_path)
    path = tmp_path / "run.safetensors"
    header, _ = checkpoints._read(path)
    fresh = algorithms.DAT(0.1).init(torch.zeros(5, 3, 4))
    with pytest.raises(ValueError, match=r"damaged: the field w"):
        checkpoints.load(path, header["run"], fresh)


def test_a_problem_that_cannot_be_told_apart_cannot_be_saved(tmp_path):
    from tests.test_algorithms import ZeroGradients

    with pytest.raises(ValueError, match=r"fingerprint\(\)"):
        simulate(tmp_path, problem=ZeroGradients(5))


def test_a_run_with_momentum_and_one_after_another_can_be_saved(tmp_path):
    rule = algorithms.DAT([0.001, 0.002], momentum=0.5)
    half = simulate(tmp_path, algorithm=rule, steps=30, record=[10, 30], checkpoint=None)
    whole = simulate(tmp_path, algorithm=rule, record=[10, 30, 60], checkpoint=None)
    for _ in range(2):
        rest = simulate(tmp_path, algorithm=rule, after=half, record=[60])
        assert torch.equal(rest.output, whole.output)
        assert rest.steps == [10, 30, 60]
        assert torch.equal(rest.metrics["Gamma"], whole.metrics["Gamma"])
