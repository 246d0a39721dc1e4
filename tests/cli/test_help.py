"""Every help ends with examples that parse, commands have few parameters, and `--set` reaches whoever has an option."""

import ast
import json
import re
import shlex
from inspect import signature
from pathlib import Path

import pytest
import typer

from klatsch.cli import app as commands
from klatsch.cli import terminal

ROOT = typer.main.get_command(commands.app)
NAMES = ["", *ROOT.commands, *(f"data {name}" for name in ROOT.commands["data"].commands)]


def parsed(words):
    """The command that a line names, after it has taken its options."""
    context, command = ROOT.make_context("klatsch", list(words)), ROOT
    while context._protected_args:
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, words, parent=context)
    return command


@pytest.mark.parametrize("name", NAMES)
def test_every_help_ends_with_examples_that_parse(name, run_cli):
    code, out, _ = run_cli(*name.split(), "--help")
    assert code == 0
    examples = re.findall(r"^ klatsch (.+?) *$", out.partition("Examples:")[2], re.M)
    assert 2 <= len(examples) <= 4
    for example in examples:
        assert parsed(shlex.split(example)) is not ROOT, example


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_no_type_beside_a_flag(name, run_cli):
    _, out, _ = run_cli(*name.split(), "--help")
    assert "bool" not in out.lower()
    assert re.search(r"--help +Show this message and exit", out)


@pytest.mark.parametrize(
    "name, words",
    [
        ("topology", "An option of the graph: rows=3 of torus"),
        ("probe", "An option of the problem: noise=10 of least-squares"),
        ("run", "An option of a rule, topology or problem: momentum=0.9"),
    ],
)
def test_help_says_what_an_option_is_for(name, words, run_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert words in run_cli(name, "--help")[1]


def test_no_function_of_the_command_line_has_many_parameters():
    for path in Path(commands.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                assert count <= 15, f"{path.name}: {node.name} has {count} parameters"


def some(momentum=0.0, order="atc", lazy=True, k: int = 1, width=1):
    pass


@pytest.mark.parametrize(
    "given, value",
    [
        ("momentum=1", 1),
        ("momentum=0,0.5", [0, 0.5]),
        ("order=cta", "cta"),
        ("order=1,true", ["1", "true"]),  # the default is a text
        ("lazy=False", False),
        ("k=linear", "linear"),  # which whoever has this option refuses
        ("width=2.5", 2.5),
        ("width=1e3", 1000.0),
    ],
)
def test_values_are_numbers_truths_and_texts(given, value):
    owner = "rule", "some"
    ((found,),) = (v.values() for v in commands.assigned([given], {owner: signature(some).parameters}).values())
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "given, message",
    [
        (["momentum"], "--set momentum: give a name and a value, such as momentum=0.9"),
        (["=3"], "--set =3: give a name and a value"),
        (["momentum=0", "momentum=0.9"], "--set momentum is given twice; separate several values by commas"),
        (["momentum=fast"], "rules[0]: momentum = 'fast'; give a number from 0 up"),
        (["dim=1.5"], "dim = 1.5; give a whole number from 1 up"),
        (["lazy=perhaps"], "lazy = 'perhaps'; give true, or false for D2 as published"),
        (
            ["mometum=0.9"],
            "an option 'mometum'; did you mean momentum? There are lazy, momentum, shared, average, every, late, wire",
        ),
        (["xyz=1"], "an option 'xyz'; there are lazy, momentum, shared, average, every, late, wire, loss"),
    ],
)
def test_settings_that_are_refused(given, message, run_cli):
    options = [word for text in given for word in ("--set", text)]
    code, out, err = run_cli("run", "--rules", "d2", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert len(err) <= 240  # three lines of a terminal


def test_settings_reach_parts_of_your_own(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from klatsch import rules, topology\n"
        "def rule(lr, slow=1.0):\n    return rules.make('dsgd', lr, momentum=1 - slow)\n"
        "def band(n, width=1):\n    return topology.ring(n) if width == 1 else topology.complete(n)\n"
    )
    options = ("-n", 5, "--steps", 50, "--seeds", 1, "--lr", 0.001, "--json")
    own = ("run", "--rules", "mine.py:rule", "-t", "mine.py:band", *options)
    error = {}
    for name, given in {"plain": (), "slow": ("--set", "slow=0.5"), "wide": ("--set", "width=2")}.items():
        code, out, err = run_cli(*own, *given)
        assert (code, err) == (0, "")
        error[name] = json.loads(out)["rows"][0]["error"]
    assert len(set(error.values())) == 3
    refused = run_cli(*own, "--set", "widht=2")[2]
    assert "did you mean width? There are slow, width, every, late, wire, loss, one_way, meets, dim, noise" in refused


def test_an_error_is_wrapped_for_a_terminal_only(monkeypatch, capsys):
    message = "word " * 40 + "[red]:smile: \x1b[31m"
    terminal.complain(message)
    line = capsys.readouterr().err
    assert line == f"klatsch: error: {'word ' * 40}[red]:smile: \\x1b[31m\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    terminal.complain(message)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
