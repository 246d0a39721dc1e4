"""The rooms and who may enter them: imports point one way, and `import klatsch` needs four libraries only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "klatsch"

# A room may import from itself and from rooms of a lower floor.
FLOORS = [
    {"files", "topology", "averaging", "engine.flat"},
    {"algorithms", "problems", "theory"},
    {"engine"},
    {"planning", "study"},
    {"cli", "__main__", ""},
]
FORBIDDEN = {("algorithms", "topology")}  # rules are pure algebra


def room(module):
    parts = module.split(".")[1:]
    return "engine.flat" if parts[:2] == ["engine", "flat"] else (parts or [""])[0]


def floor(name):
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def imports():
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(["klatsch", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: say klatsch.… instead of a relative import"
                yield module, node.module
                if node.module == "klatsch":
                    yield from ((module, f"klatsch.{alias.name}") for alias in node.names)


INSIDE = [(a, b) for a, b in imports() if b.split(".")[0] == "klatsch"]


def test_imports_point_one_way():
    assert len(INSIDE) > 20
    for importer, imported in INSIDE:
        here, there = room(importer), room(imported)
        if here == there or (here in ("cli", "__main__") and there == "") or there == "":
            assert there != "" or here in ("cli", "__main__", "") or imported == "klatsch", (importer, imported)
            continue
        assert (
            floor(there) < floor(here)
            or here == ""
            or (here == "__main__" and there == "cli")
            or (here == "topology" and there == "files")
        ), f"{importer} imports {imported}"
        assert (here, there) not in FORBIDDEN, f"{importer} imports {imported}"


def test_import_klatsch_needs_four_libraries_only():
    """Everything else may be absent: the terminal, plotting and report libraries belong to those who use them."""
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"typer", "rich", "pydantic", "matplotlib", "jinja2", "safetensors", "PIL"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import klatsch
assert klatsch.topology.make("base_graph", 6).averages_exactly
assert klatsch.theory.largest_machines("dat", 1e6, "ring") > 1
try:
    import rich
except ModuleNotFoundError:
    print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 300
