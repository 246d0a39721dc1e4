"""Starting: what one waits for before anything is computed, beside torch's own import.

Run: .venv/bin/python benchmarks/startup.py [--repeats 5]

Every line is a process of its own. All are run in turn, over and over, so that a busy moment meets them alike; printed
are the median of the seconds and the median of the ratio to the import of torch in the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

KLATSCH = [sys.executable, "-m", "klatsch"]
STUDY = ["run", "--rules", "dat", "-n", "4", "--steps", "20", "--lr", "0.01", "--seeds", "1", "--store", "r.sqlite"]
PROCESSES = {
    "import torch": [sys.executable, "-c", "import torch"],
    "import klatsch": [sys.executable, "-c", "import klatsch"],
    "from klatsch import *": [sys.executable, "-c", "from klatsch import *"],
    "klatsch --version": [*KLATSCH, "--version"],
    "klatsch --help": [*KLATSCH, "--help"],
    "klatsch run --help": [*KLATSCH, "run", "--help"],
    "klatsch list": [*KLATSCH, "list"],
    "klatsch topology ring -n 16": [*KLATSCH, "topology", "ring", "-n", "16"],
    "a study of one run of 20 rounds": [*KLATSCH, *STUDY],
}


def seconds(command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as empty:  # or a second study would find its runs done
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=empty)
        return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    for command in PROCESSES.values():  # once unseen: files come from the disk, the kernel is built
        seconds(command)
    turns = [{name: seconds(command) for name, command in PROCESSES.items()} for _ in range(repeats)]
    print(f"median of {repeats}: seconds, and times torch's import")
    for name in PROCESSES:
        took = statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(turn[name] / turn["import torch"] for turn in turns)
        print(f"{name:<32} {took:6.2f} s  {ratio:6.2f}")
