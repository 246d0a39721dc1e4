"""What ranks do in the tests of wrappers and frameworks: each function runs in every process, after the fork."""

import json
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import klatsch
from tests.support.processes import say

LR, ROUNDS = 0.05, 5
ANYTIME = (klatsch.optim.DATSGD, {"lr": LR, "order": "cta", "beta": 0.9, "every": 2})


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


def ddp_before_and_the_model_evaluated_first():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = gossip(model.parameters())
    with torch.no_grad():
        model(batch(0, 0)[0])
    return train(wrapped, optimizer)


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


def ddp_that_is_gone_since():
    model = make_model()
    optimizer = gossip(model.parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.__dict__["itself"] = wrapped
    del wrapped
    return train(model, optimizer)


def ddp_of_one_rank():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = make_model()
    wrapped = DistributedDataParallel(model, process_group=groups[dist.get_rank()])
    return train(wrapped, gossip(model.parameters()))


def momentum_of_a_group():
    """The last rank gives a group another momentum."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    groups = [{"params": list(make_model().parameters()), "momentum": 0.5 if odd else 0.9}]
    return klatsch.optim.DSGD(groups, lr=LR).rounds


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


def inside_nodes(folder, kinds):
    """Two nodes of two ranks: DDP or FSDP between the ranks of a node, gossip between nodes; by kind, x and Gamma."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    found = {kind: inside_a_node(kind, nodes[rank // 2], across[rank % 2]) for kind in kinds}
    torch.save(found, folder / f"inside-{rank}")


def inside_a_node(kind, node, partners):
    model = make_model(seed=0 if kind == "fsdp" else dist.get_rank())  # FSDP cannot spread a start on the CPU
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
    return x, consensus


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- frameworks ----------------------------------------------------------------------------------------------------


def loader(rank, rounds=ROUNDS, **options):
    pairs = [batch(rank, t) for t in range(rounds)]
    return DataLoader(TensorDataset(*map(torch.cat, zip(*pairs, strict=True))), batch_size=8, **options)


def lightning(folder):
    """Lightning's Trainer with its DDP."""
    import lightning

    trainer = lightning.Trainer(strategy="ddp", max_epochs=1, default_root_dir=folder, **quiet())
    try:
        trainer.fit(lightning_module(), loader(int(os.environ["RANK"])))
    except ValueError as error:
        keep(folder, str(error))


def accelerate(folder):
    """Accelerate with its DDP."""
    from accelerate import Accelerator

    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, gossip(model.parameters()))
    try:
        for inputs, targets in loader(dist.get_rank()):
            optimizer.zero_grad()
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
    except ValueError as error:
        keep(folder, str(error))


def trainer(folder):
    """The Trainer of Hugging Face with its DDP."""
    from transformers import Trainer

    try:
        hugging_face(folder, Trainer).train()
    except ValueError as error:
        keep(folder, str(error))


