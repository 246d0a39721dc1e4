"""Ranks for the tests: real processes, forked from a prepared one, that each run a scenario.

Run as a program it is one rank: `python -m tests.support.processes FOLDER SCENARIO JSON`.
"""

import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path

from tests.support.waiting import wait_until


class Ranks:
    """SIZE processes that each run `SCENARIO(folder, **options)` in a process group.

    A scenario is a function of tests/support/rank_scenarios.py, or "MODULE.FUNCTION" of another file of tests/support.
    """

    def __init__(self, prepared, folder, size, scenario, preload=(), **options):
        self.folder, self.size = Path(folder), size
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.glob("code-*"):  # of ranks before these
            path.unlink()
        module, _, function = f"rank_scenarios.{scenario}".rpartition(".")
        name = f"tests.support.{module.rpartition('.')[2]}"
        words = ("-m", "tests.support.processes", self.folder, f"{name}:{function}", json.dumps(options))
        tell = [self.folder / f"code-{rank}" for rank in range(size)]
        self.processes = prepared.ranks(size, *words, preload=(name, *preload), tell=tell)
        self.pids = [process.pid for process in self.processes]

    def go_on(self, rank):
        """Wake a rank that has stopped itself."""
        os.kill(self.pids[rank], signal.SIGCONT)

    def has_stopped(self, rank):
        """Wait until a rank has stopped itself."""
        wait_until_stopped(self.processes[rank])

    def kill(self, rank):
        self.processes[rank].kill()

    def wait_for(self, name):
        """The content of a file that a rank writes when it has come to some point."""
        wait_until((self.folder / name).exists, self)
        return (self.folder / name).read_text()

    def poll(self):
        """None while one of them runs, and then their exit codes."""
        codes = [process.poll() for process in self.processes]
        return None if None in codes else codes

    @property
    def returncode(self):
        return [process.returncode for process in self.processes]

    def codes(self):
        """The exit codes of all ranks; minus the signal for those that were killed."""
        for process in self.processes:
            process.communicate()
        return self.returncode

    def errors(self, rank):
        return self.processes[rank].stderr

    def warnings(self, rank):
        return re.findall(r"RuntimeWarning: (.*)", self.errors(rank))

    def succeed(self):
        codes = self.codes()
        assert codes == [0] * self.size, "\n".join(self.errors(rank) for rank in range(self.size))


def wait_until_stopped(process):
    """Wait until a process has stopped itself."""
    state = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", process)


def say(folder, name, text=""):
    """Write a file that is whole once it can be seen."""
    hidden = Path(folder) / f".{name}"
    hidden.write_text(str(text))
    hidden.rename(Path(folder) / name)


def main():
    folder, scenario, options = sys.argv[1:]
    module, _, function = scenario.partition(":")
    getattr(importlib.import_module(module), function)(Path(folder), **json.loads(options))


if __name__ == "__main__":
    main()
