"""Studies of the language problem: a run knows its text, and results are shown where the text is gone."""

import json
import lzma
import shutil
from pathlib import Path

import pytest

from klatsch.problems import prediction
from klatsch.study import Store, expand, load, run_study, workers
from klatsch.study.batches import pack

STUDY = """
steps = 4
nodes = 3
seeds = 1
record = 2
lr = [0.1, 0.3]
dtype = "float32"
rules = ["dsgd", "dat"]
topologies = ["ring"]

[problem]
name = "language"
folder = "text"
pattern = ["*.txt", "a*.txt"]
context = 12
width = 8
depth = 1
heads = 2
batch = 2
test = 10
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a study and its text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    write("once upon a time")
    return tmp_path


def write(words):
    """Text for the study, as another process would find it."""
    for k in range(6):
        for package in ("ant", "bee"):
            file = f"text/{package}/{package}{k}.txt"
            (place := Path(file)).parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{words} {package} {k}. " * 20)
    prediction._read.cache_clear()
    prediction.load.cache_clear()


def keys():
    return {case.key for case in expand(load("study.toml"))[0]}


def done_now():
    """How many runs are done that were not in the store."""
    with Store("study.sqlite") as store:
        return run_study(load("study.toml"), store, executor=workers.threads).progress.runs_done


@pytest.mark.slow
def test_runs_of_another_text_are_other_runs(folder, run_cli):
    assert done_now() == 8
    before = keys()
    write("twice upon a time")
    assert not keys() & before
    assert done_now() == 8
    write("once upon a time")
    assert keys() == before
    assert done_now() == 0
    rows = json.loads(run_cli("results", "study.sqlite", "--json")[1])["rows"]
    assert len(rows) == 8  # two rules and patterns, for each text
    assert all(0 < row["bits"] < 8.5 for row in rows)


@pytest.mark.slow
def test_results_do_not_need_the_text(folder, run_cli):
    assert done_now() == 8
    shutil.rmtree("text")
    prediction._read.cache_clear()
    prediction.load.cache_clear()
    code, out, _ = run_cli("results", "study.sqlite")
    assert code == 0
    assert "bits" in out
    code, _, err = run_cli("report", "study.sqlite")
    assert not err, err
    assert code == 0
    code, _, err = run_cli("run", "study.toml")
    assert code == 2
    assert "folder = text is not a folder" in err


def test_text_that_changes_while_a_study_waits_is_not_taken_for_the_old_one(folder):
    study = load("study.toml")
    expanded = expand(study)
    write("thrice upon a time")
    with pytest.raises(ValueError, match="the data of language have changed since the study was read"):
        run_study(study, expanded=expanded, executor=workers.threads)


def test_a_stack_on_a_gpu_fits_its_memory(folder):
    cases, _ = expand(load("study.toml"))
    assert {len(batch.cases) for batch in pack(cases, "cpu")} == {1}
    assert max(len(batch.cases) for batch in pack(cases, "cuda")) == 2  # small models: both learning rates
    (folder / "study.toml").write_text(STUDY.replace("width = 8", "width = 512").replace("depth = 1", "depth = 16"))
    cases, _ = expand(load("study.toml"))
    assert {len(batch.cases) for batch in pack(cases, "cuda")} == {1}  # 50 M parameters on three nodes, 12 vectors


@pytest.mark.slow
def test_the_command_line_takes_its_options(folder, run_cli):
    options = {"folder": "text", "pattern": "*.txt", "context": 12, "width": 8, "depth": 1, "heads": 2, "batch": 2}
    words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    code, out, _ = run_cli(
        *("run", "--problem", "language", *words, "--rules", "dsgd", "-n", 3, "--lr", 0.1, "--steps", 3),
        *("--seeds", 1, "--float32"),
    )
    assert code == 0
    assert "bits per byte on held-out text" in out
    code, _, err = run_cli("run", "--problem", "language", "--epochs", 2)
    assert (code, "language has no data set of known size; give steps" in err) == (2, True)


def test_the_runs_of_the_documents_can_be_shown(tmp_path, run_cli):
    """If the format changes, docs/results/language-runs.sqlite.xz has to be converted, too."""
    packed = Path(__file__).parents[2] / "docs" / "results" / "language-runs.sqlite.xz"
    (tmp_path / "runs.sqlite").write_bytes(lzma.decompress(packed.read_bytes()))
    code, out, err = run_cli("results", tmp_path / "runs.sqlite", "--json")
    assert (code, err) == (0, "")
    assert {row["rule"].split()[0] for row in json.loads(out)["rows"]} >= {"dadam", "dat-adam", "diloco-adam"}
