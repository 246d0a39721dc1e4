"""What ranks do in the tests of hosts: two hosts of two ranks, DDP or FSDP2 inside, gossip between them."""

import os
import signal
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import klatsch
from tests.support.rank_scenarios import group

HOSTS, INSIDE, ROUNDS, BLOCK = 2, 2, 12, 256
RULES = {
    "dat": ("dat", {"lr": 0.05}),
    "dat-d2 beta": ("dat-d2", {"lr": 0.05, "beta": 0.9, "averaging": "constant"}),
    "dat-gt": ("dat-gt", {"lr": 0.05}),
    "dat-adam": ("dat-adam", {"lr": 0.01, "eps": 1e-3}),
}
CHANNELS = {"plain": {}, "seldom and small": {"every": 4, "wire": "int8"}}
CASES = [(kind, "dat", "plain") for kind in ("ddp before", "fsdp2", "whole")]
CASES += [("ddp before", label, "seldom and small") for label in ("dat-d2 beta", "dat-gt")]
CASES += [("fsdp2", label, "seldom and small") for label in ("dat-d2 beta", "dat-adam")]
CASES += [("ddp after", "dat", "seldom and small")]


def graph_of(channel):
    """On which hosts stay apart for a while."""
    ring = klatsch.topology.lazy(klatsch.topology.ring(HOSTS))
    return klatsch.topology.channel(ring, **CHANNELS[channel])


