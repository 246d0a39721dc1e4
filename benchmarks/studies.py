"""Studies: the paper's figure 1 (4,536 runs of 100,000 rounds) in short, projected to its full length.

Run: .venv/bin/python benchmarks/studies.py [--rounds 2000] [--full]

On the CPU all 162 batches are run with fewer rounds on all cores, one process each; the projection takes the time of
the batches only, not that of starting processes. Beside it, what packing into columns brings: the 28 runs of one
batch together and one after the other. On a GPU (if there is one) all 4,536 runs are six stacks; --full runs them
with all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from klatsch.native import cores
from klatsch.study import Store, execute, expand
from klatsch.study.batches import Batch, pack, run_batch
from klatsch.study.spec import study_of

PAPER_ROUNDS = 100_000


def figure_1(device: str, dtype: str, rounds: int) -> None:
    study = study_of("fig1", "paper", device, dtype).model_copy(update={"steps": rounds})
    cases, _ = expand(study)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "bench.sqlite") as store:
        told: list[tuple[float, int]] = []
        began = time.monotonic()
        progress = execute(cases, store, device=device, told=lambda p: told.append((time.monotonic(), p.work_done)))
        wall = time.monotonic() - began
        simulated = sum(outcome.seconds for outcome in store.outcomes(store.done(), names=()).values())
    # From the first batch to the last: without the start of the workers.
    (first, done), (last, all_done) = told[1], told[-1]
    pace = (all_done - done) / max(last - first, 1e-9)
    full = progress.work * PAPER_ROUNDS / rounds
    where = torch.cuda.get_device_name() if device == "cuda" else f"{cores()} cores"
    print(f"{where}, {dtype}: {len(cases):,} runs of {rounds:,} rounds in {progress.batches} batches")
    print(f"  wall time {wall:.1f} s, of which {simulated:.1f} s of simulation (summed over workers)")
    print(f"  {pace / 1e6:.1f} million node-gradients/s, {len(cases) / wall:.1f} runs/s")
    if rounds < PAPER_ROUNDS:
        print(f"  projected for {PAPER_ROUNDS:,} rounds: {full / pace / 60:.1f} min")


def packing(rounds: int) -> None:
    """The runs of one batch together, and one after the other, in turn."""
    torch.set_num_threads(1)
    study = study_of("fig1", "paper").model_copy(update={"steps": rounds, "seeds": (0,), "record": 2})
    print(f"28 runs on one core, dat on a ring, float32, {rounds:,} rounds: seconds together, one by one, ratio")
    for nodes in (4, 25, 100):
        chosen = [c for c in expand(study)[0] if (c.rule, c.topology, c.nodes) == ("dat", "ring", nodes)]
        (batch,) = pack(chosen, "cpu")
        ratios, together, alone = [], 0.0, 0.0
        for _ in range(3):
            together, alone = timed([batch]), timed([Batch(((case,),), "cpu") for case in chosen])
            ratios.append(alone / together)
        print(f"  M = {nodes:3}  {together:8.2f}  {alone:8.2f}  {statistics.median(ratios):6.1f}")


def timed(batches: list[Batch]) -> float:
    began = time.perf_counter()
    for batch in batches:
        run_batch(batch)
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2_000)
    parser.add_argument("--full", action="store_true", help="all rounds, on a GPU")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        figure_1("cuda", "float64", PAPER_ROUNDS if arguments.full else 5 * arguments.rounds)
    else:
        figure_1("cpu", "float32", arguments.rounds)
        packing(arguments.rounds)
