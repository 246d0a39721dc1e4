"""Several machines: single.py with its optimizer replaced. Run: torchrun --nproc-per-node 4 quickstart.py."""

import torch
import torch.distributed as dist
from torch import nn

import klatsch

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
labels = torch.randint(2, (8000,))
angle = torch.rand(8000) * 9
inputs = torch.stack([angle * torch.cos(angle + 3.14 * labels), angle * torch.sin(angle + 3.14 * labels)], 1) / 3
test_inputs, test_labels = inputs[6000:], labels[6000:]
inputs, labels = inputs[rank:6000:size], labels[rank:6000:size]  # what this machine has

model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(1500):
    batch = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
    loss.backward()
    optimizer.step()

model.eval()
accuracy = (model(test_inputs).argmax(1) == test_labels).float().mean()
print(f"rank {rank} of {size}: test accuracy {accuracy:.3f}, distance from the others {optimizer.consensus():.1e}")
dist.destroy_process_group()
