"""Real kills, real disks: a study that is stopped at any moment loses at most the batches in progress."""

import contextlib
import csv
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager

import psutil
import pytest
from safetensors import safe_open

from klatsch.study import Store, execute, expand, load, parse, run_study, workers
from klatsch.study.batches import pack
from klatsch.study.execute import Claims, checkpoint
from klatsch.study.store import FORMAT
from tests.support.studies import PAPER, SMALL
from tests.support.waiting import HANG, wait_until


def complaints(err):
    """What a study says beside how far it is, which it tells where it takes long."""
    return [line for line in err.splitlines() if not re.match(r"projected: |\d+/\d+ batches", line)]


def table(start, store, path):
    """Everything that was measured, without the times; bit by bit, since every batch is the same call each time."""
    done = start("results", store, "--curves", "--csv", path).done()
    assert (done.returncode, done.stderr) == (0, "")
    with path.open() as file:
        rows = [{k: v for k, v in row.items() if k not in ("seconds", "finished")} for row in csv.DictReader(file)]
    return sorted(rows, key=lambda row: (row["key"], int(row["step"])))


def worker_processes(driver):
    """The workers among a driver's children; the resource tracker is not one of them."""
    try:
        children = psutil.Process(driver.pid).children()
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    except psutil.Error:
        return []


@pytest.mark.soak
def test_kill_9_again_and_again_and_the_table_is_the_same(tmp_path, start):
    """Workers and the driver in turn, at random moments."""
    file = tmp_path / "s.toml"
    file.write_text(PAPER)
    assert start("run", file, "--store", tmp_path / "calm.sqlite").done().returncode == 0
    store, moments, kills, saved = tmp_path / "wild.sqlite", random.Random(7), 0, 0

    def progress():
        """How far the batches in progress are, as their checkpoints say; None where one has just been finished."""
        with contextlib.suppress(FileNotFoundError):
            return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("wild.sqlite-*.safetensors")}

    for attempt in range(100):
        before = progress()
        process = start("run", file, "--store", store, spawn=True)
        wait_until(lambda p=process: worker_processes(p) or p.poll() is not None)
        if attempt % 3:  # every third time while they are starting
            wait_until(lambda p=process, b=before: progress() != b or p.poll() is not None)
            saved += process.poll() is None
        time.sleep(moments.uniform(0.0, 3.0))
        crew = worker_processes(process)
        if kills == 6:
            break
        if process.poll() is not None:  # a fast machine was done before the last kill: once more, from the start
            assert process.returncode == 0
            process.communicate()
            for file_ in tmp_path.glob("wild.sqlite*"):
                file_.unlink()
            continue
        if attempt % 2 == 0 and crew:  # a worker: the driver starts others and goes on
            os.kill(crew[0].pid, signal.SIGKILL)
            kills += 1
            time.sleep(moments.uniform(0.0, 3.0))
        if process.poll() is None and kills < 6:
            crew += worker_processes(process)
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate(timeout=HANG)
        assert not psutil.wait_procs(crew, timeout=HANG)[1], "workers outlive their driver"
    process.communicate(timeout=HANG)
    if process.returncode != 0:
        again = start("run", file, "--store", store).done()
        assert (again.returncode, complaints(again.stderr)) == (0, [])
    assert kills == 6
    assert saved, "no batch was ever in progress"
    assert table(start, store, tmp_path / "wild.csv") == table(start, tmp_path / "calm.sqlite", tmp_path / "calm.csv")
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_killed_worker_is_replaced_and_the_study_goes_on(tmp_path, start):
    file = tmp_path / "s.toml"
    short = PAPER.replace("100000", "5000").replace("[25, 36]", "25")
    file.write_text(short.replace("heterogeneity = [1.0, 10.0]", "heterogeneity = 1.0"))
    process = start("run", file)
    crew = wait_until(lambda: worker_processes(process), process)
    os.kill(crew[0].pid, signal.SIGKILL)
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, complaints(err)) == (0, [])
    assert "28 runs new" in out


def die(*_):
    os._exit(1)


@pytest.mark.processes
def test_workers_that_always_die_end_the_study_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "work", die)
    with pytest.raises(ValueError, match=r"worker processes died 6 times in a row.*--workers.*safe"):
        run_study(parse(SMALL), tmp_path / "s.sqlite", executor=lambda: workers.processes(1))


def test_results_that_never_come_are_not_waited_for(monkeypatch):
    """As from a Dask scheduler that was killed while it handed one over."""

    class Silent:
        def submit(self, *_):
            return Future()

    @contextmanager
    def gone():
        yield workers.Workers(Silent(), None, 1, check=check)

    looks = []

    def check():
        looks.append("alive")
        if len(looks) == 3:
            raise ValueError("the scheduler is gone")

    monkeypatch.setattr(sys.modules["klatsch.study.execute"], "BEAT", 0.01)
    with pytest.raises(ValueError, match="the scheduler is gone"):
        run_study(parse(SMALL), executor=gone)


