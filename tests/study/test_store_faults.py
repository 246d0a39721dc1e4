"""A store that several processes share, that was killed, damaged or edited, or that another version wrote."""

import re
import signal
import sqlite3
import time

import numpy as np
import pytest

from klatsch.study import Store, execute, expand, load, parse, run_study, workers
from klatsch.study.batches import pack
from klatsch.study.execute import Claims, checkpoint
from klatsch.study.store import FORMAT
from tests.support.studies import PAPER, SMALL
from tests.support.waiting import wait_until

TEXT = 'steps = 50\nnodes = [4, 6]\nseeds = 2\nrecord = 5\nlr = [0.001, 0.01]\nrules = ["dat"]\ntopologies = ["ring"]\n'
LONG = PAPER.replace("100000", "400").replace("seeds = 1", "seeds = 2")
RUNS = 224  # of LONG, in 8 batches


def new_runs(process):
    """How many runs a process says it has done."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    return int(re.search(r"^([\d,]+) runs new", out, re.M)[1].replace(",", ""))


def asked(store, statement, *values):
    """What SQLite answers, or nothing as long as there is no such file or table."""
    try:
        base = sqlite3.connect(f"file:{store}?mode=rw", uri=True, timeout=60)
    except sqlite3.OperationalError:
        return []
    try:
        return base.execute(statement, values).fetchall()
    except sqlite3.OperationalError:
        return []
    finally:
        base.close()


def changed(store, *statements):
    base = sqlite3.connect(store)
    for statement in statements:
        base.execute(statement)
    base.commit()
    base.close()


@pytest.fixture
def store(tmp_path):
    """A small store, complete."""
    (tmp_path / "s.toml").write_text(TEXT)
    run_study(load(tmp_path / "s.toml"), tmp_path / "s.sqlite", executor=workers.threads)
    return tmp_path / "s.sqlite"


def refused(result, *words):
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("klatsch: error: ")
    for word in words:
        assert word in err


def values(store):
    with Store(store, read_only=True) as opened:
        outcomes = opened.outcomes(opened.done())
    return {key: outcome.metrics["distance"].tolist() for key, outcome in outcomes.items()}


# --- several processes ----------------------------------------------------------------------------------------------


def test_three_processes_share_the_work(tmp_path, start):
    """Each run is done once, and counted by the one that did it."""
    file = tmp_path / "s.toml"
    file.write_text(LONG)
    assert sum(new_runs(process) for process in [start("run", file) for _ in range(3)]) == RUNS
    assert [path.name for path in tmp_path.iterdir() if path != file] == ["s.sqlite"]
    assert asked(tmp_path / "s.sqlite", "SELECT count(*) FROM runs") == [(RUNS,)]
    assert asked(tmp_path / "s.sqlite", "SELECT count(*) FROM owners") == [(0,)]
    assert new_runs(start("run", file)) == 0


TOGETHER = """
import os, sys
from klatsch.study import Store
from klatsch.study.execute import Claims

for number in range(8):
    ready, go = os.pipe()
    crew = []
    for _ in range(6):
        if (pid := os.fork()) == 0:
            os.close(go)
            os.read(ready, 1)  # until the other end is closed, for all at once
            with Store(f"{number}.sqlite") as store, Claims(store) as claims:
                claims.take([], 1)
            os._exit(0)
        crew.append(pid)
    os.close(go)
    for pid in crew:
        if os.waitpid(pid, 0)[1] != 0:
            sys.exit(1)
    os.close(ready)
