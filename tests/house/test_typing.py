"""A user's script passes mypy --strict: klatsch says its types (py.typed)."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


@pytest.mark.soak
def test_a_script_of_a_user_passes(prepared, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "reveal_type(klatsch.optim.GossipSGD)\nklatsch.simulate(problem, 3, graph, 100)\n")
    done = prepared.program(sys.executable, "-m", "mypy", "--strict", script, cwd=ROOT).done()
    wrong = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(wrong) == 1, done.stdout + done.stderr
    assert 'Argument 2 to "simulate" has incompatible type "int"; expected "Rule"' in wrong[0]
    assert 'Revealed type is "def (params' in done.stdout
    assert (ROOT / "src" / "klatsch" / "py.typed").exists()
