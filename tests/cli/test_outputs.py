"""No output costs the user another file: the input itself, a store, a checkpoint, or anything of another kind."""

import os

import pytest
import torch
from safetensors.torch import save_file

from klatsch import files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with one run, and a checkpoint."""
    from klatsch.study import Store, parse, run_study, workers

    folder = tmp_path_factory.mktemp("made")
    study = parse(
        {"name": "one", "rules": [{"name": "dat"}], "topologies": [{"name": "ring"}], "nodes": [3], "steps": 4}
        | {"lr": [0.01], "seeds": 1, "problem": {"name": "least-squares", "dim": 2}}
    )
    with Store(folder / "s.sqlite") as store:
        run_study(study, store, executor=workers.threads)
    save_file({"w": torch.ones(3)}, folder / "w.safetensors")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A folder with copies of them, in which the commands run."""
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WRITERS = {
    "report": ["report", "s.sqlite", "-o", "OUT"],
    "csv": ["results", "s.sqlite", "--csv", "OUT"],
    "parquet": ["results", "s.sqlite", "--parquet", "OUT"],
    "probe": ["probe", "least-squares", "-n", 2, "--set", "dim=2", "--samples", 4, "-o", "OUT"],
}
DRAWERS = {
    "plan": ["plan", "least-squares", "--set", "dim=2", "-n", 2, "--target", 0.1, "--minutes", 60, "--plot", "OUT"],
    "topology": ["topology", "ring", "-n", 4, "--draw", "OUT"],
    "run": [
        "run",
        "--rules",
        "dat",
        "-n",
        3,
        "--steps",
        4,
        "--lr",
        0.01,
        "--seeds",
        1,
        "--set",
        "dim=2",
        "--plot",
        "OUT",
    ],
}


def filled(command, out):
    return [out if word == "OUT" else word for word in command]


@pytest.mark.parametrize("victim", ["s.sqlite", "w.safetensors"])
@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_a_store_and_a_checkpoint_are_not_overwritten(command, victim, folder, run_cli):
    before = contents(folder)
    code, out, err = run_cli(*filled(command, victim))
    assert (code, out) == (2, "")
    assert err.startswith(f"klatsch: error: cannot write {victim}: ")
    assert err.count("\n") == 1
    assert "give another name" in err
    assert contents(folder) == before


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("command", [WRITERS["report"], WRITERS["csv"]], ids=["report", "csv"])
def test_nor_through_a_link_to_the_input(command, link, folder, run_cli):
    link("s.sqlite", "out.html")
    before = contents(folder)
    code, _, err = run_cli(*filled(command, "out.html"))
    assert code == 2
    assert "that file is an input, or another output" in err
    assert contents(folder) == before
    assert (folder / "out.html").samefile(folder / "s.sqlite")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, suffix", [("plan", ".png"), ("topology", ".svg"), ("topology", ".pdf"), ("run", ".png")]
)
def test_a_picture_replaces_a_picture_of_its_kind_only(name, suffix, folder, run_cli):
    command = DRAWERS[name]
    out = folder / f"figure{suffix}"
    (folder / "s.sqlite").rename(out)
    before = contents(folder)
    code, _, err = run_cli(*filled(command, out))
    assert code == 2
    assert f"it holds SQLite, and would become {suffix[1:].upper()}; give another name, or remove it first" in err
    assert contents(folder) == before
    out.unlink()
    for _ in range(2 * (name == "topology")):  # new, and over a picture; the others draw in tests of their own
        assert run_cli(*filled(command, out))[0] == 0


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_a_file_of_the_same_kind_is_replaced(command, folder, run_cli):
    (folder / "out").write_bytes(b"")  # an empty one is nothing to lose
    for _ in range(2):
        code, _, err = run_cli(*filled(command, "out"))
        assert (code, err) == (0, "")
    (folder / "out").write_bytes(b'"""A program, not a table."""\n')
    code, _, err = run_cli(*filled(command, "out"))
    assert code == 2
    assert "it holds something else" in err


def test_csv_and_parquet_in_one_file_are_refused_before_either_is_written(folder, run_cli):
    before = contents(folder)
    code, out, err = run_cli("results", "s.sqlite", "--csv", "both", "--parquet", "both")
    assert (code, out) == (2, "")
    assert "that file is an input, or another output" in err
    assert contents(folder) == before


@pytest.mark.parametrize(
    "name, content, kept",
    [
        ("train.py", "import os, sys\n", True),
        ("numbers.json", "[1, 2]\n", True),
        ("diary.txt", "Dear diary, today\n", True),
        ("table.csv", "a;b\n1;2\n", False),  # as some spreadsheets write it
        ("table.csv", "a\n1\n", False),
    ],
)
def test_a_table_takes_the_place_of_a_table_only(folder, run_cli, name, content, kept):
    (folder / name).write_text(content)
    code, _, err = run_cli("results", "s.sqlite", "--csv", name)
    assert (code, (folder / name).read_text() == content) == ((2, True) if kept else (0, False)), err


def test_what_is_no_file_is_left_alone(folder, run_cli):
    os.mkfifo("pipe")
    for out in ("pipe", "/dev/null"):
        code, _, err = run_cli(*filled(WRITERS["probe"], out))
        assert code == 2
        assert "not an ordinary file" in err
    assert (folder / "pipe").is_fifo()


@pytest.mark.parametrize(
    "head, kind",
    [
        (b"SQLite format 3\0" + bytes(84), "SQLite"),
        (b"\x10" + bytes(7) + b'{"w": {}}       ', "safetensors"),
        (b'{"a" : {"b": 1}}', "JSON"),  # its ninth byte is a brace, too
        (b"problem,topology,nodes\n", "CSV"),
        (b"<!doctype html>\n<html>", "HTML"),
        (b"\xef\xbb\xbf<!-- by hand -->\n<!DOCTYPE html>", "HTML"),
        (b'rules = ["dat", "dsgd"]\n', None),
        (b"[problem]\nname = 1, 2\n", None),
        (b"# a comment, of a study\n", None),
        (b"import os, sys\n", None),
        (b"[1, 2]\n", None),
        (bytes(64), None),
        (b"\x7fELF\x02\x01\x01,", None),
    ],
)
def test_kinds_by_the_first_bytes(head, kind):
    assert files.kind_of(head, len(head)) == kind
