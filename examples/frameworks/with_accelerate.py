"""Accelerate. Run: torchrun --nproc-per-node 2 with_accelerate.py; on GPUs accelerate launch will do."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from spirals import network, spirals
from torch import nn
from torch.utils.data import DataLoader

import klatsch

accelerator = Accelerator(cpu=True)
model = accelerator.prepare_model(network(), evaluation_mode=True)  # on its device, with autocast, without DDP
optimizer = gossip = klatsch.optim.GossipSGD(model.parameters(), lr=0.1, order="cta")
torch.manual_seed(0)
loader = DataLoader(spirals(8192), batch_size=64, shuffle=True)
optimizer, loader = accelerator.prepare(optimizer, loader)  # every process gets its part of the data
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(gossip, 5)
for epoch in range(5):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
    scheduler.step()
    accelerator.print(f"epoch {epoch}: loss {loss:.3f}, consensus {gossip.consensus():.2e}")
with klatsch.merged(model):  # the mean of all processes, to evaluate or save
    accelerator.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
