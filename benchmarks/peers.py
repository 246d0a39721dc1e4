"""klatsch beside its peers: each in an environment of its own, on the same task, in turns, in one run.

Run: .venv/bin/python benchmarks/peers.py [--only decent-bench,hivemind] [--turns 3] [--python /path/to/python3.13]

pip makes the environments (600 MB in all, most of it decent-bench's, which needs a Python from 3.13 up). The others see
the packages of the environment that runs this script, so torch is not fetched again. A peer that does not install, or
fails, is named with the reason, and the others go on. Tasks:

decent-bench    simulation: the same least squares, matrix, step size and rounds
Decent-DP       four ranks: LeNet on a tenth of Fashion-MNIST, with the same optimizer, batches and graph
schedulefree, torch.optim.Muon      one node: a network with one hidden layer, float64
torchft, hivemind       four members, one thread each: LeNet on random images with SGD; one is killed with kill -9 while
    they train, and a new one starts at once. "longest pause": the longest time between two steps of a survivor until
    the new one is in; "all mix again": until every survivor has completed an exchange after the kill; "newcomer": from
    having loaded its libraries to its first exchange. hivemind averages about every five seconds: a round takes three.

A ratio compares times of one turn. Shown is the median over the turns, in brackets the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

PEERS = ("decent-bench", "decent-dp", "schedulefree", "torchft", "hivemind")
NEEDS = {"decent-bench": (3, 13)}  # a Python of its own
RULES = {"DGD": "dsgd", "ATC": "dsgd", "ED": "d2", "ATC_Tracking": "gt"}  # algorithms of decent-bench, and klatsch's
NODES, DIM, ROUNDS, LONGER = 16, 50, 500, 100  # of the least squares; how many times more rounds time klatsch
RANKS, BATCH, LR = 4, 64, 0.1
STEPS, BLOCK, IMAGES = 300, 25, 6000  # of a rank beside Decent-DP, steps in a turn, and images of all ranks
WAYS = {  # of members: by name, the peer, and what a user would write
    "local": ("", "torch.optim.SGD"),
    "klatsch/8": ("", "GossipSGD(every=8)"),
    "klatsch int8": ("", 'GossipSGD(wire="int8")'),
    "LocalSGD": ("torchft", "LocalSGD(sync_every=8)"),
    "DiLoCo": ("torchft", "DiLoCo(sync_every=8)"),
    "hivemind": ("hivemind", "Optimizer(use_local_updates=True)"),
}
H, HIVE_SECONDS = 8, 5.0  # steps between two exchanges, and hivemind's seconds
MIXES, PATIENCE = 3, 180.0  # exchanges of every member before the kill; seconds for anything to happen


class Skipped(Exception):  # noqa: N818
    """A peer that cannot be measured here, and why."""


def show(peer: str, what: str, theirs: str, klatsch: str = "") -> None:
    print(f"{peer:19} {what:70} {theirs:>20} {klatsch:>20}".rstrip(), flush=True)


def ranged(values: list[float], form: str = ".2f") -> str:
    middle, *ends = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({ends[0]}-{ends[1]})"


# --- environments -----------------------------------------------------------------------------------------------------


def environment(name: str, folder: Path, python: str) -> str:
    """The Python of a peer's environment, which is made if there is none."""
    home, least = folder / name, NEEDS.get(name)
    own = home / "bin/python"
    if (home / "complete").exists():
        return str(own)
    base = sys.executable if least is None or sys.version_info >= least else python
    version = tuple(json.loads(ran(base, "-c", "import sys; print(list(sys.version_info[:2]))")))
    if least is not None and version < least:
        raise Skipped(f"it needs Python {least[0]}.{least[1]}, and {base} is older; name another one with --python")
    print(f"making {home}", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    ran(base, "-m", "venv", str(home))
    limits = home / "constraints.txt"
    limits.write_text("" if least else f"torch=={metadata.version('torch')}\n")
    if least is None:  # packages that it does not have itself are those of this environment
        (site,) = home.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(sysconfig.get_path("purelib"))
    ran(str(own), "-m", "pip", "install", "--quiet", "--constraint", str(limits), name)
    (home / "complete").touch()
    return str(own)


def settings(**variables: str) -> dict[str, str]:
    """The environment variables of a worker, which has one thread and finds this klatsch."""
    import klatsch

    home = str(Path(klatsch.__file__).parents[1])
    path = {} if home == sysconfig.get_path("purelib") else {"PYTHONPATH": home}
    return os.environ | path | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | variables


def ran(*command: str) -> str:
    """What a command prints; skipped with its last words if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=settings())
    except OSError as error:
        raise Skipped(f"{command[0]}: {error.strerror}; name a Python with --python") from None
    if done.returncode:
        raise Skipped(f"exit code {done.returncode}: {last_words(done.stderr)}")
    return done.stdout


def last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    return [*([lines[-1]]), *(line for line in lines if "rror:" in line)][-1][:200]


def part(python: str, *words: object) -> list[str]:
    return [python, str(Path(__file__).with_name("peer_programs.py")), *map(str, words)]


def title(name: str, python: str) -> str:
    code = f"from importlib import metadata; print(metadata.version({name!r}))"
    return f"{name} {ran(python, '-c', code).strip()}"


# --- decent-bench: simulation -----------------------------------------------------------------------------------------


def beside_decent_bench(peer: str, python: str, turns: int) -> None:
    import numpy as np
    import torch

    import klatsch

    torch.set_num_threads(1)
    chance, graph = np.random.default_rng(0), klatsch.topology.ring(NODES)
    A, b = chance.normal(size=(NODES, DIM, DIM)), chance.normal(size=(NODES, DIM))
    problem = klatsch.problems.LeastSquares.from_arrays(A, b)
    lr = 0.5 / problem.L
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    with tempfile.TemporaryDirectory() as folder:
        task, found = Path(folder, "task.npz"), Path(folder, "found.npz")
        np.savez(task, A=A, b=b, P=graph.matrix(1).toarray(), lr=lr)
        for turn in range(turns):
            seconds = json.loads(ran(*part(python, "decent-bench", task, found)))
            for name, of in RULES.items():
                rule = klatsch.rules.make(of, lr=lr, **({"order": "cta"} if name == "DGD" else {}))
                ours = klatsch.simulate(problem, rule, graph, ROUNDS, 1, progress=False)
                long = klatsch.simulate(problem, rule, graph, LONGER * ROUNDS, 1, progress=False)
                rates[name].append((ROUNDS / seconds[name], LONGER * ROUNDS / long.seconds))
                apart = difference(ours.output[:, 0], torch.from_numpy(np.load(found)[name]))
                if not turn or apart > 1e-10:
                    show(peer, f"{name} and {of}: relative difference after {ROUNDS} rounds", f"{apart:.0e}")
    for name, pairs in rates.items():
        cells = [ranged([*way], ",.0f") for way in zip(*pairs, strict=True)]
        show(peer, f"{name} and {RULES[name]} ({long.engine}): rounds per second", *cells)


def difference(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


# --- Decent-DP: ranks -------------------------------------------------------------------------------------------------


def beside_decent_dp(peer: str, python: str, turns: int) -> None:
    at = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command, pipe = part(python, "decent-dp", turns), subprocess.PIPE
    ranks = [
        subprocess.Popen(command, env=settings(RANK=str(k), **at), stdout=pipe, stderr=pipe, text=True)
        for k in range(RANKS)
    ]
    try:
        said = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise Skipped(f"a rank failed: {last_words(said[0][1])}")
    found = json.loads(said[0][0].splitlines()[-1])
    show(peer, "SGD, complete graph, and DSGD cta: relative difference, float64", f"{found.pop('apart'):.0e}")
    for kind, graph in (("SGD", "one-peer-exp, and DSGD cta"), ("AdamW", "one-peer-exp, and GossipAdamW cta")):
        ways = [found[f"{who} {kind}"] for who in ("theirs", "klatsch")]
        for column, what in enumerate(("step", "processor time of a step")):
            ratios = [[ratio(*pair, column) for pair in zip(way, found["local"], strict=True)] for way in ways]
            show(peer, f"{kind}, {graph}: {what}, times one without communication", *map(ranged, ratios))
        accuracy = (ranged([turn["accuracy"] for turn in way], ".1f") for way in ways)
        show(peer, f"{kind}, {graph}: test accuracy after {STEPS} steps, %", *accuracy)


def ratio(turn: dict[str, Any], bare: dict[str, Any], column: int) -> float:
    """Of blocks of steps that ran one after the other; the first one warms up."""
    pairs = zip(turn["blocks"][1:], bare["blocks"][1:], strict=True)
    return statistics.median(block[column] / other[column] for block, other in pairs)


# --- schedulefree, torch.optim.Muon: one node -------------------------------------------------------------------------


def beside_schedulefree(peer: str, python: str, turns: int) -> None:
    for what, (apart, times) in json.loads(ran(*part(python, "schedulefree", turns))).items():
        name = peer if "ScheduleFree" in what else f"torch {metadata.version('torch')}"
        show(name, f"{what}: relative difference after 100 steps", f"{apart:.0e}")
        if times:
            show(name, f"{what}: ms of processor time of step()", *(ranged([1e3 * s for s in way]) for way in times))


# --- torchft, hivemind: members that die ------------------------------------------------------------------------------


class Process:
    """A process with all that it starts, and what it tells: times, steps and exchanges, or where it is met."""

    def __init__(self, command: list[str], at: dict[str, str]) -> None:
        said = None if os.environ.get("VERBOSE") else subprocess.DEVNULL
        self.running = subprocess.Popen(
            command, env=settings(**at), stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        self.told: list[Any] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.running.stdout is not None
        for line in self.running.stdout:
            with suppress(ValueError):
                self.told.append(json.loads(line))

    def mixed(self, more: int, after: float = 0.0) -> float | None:
        """When it had done so many exchanges more than it had at some time, or at its first step."""
        rows = [*self.told][1:]
        had = max((row[2] for row in rows if row[0] <= after), default=rows[0][2] if rows else 0)
        return next((row[0] for row in rows if row[0] > after and row[2] >= had + more), None)

    def kill(self) -> None:
        """With its children, as if its machine had lost its power."""
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, signal.SIGKILL)
        self.running.wait()


def wait_until(what: str, met: Callable[[], Any], processes: list[Process]) -> None:
    until = time.monotonic() + PATIENCE
    while not met():
        if any(process.running.poll() is not None for process in processes):
            raise Skipped(f"{what}: a process ended by itself; VERBOSE=1 shows why")
        if time.monotonic() > until:
            raise Skipped(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(0.05)


def crew(way: str, python: str, seconds: float, pace: float, folder: str) -> dict[str, float]:
    """Seconds of a step of four members, and of what a kill costs."""
    token, every = str(Path(folder, "token")), round(HIVE_SECONDS / pace) if way == "hivemind" else H
    at, place, members = {"KLATSCH_CREW_TOKEN_FILE": token}, [], []
    try:
        if way.startswith("klatsch"):
            at["KLATSCH_CREW"] = f"127.0.0.1:{(port := str(free_port()))}"
            serve = [python, "-m", "klatsch", "crew", "serve", "--port", port, "--token-file", token]
            place.append(Process(serve, {}))
            wait_until("the registry", Path(token).exists, place)
        elif way != "local":
            place.append(Process(part(python, "meeting-place", way), {}))
            wait_until("a meeting place", lambda: place[0].told, place)
            at["MEETING_PLACE"] = place[0].told[0]
        members += [Process(part(python, "member", way, k, every), at) for k in range(RANKS)]
        survivors = members[:-1]
        wait_until(f"{MIXES} exchanges", lambda: all(each.mixed(MIXES) for each in members), members)
        began = time.monotonic()
        time.sleep(seconds)
        killed = time.monotonic()
        steps = statistics.mean(sum(began < row[0] < killed for row in each.told) for each in members)
        found = {"step": (killed - began) / steps}
        if way == "local":
            return found
        members[-1].kill()
        members.append(newcomer := Process(part(python, "member", way, RANKS, every), at))
        wait_until("exchanges after the kill", lambda: all(each.mixed(1, killed) for each in survivors), survivors)
        wait_until("the newcomer's first exchange", lambda: newcomer.mixed(1), [*survivors, newcomer])
        again, joined = [each.mixed(1, killed) or 0.0 for each in survivors], newcomer.mixed(1) or 0.0
        wait_until("a step after that", lambda: all(each.told[-1][0] > joined for each in survivors), survivors)
        times = [[row[0] for row in each.told] for each in survivors]
        pause = max(b - a for each in times for a, b in pairwise(each) if b > killed and a < joined)
        return found | {"pause": pause, "again": max(again) - killed, "joined": joined - newcomer.told[0][0]}
    finally:
        for process in [*members, *place]:
            process.kill()


def crews(pythons: dict[str, str], turns: int, seconds: float) -> None:
    """Members of all kinds, in turns."""
    ways = [way for way, (peer, _) in WAYS.items() if not peer or peer in pythons]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(turns):
        pace = 0.0
        for way in ways if turn % 2 == 0 else ["local", *ways[:0:-1]]:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    row = crew(way, pythons.get(WAYS[way][0], sys.executable), seconds, pace, folder)
            except Skipped as reason:
                show(WAYS[way][0] or "klatsch", f"{WAYS[way][1]}: skipped in turn {turn + 1}", str(reason))
                if way == "local":
                    return
                continue
            pace = pace or row["step"]
            found[way].append(row | {"ratio": row["step"] / pace})
    floor = ranged([1e3 * row["step"] for row in found["local"]], ".1f")
    show("torch", "SGD without communication: ms of a step", floor)
    names = {peer: title(peer or "klatsch", python) for peer, python in {"": sys.executable, **pythons}.items()}
    figures = {"ratio": "step, times one without communication", "pause": "longest pause, s"}
    figures |= {"again": "all mix again, s", "joined": "newcomer, s"}
    for figure, named in figures.items():
        for way in ways[1:]:
            peer, what = WAYS[way]
            if found[way]:
                told = ranged([row[figure] for row in found[way]])
                show(names[peer], f"{what}: {named}", *((told,) if peer else ("", told)))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


BESIDE = {"decent-bench": beside_decent_bench, "decent-dp": beside_decent_dp, "schedulefree": beside_schedulefree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS), help="packages")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache/klatsch/peers", metavar="FOLDER")
    parser.add_argument("--python", default="python3.13", help="for peers that need a later one than this")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="that members train before the kill")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # with all that it has started
    names = given.only.split(",")
    if unknown := set(names) - {*PEERS}:
        parser.error(f"--only has {', '.join(sorted(unknown))}; give some of {', '.join(PEERS)}")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"{machine}, torch {metadata.version('torch')}; {given.turns} turns; load {os.getloadavg()[0]:.1f}\n")
    show("peer", "what was run", "peer", "klatsch")
    pythons: dict[str, str] = {}
    for name in names:
        try:
            pythons[name] = environment(name, given.environments, given.python)
            if name in BESIDE:
                BESIDE[name](title(name, pythons[name]), pythons[name], given.turns)
        except Skipped as reason:
            show(name, "skipped", str(reason))
    if members := {name: pythons[name] for name in ("torchft", "hivemind") if name in pythons}:
        crews(members, given.turns, given.seconds)


if __name__ == "__main__":
    main()