def make_model():
    """433 numbers: more than one block; the last layer has one row, so that one rank has nothing of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))


def batch(rank, t):
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + t))
    return inputs, inputs.sum(1, keepdim=True).sin() + 0.3 * (rank // INSIDE)


class Together(klatsch.problems.Problem):
    """The hosts as nodes: each has the mean gradient of its ranks. `pieces` are their places in one padded vector."""

    def __init__(self, pieces=None):
        self.model = make_model()
        self.names, self.shapes = zip(*((n, p.shape) for n, p in self.model.named_parameters()), strict=True)
        length = sum(shape.numel() for shape in self.shapes)
        self.places = torch.arange(length) if pieces is None else pieces
        self.nodes, self.dim = HOSTS, length if pieces is None else -(-(int(pieces.max()) + 1) // BLOCK) * BLOCK

    def cut(self, vector):
        parts = vector[self.places].split([shape.numel() for shape in self.shapes])
        return {n: v.reshape(shape) for n, v, shape in zip(self.names, parts, self.shapes, strict=True)}

    def start(self):
        return self._spread(torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]))

    def grad(self, x, t, nodes=None):
        return torch.stack([torch.stack([self._gradient(one, host, t) for one in x[host]]) for host in range(HOSTS)])

    def metrics(self, x):
        return {"size": x.square().sum(-1).mean(0)}

    @torch.enable_grad()
    def _gradient(self, x, host, t):
        x = x.detach().requires_grad_()
        losses = [
            (functional_call(self.model, self.cut(x), inputs) - targets).square().mean()
            for inputs, targets in (batch(host * INSIDE + k, t) for k in range(INSIDE))
        ]
        return torch.autograd.grad(sum(losses) / INSIDE, x)[0]

    def _spread(self, values):
        found = torch.zeros(self.dim)
        found[self.places] = values
        return found


def places_of_pieces():
    """Where the numbers of the model lie if the pieces of each rank come one after the other, in whole blocks."""
    found, starts = [], [0, 0]
    pieces = [
        [p.chunk(INSIDE)[k] if k < len(p.chunk(INSIDE)) else p[:0] for p in make_model().parameters()] for k in (0, 1)
    ]
    starts[1] = -(-sum(v.numel() for v in pieces[0]) // BLOCK) * BLOCK
    for first, second in zip(*pieces, strict=True):
        for k, each in enumerate((first, second)):
            found.append(torch.arange(each.numel()) + starts[k])
            starts[k] += each.numel()
    return torch.cat(found)


def prepared(kind, mesh, optimizer_of, frozen=False):
    """A model with an optimizer, as users make them."""
    model = make_model()
    model[0].bias.requires_grad_(not frozen)
    if kind == "ddp before":
        model = DistributedDataParallel(model, process_group=mesh.get_group("gpu"))
        return model, optimizer_of(model.parameters(), mesh=mesh["host"])
    if kind == "ddp after":
        with torch.no_grad():
            for p in model.parameters():
                p += dist.get_rank()  # ranks start from rank 0's
        optimizer = optimizer_of(model.parameters(), mesh=mesh)
        return DistributedDataParallel(model, process_group=mesh.get_group("gpu")), optimizer
    if kind == "whole":  # each talks for all
        model = DistributedDataParallel(model, process_group=mesh.get_group("gpu"))
        return model, optimizer_of(model.parameters(), group=mesh.get_group("host"))
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["gpu"])
    return model, optimizer_of(model.parameters(), mesh=mesh["host"])


def train(model, optimizer, rounds, first=0):
    rank = dist.get_rank()
    for t in range(first + 1, first + rounds + 1):
        inputs, targets = batch(rank, t)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        if t % 10 == 0:  # FSDP2 keeps whole parameters after a pass without gradients
            with optimizer.averaged(), torch.no_grad():
                model(inputs)


def whole(tensors):
    return torch.cat([getattr(v, "full_tensor", lambda v=v: v)().detach().reshape(-1) for v in tensors])


def hosts(folder):
    """Every case, with what users ask of it afterwards."""
    rank, _ = group()
    mesh = init_device_mesh("cpu", (HOSTS, INSIDE), mesh_dim_names=("host", "gpu"))
    found = {}
    for kind, label, channel in CASES:
        rule, options = RULES[label]
        made = klatsch.rules.make(rule, **options)
        model, optimizer = prepared(kind, mesh, partial(klatsch.Gossip, rule=made, topology=graph_of(channel)))
        train(model, optimizer, ROUNDS)
        ends = {"x": whole(optimizer.output()), "bytes": optimizer.bytes_sent, "consensus": optimizer.consensus()}
        optimizer.eval()
        found[kind, label, channel] = ends | {"shown": whole(model.parameters())}
    torch.save(found, folder / f"hosts-{rank}")


def keep_going(folder, kind, rounds, label="dat-d2 beta", stop=None, inside=INSIDE):
    """Train with checkpoints, and kill a rank of the last host in some round; what it ends with."""
    rank, size = group()
    mesh = init_device_mesh("cpu", (size // inside, inside), mesh_dim_names=("host", "gpu"))
    rule, options = RULES[label]
    made = klatsch.rules.make(rule, **options)
    gossip = partial(klatsch.Gossip, rule=made, topology=graph_of("seldom and small"))
    model, optimizer = prepared(kind, mesh, gossip, frozen=True)
    checkpointer = klatsch.Checkpointer(folder / f"files-{kind}", every=5)
    done = checkpointer.resume(optimizer, model=model)
    for t in range(done, rounds):
        train(model, optimizer, 1, t)
        checkpointer.step()
        if t == stop and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.eval()
    shown = whole(model.parameters())
    klatsch.average_(model, parameters=True)
    merged = whole(model.parameters())
    torch.save({"done": done, "shown": shown, "merged": merged}, folder / f"ends-{rank}")


def saved_and_loaded(folder, inside, firsts, rounds):
    """The state through torch.distributed.checkpoint, a folder for each host, for another number of ranks per host."""
    _, size = group()
    mesh = init_device_mesh("cpu", (size // inside, inside), mesh_dim_names=("host", "gpu"))
    for kind, channel, first in product(("ddp before", "fsdp2"), CHANNELS, firsts):
        (folder / f"{kind} {channel}").mkdir(exist_ok=True)
        save_and_load(folder / f"{kind} {channel}", mesh, kind, channel, inside, first, rounds)


def save_and_load(folder, mesh, kind, channel, inside, first, rounds):
    import torch.distributed.checkpoint as dcp

    rank, (rule, options) = dist.get_rank(), RULES["dat-adam"]
    made = klatsch.rules.make(rule, **options)
    model, optimizer = prepared(kind, mesh, partial(klatsch.Gossip, rule=made, topology=graph_of(channel)))
    where = {"checkpoint_id": folder / f"host{optimizer.rank}", "process_group": mesh.get_group("gpu")}
    if first:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, **where)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert optimizer.rounds == first
    for t in range(first, rounds):
        inputs, targets = (
            torch.cat(parts) for parts in zip(*(batch(b, t) for b in batches(rank, inside)), strict=True)
        )
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    if not first and inside > 1:
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, **where)
    torch.save(whole(optimizer.output()), folder / f"x-{first}-{inside}-{rank}")


def batches(rank, inside):
    """The batches of a rank, so that those of a host are the same however many ranks it has."""
    return range(rank * INSIDE // inside, (rank + 1) * INSIDE // inside)


def survive(folder, kind, rounds=20):
    """A whole host of three is killed in round 5, and the others go on without it."""
    rank, size = group()
    mesh = init_device_mesh("cpu", (size // INSIDE, INSIDE), mesh_dim_names=("host", "gpu"))
    made = klatsch.rules.make("dat", lr=0.05)
    options = {"topology": "ring", "on_failure": "continue", "timeout": 60}
    model, optimizer = prepared(kind, mesh, partial(klatsch.Gossip, rule=made, **options))
    for t in range(rounds):
        train(model, optimizer, 1, t)
        if t == 5 and rank >= size - INSIDE:
            os.kill(os.getpid(), signal.SIGKILL)
    found = {"lost": optimizer.lost, "x": whole(optimizer.output()), "consensus": optimizer.consensus()}
    klatsch.average_(model, parameters=True)
    torch.save(found | {"merged": whole(model.parameters())}, folder / f"survived-{rank}")


def refused(folder):
    """What is answered to meshes and shards that do not fit, and to a gradient that is not finite on one rank only."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, _ = group()
    mesh = init_device_mesh("cpu", (HOSTS, INSIDE), mesh_dim_names=("host", "gpu"))
    cube = init_device_mesh("cpu", (HOSTS, INSIDE, 1))
    cut = fully_shard(make_model(), mesh=mesh["gpu"])
    parallel = parallelize_module(make_model(), mesh["gpu"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    gossip = partial(klatsch.optim.DSGD, lr=0.1)
    cases = {
        "both": lambda: gossip(make_model().parameters(), mesh=mesh["host"], group=mesh.get_group("host")),
        "no mesh": lambda: gossip(make_model().parameters(), mesh=(2, 2)),
        "cube": lambda: gossip(make_model().parameters(), mesh=cube),
        "tensor parallel": lambda: gossip(parallel.parameters(), mesh=mesh["host"]),
        "some": lambda: gossip([*cut.parameters(), nn.Parameter(torch.ones(3))], mesh=mesh["host"]),
        "over all": lambda: gossip(fully_shard(make_model(), mesh=mesh["host"]).parameters(), mesh=mesh["host"]),
    }
    bare, ddp = make_model(), DistributedDataParallel(make_model(), process_group=mesh.get_group("gpu"))
    changed = gossip(ddp.parameters(), mesh=mesh)
    train(ddp, changed, 1)
    if rank % INSIDE == 0:
        with torch.no_grad():
            next(ddp.parameters())[0] += 1
    cases |= {
        "without DDP": lambda: train(bare, gossip(bare.parameters(), mesh=mesh), 1),
        "changed": lambda: train(ddp, changed, 1, 1),
    }
    found = {}
    for name, make in cases.items():
        try:
            make()
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    optimizer = gossip(cut.parameters(), mesh=mesh["host"], on_nonfinite="skip")
    train(cut, optimizer, 1)
    cut(batch(rank, 2)[0]).square().mean().backward()
    if rank == 0:
        next(cut.parameters()).grad.to_local()[0] = torch.inf
    optimizer.step()
    torch.save(found | {"skipped": optimizer.skipped, "x": whole(cut.parameters())}, folder / f"refused-{rank}")


def tiny(folder):
    """Models so small that a rank has nothing of them, or of one dtype; a push weight for all numbers, and a ledger."""
    from torch.distributed.fsdp import fully_shard

    rank, _ = group()
    mesh = init_device_mesh("cpu", (HOSTS, INSIDE), mesh_dim_names=("host", "gpu"))
    found = {}
    lasting = {"on_failure": "continue", "timeout": 60}
    for kind in ("ddp", "fsdp2"):
        for numbers, rule, options in (
            *((numbers, "dat-sgp", {}) for numbers in (1, 4, 256)),  # and a bias: 2, 5 and 257 numbers
            (4, "dat-d2", lasting),
            (4, "gt", lasting | {"wire": "int8"}),
        ):
            torch.manual_seed(0)
            model = nn.Linear(numbers, 1)
            if kind == "ddp":
                model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
                wrapped = DistributedDataParallel(model, process_group=mesh.get_group("gpu"))
            else:
                wrapped = fully_shard(model, mesh=mesh["gpu"])
            made = klatsch.rules.make(rule, lr=0.05)
            optimizer = klatsch.Gossip(model.parameters(), made, graph_of("plain"), mesh=mesh["host"], **options)
            for t in range(5):
                inputs = torch.randn(4, numbers, generator=torch.Generator().manual_seed(10 * rank + t))
                optimizer.zero_grad()
                extra = model.extra.square().sum() if kind == "ddp" else 0.0
                (wrapped(inputs).square().mean() + extra).backward()
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            found[f"{kind} {numbers} {rule}"] = whole(v.float() for v in optimizer.output()), optimizer.consensus()
    torch.save(found, folder / f"tiny-{rank}")


def one_link(folder):
    """The first rank of the second host sends what is not finite: its twin goes on without it, and so do both hosts."""
    rank, _ = group()
    mesh = init_device_mesh("cpu", (HOSTS, INSIDE), mesh_dim_names=("host", "gpu"))
    options = {"on_failure": "continue", "on_nonfinite": "skip", "timeout": 60}
    model, optimizer = prepared("ddp before", mesh, partial(klatsch.optim.DSGD, lr=0.05, **options))
    for t in range(12):
        if t == 5 and rank == INSIDE:
            optimizer.vectors()[0]["w"][:2] = torch.nan
        train(model, optimizer, 1, t)
    torch.save({"lost": optimizer.lost, "x": whole(model.parameters())}, folder / f"link-{rank}")
