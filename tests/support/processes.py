"""Real processes for the tests of ranks: one loads the libraries and forks the others, so that many start quickly.

Run as a program it is that first process: `python tests/support/processes.py FOLDER SIZE SCENARIO JSON`.
"""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.waiting import HANG, wait_until  # noqa: E402


class Ranks:
    """SIZE processes that each run `SCENARIO(folder, **options)` in a process group.

    A scenario is a function of tests/support/rank_scenarios.py, or "MODULE.FUNCTION" of another file of tests.
    """

    def __init__(self, folder, size, scenario, **options):
        self.folder, self.size = Path(folder), size
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, __file__, str(folder), str(size), scenario, json.dumps(options)]
        self.first = subprocess.Popen(command, start_new_session=True)
        self.pids = [int(self.wait_for(f"pid-{rank}")) for rank in range(size)]

    def go_on(self, rank):
        """Wake a rank that has stopped itself."""
        os.kill(self.pids[rank], signal.SIGCONT)

    def has_stopped(self, rank):
        """Wait until a rank has stopped itself."""
        state = Path(f"/proc/{self.pids[rank]}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", self.first)

    def kill(self, rank):
        os.kill(self.pids[rank], signal.SIGKILL)

    def wait_for(self, name):
        """The content of a file that a rank writes when it has come to some point."""
        wait_until((self.folder / name).exists, self.first)
        return (self.folder / name).read_text()

    def codes(self):
        """The exit codes of all ranks; minus the signal for those that were killed."""
        try:
            self.first.wait(HANG)
        finally:
            self.end()
        return [int((self.folder / f"code-{rank}").read_text()) for rank in range(self.size)]

    def errors(self, rank):
        return (self.folder / f"stderr-{rank}").read_text()

    def warnings(self, rank):
        return re.findall(r"RuntimeWarning: (.*)", self.errors(rank))

    def succeed(self):
        codes = self.codes()
        assert codes == [0] * self.size, "\n".join(self.errors(rank) for rank in range(self.size))

    def end(self):
        if self.first.poll() is None:
            os.killpg(self.first.pid, signal.SIGKILL)
            self.first.wait()


def say(folder, name, text=""):
    """Write a file that is whole once it can be seen."""
    hidden = Path(folder) / f".{name}"
    hidden.write_text(str(text))
    hidden.rename(Path(folder) / name)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    folder, size, scenario, options = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    import torch

    module, _, function = f"rank_scenarios.{scenario}".rpartition(".")
    run = getattr(importlib.import_module(f"tests.support.{module.rpartition('.')[2]}"), function)
    port, pids = free_port(), {}
    for rank in range(size):
        if (pid := os.fork()) == 0:
            sys.stderr = (folder / f"stderr-{rank}").open("w", buffering=1)
            os.dup2(sys.stderr.fileno(), 2)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            torch.set_num_threads(1)
            try:
                run(folder, **options)
            except Exception:
                traceback.print_exc()
                sys.exit(1)
            sys.exit(0)
        pids[pid] = rank
        say(folder, f"pid-{rank}", pid)
    for _ in range(size):
        pid, status = os.wait()
        say(folder, f"code-{pids[pid]}", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
