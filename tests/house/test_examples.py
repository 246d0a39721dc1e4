"""The examples run as the documents say, under torchrun with real processes."""

import difflib
import os
import re
from pathlib import Path

import pytest

from tests.support.machine import DATA, needs_data

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def printed(prepared):
    """What ranks print that run a script."""

    def run(size, *words):
        ranks = prepared.ranks(size, *words)
        assert [rank.done().returncode for rank in ranks] == [0] * size, ranks[0].stderr
        return "".join(rank.stdout for rank in ranks)

    return run


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_page_shows_the_difference_between_the_two_scripts(page):
    pair = [(EXAMPLES / name).read_text().splitlines() for name in ("single.py", "quickstart.py")]
    difference = list(difflib.unified_diff(*pair, n=0, lineterm=""))[5:]  # without names and docstrings
    first = (ROOT / page).read_text()
    (shown,) = re.findall(r"```diff\n(.*?)```", first, re.S)
    assert shown.splitlines() == difference
    assert "torchrun --nproc-per-node 4 examples/quickstart.py" in first
    added = [line for line in difference if line.startswith("+") and line != "+"]
    assert len(added) <= 10


def test_the_page_on_language_shows_the_difference_between_the_two_gpts():
    pair = [(EXAMPLES / name).read_text().splitlines() for name in ("gpt_single.py", "gpt.py")]
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "language.md").read_text(), re.S)
    assert shown.splitlines() == list(difflib.unified_diff(*pair, "gpt_single.py", "gpt.py", n=0, lineterm=""))


def test_the_script_for_several_machines_gives_each_its_own_data_and_tensorboard_shows_all(prepared, tmp_path):
    pytest.importorskip("tensorboard")
    script = re.search(r"```py\n(.*?)```", (ROOT / "docs" / "ranks.md").read_text(), re.S)[1]
    same = script.replace("sampler=sampler", "shuffle=True")
    assert same != script
    for name, text in (("own", script), ("same", same)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
        ranks = prepared.ranks(4, "train.py", cwd=tmp_path / name, preload=("torch.utils.tensorboard",))
        assert [rank.done().returncode for rank in ranks] == [0] * 4, ranks[0].stderr
        lines = [re.fullmatch(r"rank (\d): loss (.+), distance from the others (.+)\n", rank.stdout) for rank in ranks]
        assert all((float(line[3]) > 0) == (name == "own") for line in lines)
        assert (len({line[2] for line in lines}) > 1) == (name == "own")
        assert {path.parent.name for path in (tmp_path / name / "runs").rglob("events.*")} == {*"0123"}


def test_quickstart_is_as_good_as_a_single_machine_within_half_a_point(python, torchrun):
    """Every rank, at x. Over three seeds the worst rank has 99.95 %, a single machine 99.65 to 100 %."""
    single = python(EXAMPLES / "single.py").done()
    alone = float(re.fullmatch(r"test accuracy (0\.\d+|1.000)\n", single.stdout)[1])
    assert alone > 0.98
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = torchrun(4, "--standalone", EXAMPLES / "quickstart.py", env=environment, spawn=True)  # as a user does
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank \d of 4: test accuracy ([\d.]+), distance from the others ([\d.e-]+)", done.stdout)
    assert len(found) == 4
    assert min(float(accuracy) for accuracy, _ in found) >= alone - 0.005
    assert "RuntimeWarning" not in done.stderr  # it evaluates at x


@needs_data
@pytest.mark.parametrize("options", [["--order", "cta"], ["--optimizer", "DATD2"]])
def test_lenet(tmp_path, printed, options):
    command = [EXAMPLES / "lenet.py", "--data", DATA, "--alpha", "1", "--checkpoints", tmp_path, *options]
    out = printed(2, *command, "--rounds", "100", "--report", "100")
    (accuracy,) = re.findall(
        r"round 100: accuracy (0\.\d+) \(worst machine 0\.\d+, merged 0\.\d+\), consensus .*, sent \d+ MB", out
    )
    assert float(accuracy) > 0.4
    assert len(list(tmp_path.glob("rank0000?-round0000000100.safetensors"))) == 2
    if "cta" in options:  # to resume is the same for all rules
        out = printed(2, *command, "--rounds", "110", "--report", "110")
        assert out.startswith("resuming after round 100\nround 110: ")


def test_lenet_without_data(tmp_path, python):
    done = python(EXAMPLES / "lenet.py", "--data", tmp_path).done()
    assert done.returncode == 2
    assert f"--data = {tmp_path} has no train-images-idx3-ubyte.gz; put its four files into" in done.stderr
    assert "Traceback" not in done.stderr


DYING = """
import os, runpy, signal, sys
import klatsch

def step(self, usual=klatsch.Checkpointer.step, taken=[]):
    usual(self)
    taken.append(self)
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], len(taken)) == ("2", "0", 14):
        os.kill(os.getpid(), signal.SIGKILL)

klatsch.Checkpointer.step = step
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_gpt_survives_kill_9_and_a_plain_script_loads_its_model(tmp_path, python, torchrun):
    dying, merged = tmp_path / "dying.py", tmp_path / "merged.pt"
    dying.write_text(DYING)
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command = EXAMPLES / "gpt.py", "--steps", 40, "--checkpoints", tmp_path / "checkpoints", "--save", merged
    done = torchrun(4, "--standalone", "--max-restarts", 1, dying, *command, env=environment)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    losses = [float(loss) for loss in re.findall(r"rank 0, step \d+: loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 0.5
    assert float(re.search(r"([\d.]+) bits per byte", done.stdout)[1]) < 6
    # The plain script has no klatsch in it; without steps it says what the model that it loads is worth.
    plain = (EXAMPLES / "gpt_single.py").read_text()
    assert "klatsch" not in plain
    script = tmp_path / "plain.py"
    script.write_text(
        plain.replace("model = GPT()\n", f"model = GPT()\nmodel.load_state_dict(torch.load({str(merged)!r}))\n")
    )
    again = python(script, "--steps", 0, "--save", tmp_path / "copy.pt").done()
    assert again.returncode == 0, again.stderr
    bits = [re.search(r"[\d.]+ bits per byte", each.stdout)[0] for each in (done, again)]
    assert bits[0] == bits[1]
