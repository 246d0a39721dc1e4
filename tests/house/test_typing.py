"""A user's script passes mypy --strict: klatsch says its types (py.typed)."""

import sys
from pathlib import Path

import pytest

from tests.tools.smoke import SCRIPT

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_a_script_of_a_user_passes(prepared, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "reveal_type(klatsch.optim.GossipSGD)\nklatsch.simulate(problem, 3, graph, 100)\n")
    done = prepared.program(sys.executable, "-m", "mypy", "--strict", script, cwd=ROOT).done()
    wrong = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(wrong) == 1, done.stdout + done.stderr
    assert 'Argument 2 to "simulate" has incompatible type "int"; expected "Rule"' in wrong[0]
    assert 'Revealed type is "def (params' in done.stdout
    assert (ROOT / "src" / "klatsch" / "py.typed").exists()
