"""The notebooks of the documents run, and show what they would show now."""

import json

import pytest

from tests.tools.notebooks import NOTEBOOKS, run


def outputs(content):
    return [(cell["execution_count"], len(cell["outputs"])) for cell in content["cells"] if "outputs" in cell]


@pytest.mark.documents
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert outputs(run(path)) == outputs(json.loads(path.read_text()))


def test_there_are_three_notebooks():
    assert len(NOTEBOOKS) == 3
