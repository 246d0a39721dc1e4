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


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint")
def test_the_workflows_are_sound():
    done = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
