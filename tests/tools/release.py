"""Build the wheel and the sdist, and check all that an upload needs. `make release` runs it.

.venv/bin/python -m tests.tools.release
.venv/bin/python -m tests.tools.release --python python3.12 --torch 2.6.0 --also numpy==1.26.4
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.tools.smoke import SCRIPT

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"


def run(*words: str | Path, cwd: Path = ROOT) -> None:
    print("$", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, cwd=cwd)


def version() -> str:
    """The version, of which all files must speak."""
    (number,) = re.findall(r'VERSION = "(.+)"', (ROOT / "src/klatsch/extras.py").read_text())
    heading = re.search(r"^## (\S+) – (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r"^version: (\S+)\ndate-released: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)
    assert heading is not None, "CHANGELOG.md has no heading such as: ## 0.2.0 – 2026-11-18"
    assert cited is not None, "CITATION.cff has no version and date-released"
    assert heading.groups() == cited.groups(), f"CHANGELOG.md has {heading.groups()}, CITATION.cff {cited.groups()}"
    assert heading[1] == number, f"CHANGELOG.md is about {heading[1]}, extras.py says {number}"
    return number


def build(number: str) -> Path:
    """Both archives, the wheel from the sdist, checked; returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    wheel, sdist = DIST / f"klatsch-{number}-py3-none-any.whl", DIST / f"klatsch-{number}.tar.gz"
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(Path(sys.executable).with_name("check-wheel-contents"), wheel)
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    left_out = {str(path.relative_to(ROOT / "src")) for path in sources} - packed
    assert not left_out, f"the wheel has no {sorted(left_out)}"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "Makefile", "tests/conftest.py"}
    assert wanted <= names, f"the sdist has no {sorted(wanted - names)}"
    return wheel


def install(wheel: Path, python: str, torch: str, also: list[str], typed: bool) -> None:
    """In an empty environment: the core trains, with [cli] the command works, and a script of a user passes mypy."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        installed = Path(folder) / "bin" / "python"
        smoke = Path(shutil.copy(ROOT / "tests/tools/smoke.py", folder))
        pip = installed, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"torch=={torch}", *also
        for extra in ("", "[cli]"):
            run(*pip, f"klatsch{extra} @ {wheel.as_uri()}", cwd=Path(folder))
            run(installed, smoke, *["--cli"] * bool(extra), cwd=Path(folder))
            libraries = [path for path in Path(folder).glob("lib/python*/site-packages/*") if "torch" not in path.name]
            files = (file for path in libraries for file in (path, *path.rglob("*")) if file.is_file())
            print(f"klatsch{extra} and its libraries but torch: {sum(f.stat().st_size for f in files) / 1e6:.0f} MB")
        if typed:
            run(*pip, "mypy", cwd=Path(folder))
            (script := Path(folder) / "script.py").write_text(SCRIPT)
            run(installed, "-m", "mypy", "--strict", script, cwd=Path(folder))


def main() -> None:
    """Build, check, install."""
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="whose empty environment gets the wheel")
    parser.add_argument("--torch", default=pinned, help=f"which torch goes with it ({pinned})")
    parser.add_argument("--also", nargs="*", default=[], help="other requirements, such as numpy==1.26.4")
    parser.add_argument("--wheel", type=Path, help="a wheel to install, instead of building one")
    asked = parser.parse_args()
    typed = asked.torch == pinned  # older ones have fewer types
    install(asked.wheel or build(version()), asked.python, asked.torch, asked.also, typed)


if __name__ == "__main__":
    main()
