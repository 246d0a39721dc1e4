"""A training as a user writes it, for torchrun: resumes from its checkpoints, and keeps what it ends with.

`torchrun ... tests/rank_training.py FOLDER ROUNDS`
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import klatsch

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.05, momentum=0.9, topology="one_peer_exponential")
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60], 0.5)
checkpointer = klatsch.Checkpointer(folder / "checkpoints", every=7)
done = checkpointer.resume(optimizer, model=model, scheduler=scheduler)
with (folder / f"log-{rank}").open("a") as log:
    for t in range(done, rounds):
        inputs = torch.randn(16, 6)  # from the generator, whose state belongs to the checkpoint
        loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step()
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], t + 1, loss.item(), file=log, flush=True)
        time.sleep(0.01)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"final-{rank}")
