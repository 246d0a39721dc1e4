"""The reference shows examples that run, and the lint of the site, which `make docs` runs, finds what leads nowhere."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.tools.site import dead

SOURCE = Path(__file__).parents[2] / "src"
EXAMPLES = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_examples_in_docstrings_print_what_is_shown(path):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed


def test_dead_links_pictures_without_a_description_and_headings_without_a_level_are_found(tmp_path):
    (tmp_path / "b.html").write_text(
        '<h1 id="here">B</h1><img src="b.html"><p role="heading"><p role="heading" aria-level="2">'
    )
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a> <a href="b.html#gone">2</a> <a href="c.html">3</a> <a href="#top">4</a>'
        '<a href="https://example.org/x">5</a> <img src="d.png" alt="D"> <p id="top">'
    )
    assert list(dead(tmp_path)) == [
        "a.html: b.html has no place gone",
        "a.html: there is no c.html",
        "a.html: there is no d.png",
        "b.html: b.html has no description",
        "b.html: a heading in <p> has no aria-level",
    ]
