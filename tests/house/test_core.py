"""`pip install klatsch` trains: the other libraries are absent here, and who needs one says how to install it."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from klatsch.extras import EXTRAS
from klatsch.simulation.driver import progress_bar

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

TRAIN_AND_SIMULATE = """
import torch
import klatsch
model = torch.nn.Linear(3, 1)
optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1, momentum=0.9)
checkpointer = klatsch.Checkpointer("saved")
checkpointer.resume(optimizer, model=model)
for _ in range(5):
    model(torch.ones(8, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
checkpointer.save()
print("distance", optimizer.consensus() < 1.0)
rule, graph = klatsch.rules.make("dat", lr=0.01), klatsch.topology.ring(4)
assert klatsch.simulate(klatsch.problems.LeastSquares(4), rule, graph, 9).rounds == 9
assert klatsch.topology.make("base_graph", 6).averages_exactly
assert klatsch.theory.largest_machines("dat", 1e6, "ring") > 1
klatsch.planning.Task
"""


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def core():
    """The libraries that `pip install klatsch` brings, with what those require."""
    names, left = set(), [name_of(line) for line in PROJECT["dependencies"]]
    while left:
        if (name := left.pop()) not in names:
            names.add(name)
            left += [name_of(line) for line in requires(name) or () if ";" not in line]
    return names


@pytest.fixture
def bare(prepared, tmp_path):
    """Runs Python with the core alone."""
    owners = packages_distributions()
    kept = core()
    absent = {
        module for module, names in owners.items() if not {name.lower().replace("_", "-") for name in names} & kept
    }
    absent = sorted((absent | EXTRAS.keys()) - {"klatsch", "_virtualenv"})

    def run(program):
        program = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n{program}"
        return [rank.done() for rank in prepared.ranks(1, sys.executable, "-c", program, fresh=True, cwd=tmp_path)]

    return run


def test_training_simulating_and_planning_need_the_core_alone(bare, tmp_path):
    (done,) = bare(TRAIN_AND_SIMULATE)
    assert (done.returncode, done.stdout) == (0, "distance True\n"), done.stderr
    assert len(list((tmp_path / "saved").glob("*-round0000000005.safetensors"))) == 1


LACKS = {
    "import klatsch.study": "klatsch.study needs pydantic: pip install 'klatsch[cli]'",
    "import klatsch.report": "klatsch.report needs pydantic, matplotlib, jinja2: pip install 'klatsch[cli]'",
    "import klatsch.cli": "the command klatsch needs typer, rich: pip install 'klatsch[cli]'",
    "import klatsch.frameworks.lightning": "GossipStrategy needs lightning: pip install 'lightning'",
    "import klatsch.frameworks.huggingface": "GossipTrainer needs transformers, accelerate: pip install 'transformers'",
    "from klatsch import topology; topology.draw(topology.ring(4), 'a.png')": (
        "a figure needs matplotlib: pip install 'klatsch[cli]'"
    ),
    "from klatsch.simulation.driver import progress_bar\nwith progress_bar(True, 9, 0, ''): pass": (
        "a progress bar needs rich: pip install 'klatsch[cli]'"
    ),
}


def test_what_is_missing_is_named_with_the_command_that_installs_it(bare):
    tries = "\n".join(
        f"try:\n    exec({program!r})\nexcept ImportError as error:\n    print(error)" for program in LACKS
    )
    (done,) = bare(tries)
    assert done.stdout.splitlines() == list(LACKS.values()), done.stderr


def test_the_command_says_in_one_line_what_it_lacks(bare):
    (done,) = bare("import runpy\nrunpy.run_module('klatsch', run_name='__main__', alter_sys=True)")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "klatsch: error: the command klatsch needs typer, rich: pip install 'klatsch[cli]'\n"


def test_the_extras_are_those_of_the_package():
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = re.search(r"\[(.*)\]", everything)[1].split(",")
    assert set(named) == extras.keys() - {"all", "dev", "docs", "release"}
    listed = {name_of(line): f"klatsch[{extra}]" for extra in named for line in extras[extra]}
    assert {name: extra for name, extra in listed.items() if name != "klatsch"} == EXTRAS


def test_a_terminal_without_rich_has_no_bar(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar(None, 9, 0, "") as advance:
        assert advance(9) is None
