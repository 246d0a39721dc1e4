"""How fast a crew's links are, as its members see them, behind links that `tc tbf` limits.

    python benchmarks/links.py    # as root; three minutes

Four members of a million parameters train with a graph, each in a network namespace of its own behind a limit in both
directions, and `klatsch crew status` is asked what they see. The table has what they say over the limit: the least, the
middle and the largest of all links.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from klatsch.files import token_of
from klatsch.ranks.registry import ask
from ranks import namespaces

MEMBERS, PORT, SECONDS = 4, 4719, 20
PROGRAM = """
import time, torch, klatsch
from torch import nn

vector, graph = nn.Parameter(torch.zeros(1_000_000)), "{graph}"
optimizer = klatsch.Gossip([vector], klatsch.rules.make("dsgd", lr=1e-6), graph)
vector.grad, end = torch.randn(1_000_000), time.monotonic() + {seconds}
while time.monotonic() < end:
    time.sleep(0.05)
    optimizer.step()
optimizer.leave()
"""


def seen(rate: float, graph: str, folder: Path) -> list[float]:
    """Bytes per second of every link."""
    token, registry = folder / "token", [sys.executable, "-m", "klatsch", "crew", "serve"]
    with namespaces(MEMBERS, rate) as prefixes:
        environment = os.environ | {"KLATSCH_CREW": f"10.77.0.1:{PORT}", "KLATSCH_CREW_TOKEN_FILE": str(token)}
        environment |= {"OMP_NUM_THREADS": "1"}
        words = ["--token-file", str(token), "--port", str(PORT), "--least", str(MEMBERS)]
        started = [subprocess.Popen([*prefixes[0].split(), *registry, *words], stdout=subprocess.DEVNULL)]
        program = PROGRAM.format(graph=graph, seconds=SECONDS)
        try:
            while not token.exists():
                time.sleep(0.1)
            time.sleep(2.0)  # until it listens
            for prefix in prefixes:
                command = [*prefix.split(), sys.executable, "-c", program]
                started.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            time.sleep(SECONDS)
            asking = f"import sys; sys.path[:0] = {sys.path!r}; import links; links.tell({str(token)!r})"
            told = subprocess.run([*prefixes[0].split(), sys.executable, "-c", asking], capture_output=True, text=True)
            for member in started[1:]:
                member.wait()
        finally:
            for process in started:
                process.kill()
    return [float(word) for word in told.stdout.split()]


def tell(token: str) -> None:
    """Print what the crew's members see, from inside its network."""
    rows = ask([("10.77.0.1", PORT)], token_of(token), {"op": "status", "links": True})["members"]
    print(*(rate for row in rows for _, rate in row.get("links", {}).values()))


def main() -> None:
    if os.geteuid() != 0:
        print("limited networks need root (ip netns, tc): nothing to measure")
        return
    print("limit, graph, links: least, middle and largest rate over the limit")
    for rate, graph in [(5e7, "ring"), (5e7, "base_graph"), (2e8, "ring"), (2e8, "base_graph")]:
        with tempfile.TemporaryDirectory() as folder:
            found = [8 * each / rate for each in seen(rate, graph, Path(folder))]
        shares = f"{min(found):.2f} {statistics.median(found):.2f} {max(found):.2f}" if found else "none are known"
        print(f"{rate / 1e6:3.0f} Mbit/s  {graph:10}  {len(found)}  {shares}", flush=True)


if __name__ == "__main__":
    main()