def quiet():
    found = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "use_distributed_sampler": False}
    return found | {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def lightning_module(make=gossip):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_model()
            self.from_x = {True: [], False: []}  # in training and in validation

        def training_step(self, pair, number):
            (optimizer,) = self.trainer.optimizers
            x = torch.cat([v.reshape(-1) for v in optimizer.output()])
            self.from_x[self.training].append(float((flat(self.net) - x).abs().max()))
            inputs, targets = pair
            return (self.net(inputs) - targets).square().mean()

        def validation_step(self, pair, number):
            self.log("loss", self.training_step(pair, number), sync_dist=True)

        def configure_optimizers(self):
            return make(self.parameters())

    return Module()


def anytime(parameters):
    """A rule that trains at another point than x."""
    make, options = ANYTIME
    return make(parameters, **options)


def lightning_goes_on(folder):
    """Four epochs at once, and two and two; what is saved is the merged model, what is validated is x."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from klatsch.frameworks.lightning import GossipStrategy

    given = dict(os.environ)

    def fit(name, epochs, make=anytime, **options):
        os.environ.update(given)  # Lightning takes some away at the end
        saves = ModelCheckpoint(folder / name, filename="{epoch}", every_n_epochs=1, save_top_k=1, monitor="epoch",
                                mode="max", enable_version_counter=False)  # fmt: skip
        logs = {"logger": CSVLogger(folder, "csv", "") if name == "whole" else False, "log_every_n_steps": 5}
        trainer = lightning.Trainer(strategy=GossipStrategy(), max_epochs=epochs, callbacks=[saves], **quiet() | logs)
        module = lightning_module(make)
        rank = int(os.environ["RANK"])
        trainer.fit(module, loader(rank), loader(rank), weights_only=True, **options)
        return trainer, module, saves.best_model_path

    whole, module, _ = fit("whole", 4)
    _, _, path = fit("parts", 2)
    again, other, last = fit("parts", 4, ckpt_path=path)
    optimizers = [trainer.optimizers[0] for trainer in (whole, again)]
    saved = torch.load(last, weights_only=True)
    mean = klatsch.average_(other, parameters=True).state_dict()
    found = {
        "rounds": [optimizer.rounds for optimizer in optimizers],
        "x": [torch.cat([v.reshape(-1) for v in optimizer.output()]).tolist() for optimizer in optimizers],
        "saved": max(float((saved["state_dict"][name] - mean[name]).abs().max()) for name in mean),
        "merged": flat(module).tolist(),
        "from x": {name: max(other.from_x[mode]) for name, mode in (("training", True), ("validation", False))},
        "files": sorted(file.name for file in (folder / "parts").iterdir()),
        "alone": refusal(lambda: fit("alone", 1, lambda parameters: torch.optim.SGD(parameters, LR))),
    }
    dist.barrier()
    own = folder / "parts" / f"{os.path.basename(last)}.rank1"
    if dist.get_rank() == 1:
        own.unlink()
    dist.barrier()
    if dist.get_rank() == 1:
        found["missing"] = refusal(lambda: again.strategy.load_checkpoint(last, weights_only=True))
    os.environ.update(given)
    (told,) = again.validate(other, loader(dist.get_rank()), ckpt_path=last, weights_only=True, verbose=False)
    found["validated"] = [told["loss"], float(torch.stack(losses(saved["state_dict"])).mean())]
    keep(folder, found)


def lightning_ends_unevenly(folder):
    """Ranks with 5, 8, ... batches: three epochs, and two and one; callbacks that average are refused at the start."""
    import lightning
    from lightning.pytorch import callbacks

    from klatsch.frameworks.lightning import GossipStrategy

    given, rank = dict(os.environ), int(os.environ["RANK"])

    def fit(name, epochs, *extra, **options):
        os.environ.update(given)
        saves = callbacks.ModelCheckpoint(folder / name, save_top_k=1, monitor="epoch", mode="max",
                                          enable_version_counter=False)  # fmt: skip
        trainer = lightning.Trainer(strategy=GossipStrategy(), max_epochs=epochs, callbacks=[saves, *extra], **quiet())
        module = lightning_module(anytime)
        trainer.fit(module, loader(rank, rounds=ROUNDS + 3 * rank), loader(rank), weights_only=True, **options)
        (optimizer,) = trainer.optimizers
        x = torch.cat([v.reshape(-1) for v in optimizer.output()])
        return trainer.global_step, optimizer.rounds, x.tolist(), flat(module).tolist()

    steps, rounds, x, merged = fit("whole", 3)
    fit("parts", 2)
    # Under the first rank's name on all.
    _, rounds_again, again, _ = fit("parts", 3, ckpt_path=str(folder / "parts" / "epoch=1-step=10.ckpt"))
    dist.barrier()
    found = {
        "steps": steps,
        "rounds": [rounds, rounds_again],
        "x": [x, again],
        "merged": merged,
        "files": sorted(file.name for file in (folder / "whole").iterdir()),
        "ema": refusal(lambda: fit("ema", 1, callbacks.EMAWeightAveraging())),
        "swa": refusal(lambda: fit("swa", 2, callbacks.StochasticWeightAveraging(swa_lrs=0.01))),
    }
    keep(folder, found)


def losses(state):
    """Of a saved model on the data of all ranks."""
    model = make_model()
    model.load_state_dict({name.removeprefix("net."): v for name, v in state.items()})
    pairs = [batch(rank, t) for rank in range(dist.get_world_size()) for t in range(ROUNDS)]
    return [(model(inputs) - targets).square().mean().detach() for inputs, targets in pairs]


def hugging_face(folder, kind, epochs=1, name="trainer", how=ANYTIME, **options):
    from transformers import TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, inputs, labels):
            outputs = self.net(inputs)
            return {"loss": (outputs - labels).square().mean(), "logits": outputs}

    arguments = TrainingArguments(
        output_dir=folder / name,
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no"} | options,
    )
    size = int(os.environ["WORLD_SIZE"])
    rows = [{"inputs": a, "labels": b} for rank in range(size) for a, b in loader(rank).dataset]
    return kind(Model(), arguments, None, rows, rows, optimizer_cls_and_kwargs=how)


def trainer_goes_on(folder):
    """Four epochs at once, and two and two; what is saved is the merged model."""
    from safetensors.torch import load_file

    from klatsch.frameworks.huggingface import GossipTrainer

    saving = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    whole = hugging_face(folder, GossipTrainer, 4, "whole", logging_steps=5, **saving)
    whole.train()
    first = hugging_face(folder, GossipTrainer, 4, "parts", **saving)
    first.add_callback(ends_after(2))
    first.train()
    again = hugging_face(folder, GossipTrainer, 4, "parts", **saving)
    again.train(resume_from_checkpoint=True)
    best = hugging_face(folder, GossipTrainer, 2, "best", load_best_model_at_end=True, **saving)
    best.train()
    thrifty = hugging_face(folder, partial(GossipTrainer, consensus="off", merge=False), 1, "thrifty", **saving)
    thrifty.train()
    own = load_file(folder / "thrifty" / f"checkpoint-{thrifty.state.global_step}" / "model.safetensors")
    optimizers = [one.optimizer.optimizer for one in (whole, again)]
    last = folder / "parts" / f"checkpoint-{again.state.global_step}"
    saved = load_file(last / "model.safetensors")
    found = {
        "rounds": [optimizer.rounds for optimizer in optimizers],
        "x": [torch.cat([v.reshape(-1) for v in optimizer.output()]).tolist() for optimizer in optimizers],
        "saved": max(float((saved[name] - v).abs().max()) for name, v in again.model.state_dict().items()),
        "merged": flat(again.model).tolist(),
        "best": flat(best.model).tolist(),
        "consensus": [row["eval_consensus"] for row in again.state.log_history if "eval_consensus" in row],
        "logged": [row["gossip_bytes"] for row in whole.state.log_history if "loss" in row],
        "thrifty": any("eval_consensus" in row for row in thrifty.state.log_history),
        "own": torch.cat([v.reshape(-1) for v in own.values()]).sort()[0].tolist(),
        "own x": torch.cat([v.reshape(-1) for v in thrifty.optimizer.optimizer.output()]).sort()[0].tolist(),
        "files": sorted(file.name for file in last.iterdir()),
        "evaluated": [best.evaluate()["eval_loss"], best.state.best_metric],
        "alone": refusal(hugging_face(folder, GossipTrainer, how=(torch.optim.SGD, {"lr": LR})).train),
    }
    dist.barrier()
    if dist.get_rank() == 1:
        (last / "optimizer-1.pt").unlink()
    dist.barrier()
    if dist.get_rank() == 1:
        found["missing"] = refusal(lambda: again._load_optimizer_and_scheduler(last))
    keep(folder, found)


def ends_after(epochs):
    from transformers import TrainerCallback

    class Ends(TrainerCallback):
        def on_epoch_end(self, args, state, control, **_):
            control.should_training_stop = state.epoch >= epochs

    return Ends()


def refusal(act):
    try:
        act()
    except ValueError as error:
        return str(error)
