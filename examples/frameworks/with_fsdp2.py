"""Hosts with several GPUs: FSDP2 inside, gossip between. Run: torchrun --nproc-per-node 4 with_fsdp2.py."""

import torch
import torch.distributed as dist
from spirals import network, spirals
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import klatsch

dist.init_process_group("gloo")  # two hosts, half of the ranks each; on GPUs NCCL and "cuda"
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("host", "gpu"))
model = network()
for layer in [*model, model]:  # the blocks of a transformer, then the whole
    fully_shard(layer, mesh=mesh["gpu"])
torch.manual_seed(dist.get_rank())
loader = DataLoader(spirals(), batch_size=64, shuffle=True)
optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=lambda t: 3 / (t + 30), order="cta", mesh=mesh["host"])
for epoch in range(5):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss:.3f}, consensus {optimizer.consensus():.2e}", flush=True)
with klatsch.merged(model):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