"""


def test_processes_that_make_a_store_together_do_not_take_it_for_damaged(tmp_path, python):
    """Each looks at a file that another is just making; several times, since it is a matter of moments."""
    done = python("-c", TOGETHER, cwd=tmp_path).done()
    assert done.returncode == 0, done.stderr


def test_what_a_killed_process_was_at_is_done_by_the_others(tmp_path, start):
    file, store = tmp_path / "s.toml", tmp_path / "s.sqlite"
    file.write_text(LONG)
    three = [start("run", file) for _ in range(3)]
    owned = "SELECT pid FROM claims JOIN owners ON owners.id = owner WHERE pid = ?"
    doomed = wait_until(lambda: [each for each in three if asked(store, owned, each.pid)], *three)[0]
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    others = sum(new_runs(process) for process in three if process is not doomed)
    done_by_the_dead = RUNS - others
    assert 0 <= done_by_the_dead < RUNS
    assert asked(store, "SELECT count(*) FROM runs") == [(RUNS,)]


def test_one_that_finds_all_taken_waits_for_the_results(tmp_path, start):
    """The first process is paused with every batch in its hands: the second one waits, and does nothing twice."""
    file, store = tmp_path / "s.toml", tmp_path / "s.sqlite"
    file.write_text(
        LONG.replace("nodes = [25, 36]", "nodes = 25").replace('"dat", ', "").replace("seeds = 2", "seeds = 1")
    )
    first = start("run", file, "--workers", 1)
    wait_until(lambda: asked(store, "SELECT * FROM claims"), first)
    first.send_signal(signal.SIGSTOP)
    second = start("run", file, "--workers", 1)
    wait_until(lambda: len(asked(store, "SELECT * FROM owners")) == 2, second)
    first.send_signal(signal.SIGCONT)
    assert (new_runs(first), new_runs(second)) == (28, 0)


def claim_elsewhere(store, cases):
    """A process on another machine, which is at all these runs."""
    store.remember(parse(SMALL))
    with store.transaction():
        store.execute("INSERT INTO owners VALUES ('far', 'another machine', 1, 7)")
        store.execute_many("INSERT INTO claims VALUES (?, ?, 'far')", [(case.key, "batch") for case in cases])


def test_a_machine_that_is_silent_is_taken_for_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(Claims, "silence", 0.3)
    cases, _ = expand(parse(SMALL))
    with Store(tmp_path / "s.sqlite") as store:
        claim_elsewhere(store, cases)
        told = []
        assert execute(cases, store, executor=workers.threads, told=lambda p: told.append(p.elsewhere)).runs_done == 8
    assert max(told) == 4  # it was waited for
    assert asked(tmp_path / "s.sqlite", "SELECT * FROM owners") == []


def test_a_machine_that_gives_signs_of_life_is_waited_for(tmp_path, monkeypatch):
    """However far its clock is off: only the number of its signs is looked at."""
    monkeypatch.setattr(Claims, "silence", 0.0)  # dead is who gives none between two looks
    cases, _ = expand(parse(SMALL))
    looks = []

    def sleep(_):
        looks.append(len(looks))
        with Store(tmp_path / "s.sqlite") as other, other.transaction():
            if len(looks) < 20:
                other.execute("UPDATE owners SET beats = beats - 1 WHERE id = 'far'")
            else:
                other.execute("DELETE FROM owners WHERE id = 'far'")

    monkeypatch.setattr(time, "sleep", sleep)
    with Store(tmp_path / "s.sqlite") as store:
        claim_elsewhere(store, cases)
        assert execute(cases, store, executor=workers.threads).runs_done == 8
    assert len(looks) == 20


def test_what_somebody_else_stored_first_is_not_counted(tmp_path):
    """One that was taken for dead, and was not."""
    cases, _ = expand(parse(SMALL))
    (batch, *_) = pack(cases, "cpu")
    outcome = workers.run_batch(batch)
    with Store(tmp_path / "s.sqlite") as store, Store(tmp_path / "s.sqlite") as other:
        assert (other.save(batch, outcome), store.save(batch, outcome)) == (2, 0)


def test_what_was_not_stored_is_stored_by_the_next_save(tmp_path, monkeypatch):
    """A save that fails after some runs takes their graph back, too."""
    (batch, *_) = pack(expand(parse(SMALL))[0], "cpu")
    outcome, seal = workers.run_batch(batch), Store._seal
    with Store(tmp_path / "s.sqlite") as store:
        monkeypatch.setattr(Store, "_seal", lambda self, number: seal(self, number) if number == 1 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.save(batch, outcome)
        monkeypatch.undo()
        assert store.save(batch, outcome) == len(batch.cases) > 1


# --- what kills leave behind ----------------------------------------------------------------------------------------


def test_leftovers_beside_a_complete_store_go_with_the_next_run(tmp_path, start):
    file, store = tmp_path / "s.toml", tmp_path / "s.sqlite"
    file.write_text(PAPER)
    process = start("run", file)
    saved = wait_until(lambda: list(tmp_path.glob("s.sqlite-*.safetensors")), process)[0]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    copy = saved.read_bytes()
    # The study changes: nobody will go on from what was in progress.
    file.write_text(PAPER.replace("100000", "50"))
    assert new_runs(start("run", file)) == 112
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.sqlite", "s.toml"]
    # Killed after a batch was stored and before its checkpoint went, or while one was written.
    ((done,),) = asked(store, "SELECT batch FROM runs LIMIT 1")
    (tmp_path / f"s.sqlite-{done}.safetensors").write_bytes(copy)
    (tmp_path / f".s.sqlite-{done}.safetensors.0123abcd").write_bytes(copy[:1000])
    assert new_runs(start("run", file)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.sqlite", "s.toml"]


def test_what_a_living_process_is_at_is_not_swept(tmp_path):
    cases, _ = expand(parse(SMALL))
    with Store(tmp_path / "s.sqlite") as mine, Store(tmp_path / "s.sqlite") as other:
        with Claims(other) as share:
            ((batch,), _) = share.take(pack(expand(parse({**SMALL, "steps": 60}))[0], "cpu"), 1)
            files = [checkpoint(other, batch), tmp_path / f".{checkpoint(other, batch).name}.0123abcd"]
            for file in files:
                file.write_bytes(b"")
            execute(cases, mine, executor=workers.threads)
            assert all(file.exists() for file in files)
        execute(cases, mine, executor=workers.threads)
        assert not any(file.exists() for file in files)


# --- checksums ------------------------------------------------------------------------------------------------------


def flip(store, value):
    """Flip one bit of a number where it lies in the file."""
    data, found = bytearray(store.read_bytes()), np.array(value, ">f8").tobytes()
    assert data.count(found) == 1
    data[data.index(found) + 6] ^= 1
    store.write_bytes(data)


def test_a_flipped_bit_in_a_value_is_found_and_the_run_done_again(store, tmp_path, run_cli):
    before = values(store)
    ((value,),) = asked(store, "SELECT value FROM metrics WHERE run = 3 AND name = 'distance' AND step = 50")
    flip(store, value)
    assert asked(store, "SELECT value FROM metrics WHERE run = 3 AND name = 'distance' AND step = 50") != [(value,)]
    damaged = store.read_bytes()
    for command in (
        ("results", store),
        ("results", store, "--all"),
        ("results", store, "--csv", tmp_path / "r.csv"),
        ("report", store, "-o", tmp_path / "r.html"),
    ):
        refused(run_cli(*command), str(store), "1 of 8 runs is damaged", "number 3", "checksum", "run the study again")
    assert store.read_bytes() == damaged
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.sqlite", "s.toml"]
    code, out, err = run_cli("run", tmp_path / "s.toml")
    assert (code, err) == (0, "")
    assert "1 run new (1 was damaged), results in" in out
    after = values(store)
    assert after.keys() == before.keys()
    for key in before:  # alone in its batch, not beside another learning rate: sums may round differently
        np.testing.assert_allclose(after[key], before[key], rtol=1e-9)
    assert run_cli("results", store)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE runs SET settings = replace(settings, '0.001', '0.002') WHERE id = 3",
        "UPDATE runs SET lr = 7 WHERE id = 3",
        "UPDATE runs SET diverged = 1 WHERE id = 3",
        "UPDATE runs SET finished = '1999-01-01T00:00:00+00:00' WHERE id = 3",
        "UPDATE metrics SET step = 49 WHERE run = 3 AND step = 50",
        "UPDATE metrics SET name = 'error' WHERE run = 3 AND name = 'Gamma'",
        "UPDATE runs SET exchange = replace(exchange, '50', '51') WHERE id = 3",
    ],
)
def test_a_checksum_covers_all_that_is_stored_of_a_run(edit, store, run_cli):
    changed(store, edit)
    refused(run_cli("results", store), "1 of 8 runs is damaged (number 3 does not match its checksum)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit, flaw",
    [
        ("UPDATE runs SET checksum = NULL WHERE id = 3", "1 of 8 runs is damaged (number 3 has no checksum)"),
        ("UPDATE graphs SET links = replace(links, '2', '0')", "damaged (number 1 lacks the links of its graph)"),
    ],
)
def test_what_is_not_whole_is_done_again(edit, flaw, store, tmp_path, run_cli):
    changed(store, edit)
    refused(run_cli("results", store), flaw)
    assert "damaged)" in run_cli("run", tmp_path / "s.toml")[1]
    assert run_cli("results", store, "--gradient", "0.1")[0] == 0


def test_a_checksum_covers_the_environment(store, run_cli):
    changed(store, "UPDATE runs SET environment = replace(environment, 'torch', 'tensor')")
    refused(run_cli("results", store), "8 of 8 runs are damaged (number 1 does not match its checksum)")


# --- other versions -------------------------------------------------------------------------------------------------


def test_an_sqlite_that_is_too_old_is_told(tmp_path, monkeypatch, run_cli):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    (tmp_path / "s.toml").write_text(TEXT)
    words = "klatsch needs SQLite 3.37 or newer, and this Python has 3.34.1; use another Python"
    refused(run_cli("run", tmp_path / "s.toml"), words)
    assert [file.name for file in tmp_path.iterdir()] == ["s.toml"]


def test_a_store_of_another_format_is_refused_and_left_alone(store, tmp_path, run_cli):
    changed(store, f"PRAGMA user_version = {FORMAT - 1}")
    before = store.read_bytes()
    for command in (("results", store), ("run", tmp_path / "s.toml")):
        refused(run_cli(*command), f"older klatsch (format {FORMAT - 1}", "run the study into a new store")
    assert store.read_bytes() == before
