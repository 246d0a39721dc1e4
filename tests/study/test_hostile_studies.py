"""Studies and stores as an attacker, or bad luck, would have them: one line, exit code 2, nothing written."""

import math
import os
import sqlite3
from dataclasses import replace

import pytest

from klatsch.study import Store, expand, load, parse, run_study, spec, workers
from klatsch.study.batches import pack, quick
from tests.support.cluster import impatient

TEXT = 'steps = 50\nnodes = [4, 6]\nseeds = 2\nrecord = 5\nlr = [0.001, 0.01]\nrules = ["dat"]\ntopologies = ["ring"]\n'
HEAD = 'steps = 50\nrules = ["dat"]\ntopologies = ["ring"]\n'
SMALL = {"steps": 50, "nodes": 4, "rules": ["dat"], "topologies": ["ring"]}


def refused(result, *words):
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("klatsch: error: ")
    assert len(err) < 1000
    for word in words:
        assert word in err, err


@pytest.fixture
def study_file(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(TEXT)
    return file


# --- refused before anything is written -----------------------------------------------------------------------------

REFUSED = {
    "dtype": (["--dtype", "float16"], "dtype = 'float16'"),
    "no worker": (["--workers", "0"], "--workers 0"),
    "too many workers": (["--workers", "100000000"], "--workers 100000000: give a number from 1 to 1,024"),
    "device": (["--device", "tpu"], "device = 'tpu'"),
    "backend that is not supported": (["--device", "mps"], "device = 'mps'"),
    "device and workers": (["--device", "cuda", "--workers", "2"], "leave it out"),
    "epochs": (["--epochs", "3"], "epochs = 3"),
    "store in no folder": (["--store", "nowhere/s.sqlite"], "there is no folder"),
    "store that is a folder": (["--store", "."], "is a folder"),
    "store that cannot be made": (["--store", "/proc/s.sqlite"], "make file and folder writable"),
    "device as a store": (["--store", "/dev/zero"], "not a plain file"),
    "text as a store": (["--store", "letter.txt"], "not a database"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_reproduction_has_written_nothing(case, tmp_path, run_cli, monkeypatch):
    options, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("Dear reader, " * 100)
    refused(run_cli("reproduce", "fig1", "--out", "results/paper", *options), words)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_reproduction_without_its_data_has_written_nothing(tmp_path, run_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("KLATSCH_DATA", str(tmp_path / "empty"))
    refused(run_cli("reproduce", "fig2", "--out", "results"), "KLATSCH_DATA")
    refused(run_cli("reproduce", "fig2", "--out", "results", "--data", "nowhere"), "nowhere")
    refused(run_cli("reproduce", "table1", "--out", "results", "--epochs", "3"), "table1 trains nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("command", [["reproduce", "fig1", "--out", "results"], ["run", "s.toml"]])
def test_a_cluster_that_does_not_answer_is_found_out_first(command, study_file, tmp_path, run_cli, monkeypatch):
    impatient(monkeypatch)
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli(*command, "--dask", "tcp://127.0.0.1:1")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("klatsch: error: no Dask scheduler answers at tcp://127.0.0.1:1")
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:77", "meta", "\n"])
def test_a_study_with_a_wrong_device_has_written_nothing(device, study_file, tmp_path, run_cli):
    refused(run_cli("run", study_file, "--device", device), f"device = {device!r} cannot be used", "choose cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]
    with pytest.raises(ValueError, match="cannot be used"):
        run_study(load(study_file).model_copy(update={"device": device}), tmp_path / "s.sqlite")
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


def test_a_study_without_its_data_has_written_nothing(tmp_path, run_cli, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("KLATSCH_DATA", str(tmp_path / "empty"))
    file = tmp_path / "s.toml"
    file.write_text('epochs = 1\nnodes = 4\nrules = ["dat"]\ntopologies = ["ring"]\nproblem = "fashion-mnist"\n')
    refused(run_cli("run", file), "KLATSCH_DATA")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "s.toml"]


def test_what_is_done_can_be_shown_without_the_device(study_file, tmp_path, run_cli):
    run_study(load(study_file), tmp_path / "s.sqlite", executor=workers.threads)
    code, out, _ = run_cli("run", study_file, "--device", "cuda:77")
    assert code == 0
    assert "0 runs new" in out


# --- too large, too deep, without end -------------------------------------------------------------------------------


@pytest.fixture
def never_expanded(monkeypatch):
    """Nothing may be written out that is too large: it is counted."""
    usual = spec.product

    def product(*axes):
        assert math.prod(len(axis) for axis in axes) <= 1000
        return usual(*axes)

    monkeypatch.setattr(spec, "product", product)


@pytest.mark.slow
def test_long_lists_are_read_once(never_expanded):
    """An entry is looked up, not compared with all before it: 10,000 tables and 300,000 sizes are a moment."""
    compared = 0

    class Rate(float):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return float(self) == float(other)

        __hash__ = float.__hash__

    many = 5_000
    assert spec.several([Rate(k) for k in range(many)] * 2) == list(range(many))
    assert compared < 10 * many
    with pytest.raises(ValueError, match=r"a grid of 300,000 runs; the limit is 100,000"):
        parse({**SMALL, "nodes": list(range(1, 300_001)), "lr": 0.1, "seeds": 1})
    tables = [{"name": "dat", "momentum": k / 2e4} for k in range(10_000)]
    assert len(spec.several(tables + tables)) == 10_000


def test_equal_entries_are_still_one():
    assert spec.several([1, 1.0, "a", "a", {"k": 2}, {"k": 2}, [1], [1]]) == [1.0, "a", {"k": 2}, [1]]
    assert parse({**SMALL, "nodes": [9, 4, 9], "lr": [0.1, 0.2, 0.1]}).nodes == (9, 4)


TOO_LARGE = {
    "cases": ({"nodes": list(range(1, 301)), "seeds": 300, "lr": [k / 1e3 for k in range(1, 101)]}, "9,000,000 runs"),
    "rates": ({"lr": [k / 1e6 for k in range(1, 100_001)], "seeds": 2}, "a grid of 200,000 runs"),
    "seeds": ({"seeds": 10**12}, "seeds = 1000000000000; give a whole number from 1 to 100000"),
    "a problem's options": (
        {"problem": {"noise": list(range(1, 2001)), "heterogeneity": list(range(1, 2001))}},
        "a grid of 4,000,000 settings; the limit is 1,000",
    ),
    "a rule's options": (
        {"rules": [{"name": "dat", "momentum": [k / 1e3 for k in range(999)], "lr": [k + 1 for k in range(1000)]}]},
        "a grid of 999,000 settings",
    ),
}


@pytest.mark.parametrize("case", TOO_LARGE)
@pytest.mark.slow
def test_a_grid_without_end_is_counted_and_refused(case, never_expanded):
    changes, words = TOO_LARGE[case]
    with pytest.raises(ValueError, match=words):
        parse({**SMALL, **changes})


def test_what_has_no_end_is_no_study_and_no_store(study_file, tmp_path, start):
    def klatsch(*arguments):
        """A process of its own, which must end by itself; no terminal, and no writer at the other end of a pipe."""
        done = start(*arguments).done()
        return done.returncode, done.stdout, done.stderr

    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        refused(klatsch("run", path), f"{path} is not a plain file, but a device or a pipe")
        refused(klatsch("run", study_file, "--store", path), f"{path} is not a plain file")
        refused(klatsch("results", path), f"{path} is not a plain file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "s.toml"]


def test_a_study_of_many_megabytes_is_not_read(tmp_path, run_cli):
    file = tmp_path / "s.toml"
    file.write_text(f"{HEAD}nodes = [{'4, ' * 3_000_000}]\n")
    refused(run_cli("run", file), f"{file} is larger than 1 MiB")


def nested(depth, opening="[", closing="]"):
    return opening * depth + closing * depth


DEEP = {
    "lists": f"nodes = {nested(5_000)}\n",
    "tables": f"problem = {nested(5_000, '{ a = ', '}')}\n",
    "keys": f"nodes = 4\n{'.'.join('a' * 5_000)} = 1\n",
    "not quite so deep": f"nodes = {nested(300)}\n",
    "an option": f"nodes = 4\nproblem = {{ noise = {nested(200)} }}\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DEEP)
def test_a_study_that_is_nested_deeply_is_one_line(case, tmp_path, run_cli):
    file = tmp_path / "s.toml"
    file.write_text(HEAD + DEEP[case])
    refused(run_cli("run", file), str(file))


def test_json_that_is_nested_deeply_is_one_line(study_file, tmp_path, run_cli):
    store, deep = tmp_path / "s.sqlite", nested(50_000)
    run_study(load(study_file), store, executor=workers.threads)
    whole = store.read_bytes()
    for edit in (
        "UPDATE runs SET settings = ?, checksum = NULL",
        "UPDATE runs SET environment = ?",
        "UPDATE studies SET spec = ?",
    ):
        store.write_bytes(whole)
        changed(store, edit, deep)
        refused(run_cli("report", store, "-o", tmp_path / "r.html"), str(store))


def test_a_checkpoint_whose_header_is_nested_deeply_is_damaged(tmp_path):
    import torch
    from safetensors.torch import save_file

    from klatsch import sealed

    save_file({"w": torch.zeros(1)}, tmp_path / "c.safetensors", metadata={"klatsch": nested(50_000)})
    with pytest.raises(sealed.CheckpointError, match="damaged or not a checkpoint"):
        sealed.read(tmp_path / "c.safetensors", "klatsch simulation 1")


# --- edited stores --------------------------------------------------------------------------------------------------


def changed(store, statement, *values):
    base = sqlite3.connect(store)
    base.execute(statement, values)
    base.commit()
    base.close()


def sealed_again(path):
    """Give every run of an edited store the checksum that it should have."""
    with Store(path) as store, store.transaction():
        for (number,) in store.execute("SELECT id FROM runs"):
            store._seal(number)


EDITS = {
    "no metrics": "DELETE FROM metrics WHERE run = 3",
    "no last metrics": "DELETE FROM metrics WHERE run = 3 AND step = 50",
    "one metric less": "DELETE FROM metrics WHERE run = 3 AND name = 'Gamma' AND step < 50",
    "no environment": "UPDATE runs SET environment = 'no JSON' WHERE id = 3",
    "another environment": "UPDATE runs SET environment = '[1, 2]' WHERE id = 3",
    "an environment without a processor": "UPDATE runs SET environment = '{}' WHERE id = 3",
}


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.slow
def test_an_edited_run_is_one_line_and_is_done_again(edit, sealed, study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    run_study(load(study_file), store, executor=workers.threads)
    changed(store, EDITS[edit])
    if not sealed:  # by one who can compute a checksum, too
        sealed_again(store)
    for command in (
        ("results", store),
        ("results", store, "--all"),
        ("results", store, "--csv", tmp_path / "r.csv", "--curves"),
        ("report", store, "-o", tmp_path / "r.html"),
    ):
        refused(run_cli(*command), str(store), "of 8 runs", "damaged", "run the study again")
    code, out, err = run_cli("run", study_file)
    assert (code, err) == (0, "")
    assert "damaged)" in out
    assert run_cli("results", store, "--all")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        ("trigger", "CREATE TRIGGER evil AFTER INSERT ON runs BEGIN DELETE FROM metrics; END"),
        ("trigger", "CREATE TRIGGER evil AFTER INSERT ON owners BEGIN DELETE FROM runs; END"),
        ("view", "CREATE VIEW evil AS SELECT * FROM runs"),
        ("table", "CREATE VIRTUAL TABLE evil USING fts5(text)"),
    ],
)
def test_what_acts_by_itself_in_a_store_is_refused_and_not_run(kind, statement, study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    run_study(load(study_file), store, executor=workers.threads)
    changed(store, statement)
    before = store.read_bytes()
    study_file.write_text(TEXT.replace("seeds = 2", "seeds = 3"))
    for command in (("run", study_file), ("results", store), ("report", store, "-o", tmp_path / "r.html")):
        refused(run_cli(*command), f"holds a {kind} 'evil' that klatsch did not make", f"DROP {kind.upper()}")
        assert store.read_bytes() == before
    changed(store, f"DROP {kind} evil")
    assert run_cli("run", study_file)[0] == 0


def test_a_table_and_an_index_of_ones_own_may_stay(study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    run_study(load(study_file), store, executor=workers.threads)
    changed(store, "CREATE TABLE notes (text TEXT)")
    changed(store, "CREATE INDEX quick ON runs (rule)")
    study_file.write_text(TEXT.replace("seeds = 2", "seeds = 3"))
    assert "4 runs new" in run_cli("run", study_file)[1]


@pytest.mark.slow
@pytest.mark.parametrize("table", ["runs", "metrics", "studies", "owners", "claims", "graphs"])
def test_a_table_that_is_missing_is_damage(table, study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    run_study(load(study_file), store, executor=workers.threads)
    changed(store, f"DROP TABLE {table}")
    for command in (("run", study_file), ("results", store)):
        refused(run_cli(*command), f"its table '{table}' is missing", "damaged or was edited", "restore a copy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE runs SET settings = CAST(x'ff00ff' AS TEXT)",
        "UPDATE runs SET key = CAST(x'ff00ff' AS TEXT) WHERE id = 3",
        "UPDATE runs SET environment = CAST(x'ff00ff' AS TEXT)",
        "UPDATE studies SET spec = CAST(x'ff00ff' AS TEXT)",
        "ALTER TABLE runs DROP COLUMN seconds",
    ],
)
def test_damage_is_called_damage(edit, study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    run_study(load(study_file), store, executor=workers.threads)
    changed(store, edit)
    refused(run_cli("report", store, "-o", tmp_path / "r.html"), str(store), "damaged or was edited", "a copy")


def test_a_schema_that_is_no_text_is_called_damage(study_file, tmp_path, run_cli):
    store = tmp_path / "s.sqlite"
    run_study(load(study_file), store, executor=workers.threads)
    store.write_bytes(store.read_bytes().replace(b"CREATE TABLE metrics", b"CREATE \xff\xfe\xfd\xff\xfe metrics"))
    for command in (("run", study_file), ("results", store)):
        refused(run_cli(*command), str(store), "damaged or was edited")


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_name_is_one_line(tmp_path, run_cli):
    file = tmp_path / "s.toml"
    file.write_text(f'{HEAD}nodes = 4\nname = "two\\nlines"\n')
    refused(run_cli("run", file), r"'two\nlines' cannot be printed; give one line of text")


def test_a_file_name_of_two_lines_is_shown_in_one(tmp_path, run_cli):
    refused(run_cli("run", tmp_path / "two\nlines\x1b[31m.toml"), r"there is no file", r"two\nlines\x1b[31m.toml")
    refused(run_cli("results", tmp_path / "two\nlines.sqlite"), r"two\nlines.sqlite")


def test_several_mistakes_are_counted_as_such(tmp_path, run_cli):
    file = tmp_path / "s.toml"
    file.write_text("stpes = 3\nnodes = 4\n")
    refused(run_cli("run", file), "unknown key 'stpes'", "; that is the first of 2 mistakes\n")


# --- a problem of somebody's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", ["GeneratorExit", "SystemExit(3)", "BaseException('a\\nb')", "RecursionError"])
@pytest.mark.parametrize("where", ["file", "function", "property", "gradient"])
def test_a_source_that_raises_anything_is_one_line(where, raised, tmp_path, run_cli):
    file = tmp_path / "mine.py"
    body = {place: f"raise {raised}" if place == where else "pass" for place in ("file", "function", "property")}
    gradient = f"raise {raised}" if where == "gradient" else "return x"
    file.write_text(
        "import torch\nfrom klatsch import problems\n"
        "class Mine(problems.Problem):\n"
        "    dim = 3\n"
        "    @property\n"
        f"    def nodes(self):\n        {body['property']}\n        return 4\n"
        "    def start(self):\n        return torch.zeros(3)\n"
        f"    def grad(self, x, t, nodes=None):\n        {gradient}\n"
        "    def metrics(self, x):\n        return {}\n"
        f"def make():\n    {body['function']}\n    return Mine()\n"
        f"{body['file']}\n"
    )
    refused(run_cli("probe", f"{file}:make"), str(file), raised.split("(")[0], "fix it and rerun")


# --- quick studies --------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch):
    """What was opened to run batches."""
    found, threads, processes = [], workers.threads, workers.processes
    monkeypatch.setattr(workers, "threads", lambda count=None: (found.append("threads"), threads(count))[1])
    monkeypatch.setattr(workers, "processes", lambda count=None: (found.append("processes"), processes(count))[1])
    return found


@pytest.mark.processes
def test_a_study_of_seconds_runs_in_the_driver(study_file, tmp_path, run_cli, opened):
    for options in ((), ("--workers", 1)):
        store = tmp_path / f"{len(options)}.sqlite"
        assert run_cli("run", study_file, "--store", store, *options)[0] == 0
    assert opened == ["threads", "processes"]
    tables = []
    for name in ("0", "2"):
        base = sqlite3.connect(tmp_path / f"{name}.sqlite")
        tables.append(
            base.execute("SELECT key, name, step, value FROM metrics JOIN runs ON runs.id = run ORDER BY 1, 2, 3")
        )
        tables[-1] = tables[-1].fetchall()
        base.close()
    assert len(tables[0]) > 100
    assert tables[0] == tables[1]  # the same operations, on the same machine: to the last bit


LONGER = {
    "rounds": {"steps": 20_001},
    "gradients": {"steps": 1_000, "nodes": 64},
    "parameters": {"problem_options": {"dim": 5_000}},
    "images": {"problem": "fashion-mnist"},
}


@pytest.mark.parametrize("case", LONGER)
def test_a_longer_one_runs_in_processes(case):
    short, _ = expand(parse(SMALL))
    assert quick(pack(short, "cpu"))
    assert not quick(pack([replace(each, **LONGER[case]) for each in short], "cpu"))


def test_one_of_many_batches_runs_in_processes():
    assert not quick(pack(expand(parse({**SMALL, "steps": 2, "seeds": 70}))[0], "cpu"))
