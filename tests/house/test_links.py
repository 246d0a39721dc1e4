"""The documents name files, make targets and other documents that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_links_lead_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"


def test_files_named_in_the_documents_exist():
    roots = ROOT, ROOT / "src", ROOT / "src" / "klatsch"
    for path in [path for path in DOCUMENTS if path.name != "CHANGELOG.md" and path.parent.name != "results"]:
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|c|toml|safetensors))`", path.read_text()):
            assert any((root / name).exists() for root in roots), f"{path.name}: {name}"


def test_make_targets_named_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in DOCUMENTS:
        for target in re.findall(r"^ {4}make (\w+)", path.read_text(), re.M):
            assert f"\n{target}:" in makefile, f"{path.name}: {target}"
