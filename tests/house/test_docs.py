"""What the documents show is true: code runs, printed output is what comes out, commands work."""

import contextlib
import inspect
import io
import lzma
import re
import shlex
from pathlib import Path

import pytest

from klatsch import optim
from klatsch.study import expand, load
from tests.cli.test_run import small_demo
from tests.support.machine import DATA
from tests.support.on_ranks import assert_same_as_in

pytestmark = [pytest.mark.documents, pytest.mark.usefixtures("in_threads")]

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SIMULATION, STUDIES, OWN = (ROOT / "docs" / f"{name}.md" for name in ("simulation", "studies", "own"))


def blocks_of(path, kind="python"):
    return re.findall(rf"```{kind}\n(.*?)```", path.read_text(), re.S)


TEN_LINES = blocks_of(SIMULATION)[0]
BLOCKS = [(path, block) for path in DOCUMENTS if path != OWN for block in blocks_of(path) if block != TEN_LINES]


def commands_of(path):
    return [command.strip() for command in re.findall(r"^ {4}(?:\.venv/bin/)?klatsch (.+)$", path.read_text(), re.M)]


def paragraphs_of(path):
    """Commands that stand together: one may need what the one before it wrote."""
    blocks = re.findall(r"(?:^ {4}(?:\.venv/bin/)?klatsch .+\n)+", path.read_text(), re.M)
    return [re.findall(r"klatsch (.+)", block) for block in blocks]


COMMANDS = [(path, commands) for path in DOCUMENTS if path not in (STUDIES, OWN) for commands in paragraphs_of(path)]


def assert_works(command, run_cli):
    code, out, err = run_cli(*shlex.split(command))
    assert (code, re.sub(r"drawn to .+\n", "", err)) == (0, ""), command
    assert out


def printed_by(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "document", "exec"), {})
    return out.getvalue()


@pytest.mark.parametrize("path, code", BLOCKS, ids=[f"{path.name}-{k}" for k, (path, _) in enumerate(BLOCKS)])
def test_code_runs(path, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed_by(code)


def test_the_ten_lines_print_what_is_shown():
    assert len(TEN_LINES.splitlines()) <= 10
    assert printed_by(TEN_LINES) == blocks_of(SIMULATION, "text")[0]


def test_the_optimizers_have_the_defaults_that_are_shown():
    rows = re.findall(r"^\| `klatsch\.optim\.(\w+)(\(params, .*\))` ", (ROOT / "docs" / "ranks.md").read_text(), re.M)
    named = {name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, optim.Named)}
    assert {name for name, _ in rows} == named - {"Named"}
    for name, shown in rows:
        assert shown == str(inspect.signature(vars(optim)[name])).replace(" *,", "").replace(", **options", "").replace(
            "'", '"'
        )


@pytest.mark.parametrize("path, commands", COMMANDS, ids=[f"{path.name}-{block[0]}" for path, block in COMMANDS])
def test_commands_work(path, commands, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_demo(monkeypatch)  # the whole grid is tested elsewhere
    if any(command.startswith("data ") for command in commands):
        if not DATA.is_dir():
            pytest.skip("name the folder with Fashion-MNIST in $KLATSCH_DATA")
        monkeypatch.setenv("KLATSCH_DATA", str(DATA))
    for packed in (ROOT / "docs" / "results").glob("*.sqlite.xz"):
        if any(packed.stem in command for command in commands):
            Path(packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    for command in commands:
        assert_works(command, run_cli)


def test_the_image_study_can_be_run(tmp_path, monkeypatch):
    if not DATA.is_dir():
        pytest.skip("name the folder with Fashion-MNIST in $KLATSCH_DATA")
    monkeypatch.setenv("KLATSCH_DATA", str(DATA))
    (study,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "images.md").read_text(), re.S)
    (tmp_path / "images.toml").write_text(study)
    cases, left_out = expand(load(tmp_path / "images.toml"))
    assert len(cases) == 16
    assert not left_out


def test_the_study_and_its_commands_work_in_this_order(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (study,) = re.findall(r"```toml\n(.*?)```", STUDIES.read_text(), re.S)
    Path("study.toml").write_text(study)
    commands = commands_of(STUDIES)
    assert len(commands) >= 6
    for command in commands:
        assert_works(command, run_cli)
    assert "0 runs new" in run_cli("run", "study.toml")[1]
    assert {"errors.svg", "runs.csv", "runs.parquet", "report.html"} <= {path.name for path in tmp_path.iterdir()}


def test_parts_of_your_own_work_as_shown(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine, use = blocks_of(OWN)
    Path("mine.py").write_text(mine)
    Path("own.toml").write_text(*blocks_of(OWN, "toml"))
    Path("published.py").write_text((ROOT / "examples" / "published.py").read_text())
    printed_by(use)
    commands = commands_of(OWN)
    assert len(commands) == 5
    for command in commands:
        assert_works(command, run_cli)


RULES = [
    block for path in DOCUMENTS for block in blocks_of(path) if re.search(r"^class \w+\((rules\.)?Rule\)", block, re.M)
]


@pytest.mark.parametrize("code", RULES)
def test_every_rule_that_is_shown_runs_on_ranks(code, run_cli, launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(code)
    names = re.findall(r"^class (\w+)\((?:rules\.)?Rule\)", code, re.M)
    rules = ", ".join(f'"mine.py:{name}"' for name in names)
    Path("s.toml").write_text(
        f'steps = 60\nnodes = 3\nseeds = 1\nlr = [1e-3, 3e-3]\nrules = [{rules}]\ntopologies = ["ring"]'
    )
    code, out, err = run_cli("run", "s.toml")
    assert (code, err) == (0, "")
    assert f"{2 * len(names)} runs new" in out
    assert_same_as_in("s.sqlite", launch(3, "on_ranks.study", file=str(tmp_path / "s.toml")))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_studies_can_be_run(path):
    cases, left_out = expand(load(path))
    assert cases
    assert not left_out


def test_there_is_something_to_test():
    assert len(BLOCKS) >= 4
    assert RULES
    assert sum(len(commands) for _, commands in COMMANDS) >= 15
