"""Going on after a kill: the same call ends with the same bits; a damaged or foreign file is refused and left alone."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import klatsch
from klatsch import native, problems, rules, sealed
from klatsch import topology as tp
from klatsch.simulation import driver, simulate_together
from tests.support.machine import KERNEL
from tests.support.table import ZeroGradients

PROGRAM = """
import os, signal, sys, klatsch
from klatsch import problems, rules
path, engine, rule, steps, last, out = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
done = 0

def tell(rounds):
    global done
    done += rounds
    if done > last:
        os.kill(os.getpid(), signal.SIGKILL)

result = klatsch.simulate(
    problems.LeastSquares(6, dim=8, heterogeneity=3.0), rules.make(rule, lr=[0.0005, 0.001, 1e300]),
    klatsch.topology.lazy(klatsch.topology.ring(6)), steps, record=40,
    checkpoint=None if path == "-" else path, checkpoint_every=0, engine=engine, progress=tell,
)
import torch
torch.save({"output": result.output, **result.metrics}, out)
"""


def run(python, path, engine, rule, steps, last, out):
    """The exit code of a process that kills itself once it is beyond the round `last`."""
    return python("-c", PROGRAM, path, engine, rule, steps, last, out).done().returncode


@pytest.mark.parametrize(
    "engine, rule, steps", [("torch", "dat", 1000), pytest.param("fused", "dat-d2", 30_000, marks=KERNEL)]
)
def test_killed_and_started_again_it_ends_with_the_same_bits(engine, rule, steps, python, tmp_path):
    assert run(python, "-", engine, rule, steps, steps, tmp_path / "straight") == 0
    saved = tmp_path / "run.safetensors"
    stops = []
    for last in (steps // 5, 2 * steps // 5, 3 * steps // 5):
        assert run(python, saved, engine, rule, steps, last, tmp_path / "killed") == -signal.SIGKILL
        stops.append(rounds_in(saved))
    assert 0 < stops[0] < stops[1] < stops[2] < steps, stops
    assert run(python, saved, engine, rule, steps, steps, tmp_path / "resumed") == 0
    straight, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    for name, values in straight.items():
        assert torch.equal(values, resumed[name]), name  # bits: same call
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
        "rule": rules.make("dat", [0.001, 0.002]),
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
    whole = simulate(tmp_path, problem=problem, checkpoint=None)
    assert torch.equal(result.output, whole.output)  # bits: same call


def test_a_finished_run_is_read_and_not_run_again(tmp_path):
    first = simulate(tmp_path, problem=Watched(5, dim=4))
    problem = Watched(5, dim=4)
    problem.to = lambda *_: problem
    again = simulate(tmp_path, problem=problem)
    assert problem.rounds == 0
    assert torch.equal(first.output, again.output)  # bits: a copy
    assert all(torch.equal(first.metrics[name], again.metrics[name]) for name in first.metrics)  # bits: a copy
    assert again.rounds == 60


CHANGES = {
    "problem": {"problem": problems.LeastSquares(5, dim=4, seed=1)},
    "lr": {"rule": rules.make("dat", [0.001, 0.003])},
    "averaging p": {"rule": rules.make("dat", [0.001, 0.002], averaging="linear")},
    "base": {"rule": rules.make("dat-d2", [0.001, 0.002])},
    "learning rates": {"rule": rules.make("dat", lambda t: 0.001 * (1 + (t > 20)))},
    "topology": {"topology": tp.complete(5)},
    "steps": {"steps": 70},
    "record": {"record": [20, 60]},
    "dtype": {"dtype": torch.float32},
}
if native.why_not() is None:
    CHANGES["engine"] = {"engine": "fused"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_foreign_checkpoint_is_refused_by_name_and_left_alone(name, tmp_path):
    simulate(tmp_path, **({"rule": rules.make("dat", lambda t: 0.001)} if name == "learning rates" else {}))
    path = tmp_path / "run.safetensors"
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=rf"run\.safetensors belongs to another run: {name} is .* there and .* here; move"
    ):
        simulate(tmp_path, **CHANGES[name])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "text", "other", "one bit", "header"])
def test_a_damaged_checkpoint_is_refused_by_name_and_left_alone(damage, tmp_path):
    simulate(tmp_path)
    path = tmp_path / "run.safetensors"
    whole = path.read_bytes()
    if damage == "other":
        from safetensors.torch import save

        content = save({"weights": torch.zeros(3)})
    else:
        content = {
            "cut": whole[:-9],
            "empty": b"",
            "noise": os.urandom(500),
            "text": b"hello",
            "one bit": whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:],
            "header": whole.replace(b'\\"rounds\\": 60', b'\\"rounds\\": 50'),
        }[damage]
        assert content != whole
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.safetensors is (damaged|not a checkpoint).*move the file away"):
        simulate(tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("moment", [3, 11, 12, 60])
def test_an_interrupt_at_any_moment_finds_a_consistent_run(moment, tmp_path):
    """Also where the bar is told, after the state has moved on."""
    told = []

    def tell(rounds):
        told.append(rounds)
        if sum(told) >= moment and len(told) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path, progress=tell, record=[3, 10, 11, 60])
    whole = simulate(tmp_path, record=[3, 10, 11, 60], checkpoint=None)
    resumed = simulate(tmp_path, record=[3, 10, 11, 60])
    assert torch.equal(resumed.output, whole.output)  # bits: same call
    assert all(torch.equal(resumed.metrics[name], whole.metrics[name]) for name in whole.metrics)  # bits: same call


@pytest.mark.parametrize("brief", [False, True])
def test_an_interrupt_while_something_is_measured(brief, tmp_path, monkeypatch):
    """What was being measured is measured again."""
    problem, measured = problems.LeastSquares(5, dim=4), problems.LeastSquares.metrics
    given = {"problem": problem.briefly() if brief else problem, "record": [1, 10, 30, 60]}
    whole, calls = simulate(tmp_path, checkpoint=None, **given), iter(range(100))

    def metrics(self, x):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return measured(self, x)

    monkeypatch.setattr(problems.LeastSquares, "metrics", metrics)
    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path, **given)
    resumed = simulate(tmp_path, **given)
    assert resumed.steps == [1, 10, 30, 60]
    for name, values in whole.metrics.items():
        assert torch.equal(resumed.metrics[name], values)  # bits: same call


def test_a_checkpoint_that_cannot_be_written_shows_before_the_first_round(tmp_path):
    for path in (tmp_path / "nowhere" / "run", tmp_path):
        with pytest.raises(ValueError, match="folder that exists"):
            simulate(tmp_path, checkpoint=path)
    for every in (-1, float("nan"), "5"):
        with pytest.raises(ValueError, match="checkpoint_every"):
            simulate(tmp_path, checkpoint_every=every)


@pytest.mark.slow
def test_saves_come_on_time_also_late_in_a_run(tmp_path, monkeypatch):
    """Log-spaced points leave long stretches at the end, which must not become one piece."""
    pieces, problem = [], Watched(5, dim=4)
    problem.to = lambda *_: problem
    monkeypatch.setattr("klatsch.simulation.driver.time.perf_counter", lambda: 1e-3 * problem.rounds)  # 1 ms per round
    simulate(tmp_path, problem=problem, steps=3_000, record=30, progress=pieces.append, checkpoint=None)
    assert max(pieces) == 256  # 128 rounds take less than 0.2 s, 256 take more


def test_another_start_is_another_run(tmp_path):
    first = simulate(tmp_path, steps=30, record=[30], checkpoint=None)
    simulate(tmp_path, after=first, record=[60])
    other = type(first)(**{**vars(first), "state": {name: v + 1 for name, v in first.state.items()}})
    with pytest.raises(ValueError, match="begun"):
        simulate(tmp_path, after=other, record=[60])


@pytest.mark.parametrize("name", ["problem", "lr", "topology", "dtype", "base"])
def test_going_on_after_a_result_of_another_run_is_refused(name, tmp_path):
    changes = {**CHANGES[name], "steps": 30, "record": [30], "checkpoint": None}
    with pytest.raises(ValueError, match=f"another {name}"):
        simulate(tmp_path, after=simulate(tmp_path, **changes))


def test_a_finished_run_is_not_written_again(tmp_path):
    simulate(tmp_path)
    stamp = (tmp_path / "run.safetensors").stat().st_mtime_ns
    simulate(tmp_path)
    assert (tmp_path / "run.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("speed, saved", [(5e8, True), (1.0, False)])
def test_large_states_are_saved_seldom_from_the_start(speed, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "SPEED", speed)
    networks, path = ([problems.LeastSquares(5, dim=4)], rules.make("dat", 0.001), [tp.ring(5)], 60), tmp_path / "run"
    simulate_together(*networks, checkpoint=path, checkpoint_every=1e-9, checkpoint_at_end=False)
    assert path.exists() is saved
    simulate_together(*networks, checkpoint=path)
    assert rounds_in(path) == 60


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    simulate(tmp_path)
    path = tmp_path / "run.safetensors"
    header, _ = sealed.read(path, driver.FORMAT)
    fresh = rules.make("dat", 0.1).init(torch.zeros(5, 3, 4))
    run = SimpleNamespace(now=SimpleNamespace(state=fresh), stand_after=lambda rounds: None)
    with pytest.raises(ValueError, match=r"damaged: the field w"):
        driver.Saver(path, 0.0, header["run"]).restore(run)


def test_a_problem_that_cannot_be_told_apart_cannot_be_saved(tmp_path):

    with pytest.raises(ValueError, match=r"fingerprint\(\)"):
        simulate(tmp_path, problem=ZeroGradients(5))


def test_a_run_with_momentum_and_one_after_another_can_be_saved(tmp_path):
    rule = rules.make("dat", [0.001, 0.002], momentum=0.5)
    half = simulate(tmp_path, rule=rule, steps=30, record=[10, 30], checkpoint=None)
    whole = simulate(tmp_path, rule=rule, record=[10, 30, 60], checkpoint=None)
    for _ in range(2):
        rest = simulate(tmp_path, rule=rule, after=half, record=[60])
        assert torch.equal(rest.output, whole.output)  # bits: same call
        assert rest.steps == [10, 30, 60]
        assert torch.equal(rest.metrics["Gamma"], whole.metrics["Gamma"])  # bits: same call
