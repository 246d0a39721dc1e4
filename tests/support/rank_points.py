"""What several ranks do at the query point and at x; each function runs in every process, after the fork."""

import warnings
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

import klatsch
from tests.support.rank_scenarios import group

STEPS = 6


def make(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    groups = [
        {"params": list(model[0].parameters()), "momentum": 0.5},
        {"params": [*model[1].parameters(), *model[2].parameters()], "weight_decay": 0.0},
    ]
    ring = klatsch.topology.lazy(klatsch.topology.ring(3))  # three on a plain ring agree at once
    rule = klatsch.rules.make("dat-gt", lr=0.1, beta=0.9)
    return model, klatsch.Gossip(groups, rule, ring, weight_decay=0.01)


def step(model, optimizer, inputs):
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def train(model, optimizer, rank, last, after=lambda: None):
    while optimizer.rounds < last:
        numbers = torch.Generator().manual_seed(100 * rank + optimizer.rounds)
        step(model, optimizer, torch.randn(8, 4, generator=numbers, dtype=torch.float64))
        after()


def held(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def points(folder):
    """A training that is looked at in between, and a calm one beside it."""
    rank, _ = group()
    found = {}
    calm, other = make(rank)
    train(calm, other, rank, STEPS)
    found["calm"] = held(calm)

    model, optimizer = make(rank)
    keeper = klatsch.Checkpointer(folder / "checkpoints", every=100)
    keeper.resume(optimizer, model=model)
    train(model, optimizer, rank, 4)
    found["query"], found["Gamma train"] = held(model), optimizer.consensus()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        optimizer.eval()
        found["x"], found["Gamma eval"] = held(model), optimizer.consensus()
        keeper.save()
        for call in (optimizer.step, optimizer.finish):
            try:
                call()
            except ValueError as error:
                found[call.__name__] = str(error)
        optimizer.train()
        found["own buffer"] = model[1].running_var.clone()
        with suppress(KeyError), klatsch.merged(model):
            found["merged"], found["Gamma merged"] = held(model), optimizer.consensus()
            found["merged buffer"] = model[1].running_var.clone()
            raise KeyError
        found["back"], found["buffer back"] = held(model), model[1].running_var.clone()
        numbers = torch.Generator().manual_seed(rank)
        klatsch.recalibrate(model, torch.randn(3, 8, 4, generator=numbers, dtype=torch.float64))
        found["own statistics"] = model[1].running_mean.clone()
        found["statistics"] = klatsch.average_(model)[1].running_mean.clone()
        for _ in range(2):
            klatsch.average_(model, parameters=True)
            found["merged again"] = held(model)
            optimizer.train()
    found["heard"] = [str(warning.message) for warning in heard]
    train(model, optimizer, rank, STEPS)
    found["end"] = held(model)
    optimizer.finish()

    again, resumed = make(rank)
    resumed.eval()
    found["resumed"] = klatsch.Checkpointer(folder / "checkpoints").resume(resumed, model=again)
    found["resumed x"] = held(again)
    resumed.train()
    train(again, resumed, rank, STEPS)
    found["resumed end"] = held(again)
    torch.save(found, folder / f"points-{rank}")
    dist.destroy_process_group()
