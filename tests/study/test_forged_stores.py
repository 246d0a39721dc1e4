"""A store from a stranger: whatever it holds, nothing of it is imported, called or drawn as a command.

Each store here is forged by one who knows the format, so that its checksums are right.
"""

import csv
import json
import os
import re
import sqlite3
from pathlib import Path

import pytest

from klatsch.study import Store, parse, run_study, workers

EVIL = """from pathlib import Path

Path("{marker}").touch()


def part(*args, **options):
    Path("{marker}").touch()
    raise SystemExit(0)
"""
STUDY = {
    "name": "s",
    "steps": 50,
    "nodes": 4,
    "seeds": 1,
    "record": 3,
    "lr": [0.001, 0.01],
    "rules": ["dat"],
    "topologies": ["ring"],
    "problem": {"dim": 5},
}
KNOWN = {"source": "0" * 64, "headline": ["distance", "how far"], "large_is_good": []}
OWN = {"rule": "evil.py:part", "topology": "evil.py:part", "problem": "evil.py:part"}
SHOWN = {
    "results": (),
    "all": ("--all",),
    "json": ("--json",),
    "csv": ("--csv", "r.csv", "--curves", "--gradient", "0.1"),
    "clock": ("--gradient", "0.1", "--network", "wan"),
    "plot": ("--plot", "r.png", "--gradient", "0.1", "--against", "seconds"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a store, and a file whose execution leaves a mark."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text(EVIL.format(marker=tmp_path / "marker"))
    run_study(parse(STUDY), tmp_path / "s.sqlite", executor=workers.threads)
    return tmp_path


def forge(settings=None, study=None, sealed=True, **columns):
    """Change what the store says of its runs and studies; dictionaries in it are merged, and checksums are right."""
    base = sqlite3.connect("s.sqlite")
    for number, text in base.execute("SELECT id, settings FROM runs").fetchall():
        changed = {**json.loads(text), **(settings or {})}
        base.execute("UPDATE runs SET settings = ? WHERE id = ?", [json.dumps(changed), number])
        for name, value in columns.items():
            base.execute(f"UPDATE runs SET {name} = ? WHERE id = ?", [value, number])
    for name, text in base.execute("SELECT name, spec FROM studies").fetchall():
        changed = {**json.loads(text), **(study or {})}
        base.execute("UPDATE studies SET spec = ? WHERE name = ?", [json.dumps(changed), name])
    if not sealed:
        base.execute("UPDATE runs SET checksum = NULL")
    base.commit()
    base.close()
    if sealed:
        with Store("s.sqlite") as store, store.transaction():
            for (number,) in store.execute("SELECT id FROM runs"):
                store._seal(number)


def in_spec(part):
    """The study with a part that the store alone names."""
    name = f"{Path('evil.py').absolute()}:part"
    if part == "wire":
        return {"topologies": [{"name": "ring", "wire": name}]}
    return {part: {"name": name}} if part == "problem" else {{"rule": "rules", "topology": "topologies"}[part]: [name]}


def told(result):
    """Shown, or refused in one line: never a traceback."""
    code, out, err = result
    assert code == 0 or (code, out, err.count("\n")) == (2, "", 1), err
    return code, out, err


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rule", "topology", "problem", "wire"])
@pytest.mark.parametrize("sources", ["none", "known", "no checksum"])
def test_a_part_that_a_run_names_is_not_executed(part, sources, place, run_cli):
    name = f"{place / 'evil.py'}:part"
    named = {"topology_options": {"wire": name}} if part == "wire" else {part: name}
    forge({**named, "sources": {part: KNOWN} if sources == "known" else {}}, sealed=sources != "no checksum")
    for options in SHOWN.values() if sources == "known" else (SHOWN["all"], SHOWN["csv"]):
        code, out, err = told(run_cli("results", "s.sqlite", *options))
        unknown = part == "wire" and "--plot" in options  # seconds, of which bytes the file would have to say
        assert code == (0 if sources == "known" and not unknown else 2), (options, err)
        if sources == "known" and "--csv" not in options and part == "rule":
            assert "evil.py:part" in out + err or "--plot" in options  # as a text
    told(run_cli("report", "s.sqlite"))
    assert not (place / "marker").exists()


@pytest.mark.parametrize("part", ["rule", "topology", "problem", "wire"])
@pytest.mark.parametrize("known", [False, True])
def test_a_part_that_a_study_names_is_not_executed(part, known, place, run_cli):
    names = in_spec(part)
    sources = {f"{place / 'evil.py'}:part": KNOWN} if known else {}
    forge(study={**names, "sources": sources, "screen": {"steps": 10}})
    assert told(run_cli("report", "s.sqlite"))[0] == (0 if known else 2)
    assert told(run_cli("results", "s.sqlite"))[0] == (0 if known else 2)
    assert not (place / "marker").exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rule", "topology", "problem"])
def test_a_study_runs_its_own_parts_into_a_forged_store(part, place, run_cli, in_threads, monkeypatch):
    """Checkpoints beside the store are looked at when a study ends, by the studies that the store names."""
    name = f"{place / 'evil.py'}:part"
    named = {"topology_options": {"wire": name}} if part == "wire" else {part: name}
    forge({**named, "sources": {}}, {**in_spec(part), "sources": {}, "name": "forged"})
    base = sqlite3.connect("s.sqlite")
    base.execute("UPDATE studies SET name = 'forged'")
    base.commit()
    base.close()
    left = place / f"s.sqlite-{'0' * 32}.safetensors"
    left.touch()
    Path("s.toml").write_text('steps = 9\nnodes = 4\nseeds = 1\nlr = 0.1\nrules = ["dsgd"]\ntopologies = ["ring"]\n')
    told(run_cli("run", "s.toml"))
    small = {**STUDY, "name": "fig1-quick", "problem": {"dim": 5, "noise": 1.0, "heterogeneity": 1.0}}
    monkeypatch.setattr("klatsch.study.spec.study_of", lambda *_: parse(small))
    told(run_cli("reproduce", "fig1", "--store", "s.sqlite", "--out", "paper"))
    assert not (place / "marker").exists()


def test_a_study_of_a_stranger_with_an_own_topology_and_no_run(place, run_cli):
    base = sqlite3.connect("s.sqlite")
    for table in ("metrics", "runs"):
        base.execute(f"DELETE FROM {table}")
    base.commit()
    base.close()
    forge(study={**in_spec("topology"), "sources": {}})
    for command in ("results", "report"):
        code, _, err = told(run_cli(command, "s.sqlite"))
        assert code == 2, err
    assert not (place / "marker").exists()


HOSTILE = {
    "a shell command as nodes": {"nodes": "id > marker"},
    "nodes without end": {"nodes": 10**12},
    "rounds without end": {"steps": 10**15},
    "a size that is no number": {"problem_options": {"dim": [1] * 9}},
    "a large number": {"problem_options": {"dim": 10**400}},
    "a device as a network": {"topology_options": {"meets": "pairwise 0.1 over /dev/zero"}},
    "no options": {"rule_options": {}},
    "a list of rules": {"rule": ["dat"]},
    "an unknown key": {"command": "id > marker"},
    "an escape sequence": {"rule": "\x1b]0;owned\x07dat"},
    "a line that turns around": {"topology": "ring\u202e"},
    "not a dictionary": {"sources": [1]},
    "an odd channel": {"topology_options": {"wire": "float128", "every": -1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_absurd_settings_are_one_line_or_plain_text(case, place, run_cli):
    forge(HOSTILE[case])
    for options in (SHOWN["all"], SHOWN["csv"], SHOWN["plot"]):
        _, out, err = told(run_cli("results", "s.sqlite", *options))
        assert "\x1b]" not in out + err
        assert "\u202e" not in out + err
    told(run_cli("report", "s.sqlite"))
    assert not (place / "marker").exists()


SPECS = {
    "a grid without end": {"lr": [1e-9 * k for k in range(1, 1000)], "seeds": list(range(1000))},
    "a problem that fills memory": {"problem": {"name": "least-squares", "dim": 10**6}},
    "nodes without end": {"nodes": [10**12]},
    "batches of nothing": {"problem": {"name": "fashion-mnist", "batch": 0}, "steps": None, "epochs": 3},
    "a figure that it is not": {"name": "s"},
    "a home of nobody": {"rules": ["~nobody-at-all/x.py:part"]},
    "sources that are none": {"sources": 7},
    "an unknown graph": {"topologies": ["moon"]},
    "what is left out": {"left_out": [[{}, 3]], "refused": [[]]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPECS)
def test_absurd_studies_are_one_line_or_plain_text(case, place, run_cli):
    forge(study=SPECS[case])
    base = sqlite3.connect("s.sqlite")
    base.execute("UPDATE studies SET kind = ?", ["fig2" if case == "a figure that it is not" else "study"])
    base.commit()
    base.close()
    for command in ("results", "report"):
        told(run_cli(command, "s.sqlite"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "columns",
    [
        {"engine": "\x1b[31m"},
        {"exchange": '{"numbers": 5, "messages": [[true, 1, [7]]]}'},
        {"exchange": '{"numbers": 1e400}'},
        {"exchange": "[]"},
        {"exchange": '{"numbers": 5, "call": "os.system"}'},
    ],
)
def test_absurd_facts_are_one_line(columns, place, run_cli):
    forge(**columns)
    for options in (SHOWN["results"], SHOWN["csv"]):
        code, _, err = told(run_cli("results", "s.sqlite", *options))
        assert code == 2, err


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE runs SET seconds = 'much'",
        "UPDATE runs SET diverged = 'yes'",
        "UPDATE runs SET finished = x'00'",
        "UPDATE metrics SET value = 'much' WHERE run = 2",
        "UPDATE metrics SET value = x'00ff' WHERE run = 2 AND step = 50",
    ],
)
def test_values_of_another_type_are_damage(edit, place, run_cli):
    """SQLite refuses them, and finds them when it is tricked: tables are STRICT again when the store is read."""
    base = sqlite3.connect("s.sqlite")
    with pytest.raises(sqlite3.IntegrityError, match="cannot store"):
        base.execute(edit)
    base.close()
    strict = dict(schema("SELECT name, sql FROM sqlite_master WHERE sql LIKE '%STRICT%'"))
    for name, sql in strict.items():
        schema("UPDATE sqlite_master SET sql = ? WHERE name = ?", re.sub(" STRICT,?", "", sql), name)
    schema(edit)
    for options in SHOWN.values():
        code, _, err = told(run_cli("results", "s.sqlite", *options))
        assert code == 2
        assert "is not as klatsch makes it" in err
    for name, sql in strict.items():
        schema("UPDATE sqlite_master SET sql = ? WHERE name = ?", sql, name)
    for options in SHOWN.values():
        code, _, err = told(run_cli("results", "s.sqlite", *options))
        assert code == 2
        assert "damaged or was edited" in err


def schema(statement, *values):
    """Run a statement as one who may change the schema, too."""
    base = sqlite3.connect("s.sqlite")
    base.execute("PRAGMA writable_schema = ON")
    rows = base.execute(statement, values).fetchall()
    base.commit()
    base.close()
    return rows


def test_links_of_a_graph_are_checked(place, run_cli):
    import hashlib

    for links in (
        "5",
        "[[null, null]]",
        "[[[1e400], [0]]]",
        "[]",
        "[[[0], [4]]]",
        "[[[0, 1], [1]]]",
        '[["os", "system"]]',
        "[[[0], [-1]]]",
    ):
        digest = hashlib.sha256(links.encode()).hexdigest()
        base = sqlite3.connect("s.sqlite")
        base.execute("INSERT INTO graphs VALUES (?, ?)", [digest, links])
        base.commit()
        base.close()
        forge(graph=digest)
        code, _, err = told(run_cli("results", "s.sqlite", "--gradient", "0.1"))
        assert code == 2, (links, err)


@pytest.mark.slow
def test_names_are_texts_in_tables_and_pages(place, run_cli):
    """Markup of rich, of HTML and of matplotlib is shown, not obeyed."""
    markup = "[red]x[/red] <script>alert(1)</script> $\\frac{1}$"
    forge({"problem_options": {"dim": 5, "note": markup}, "rule_options": {"lr": 0.01, "note": markup}})
    run_study(parse({**STUDY, "problem": {"dim": 6}}), place / "s.sqlite", executor=workers.threads)
    shown = run_cli("results", "s.sqlite", "--all")[1]
    assert "[red]x[/red]" in shown
    code, _, err = run_cli("results", "s.sqlite", "--where", f"note={markup}", "--plot", "r.svg")
    assert code == 0, err
    assert "<script>" not in Path("r.svg").read_text()
    forge(study={"name": f"<script>{STUDY['name']}", "rules": [{"name": "dat", "note": markup}]})
    told(run_cli("report", "s.sqlite"))
    if Path("report.html").exists():
        assert "<script>alert" not in Path("report.html").read_text()


@pytest.mark.parametrize("text", ["=1+1", "+x", "-x", "@SUM(A1)"])
def test_cells_that_a_spreadsheet_would_compute_are_quoted(text, place, run_cli):
    forge({"problem_options": {"dim": 5, "note": text, "offset": -2.5}})
    assert run_cli("results", "s.sqlite", "--csv", "r.csv")[0] == 0
    with Path("r.csv").open() as file:
        for line in csv.DictReader(file):
            assert line["note"] == f"'{text}"
            assert line["offset"] == "-2.5"


@pytest.mark.slow
def test_a_store_writes_nowhere_but_beside_itself(place, run_cli):
    forge({"topology": f"{place}/../elsewhere.py:part", "sources": {"topology": KNOWN}}, batch="../../elsewhere")
    before = sorted(os.listdir(place.parent))
    for options in SHOWN.values():
        told(run_cli("results", "s.sqlite", *options))
    told(run_cli("report", "s.sqlite"))
    assert sorted(os.listdir(place.parent)) == before