def rounds_in(path):
    with safe_open(path, framework="pt") as checkpoint:
        return json.loads(checkpoint.metadata()["klatsch"])["rounds"]


def test_ctrl_c_saves_what_is_in_progress(tmp_path, start):
    file = tmp_path / "s.toml"
    file.write_text(PAPER)
    process = start("run", file)
    saved = wait_until(lambda: list(tmp_path.glob("s.sqlite-*.safetensors")), process)
    before = rounds_in(saved[0])
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes of the group
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"stopped; .*s.sqlite holds [\d,]+ runs; the same command continues from here\n", err)
    assert before < rounds_in(saved[0]) < 100_000


def test_ctrl_c_while_workers_are_starting_is_quiet(tmp_path, start):
    file = tmp_path / "s.toml"
    file.write_text(PAPER)
    process = start("run", file, spawn=True)
    wait_until(lambda: worker_processes(process), process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"stopped; .*\n", err)


def test_a_checkpoint_that_cannot_be_used_is_thrown_away(tmp_path):
    study = parse(SMALL)
    with Store(tmp_path / "s.sqlite") as store:
        cases, _ = expand(study)
        for batch in pack(cases, "cpu"):
            checkpoint(store, batch).write_bytes(b"rubbish")
        assert execute(cases, store, executor=workers.threads).runs_done == 8
    assert [path.name for path in tmp_path.iterdir()] == ["s.sqlite"]


def test_what_nobody_can_go_on_from_is_swept_away(tmp_path):
    study = parse(SMALL)
    interrupted = parse({**SMALL, "name": "interrupted", "steps": 60})
    first, second = pack(expand(interrupted)[0], "cpu")[:2]
    with Store(tmp_path / "s.sqlite") as store:
        store.remember(interrupted)
        left = [(case.key, batch.key, None) for batch in (first, second) for case in batch.cases]
        with store.transaction():  # what the claims of a process that has ended look like
            store.execute_many("INSERT INTO claims VALUES (?, ?, ?)", left)
        waiting, old = checkpoint(store, first), checkpoint(store, second)
        finished = checkpoint(store, pack(expand(study)[0], "cpu")[0])
        unknown = tmp_path / f"s.sqlite-{32 * 'a'}.safetensors"
        torn = tmp_path / f".{waiting.name}.12ab34cd"
        others = [tmp_path / f"s.sqlite-x-{32 * 'a'}.safetensors", tmp_path / "s.sqlite-notes.safetensors"]
        for path in (waiting, old, finished, unknown, torn, *others):
            path.write_bytes(b"")
        os.utime(old, (1, 1))
        run_study(study, store, executor=workers.threads)
    assert {path.name for path in tmp_path.iterdir()} == {"s.sqlite", waiting.name, *(path.name for path in others)}


# --- files that cannot be used --------------------------------------------------------------------------------------


@pytest.fixture
def study_file(tmp_path):
    """A study, and its store."""
    file = tmp_path / "s.toml"
    file.write_text(
        "steps = 50\nrecord = 5\nnodes = [4, 6]\nseeds = 2\n"
        'lr = [0.001, 0.01]\nrules = ["dat"]\ntopologies = ["ring"]\n'
    )
    study = load(file)
    with Store(tmp_path / "s.sqlite") as store:
        run_study(study, store, executor=workers.threads)
    return file


def refused(result, *words):
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("klatsch: error: ")
    for word in words:
        assert word in err


