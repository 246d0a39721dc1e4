"""The live page in Chromium: how fluid it is with 64 members, and how soon it shows that a rank was killed.

Run: .venv/bin/python benchmarks/live_page.py [--members 64] [--seconds 20] [--kills 5]

Members are imitated: each writes five rounds a second to its log, with the seconds that it waited for its neighbours.
The page counts its frames; a smooth one has 60 a second. Then five times six real ranks train on a ring, one of them
is killed, and the time is taken until the page says that it is lost.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.browser import BROWSER, Tab
from tests.support.prepared import Prepared
from tests.support.processes import Ranks

COUNT = """window.gaps = []; window.before = performance.now(); requestAnimationFrame(function count(now) {
    gaps.push(now - before); before = now; requestAnimationFrame(count);
}); 0"""
ROWS = "[...document.querySelectorAll('#rows tr')].map(row => row.innerText)"
LOST = rf"{ROWS}.some(text => /^5.*\tlost\t/s.test(text))"


@contextmanager
def page(log: Path) -> Iterator[Tab]:
    """The live page of a log."""
    words = [sys.executable, "-m", "klatsch", "watch", str(log), "--port", "0", "--no-open"]
    with tempfile.TemporaryDirectory() as profile, subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        tab = Tab(profile)
        try:
            tab.open(re.findall(r"http://\S+", watch.stdout.readline())[0])
            yield tab
        finally:
            tab.close()
            watch.terminate()


def imitate(log: Path, size: int, stop: threading.Event) -> None:
    """Five rounds a second of all members."""
    files = [(log / f"{k}.jsonl").open("w", buffering=1) for k in range(size)]
    around = [[str((k - 1) % size), str((k + 1) % size)] for k in range(size)]

    def tell(k: int, kind: str, **facts: object) -> None:
        files[k].write(json.dumps({"event": kind, "time": time.time(), "member": str(k), **facts}) + "\n")

    for k in range(size):
        tell(k, "epoch", epoch=1, round=1, members=[*map(str, range(size))], neighbours=around[k])
    t = 0
    while not stop.wait(0.2):
        t += 1
        for k in range(size):
            waits = dict.fromkeys(around[k], 0.01 * t * (1 + (k + t) % 5))
            facts = {"loss": 1 / t, "consensus": 1 / t, "bytes": 1000 * t, "waited": sum(waits.values())}
            tell(k, "round", round=t, waits=waits, **facts)


def busy(tab: Tab) -> float:
    """Seconds of processor time that the page has taken."""
    return next(m["value"] for m in tab.ask("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration")


def frames(size: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stop = threading.Event()
        writer = threading.Thread(target=imitate, args=(Path(folder), size, stop))
        writer.start()
        try:
            with page(Path(folder)) as tab:
                tab.until(f"document.querySelectorAll('#rows tr').length === {size}")
                time.sleep(5)
                tab.ask("Performance.disable")
                tab.ask("Performance.enable", timeDomain="threadTicks")  # processor time
                began = time.perf_counter(), busy(tab)
                tab.value(COUNT)
                time.sleep(seconds)
                gaps = sorted(tab.value("gaps"))
                share = (busy(tab) - began[1]) / (time.perf_counter() - began[0])
        finally:
            stop.set()
            writer.join()
    print(f"{size} members, {5 * size} rounds a second: {len(gaps) / seconds:.0f} frames a second, of which 99 %")
    print(f"within {gaps[int(0.99 * len(gaps))]:.0f} ms, the longest {gaps[-1]:.0f} ms")
    print(f"the page takes {share:.0%} of a core")


def kills(count: int) -> None:
    prepared, took = Prepared(), []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "log").mkdir()
            with page(Path(folder) / "log") as tab:
                ranks = Ranks(prepared, folder, 6, "rank_watched.slow_link")
                for rank in range(6):
                    ranks.has_stopped(rank)
                for rank in range(6):
                    ranks.go_on(rank)
                tab.until(rf"{ROWS}.filter(text => /\btraining\b/.test(text)).length === 6")
                ranks.kill(5)
                began = time.perf_counter()
                tab.until(LOST)
                took.append(time.perf_counter() - began)
            prepared.end()
    prepared.close()
    print(
        f"a killed rank is shown after {statistics.median(took):.2f} s (median of {count}, at most {max(took):.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--kills", type=int, default=5)
    given = parser.parse_args()
    if BROWSER is None:
        sys.exit("needs Chromium: apt-get install chromium")
    if given.members:
        frames(given.members, given.seconds)
    if given.kills:
        kills(given.kills)


if __name__ == "__main__":
    main()
