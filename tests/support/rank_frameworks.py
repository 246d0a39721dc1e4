"""What ranks do in the tests of wrappers and frameworks: each function runs in every process, after the fork."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import klatsch
from tests.support.processes import say

LR, ROUNDS = 0.05, 5


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch(rank, t):
    """Every rank has other data in every round."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + t))
    return inputs, inputs.sum(1, keepdim=True) + rank


def gossip(parameters, group=None):
    """D-SGD on a graph on which ranks stay apart for a while."""
    size = len(dist.get_process_group_ranks(group or dist.group.WORLD))
    ring = klatsch.topology.lazy(klatsch.topology.ring(size))
    return klatsch.optim.DSGD(parameters, lr=LR, topology=ring, group=group)


def train(model, optimizer, rounds=ROUNDS):
    for t in range(rounds):
        inputs, targets = batch(dist.get_rank(), t)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return optimizer.consensus()


def keep(folder, found):
    say(folder, f"found-{dist.get_rank()}", json.dumps(found))


# --- wrappers of torch ---------------------------------------------------------------------------------------------


def ddp_before():
    model = DistributedDataParallel(make_model())
    return train(model, gossip(model.parameters()))


def ddp_after():
    model = make_model()
    optimizer = gossip(model.parameters())
    return train(DistributedDataParallel(model), optimizer)


def ddp_late():
    model = make_model()
    optimizer = gossip(model.parameters())
    train(model, optimizer, 3)
    return train(DistributedDataParallel(model), optimizer)


def ddp_late_and_silent():
    model = make_model()
    optimizer = gossip(model.parameters())
    train(model, optimizer, 3)
    return train(DistributedDataParallel(model, init_sync=False), optimizer, 10)


def ddp_compiled():
    model = torch.compile(DistributedDataParallel(make_model()), backend="eager")
    return train(model, gossip(model.parameters()))


def fsdp(model, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def fsdp_before():
    model = fsdp(make_model())
    return train(model, gossip(model.parameters()))


def fsdp_before_with_own_parameters():
    model = fsdp(make_model(), use_orig_params=True)
    return train(model, gossip(model.parameters()))


def fsdp_after():
    model = make_model()
    optimizer = gossip(model.parameters())
    return train(fsdp(model), optimizer)


def fsdp_after_with_own_parameters():
    model = make_model()
    optimizer = gossip(model.parameters())
    return train(fsdp(model, use_orig_params=True), optimizer)


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp2_before():
    model = sharded(make_model())
    return train(model, gossip(model.parameters()))


def fsdp2_after():
    model = make_model()
    optimizer = gossip(model.parameters())
    return train(sharded(model), optimizer)


def plain():
    model = make_model()
    return train(model, gossip(model.parameters()))


def ddp_of_another_model():
    model, other = make_model(), DistributedDataParallel(make_model())
    consensus = train(model, gossip(model.parameters()))
    assert next(other.parameters()) is not next(model.parameters())
    return consensus


def ddp_that_is_gone():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    wrapped(batch(0, 0)[0]).sum().backward()
    wrapped.__dict__["itself"] = wrapped  # so that it waits for the collector
    del wrapped
    return train(model, gossip(model.parameters()))


def ddp_of_one_rank():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = make_model()
    wrapped = DistributedDataParallel(model, process_group=groups[dist.get_rank()])
    return train(wrapped, gossip(model.parameters()))


def wrapped(folder, cases):
    """One after the other: what each is answered."""
    dist.init_process_group("gloo")
    found = {}
    for case in cases:
        try:
            found[case] = globals()[case]()
        except ValueError as error:
            found[case] = str(error)
    keep(folder, found)


def inside_nodes(folder, kind):
    """Two nodes of two ranks: DDP or FSDP between the ranks of a node, gossip between nodes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    node, partners = nodes[rank // 2], across[rank % 2]
    model = make_model(seed=0 if kind == "fsdp" else rank)  # FSDP cannot spread a start on the CPU
    if kind == "ddp before":
        model = DistributedDataParallel(model, process_group=node)
        optimizer = gossip(model.parameters(), partners)
    elif kind == "ddp after":
        optimizer = gossip(model.parameters(), partners)
        model = DistributedDataParallel(model, process_group=node)
    else:
        model = fsdp(model, process_group=node)
        optimizer = gossip(model.parameters(), partners)
    consensus = train(model, optimizer)
    if kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model):
            x = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()[: len(flat(make_model()))]
    else:
        x = flat(model)
    torch.save(x, folder / f"x-{rank}")
    keep(folder, consensus)


def momentum_of_a_group(folder):
    """The last rank gives a group another momentum."""
    dist.init_process_group("gloo")
    odd = dist.get_rank() == dist.get_world_size() - 1
    groups = [{"params": list(make_model().parameters()), "momentum": 0.5 if odd else 0.9}]
    try:
        klatsch.optim.DSGD(groups, lr=LR)
    except ValueError as error:
        keep(folder, str(error))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- frameworks ----------------------------------------------------------------------------------------------------


def loader(rank, **options):
    pairs = [batch(rank, t) for t in range(ROUNDS)]
    return DataLoader(TensorDataset(*map(torch.cat, zip(*pairs, strict=True))), batch_size=8, **options)


def lightning(folder, alone):
    """Lightning's Trainer: with its DDP, or one Trainer per rank."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def training_step(self, pair, number):
            inputs, targets = pair
            return (self.net(inputs) - targets).square().mean()

        def configure_optimizers(self):
            return gossip(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    if alone:
        dist.init_process_group("gloo")
        how = {"devices": 1, "strategy": "auto"}
    else:
        how = {"devices": int(os.environ["WORLD_SIZE"]), "strategy": "ddp"}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **how, **quiet)
    try:
        trainer.fit(Module(), loader(int(os.environ["RANK"])))
    except ValueError as error:
        keep(folder, str(error))
    else:
        keep(folder, trainer.optimizers[0].consensus())


def accelerate(folder, alone):
    """Accelerate: with its DDP, or with a model that is left as it is, but moved to cpu:0."""
    from accelerate import Accelerator

    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    assert str(accelerator.device) == "cpu:0"
    model = make_model()
    optimizer = inner = gossip(model.parameters())
    if alone:
        optimizer = accelerator.prepare(optimizer)
        model = model.to(accelerator.device)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    try:
        for inputs, targets in loader(dist.get_rank()):
            optimizer.zero_grad()
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
    except ValueError as error:
        keep(folder, str(error))
    else:
        keep(folder, inner.consensus())


def trainer(folder, alone):
    """The Trainer of Hugging Face: with its DDP, or where it does not see that there are other ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if alone:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, inputs, labels):
            outputs = self.net(inputs)
            return {"loss": (outputs - labels).square().mean(), "logits": outputs}

    model = Model()
    optimizer = gossip(model.parameters())
    arguments = TrainingArguments(
        output_dir=folder / f"trainer-{rank}",
        use_cpu=True,
        max_steps=ROUNDS,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"inputs": a, "labels": b} for a, b in loader(rank).dataset]
    try:
        Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None)).train()
    except ValueError as error:
        keep(folder, str(error))
    else:
        keep(folder, optimizer.consensus())
