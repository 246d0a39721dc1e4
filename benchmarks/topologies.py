"""How long large topologies take to build and to solve, and the memory they need.

    .venv/bin/python benchmarks/topologies.py [--nodes 1000 10000 100000]

Each case runs in a process of its own, so that its peak memory is its own. Memory is what the graph adds to a process
that has only imported klatsch. The last table puts the sparse eigenvalue solver beside the dense one.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np

from klatsch import topology as tp
from klatsch.topology import spectrum

FAMILIES = ("ring", "torus", "one_peer_exponential", "base_graph")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(family: str, nodes: int) -> dict[str, float]:
    """One case, in this process."""
    before = peak_mib()
    start = time.perf_counter()
    graph = tp.make(family, nodes)
    built = time.perf_counter()
    links = sum(P.nnz for P in graph.matrices)
    gap = graph.spectral_gap
    solved = time.perf_counter()
    return {
        "links": links,
        "build": built - start,
        "gap": solved - built,
        "rho": gap,
        "error": abs(gap / tp.spectral_gap(family, nodes) - 1),
        "memory": peak_mib() - before,
        "peak": peak_mib(),
    }


def in_own_process(family: str, nodes: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", family, str(nodes)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare_with_dense(family: str, nodes: int) -> None:
    graph = tp.make(family, nodes)
    times = []
    for limit in (nodes, 1):
        spectrum.DENSE_LIMIT = limit
        start = time.perf_counter()
        value = spectrum.second_modulus(graph.matrices)
        times.append((time.perf_counter() - start, value))
    (dense, exact), (sparse, value) = times
    print(f"{family:22}{nodes:>8,}{dense:>9.2f} s{sparse:>9.3f} s{dense / sparse:>9.1f}{abs(value - exact):>13.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of large topologies")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--case", nargs=2, metavar=("FAMILY", "NODES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case[0], int(arguments.case[1]))))
        return
    print(
        f"{'topology':22}{'nodes':>8}{'entries':>12}{'build':>11}{'gap':>11}{'rho':>13}{'error':>9}{'memory':>12}{'peak':>11}"
    )
    for family in FAMILIES:
        for nodes in arguments.nodes:
            r = in_own_process(family, nodes)
            print(
                f"{family:22}{nodes:>8,}{r['links']:>12,}{r['build']:>9.2f} s{r['gap']:>9.2f} s"
                f"{r['rho']:>13.4g}{r['error']:>9.0e}{r['memory']:>8.0f} MiB{r['peak']:>7.0f} MiB"
            )
    print("\nsparse solver beside the dense one: seconds, how many times faster, difference")
    print(f"{'topology':22}{'nodes':>8}{'dense':>11}{'sparse':>11}{'ratio':>9}{'difference':>13}")
    np.linalg.eigvalsh(np.eye(300))  # load LAPACK before the clock runs
    for family in ("ring", "torus", "random_regular", "one_peer_exponential"):
        compare_with_dense(family, 2_000)


if __name__ == "__main__":
    main()
