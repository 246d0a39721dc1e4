"""Small faults, put into a copy of the tree one at a time: do the tests find each of them?

    .venv/bin/python -m tests.tools.faults                    # all: half an hour on two cores
    .venv/bin/python -m tests.tools.faults rules-gt-sign ...  # some of them
    .venv/bin/python -m tests.tools.faults --check            # only whether every snippet occurs exactly once

A fault is a snippet of a file, what takes its place, and the tests that should find it (`faults.toml`). The tests run
once without any fault, where they must pass. A fault whose snippet does not occur exactly once is refused: port it to
the new code. Of those tried on the tests of 0.2 before the house became smaller, 82 of 96 were found. Three of the
others were looked for by the wrong tests, and eleven were holes, such as neighbours with different weights on ranks,
1 - v in a kernel, and int8 scales that are not finite; each has a test now.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import networkx  # noqa: F401
import pytest
import scipy.sparse.linalg  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds of one fault's tests, after which it counts as found: it hangs
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


class Fault(NamedTuple):
    """What to change, and who should notice."""

    id: str
    file: str  # in src/klatsch
    old: str
    new: str
    tests: tuple[str, ...]  # files or node ids, in tests


def trouble(fault: Fault, root: Path) -> str:
    """Why a fault cannot be put in; empty if it can."""
    path = root / "src" / "klatsch" / fault.file
    if not path.is_file():
        return f"there is no {fault.file}"
    times = path.read_text().count(fault.old)
    return "" if times == 1 else f"its snippet occurs {times} times in {fault.file}"


def run(tests: Sequence[str], tree: Path) -> int | None:
    """The exit code of pytest, in a fork of this process, which has loaded what is slow to load; None if it hangs."""
    if child := os.fork():
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    os.setsid()
    os.chdir(tree)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = True
    paths = [str(tree / "src"), str(tree)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = paths
    for name in [name for name in sys.modules if name.partition(".")[0] in ("klatsch", "tests")]:
        del sys.modules[name]
    code = 3
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def verdict(fault: Fault, tree: Path) -> str:
    """Put a fault in, run its tests, and take it out."""
    if reason := trouble(fault, tree):
        return f"refused: {reason}"
    path = tree / "src" / "klatsch" / fault.file
    content = path.read_text()
    try:
        path.write_text(content.replace(fault.old, fault.new))
        code = run(fault.tests, tree)
    finally:
        path.write_text(content)
    return {0: "ESCAPED", 1: "found", None: "found"}.get(code, f"error: pytest ends with {code}")


def main(faults: list[Fault], root: Path = ROOT) -> int:
    """The command line; returns how many faults were not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="faults to try; all by default")
    parser.add_argument("--check", action="store_true", help="only look whether every snippet occurs exactly once")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    asked = parser.parse_args()
    chosen = [fault for fault in faults if not asked.ids or fault.id in asked.ids]
    if unknown := set(asked.ids) - {fault.id for fault in faults}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    if asked.check:
        wrong = {fault.id: reason for fault in chosen if (reason := trouble(fault, root))}
        for name, reason in wrong.items():
            print(f"{name}: {reason}")
        return len(wrong)
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(root, tree, ignore=LEFT_OUT)
        if not asked.no_baseline:
            tests = tuple(dict.fromkeys(test for fault in chosen for test in fault.tests))
            if run(tests, tree) != 0:
                print((tree / "log").read_text()[-3000:])
                print("the tests fail without any fault")
                return len(chosen)
        for fault in chosen:
            began = time.monotonic()
            results[fault.id] = verdict(fault, tree)
            print(f"{fault.id}: {results[fault.id]} ({time.monotonic() - began:.0f} s)", flush=True)
            if asked.json:
                known = json.loads(asked.json.read_text()) if asked.json.exists() else {}
                asked.json.write_text(json.dumps(known | results, indent=1))
    missed = [name for name, result in results.items() if result != "found"]
    print(f"{len(results) - len(missed)} of {len(results)} found" + "".join(f"\n  {name}" for name in missed))
    return len(missed)


def listed() -> list[Fault]:
    """The faults of `faults.toml`."""
    entries = tomllib.loads(Path(__file__).with_name("faults.toml").read_text()).items()
    return [Fault(name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in entries]


if __name__ == "__main__":
    sys.exit(min(main(listed()), 1))
