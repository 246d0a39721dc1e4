"""The rooms and who may enter them: imports point one way."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "klatsch"

# A room may import from itself and from rooms on a lower floor; only the doors at the top may import the package.
FLOORS = [
    {"own", "files", "extras", "catalogue", "units"},
    {"arguments", "native", "pictures", "sealed", "watch"},
    {"columns", "encodings"},
    {"topology"},
    {"rules", "problems", "theory"},
    {"wire"},
    {"clock"},
    {"simulation", "ranks"},
    {"planning", "study", "optim"},
    {"klatsch", "report", "frameworks"},
    {"cli"},
    {"__main__"},
]
FORBIDDEN = {("rules", "topology")}  # rules are pure algebra, but for annotations


def room(module):
    parts = module.split(".")[1:]
    return parts[0] if parts else "klatsch"


def floor(name):
    return next(height for height, rooms in enumerate(FLOORS) if name in rooms)


def imported_modules(path, types=True):
    """What a file imports; without `types`, not what it imports for annotations alone."""
    tree = ast.parse(path.read_text())
    if not types:
        tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: say klatsch.… instead of a relative import"
            submodules = [f"klatsch.{alias.name}" for alias in node.names] if node.module == "klatsch" else []
            yield from submodules or [node.module]


def test_imports_point_one_way():
    checked = 0
    for path in sorted(SOURCE.rglob("*.py")):
        here = room(".".join(["klatsch", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__"))
        for module in imported_modules(path):
            there = room(module)
            if module.split(".")[0] == "klatsch" and here != there:
                checked += 1
                assert floor(there) < floor(here), f"{path.name} in {here} imports {module}"
        for module in imported_modules(path, types=False):
            assert (here, room(module)) not in FORBIDDEN, f"{path.name} in {here} imports {module}"
    assert checked >= 6


def test_files_stay_readable():
    lengths = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    long = {name: lines for name, lines in lengths.items() if lines > 700}
    assert not long, "give a part of it a file of its own"


def test_a_file_name_means_one_thing():
    stems = [path.stem for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "names", "base")]
    twice = {stem for stem in stems if stems.count(stem) > 1}
    assert not twice, "give one of them another name"


def test_rooms_declare_what_others_use():
    """getattr and Any are for what torch and Python leave open, not for what another room might have."""
    lines = [line for path in SOURCE.rglob("*.py") for line in path.read_text().splitlines()]
    assert sum(bool(re.search(r"\b(getattr|hasattr)\(", line)) for line in lines) <= 20
    assert sum(len(re.findall(r"\bAny\b", line)) for line in lines) <= 220


def test_there_are_few_files():
    assert len(list(SOURCE.rglob("*.py"))) <= 115, "let a crumb join the file that uses it"


def test_a_class_name_means_one_thing():
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, "the lower room keeps the name; give the other one another"
