"""Hostile command lines: every option of every command with values that a user might, or would not, give.

    .venv/bin/python -m tests.tools.hostile [--jobs 2] [--only run]

Each line runs in a fork of this process, in an empty folder, with a limit of memory and of processor time; one that
reaches the limit of time is no failure, since a long run may be what was asked for. Printed are the lines that end in
a traceback, in another exit code than 0, 1 or 2, in more than a few lines of complaint, or that take too much memory.
"""

import argparse
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import traceback
from itertools import product
from pathlib import Path
from typing import NoReturn

import typer

import klatsch  # loaded before the fork
from klatsch.cli import app

VALUES = ["", " ", "nan", "inf", "-1", "0", "1e308", "99999999999999999999", "-0.0", "x" * 5000, "\x1b[31mred", "a\nb"]
VALUES += ["é😀", "../../etc/passwd", "/dev/zero", "/dev/full", "fifo", "folder", "missing.toml", "--help"]
VALUES += ["a=b=c", "=", ","]
VALUES += [
    "os.py:system",
    "1,2,,3",
    "[1,2",
    "{}",
    "None",
    "true",
    "ring/0",
    "ring/999999999",
    "dat+",
    "+anytime",
    "%s%n",
]
# A line that works and is short, to which one option is added.
BASES = {
    "list": [],
    "checkpoint": ["folder"],
    "plan": ["least-squares", "--minutes", "0.01"],
    "probe": ["least-squares", "-n", "2"],
    "results": ["missing.sqlite"],
    "report": ["missing.sqlite"],
    "run": ["--rules", "dat", "-n", "4", "--steps", "5", "--lr", "0.01", "--seeds", "1"],
    "demo": ["--help"],
    "reproduce": ["fig1", "--help"],
    "topology": ["ring", "-n", "4"],
    "data": [],
}
SECONDS, MEMORY, COMPLAINT = 20, 6 * 2**30, 12


def lines() -> list[list[str]]:
    """All command lines."""
    group, made = typer.main.get_command(app.app), list[list[str]]()
    for name, command in group.commands.items():
        base = BASES.get(name, [])
        options = [o for o in command.params if o.param_type_name == "option" and not getattr(o, "is_flag", False)]
        flags = [o for o in command.params if getattr(o, "is_flag", False) and o.name != "help"]
        made += [[name, *base, option.opts[0], value] for option, value in product(options, VALUES)]
        made += [[name, *base, flag.opts[0]] for flag in flags]
        made += [[name, value] for value in VALUES]
        made += [[name, *base, "--no-such"], [name, *base, "extra", "words"]]
    return made


def trial(line: list[str]) -> tuple[str, str]:
    """What is wrong with how a line ends, if anything, and its output."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writer, 1), os.dup2(writer, 2), os.close(reader)
        _run(line)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        late = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)
        return "slow" if late else f"signal {os.WTERMSIG(status)}", text
    code = os.WEXITSTATUS(status)
    if code not in (0, 1, 2) or "Traceback" in text or "MemoryError" in text:
        return f"exit {code}", text
    return ("long complaint", text) if code == 2 and len(text.strip().splitlines()) > COMPLAINT else ("", text)


def _run(line: list[str]) -> NoReturn:
    """Run a line in this process, which ends with it."""
    code: object = 99
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            os.mkfifo("fifo")
            Path("folder").mkdir()
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 2))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            signal.alarm(3 * SECONDS)
            sys.argv = ["klatsch", *line]
            app.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main() -> int:
    """Try all lines and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    print(f"klatsch {klatsch.__version__}", flush=True)
    todo = [line for line in lines() if line[0].startswith(given.only)]
    bad = slow = 0
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        for line, (wrong, text) in zip(todo, pool.imap(trial, todo, chunksize=4), strict=True):
            slow, bad = slow + (wrong == "slow"), bad + (wrong not in ("", "slow"))
            if wrong:
                told = "" if wrong == "slow" else f"\n    {text.strip()[-600:]}"
                print(f"{wrong}: klatsch {[word[:60] for word in line]}{told}", flush=True)
    print(f"{len(todo)} command lines, {bad} end badly, {slow} reach the limit of {SECONDS} s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
