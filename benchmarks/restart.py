"""How long an all-reduce stands still when it loses a process or a machine: from kill -9 to the first step afterwards.

Run: .venv/bin/python benchmarks/restart.py [--kills 3]

Two torchruns, as if on two machines, each with a rank that trains nothing and loads nothing, so this is what any
training pays at least: torchrun notices, ends the other rank, and all meet again, import torch and connect over gloo.
First one rank is killed; then a torchrun with its rank, and another one is started at once in its place. The longer of
the two is what `klatsch.clock.Deaths` calls a restart.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = 300.0  # seconds for a restart


def worker(folder: Path) -> None:
    """Steps with an all-reduce, each of which leaves its time and the process of every rank."""
    dist.init_process_group("gloo")
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    while not (folder / "end").exists():
        pids.zero_()[dist.get_rank()] = os.getpid()
        dist.all_reduce(pids)
        told = folder / f".{os.getpid()}"
        told.write_text(" ".join(map(str, [time.time(), *pids.tolist()])))
        told.rename(folder / "step")
        time.sleep(0.01)


class Crew:
    """The torchruns, and the last step of their ranks."""

    def __init__(self, folder: Path, kills: int) -> None:
        self.folder, self.kills = folder, kills
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.agents = [self.start(), self.start()]  # the first one keeps the store
        self.pids, _ = self.step_of({*range(0)})

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "restart"]
        words += ["--max-restarts", str(2 * self.kills), __file__, "--worker", str(self.folder)]
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        out = (self.folder / "out").open("a")
        started = subprocess.Popen(words, env=environment, stdout=out, stderr=out, start_new_session=True)
        time.sleep(1.0)
        return started

    def step_of(self, gone: set[int]) -> tuple[list[int], float]:
        """The processes and the time of the first step without those that are gone."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if (self.folder / "step").exists():
                at, *pids = (self.folder / "step").read_text().split()
                if gone.isdisjoint(map(int, pids)):
                    return [*map(int, pids)], float(at)
            time.sleep(0.01)
        sys.exit(f"no step within {PATIENCE:.0f} s:\n{(self.folder / 'out').read_text()[-3000:]}")

    def after(self, kill: str) -> float:
        """The seconds that a kill costs, of a rank or of a torchrun with its rank."""
        children = f"/proc/{self.agents[1].pid}/task/{self.agents[1].pid}/children"
        gone = {*map(int, Path(children).read_text().split())} & {*self.pids}
        began = time.time()
        for pid in gone:
            os.kill(pid, signal.SIGKILL)
        if kill == "machine":
            os.killpg(self.agents[1].pid, signal.SIGKILL)
            self.agents[1].wait()
            self.agents[1] = self.start()
        self.pids, at = self.step_of(gone)
        return at - began

    def end(self) -> None:
        (self.folder / "end").touch()
        for agent in self.agents:
            with_time = agent.wait(PATIENCE)
            assert with_time is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given.worker)
    print(f"two torchruns of one rank each, gloo, torch {torch.__version__}; seconds from kill -9 to the next step")
    for kill in ("rank", "machine"):
        with tempfile.TemporaryDirectory() as name:
            crew = Crew(Path(name), given.kills)
            try:
                taken = []
                for _ in range(given.kills):
                    time.sleep(1.0)
                    taken.append(crew.after(kill))
                crew.end()
            finally:
                for agent in crew.agents:
                    if agent.poll() is None:
                        os.killpg(agent.pid, signal.SIGKILL)
        print(f"a {kill:8} {statistics.median(taken):6.1f} ({min(taken):.1f} to {max(taken):.1f})", flush=True)


if __name__ == "__main__":
    main()
