"""What two ranks do with torch's own communication hooks: DDP with gradients that are given, round by round."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

ROUNDS, RANK = 6, 2
LAYERS = ((20, 12), (9, 20))  # outputs and inputs: a tall matrix and a wide one
NUMBERS = sum(outputs * inputs + outputs for outputs, inputs in LAYERS)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(inputs, outputs) for outputs, inputs in LAYERS)).double()


def gradients(rank):
    """One per round, as a vector."""
    return torch.randn(ROUNDS, NUMBERS, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)


def hooked(folder, hook):
    """The mean gradients that torch's hook makes of them, and the first Qs of its PowerSGD."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trained = nn.parallel.DistributedDataParallel(model())
    plain, drawn = 0, []
    if hook == "fp16":
        trained.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        plain = 2  # rounds with which DDP begins
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=plain)
        trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        orthogonalize = powerSGD_hook._orthogonalize
        powerSGD_hook._orthogonalize = lambda q, epsilon: (drawn.append(q.clone()), orthogonalize(q, epsilon))
    parameters, made = list(trained.module.parameters()), []
    for given in torch.cat([torch.zeros(plain, NUMBERS, dtype=torch.float64), gradients(rank)]):
        trained.zero_grad()
        trained(torch.zeros(1, LAYERS[0][1], dtype=torch.float64))  # tells DDP that a round begins
        parts = torch.split(given, [parameter.numel() for parameter in parameters])
        sum((p * part.view_as(p)).sum() for p, part in zip(parameters, parts, strict=True)).backward()
        made.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
    torch.save((torch.stack(made[plain:]), drawn[: len(LAYERS)]), folder / f"{hook}-{rank}")
