"""A training as a user writes it, for torchrun: resumes from its checkpoints, and keeps what it ends with.

`torchrun ... rank_training.py FOLDER ROUNDS ["ATTEMPT RANK ROUND"...]`; it kills itself where the last ones say.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import klatsch

folder, rounds, attempt = Path(sys.argv[1]), int(sys.argv[2]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = klatsch.optim.DATSGD(model.parameters(), 0.05, "one_peer_exponential", momentum=0.9, beta=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [15, 30], 0.5)
checkpointer = klatsch.Checkpointer(folder / "checkpoints", every=7)
done = checkpointer.resume(optimizer, model=model, scheduler=scheduler)
with (folder / f"log-{rank}").open("a") as log:
    for t in range(done, rounds):
        if f"{attempt} {rank} {t}" in sys.argv[3:]:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(16, 6)  # from the generator, whose state belongs to the checkpoint
        loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step()
        print(attempt, t + 1, loss.item(), file=log, flush=True)
with optimizer.averaged():
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"final-{rank}")
