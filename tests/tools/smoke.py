"""Does an installed klatsch work? Run with the Python of an environment that has it, and with nothing of the clone.

python smoke.py            # installed as klatsch: trains on two ranks, simulates; the command says what it lacks
python smoke.py --cli      # installed as klatsch[cli]: the command simulates, too
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = """
import torch, klatsch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1, momentum=0.9, wire="int8")
target = torch.tensor([1.0, -2.0, 3.0, 0.5])
for _ in range(200):
    x = torch.randn(32, 4)
    loss = (model(x).squeeze() - x @ target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert loss < 0.01, loss
assert optimizer.consensus() < 0.1
"""

SIMULATE = """
from klatsch import problems, rules, simulate, topology
result = simulate(problems.LeastSquares(4), rules.make("dat", lr=0.01), topology.ring(4), 100)
assert result.rounds == 100
"""

# What mypy --strict is to pass, in the clone and where the wheel is installed.
SCRIPT = '''
from dataclasses import dataclass

import torch
from torch import Tensor

import klatsch
from klatsch.columns import Number
from klatsch.rules import Flow, Rule, State


@dataclass(frozen=True)
class Mine(Rule):
    """Plain gossip."""

    lr: float

    def init(self, x: Tensor) -> State:
        return {"w": x}

    def update(self, s: State, grad: Tensor, flow: Flow, t: int, lr: Number) -> State:
        (pull,) = flow(s["w"])
        return {"w": s["w"] + pull - lr * grad}


def train(model: torch.nn.Module, batches: list[Tensor]) -> float:
    optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1, momentum=0.9, wire="int8")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    checkpointer = klatsch.Checkpointer("checkpoints", every=100)
    for batch in batches[checkpointer.resume(optimizer, model=model, scheduler=scheduler) :]:
        optimizer.zero_grad()
        torch.autograd.backward(model(batch).square().mean())  # torch has no types for Tensor.backward
        optimizer.step()
        scheduler.step()
        checkpointer.step()
    with klatsch.merged(model):
        torch.save(model.state_dict(), "model.pt")
    return optimizer.consensus()


problem = klatsch.problems.LeastSquares(8)
graph = klatsch.topology.make("ring", 8, every=2)
result = klatsch.simulate(problem, Mine(lr=0.01), graph, 100)
final: Tensor = result.metrics["distance"][-1]
'''


def python(*words: str, ok: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | environment, timeout=600
    )
    assert done.returncode == ok, done.stdout + done.stderr
    return done


def seconds(program: str) -> float:
    """The CPU time of a program, from files that are in memory."""
    python("-c", program)
    before = os.times()
    python("-c", program)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def train() -> None:
    """Two ranks, as torchrun starts them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environments = [os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen([sys.executable, "-c", TRAIN], env=environment) for environment in environments]
    assert [rank.wait(600) for rank in ranks] == [0, 0]


def main() -> None:
    """Try it, and say how large it is and how long it takes to load."""
    import torch

    import klatsch

    folder = Path(klatsch.__file__).parent
    assert "site-packages" in folder.parts, f"{folder} is not installed"
    assert (folder / "py.typed").exists()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.suffix != ".pyc")
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        train()
        python("-c", SIMULATE)
        rooms, alone = seconds("import klatsch; klatsch.Gossip, klatsch.simulate"), seconds("import torch")
        if "--cli" in sys.argv:
            assert klatsch.__version__ in python("-m", "klatsch", "--version").stdout
            command = "run --rules dat,dsgd --topology ring -n 4 --steps 50 --workers 1"
            assert "dat" in python("-m", "klatsch", *command.split()).stdout
        else:
            lacks = python("-m", "klatsch", ok=2).stderr
            assert lacks.endswith("pip install 'klatsch[cli]'\n"), lacks
            assert lacks.count("\n") == 1, lacks
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"ok: Python {version}, torch {torch.__version__}, klatsch {klatsch.__version__} of {size / 1e6:.1f} MB,",
        end=" ",
    )
    print(f"loaded in {rooms:.2f} s of CPU time, torch alone in {alone:.2f} s")


if __name__ == "__main__":
    main()