@pytest.mark.processes
def test_a_full_disk_is_one_line_and_what_was_stored_is_safe(study_file, tmp_path, run_cli, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs to mount a small disk: run as root")
    try:
        shutil.copy(tmp_path / "s.sqlite", disk / "s.sqlite")
        with Store(disk / "s.sqlite", read_only=True) as store:
            before = store.done()
        text = study_file.read_text()
        study_file.write_text(text.replace("seeds = 2", "seeds = 40"))
        refused(run_cli("run", study_file, "--store", disk / "s.sqlite"), "full", "free some space", "safe")
        with Store(disk / "s.sqlite", read_only=True) as store:
            assert before <= store.done()
        for end in ("", "-wal"):  # what did not fit into the file is in the log beside it
            if (disk / f"s.sqlite{end}").exists():
                shutil.copy(disk / f"s.sqlite{end}", tmp_path / f"moved.sqlite{end}")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    # The full disk took no word of the end, and the process that claimed the rest, this one, is alive.
    monkeypatch.setattr(Claims, "silence", 1.0)
    with Store(tmp_path / "moved.sqlite") as store:  # where there is space, it goes on
        kept = store.done()
        assert before < kept
        assert run_study(load(study_file), store, executor=workers.threads).progress.runs_done == 160 - len(kept)


@pytest.mark.slow
def test_a_disk_that_is_too_full_for_a_checkpoint_is_one_line(study_file, tmp_path, run_cli, monkeypatch):
    monkeypatch.setattr("klatsch.study.batches.CHECKPOINT_EVERY", 0.0)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs to mount a small disk: run as root")
    try:
        study_file.write_text(study_file.read_text().replace("nodes = [4, 6]", "nodes = [400]"))
        refused(run_cli("run", study_file, "--store", disk / "s.sqlite"), "checkpoint", "free some space", "safe")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_one_line(study_file, tmp_path, run_cli):
    (tmp_path / "file").write_text("")
    refused(run_cli("run", study_file, "--store", tmp_path / "nowhere" / "s.sqlite"), "there is no folder")
    refused(run_cli("run", study_file, "--store", tmp_path), "is a folder")
    refused(run_cli("run", study_file, "--store", "/proc/s.sqlite"), "/proc/s.sqlite", "writable")
    refused(run_cli("reproduce", "table1", "--out", tmp_path / "file" / "results"), "for results", "--out")
    refused(run_cli("reproduce", "table1", "--out", "/proc/results"), "cannot use /proc/results")


@pytest.mark.slow
@pytest.mark.parametrize("keep", [50, 700, 5_000, 20_000])
def test_a_truncated_store_is_refused_and_left_as_it_is(keep, study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    damaged = store.read_bytes()[:keep]
    store.write_bytes(damaged)
    for command in (("run", study_file), ("results", store), ("report", store, "-o", tmp_path / "r.html")):
        refused(run_cli(*command), str(store), "damaged")
        assert store.read_bytes() == damaged


def test_a_store_of_a_newer_version_is_refused_and_not_changed(study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    with sqlite3.connect(store) as base:
        base.execute(f"PRAGMA user_version = {FORMAT + 1}")
    base.close()
    before = store.read_bytes()
    for command in (("run", study_file), ("results", store)):
        refused(run_cli(*command), "newer klatsch", f"format {FORMAT + 1}", "update")
        assert store.read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["s.sqlite", "s.toml"]


def test_a_newer_version_is_refused_though_its_number_is_still_in_the_log(study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    writer = sqlite3.connect(store)  # left open, so that the log is not folded into the file
    writer.execute(f"PRAGMA user_version = {FORMAT + 1}")
    writer.commit()
    for command in (("run", study_file), ("results", store)):
        refused(run_cli(*command), "newer klatsch")
    writer.close()


def test_settings_that_cannot_be_read_are_one_line(study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    base = sqlite3.connect(store)
    base.execute("UPDATE studies SET spec = '{\"steps\": -1}'")
    base.commit()
    refused(run_cli("report", store, "-o", tmp_path / "r.html"), "cannot read")
    base.execute("UPDATE runs SET settings = '{}', checksum = NULL")
    base.commit()
    base.close()
    refused(run_cli("results", store), "runs are damaged (number 1 has no checksum)")


def test_somebody_elses_database_is_refused(study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    store.unlink()
    with sqlite3.connect(store) as base:
        base.execute("CREATE TABLE addresses (name TEXT)")
    base.close()
    before = store.read_bytes()
    for command in (("run", study_file), ("results", store)):
        refused(run_cli(*command), "not a klatsch store")
        assert store.read_bytes() == before
    (tmp_path / "letter.sqlite").write_text("Dear reader, " * 100)
    refused(run_cli("run", study_file, "--store", tmp_path / "letter.sqlite"), "not a database", "damaged")


def test_a_store_that_was_killed_as_it_began_is_begun_again(study_file, tmp_path, run_cli):
    (tmp_path / "s.sqlite").write_bytes(b"")
    refused(run_cli("results", tmp_path / "s.sqlite"), "there is no store")
    assert run_cli("run", study_file)[0] == 0


def test_a_store_can_be_read_where_nothing_can_be_written(study_file, tmp_path, run_cli):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs to mount a disk: run as root")
    try:
        shutil.copy(tmp_path / "s.sqlite", disk / "s.sqlite")
        shutil.copy(tmp_path / "s.sqlite", disk / "torn.sqlite")
        (disk / "torn.sqlite-wal").write_bytes(b"what was not folded in yet")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused(run_cli("results", disk / "torn.sqlite"), "torn.sqlite-wal", "copy both")
        code, out, err = run_cli("results", disk / "s.sqlite")
        assert (code, err) == (0, "")
        assert "dat" in out
        refused(run_cli("run", study_file, "--store", disk / "s.sqlite"), "writable")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_the_store_is_one_file_in_wal_mode(study_file, tmp_path, run_cli):
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.sqlite", "s.toml"]
    base = sqlite3.connect(tmp_path / "s.sqlite")
    assert base.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    batches = base.execute("SELECT batch, count(DISTINCT finished), count(*) FROM runs GROUP BY batch").fetchall()
    assert [(times, runs) for _, times, runs in batches] == [(1, 2)] * 4  # a batch is one transaction
    base.close()
