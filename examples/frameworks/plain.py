"""torchrun alone. Run: torchrun --nproc-per-node 2 plain.py."""

import torch
import torch.distributed as dist
from spirals import network, spirals
from torch import nn
from torch.utils.data import DataLoader

import klatsch

dist.init_process_group("gloo")
model = network()
torch.manual_seed(dist.get_rank())  # every rank has its own data
loader = DataLoader(spirals(), batch_size=64, shuffle=True)
optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1, order="cta")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
for epoch in range(5):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss:.3f}, consensus {optimizer.consensus():.2e}", flush=True)
with klatsch.merged(model):  # the mean of all ranks, to evaluate or save
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
