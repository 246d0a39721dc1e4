"""A user's own model, loss and data as a problem."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from klatsch import problems
from klatsch.problems import Supervised

TASK = """
import torch
from torch import nn

def task():
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    return nn.Linear(3, 1), nn.functional.mse_loss, (inputs, inputs.sum(1, keepdim=True))

def uneven():
    return nn.Linear(3, 1), nn.functional.mse_loss
"""


class Words(Dataset):
    """Whole numbers, which the model looks up."""

    def __len__(self):
        return 60

    def __getitem__(self, k):
        return torch.tensor([k % 7, k % 3]), k % 2


def chain():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def reader():
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 2))


def numbers():
    chance = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(60, 4, generator=chance), torch.randint(2, (60,), generator=chance))


@pytest.mark.parametrize("model, data", [(chain, numbers()), (reader, Words())], ids=["numbers", "words"])
def test_gradients_and_scores_are_those_of_the_model(model, data):
    problem = Supervised(model, nn.functional.cross_entropy, data, nodes=3, batch=4, seed=2)
    assert problem.samples == 54  # one in ten is held out
    chance = torch.Generator().manual_seed(3)
    points = problem.start() + 0.1 * torch.randn(3, problem.dim, generator=chance)
    drawn = problem.draw(torch.tensor([5]))[0]
    gradients = problem.grad(points[:, None], 5)[:, 0]
    losses = problem.by_node(points[:, None])["loss"][:, 0]
    for node in range(3):
        own = copy.deepcopy(problem._stacked.module)
        nn.utils.vector_to_parameters(points[node], own.parameters())
        inputs, targets = problem.data.inputs[drawn[node]], problem.data.targets[drawn[node]]
        nn.functional.cross_entropy(own(inputs), targets).backward()
        expected = nn.utils.parameters_to_vector(parameter.grad for parameter in own.parameters())
        torch.testing.assert_close(gradients[node], expected, rtol=1e-4, atol=1e-6)  # float32, other products
        loss = nn.functional.cross_entropy(own(problem.data.test_inputs), problem.data.test_targets)
        assert float(losses[node]) == pytest.approx(loss.item(), rel=1e-5)


def test_classes_may_be_uneven():
    problem = Supervised(chain, nn.functional.cross_entropy, numbers(), nodes=2, alpha=0.01, batch=2)
    shares = problem.data.targets[problem.shards].float().mean(1)
    assert abs(float(shares[0] - shares[1])) > 0.5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": (torch.randn(9, 4), torch.zeros(9))}, "9 samples are too few to hold one in 10 out"),
        ({"data": (torch.randn(20, 4), torch.randn(20)), "alpha": 1.0}, r"targets are float32 of shape \(18,\)"),
        ({"data": [(1, 2, 3)] * 20}, r"not \(input, target\)"),
        ({"data": iter(())}, "Dataset with a length"),
        ({"loss": lambda outputs, targets: outputs}, "the loss of a batch has shape"),
        ({"model": lambda: nn.BatchNorm1d(4)}, "running statistics do not gossip"),
        ({"nodes": 40}, "there are 54 samples"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"model": chain, "loss": nn.functional.cross_entropy, "data": numbers(), "nodes": 2, "batch": 2} | change
    with pytest.raises(ValueError, match=message):
        Supervised(**given)


@pytest.mark.processes
def test_a_task_in_a_file_runs_and_is_planned(tmp_path, monkeypatch, run_cli):
    (tmp_path / "train.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    assert problems.make("train.py:task", 3, batch=5).data.inputs.shape == (180, 3)
    code, out, err = run_cli("plan", "train.py:task", "-n", 2, "--measure", "--target", "0.5", "--minutes", 60)
    assert code == 0, err
    assert "train.py:task to loss 0.5, 4 parameters" in out
    again = next(line for line in out.splitlines() if "again: klatsch run" in line).split("klatsch ")[1]
    code, _, err = run_cli(*again.split(), "--store", "results.sqlite")
    assert code == 0, err
    for words, message in (
        (("train.py:task", "--measure", "--gradient", "1"), "--measure and --gradient 1 both say"),
        (("train.py:uneven",), r"uneven gives 2 things; let it return (model, loss, (train, test))"),
    ):
        code, _, err = run_cli("plan", *words)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
