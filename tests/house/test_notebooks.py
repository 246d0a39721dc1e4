"""The notebooks of the documents run, and print what they would print now; of figures, that there is one."""

import json
import re

import pytest

from tests.tools.notebooks import NOTEBOOKS, run

NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"


def outputs(content):
    """By cell: its number, and what it printed as kinds of output, words, and numbers."""
    for cell in content["cells"]:
        if "outputs" in cell:
            said = [
                (each["output_type"], "".join(each.get("text") or each["data"]["text/plain"]))
                for each in cell["outputs"]
            ]
            words = [(kind, re.sub(NUMBER, "#", text)) for kind, text in said]
            yield cell["execution_count"], words, [float(n) for _, text in said for n in re.findall(NUMBER, text)]


@pytest.mark.documents
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_they_show(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for now, shown in zip(outputs(run(path)), outputs(json.loads(path.read_text())), strict=True):
        assert now[:2] == shown[:2]
        # All is drawn from seeds; what is left is rounding, which decides what an error of 1e-28 is.
        assert now[2] == pytest.approx(shown[2], rel=0.05, abs=1e-20)


def test_there_are_three_notebooks():
    assert len(NOTEBOOKS) == 3
