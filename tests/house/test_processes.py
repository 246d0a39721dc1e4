"""No process outlives its test, whatever becomes of pytest, and none ignores what a shell ignores."""

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
TESTS = """
import json, os, signal
from pathlib import Path
import psutil
from tests.support.waiting import wait_until

FAMILY = '''
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
worker = os.fork()
if worker:
    Path(sys.argv[1]).write_text(f"[{os.getpid()}, {child.pid}, {worker}]")
time.sleep(1000)
'''

def family(python, path):
    python("-c", FAMILY, path)
    wait_until(lambda: path.exists() and path.read_text().endswith("]"))

def test_that_fails(python):
    family(python, Path("first"))
    assert False

def test_nothing_is_left():
    assert not any(psutil.pid_exists(pid) for pid in json.loads(Path("first").read_text()))

def test_ctrl_c(python):
    waits = python("-c", "print(1, flush=True); import time; time.sleep(1000)")
    wait_until(lambda: waits.stdout, waits)
    os.kill(waits.pid, signal.SIGINT)
    assert waits.done().returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in waits.stderr

def test_that_hangs(python):
    family(python, Path("second"))
    Path("ready").touch()
    signal.pause()
"""


@pytest.mark.soak
def test_no_process_outlives_its_test_nor_pytest(prepared, tmp_path):
    (tmp_path / "test_tiny.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "test_tiny.py"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    in_the_background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    run = prepared.program(*in_the_background, *words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    wait_until((tmp_path / "ready").exists, run)
    living = json.loads((tmp_path / "second").read_text())
    assert all(psutil.pid_exists(pid) for pid in living)
    run.kill()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in living))
    out, _ = run.communicate()
    assert out.startswith("F..")  # the first one failed as it should
