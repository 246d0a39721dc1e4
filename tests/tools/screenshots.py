"""Pictures of the live page and of a report in docs/images: `python -m tests.tools.screenshots FOLDER`.

Eight ranks train and a small study runs, in FOLDER, which keeps both for the next call; then a browser shows them.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import Tab
from tests.support.prepared import Prepared
from tests.support.processes import Ranks
from tests.support.waiting import wait_until

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WINDOWS = {
    "": {"width": 1100, "height": 1590},
    "-phone": {"width": 390, "height": 844},
    "-dark": {"width": 1100, "height": 1590, "dark": True},
}
STUDY = """
name = "rules"
title = "Rules on two graphs"
steps = 2000
nodes = [4, 9, 16, 32]
lr = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
rules = [{ name = "dat", beta = 0.9 }, "dsgd", "gt"]
topologies = ["ring", "base_graph"]
problem = { name = "least-squares", noise = 10.0 }
figures = [{ across = "nodes", wide = 2 }, { name = "rounds", where = { nodes = 32 }, wide = 2 }]
"""


def klatsch(*words, **options):
    return subprocess.run([sys.executable, "-m", "klatsch", *map(str, words)], check=True, **options)


def record(folder):
    """What is shown: `spirals`, the log of a training, and `report.html`."""
    if not (folder / "spirals").exists():
        prepared = Prepared()
        Ranks(prepared, folder, 8, "rank_watched.spirals").codes()
        prepared.close()
    (folder / "study.toml").write_text(STUDY)
    klatsch("run", "study.toml", cwd=folder)
    klatsch("report", "study.sqlite", "-o", "report.html", "--title", "A report", cwd=folder)


def show_training(tab, url, window):
    """At three quarters of the run, when one rank is lost."""
    tab.open(url, **window)
    tab.until("document.querySelectorAll('#links th').length")
    # At once: between two calls, the page would set the slider back to where it is.
    slider = "document.getElementById('when')"
    tab.value(f"{slider}.value = 750, {slider}.dispatchEvent(new Event('input'))")
    tab.until("document.getElementById('status').textContent === 'paused'")
    tab.until("document.querySelectorAll('#graph .half.lost').length")
    tab.until("innerWidth < 500 || (chart.plot && !chart.stale)")


def show_report(tab, url, window):
    """A figure, with a point that is asked."""
    tab.open(url, **window)
    tab.value("document.querySelector('h2').scrollIntoView()")
    tab.until("Boolean(asked[0].panels[0].plot)")
    told = "(line => [line.x[2], line.mean[2]])(asked[0].panels[0].told.lines[1])"
    left, top = tab.value(
        f"((p, [x, y]) => (box => [box.x + p.valToPos(x, 'x'), box.y + p.valToPos(y, 'y')])"
        f"(p.over.getBoundingClientRect()))(asked[0].panels[0].plot, {told})"
    )
    for beside in (20, 1):
        tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=left + beside, y=top)
    tab.until("!asked[0].panels[0].tip.hidden")


def save(tab, name):
    """The window, in 256 colours."""
    file = IMAGES / f"{name}.png"
    tab.picture(file)
    Image.open(file).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=3).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def main():
    folder = Path(sys.argv[1]).resolve()
    record(folder)
    words = [sys.executable, "-m", "klatsch", "watch", "spirals", "--port", "0", "--no-open"]
    options = {"cwd": folder, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory() as profile, subprocess.Popen(words, **options) as watch:
        url = wait_until(lambda: re.search(r"http://\S+", watch.stdout.readline()), watch)[0]
        tab = Tab(profile)
        tab.ask("Emulation.setScrollbarsHidden", hidden=True)
        for name, window in WINDOWS.items():
            show_training(tab, url, window)
            save(tab, f"watch{name}")
            show_report(tab, (folder / "report.html").as_uri(), window)
            save(tab, f"report{name}")
        tab.close()
        watch.terminate()


if __name__ == "__main__":
    main()
