"""What starting loads: help, the version and the list need no torch, and the catalogue says what the tables say."""

import json
import sys

import pytest

import klatsch
from klatsch import catalogue, clock, planning, problems, rules, topology
from klatsch.catalogue import GROUPS
from klatsch.cli import plan as plan_command
from klatsch.cli import run as run_command
from klatsch.cli.app import parameters_of
from klatsch.report.tables import TABLES as PAPER_TABLES
from klatsch.study.spec import PAPER_GRID

HEAVY = {"torch", "numpy", "scipy", "networkx", "matplotlib", "jinja2", "safetensors", "sqlite3"}
COMMANDS = (
    *("checkpoint", "crew", "crew drop", "crew join", "crew serve", "crew status"),
    *("data", "data fetch", "data show", "demo", "list", "log", "plan", "probe"),
    *("report", "reproduce", "results", "run", "topology", "watch"),
)


@pytest.fixture
def loaded(prepared):
    """The modules that a new interpreter loads."""

    def load(*words):
        done = prepared.program(sys.executable, "-X", "importtime", *words).done()
        assert done.returncode == 0, done.stderr
        return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}

    return load


def test_help_the_version_and_the_list_need_nothing_heavy(loaded):
    every = ["--help", "", "list", *(f"{name} --help" for name in COMMANDS)]
    program = f"""
import sys
from klatsch.cli import main
for words in {every}:
    sys.argv = ["klatsch", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""
    assert loaded("-c", program) & HEAVY == set()
    assert loaded("-m", "klatsch", "--version") & HEAVY == set()


def test_every_command_is_asked_for_its_help(run_cli):
    _, out, _ = run_cli("--help")
    shown = {line[2:].split(" ")[0] for line in out.partition("Commands")[2].splitlines() if line.startswith("│ ")}
    assert shown - {""} == {name.split()[0] for name in COMMANDS}


def test_import_klatsch_loads_what_is_asked_for(loaded):
    assert loaded("-c", "import klatsch") & (HEAVY | {"rich", "typer", "pydantic"}) == set()
    everything = loaded("-c", "from klatsch import *; simulate, Gossip, planning.Task")
    assert {"torch", "scipy.sparse"} <= everything
    assert everything & {"scipy.sparse.linalg", "scipy.sparse.csgraph", "scipy.stats"} == set()
    assert everything & {"networkx", "matplotlib", "pydantic", "rich", "typer"} == set()


def test_every_name_of_the_package_is_there_and_no_other():
    found = {name: getattr(klatsch, name) for name in klatsch.__all__}
    assert found.keys() <= set(dir(klatsch))
    assert klatsch.simulate is klatsch.simulation.simulate
    assert klatsch.Gossip is klatsch.optim.Gossip
    with pytest.raises(AttributeError, match="module 'klatsch' has no attribute 'simulat'"):
        klatsch.simulat  # noqa: B018


TABLES = {
    "rule": (catalogue.rules(), rules.RULES),
    "topology": (catalogue.topologies(), topology.TOPOLOGIES),
    "problem": (catalogue.problems(), problems.PROBLEMS),
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_catalogue_has_the_first_lines_of_the_docstrings(kind):
    listed, table = TABLES[kind]
    lines = [(name, thing.__doc__.strip().splitlines()[0]) for name, thing in table.items()]
    assert [(name, entry.line) for name, entry in listed.items()] == lines


@pytest.mark.parametrize("kind", TABLES)
def test_the_catalogue_has_the_options_that_set_takes(kind):
    everywhere = {"every", "late", "wire", "loss", "one_way", "meets"}  # of every topology, in the line below the list
    assert all(f"--set {option}=" in catalogue.CHANNEL for option in everywhere)
    parts = catalogue.parts()
    for name, entry in TABLES[kind][0].items():
        listed = entry.options.split(", ") if entry.options else []
        if kind == "rule":
            product, *defaults = listed
            used = product.split("+")
            used += ["averaged"] * ("anytime" not in used)
            used += ["sgd"] * (not {"adam", "muon"} & {*used} and issubclass(rules.PATTERNS[used[0]], rules.Pattern))
            listed = [option for part in used for option in filter(None, parts[part].options.split(", "))]
            listed = {option.partition("=")[0]: option for option in (*listed, *defaults)}.values()
        options = [shown(p) for option, p in parameters_of(kind, name).items() if option not in everywhere]
        assert sorted(listed) == sorted(options), name


def shown(option):
    """An option and its default, as --set takes them."""
    if option.default in (None, option.empty):
        return option.name
    return f"{option.name}={json.dumps(option.default)}".replace('"', "").removesuffix(".0")


def test_what_help_says_is_what_the_library_does():
    assert list(catalogue.NETWORKS) == list(clock.NETWORKS)
    assert catalogue.TARGETS[len(catalogue.STUDIES) :] == (*GROUPS, *PAPER_TABLES)
    assert ",".join(f"{lr:g}" for lr in PAPER_GRID) == run_command.GRID
    assert planning.Task.machines == plan_command.MACHINES
    assert planning.Task.seconds == pytest.approx(60 * plan_command.MINUTES)


def test_the_list_prints_the_catalogue(run_cli, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("klatsch.cli.terminal.console", lambda: Console(width=300))
    _, out, _ = run_cli("list")
    for listed in (catalogue.rules(), catalogue.parts(), catalogue.topologies(), catalogue.problems()):
        for name, entry in listed.items():
            assert [name, *entry.line.split(), *entry.options.split()] in [row.split() for row in out.splitlines()]
