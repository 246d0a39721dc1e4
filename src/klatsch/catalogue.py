"""What has a name, with a line and the options of each, read from the sources: importing them would load torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent
CHANNEL = (
    "NAME/8 of any topology, such as ring/8, or --set every=8, gossips in every 8th round only: local steps "
    "in between. --set late=7 gives a message 7 rounds to travel; --set wire=bfloat16, int8, int4 or "
    "topk(0.01) sends fewer bytes. "
    "--set loss=0.1 loses a tenth of the messages, --set one_way=true each independently; on complete, loss=0.9 is a "
    "new random graph in every round. klatsch run --set meets='pairwise 0.05 over wan' averages in pairs that wait for "
    "nobody."
)


class Entry(NamedTuple):
    """A rule, a part of rules, a topology or a problem."""

    line: str
    options: str = ""  # that --set takes, with their defaults


def rules() -> dict[str, Entry]:
    """The rules: what they are products of, and the defaults of their own."""
    return {
        name: Entry(line, ", ".join([product, *(_option(k, repr(v)) for k, v in defaults.items())]))
        for name, (product, defaults, line) in _names["ALIASES"].items()
    }


def parts() -> dict[str, Entry]:
    """The parts of rules, whose options every rule that is made of them takes."""
    files = ("patterns", "directions", "anytime")
    nodes = {name: node for file in files for name, node in _defined(f"rules/{file}.py").items()}
    classes = {name: node for name, node in nodes.items() if "dataclass" in ast.unparse(node).partition("class ")[0]}
    listed = {}
    for kind in classes.values():
        bases = [classes[base.id] for base in kind.bases if base.id in classes]
        fields = [field for node in (*bases, kind) for field in node.body if isinstance(field, ast.AnnAssign)]
        values = {ast.unparse(f.target): ast.unparse(f.value) if f.value else "None" for f in fields}
        if short := ast.literal_eval(values.pop("short", "''")):
            options = (_option(k, v) for k, v in values.items() if k not in ("lr", "base") and "field(" not in v)
            listed[short] = Entry(_line(kind), ", ".join(options))
    return listed


def topologies() -> dict[str, Entry]:
    """The families of graphs."""
    functions = _defined("topology/families.py")
    return {name: _entry(functions[name], functions[name]) for name in TOPOLOGIES}


def problems() -> dict[str, Entry]:
    """The problems."""
    files = [f"problems/{path.name}" for path in (ROOT / "problems").glob("*.py")]
    classes = {name: node for file in files for name, node in _defined(file).items()}
    kinds = [classes[kind.id] for kind in classes["PROBLEMS"].values]
    made = [next(f for f in kind.body if isinstance(f, ast.FunctionDef) and f.name == "__init__") for kind in kinds]
    return {name: _entry(*pair) for name, pair in zip(PROBLEMS, zip(kinds, made, strict=True), strict=True)}


def _entry(node: Any, made: ast.FunctionDef) -> Entry:
    """What is made by a function: its options besides the number of nodes, and a problem's seed."""
    usual = [a.arg for a in made.args.args]
    defaults = dict.fromkeys([*usual, *(a.arg for a in made.args.kwonlyargs)], "None")
    defaults |= zip(reversed(usual), map(ast.unparse, reversed(made.args.defaults)), strict=False)
    defaults |= {a.arg: ast.unparse(v) for a, v in zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True) if v}
    left_out = {"self", "n", "nodes", "seed" if made is not node else ""}
    return Entry(_line(node), ", ".join(_option(*pair) for pair in defaults.items() if pair[0] not in left_out))


def _line(node: Any) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _option(name: str, default: str) -> str:
    """An option and its default, as --set takes them."""
    shown = {"None": "", "True": "true", "False": "false"}.get(default, default.strip("'").removesuffix(".0"))
    return f"{name}={shown}" if shown else name


def _defined(file: str) -> dict[str, Any]:
    """What a file defines: functions, classes and the values of tables, by name."""
    defined: dict[str, Any] = {}
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            defined[ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)] = node.value
    return defined


def _keys(file: str, table: str) -> tuple[str, ...]:
    return tuple(key.value for key in _defined(file)[table].keys)


_names: dict[str, Any] = {}
exec((ROOT / "rules" / "names.py").read_text(), _names)
RULES = tuple(_names["ALIASES"])
PROBLEMS = _keys("problems/__init__.py", "PROBLEMS")
NETWORKS = _keys("clock/network.py", "NETWORKS")
# The functions of which families are made, by their text: to parse so long a file would delay every command.
_families = (ROOT / "topology" / "families.py").read_text().partition("\nFAMILIES")[2].partition("\n}\n")[0]
TOPOLOGIES = tuple(re.findall(r"\bFamily\((?: *#.*)?\s*(\w+)", _families))
# What klatsch reproduce knows: installed studies, several of them at once, and tables.
STUDY_FILES = ROOT / "studies"
STUDIES = tuple(sorted({file.stem for file in STUDY_FILES.glob("*.toml")} - {"demo"}))  # a command of its own
GROUPS = {
    "schedule-free": ("averages", "schedules", "beyond"),
    "slow-networks": ("channels", "images-channels"),
    "language": ("language-rules", "language-links", "language-sizes"),
}
TARGETS = (*STUDIES, *GROUPS, *_keys("report/tables.py", "TABLES"))
