"""A rank of a host of a crew, with FSDP2 inside: `python -m tests.support.rank_hosted FOLDER NAME JSON`.

Every host begins with other parameters, of which one is frozen, and has other data.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import klatsch
from tests.support.processes import say


def main():
    folder, name, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    mesh = init_device_mesh("cpu", (options["ranks"],))
    torch.manual_seed(sum(name.encode()))
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))
    model[0].bias.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    rule = klatsch.rules.make(options["rule"], lr=0.05)
    optimizer = klatsch.Gossip(model.parameters(), rule, "ring", mesh=mesh)
    name = name if dist.get_rank() == 0 else f"{name}.{dist.get_rank()}"
    chance = torch.Generator().manual_seed(os.getpid())
    while not ((folder / "stop").exists() and optimizer.rounds >= int((folder / "stop").read_text())):
        inputs = torch.randn(8, 16, generator=chance)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()
        at = optimizer.post.epoch.number, optimizer.topology.size, optimizer.rounds, optimizer.rank
        say(folder, f"{name}-at", " ".join(map(str, at)))
    whole = [parameter.detach().full_tensor() for parameter in model.parameters()]
    torch.save([parameter.reshape(-1) for parameter in whole], folder / f"{name}-kept")


if __name__ == "__main__":
    main()
