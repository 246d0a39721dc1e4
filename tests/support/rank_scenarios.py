"""What ranks do in the tests: each function runs in every process, after the fork."""

import os
import signal
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch.problems import LeastSquares, WeightMatrix
from klatsch.ranks import node
from klatsch.topology import make
from tests.support import numbers_before
from tests.support.imitation import imitate
from tests.support.on_ranks import simulate_on_ranks
from tests.support.processes import say
from tests.support.waiting import wait_until

RANK_RULES = {
    **{name: (name, {}) for name in klatsch.rules.RULES},
    "dsgd shared": ("dsgd", {"momentum": 0.9, "shared": True}),
    "dsgd first": ("dsgd", {"momentum": 0.9, "shared": "first"}),
    "gt shared": ("gt", {"momentum": 0.5, "shared": True}),
    "kgt outer shared": ("kgt+outer", {"momentum": 0.5, "shared": True, "outer_lr": 0.6, "outer_momentum": 0.3}),
    "dsgd momentum": ("dsgd", {"momentum": 0.9, "average": "constant"}),
    "dat linear momentum": ("dat", {"averaging": "linear", "momentum": 0.5}),
    "dat cta": ("dat", {"order": "cta"}),
    "dat fixed cta": ("dat", {"order": "cta", "averaging": "fixed(0.9)", "momentum": 0.5}),
    "gt average": ("gt", {"average": "linear"}),
    "decentlam": ("decentlam", {"momentum": 0.5}),
    "dat beta": ("dat", {"beta": 0.9, "averaging": "linear", "momentum": 0.5}),
    "dat cta beta": ("dat", {"beta": 0.9, "order": "cta"}),
    "dat-gt beta": ("dat-gt", {"beta": 0.9}),
    "dat-d2 beta": ("dat-d2", {"beta": 0.9}),
    "dat-sgp beta": ("dat-sgp", {"beta": 0.9}),
    "dadam cta v decay": ("dadam", {"order": "cta", "shared": "v", "weight_decay": 0.1}),
    "dat-adam v decay": ("dat-adam", {"beta1": 0.5, "shared": "v", "weight_decay": 0.1}),
    "d2-adam local": ("d2-adam", {"shared": False, "average": "lr(1)"}),
    "dat-d2-adam local": ("dat-d2-adam", {"shared": False}),
    "gt-adam v decay": ("gt-adam", {"shared": "v", "weight_decay": 0.1}),
    "dat-gt-adam v": ("dat-gt-adam", {"shared": "v"}),
    "dat-adam shared": ("dat-adam", {"shared": True}),
    "dadam cta shared": ("dadam", {"order": "cta", "shared": True}),
}
RANK_GRAPHS = ("ring", "one_peer_exponential", "base_graph", "directed_ring", "ring/4", "base_graph/3")
PATTERNS = ("dsgd", "dat cta beta", "gt average", "d2", "dat-sgp", "gasloc", "kgt")  # one rule of each
# Two patterns on every graph, the others on every other one; their products and options, which know nothing of graphs,
# on one or two.
RANK_CASES = dict.fromkeys(RANK_RULES, ("ring/4",))
RANK_CASES |= dict.fromkeys([*klatsch.rules.RULES][::2], ("one_peer_exponential", "ring/4"))
RANK_CASES |= {"dsgd shared": RANK_GRAPHS, "noloco": ("random_matching", "ring/4"), "decentlam": ("ring",)}
RANK_CASES |= {rule: RANK_GRAPHS[k % 2 :: 2] for k, rule in enumerate(PATTERNS)} | {
    "dsgd": RANK_GRAPHS,
    "d2": RANK_GRAPHS,
}
ROUNDS, LR = 12, 1e-3  # as many as base_graph/3 takes to come around
ENDURE_LR, DEATH = 5e-3, 10  # the last round of one that is killed


def lr_of(label):
    """Steps of Adam and Muon are as long as the learning rate, those of others as lr times the gradient."""
    return 10 * LR if "adam" in label or "muon" in label else LR


def problem_of(size, dim=5):
    return LeastSquares(size, dim=dim, noise=1.0, heterogeneity=1.0, seed=3)


def group():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def train(optimizer, parameter, problem, rank, rounds):
    """Rounds of the problem's own stochastic gradients."""
    for _ in range(rounds):
        t = optimizer.rounds + 1
        parameter.grad = problem.grad(parameter.detach()[None].double().cpu(), t, [rank])[0].to(parameter)
        optimizer.step()


def parity(folder, device="cpu", cases=RANK_CASES, kernels=False, wire="float32", **travel):
    """Rules on those of their graphs that they are defined on, in one group after the other."""
    rank, size = group()
    if wire != "int8":  # which is cut between blocks of 256
        node.BLOCK[device] = 2  # several slices, the last one shorter
    if kernels and device == "cpu":
        imitate()
    found = {}
    for label, graphs in cases.items():
        rule, options = RANK_RULES[label]
        for name in graphs:
            algorithm, graph = klatsch.rules.make(rule, lr=lr_of(label), **options), make(name, size)
            try:
                algorithm.check_graph(graph)
            except ValueError:
                continue
            problem = problem_of(size)
            x = nn.Parameter(problem.start().to(device, torch.float32 if kernels else torch.float64, copy=True))
            optimizer = klatsch.Gossip([x], algorithm, graph, wire=wire, **travel)
            train(optimizer, x, problem, rank, ROUNDS)
            if kernels:
                worker = optimizer.shares[0].node
                assert worker._fuses, f"{label} | {name} runs operation by operation"
                assert all(worker._levels.values()), f"{label} | {name} without kernels: {worker._levels}"
            found[f"{label} | {name}"] = torch.stack([x.detach(), optimizer.output()[0]]).cpu()
    torch.save(found, folder / f"parity-{rank}")
    say(folder, f"done-{rank}", os.getpid())


# Least squares of 20 numbers as a model: of its matrices the first is a convolution, the second lies column by column.
MATRICES = [WeightMatrix(1, 3, 2), WeightMatrix(7, 2, 3, turned=True), WeightMatrix(15, 2, 2)]
MUON = {
    "muon": ("ring", "ring/4"),
    "muon shared": ("ring", "one_peer_exponential"),
    "muon momentum": ("ring", "ring/4"),
    "muon anytime": ("ring",),
}


def muon_of(label):
    name = "plain+muon+anytime" if label == "muon anytime" else "muon"
    shared = {"muon shared": True, "muon momentum": "momentum"}.get(label, False)
    return klatsch.rules.make(name, 10 * LR, weight_decay=0.1, shared=shared)


def as_model(x):
    """A problem's numbers as parameters."""
    pieces = [x[:1], x[1:7].view(3, 1, 2), x[7:13].view(3, 2).mT, x[13:15], x[15:19].view(2, 2), x[19:]]
    return [v.clone() for v in pieces]


def as_numbers(model):
    return torch.cat([(p.mT if p.shape == (2, 3) else p).detach().reshape(-1) for p in model])


def muon(folder):
    """Muon on parameters that are the numbers of a problem."""
    rank, size = group()
    node.BLOCK["cpu"] = 2  # to which it does not cut its vectors
    problem, found = problem_of(size, 20), {}
    for label, graphs in MUON.items():
        for name in graphs:
            model = [nn.Parameter(v) for v in as_model(problem.start())]
            optimizer = klatsch.Gossip(model, muon_of(label), name)
            for t in range(1, ROUNDS + 1):
                if t == ROUNDS // 2:
                    optimizer.load_state_dict(optimizer.state_dict())  # and goes on where it was
                for p, v in zip(model, as_model(problem.grad(as_numbers(model)[None], t, [rank])[0]), strict=True):
                    p.grad = v
                optimizer.step()
            found[f"{label} | {name}"] = torch.stack([as_numbers(model), as_numbers(optimizer.output())])
    torch.save(found, folder / f"muon-{rank}")


def numbers(folder, rules, graph):
    """What these rules computed when they were written by hand, on a graph of as many nodes as there are ranks."""
    rank, _ = group()
    found = {}
    for case in numbers_before.CASES:
        if case[0] in rules and case[2] == graph:
            found |= numbers_before.numbers(case, simulate_on_ranks, group=dist.group.WORLD)
    if rank == 0:
        torch.save(found, folder / "numbers")


def endure(
    folder,
    victim,
    harm,
    graph="ring",
    on_failure="raise",
    timeout=60,
    rounds=60,
    ask=None,
    rule="dsgd",
    options=None,
    travel=None,
):
    """A run in which one rank kills or stops itself after DEATH rounds; every point that the others pass is kept."""
    rank, size = group()
    problem = problem_of(size)
    x = nn.Parameter(problem.start().clone())
    made = klatsch.rules.make(rule, lr=ENDURE_LR, **options or {})
    optimizer = klatsch.Gossip([x], made, graph, timeout=timeout, on_failure=on_failure, **travel or {})
    path, lost = [x.detach().clone()], [()]
    for t in range(1, rounds + 1):
        if rank == victim and t == DEATH + 1:
            os.kill(os.getpid(), getattr(signal, harm))
        train(optimizer, x, problem, rank, 1)
        path.append(x.detach().clone())
        lost.append(optimizer.lost)
        if t == ask:  # those who are left, and without harm
            model = nn.Module()
            model.x = x
            model.register_buffer("number", torch.tensor([float(rank)]))
            say(folder, f"answer-{rank}", optimizer.consensus())
            say(folder, f"mean-{rank}", float(klatsch.average_(model).number))
    torch.save({"path": torch.stack(path), "lost": lost}, folder / f"path-{rank}")
    say(folder, f"end-{rank}")


def awake(folder, graph, timeout, rule="dsgd"):
    """Rank 1 stops itself after ten rounds, and is woken when another has given it up; all train on for a while."""
    rank, size = group()
    problem = problem_of(size)
    x = nn.Parameter(problem.start().clone())
    optimizer = klatsch.Gossip(
        [x], klatsch.rules.make(rule, lr=ENDURE_LR), graph, timeout=timeout, on_failure="continue"
    )
    left = 30
    while left:
        if rank == 1 and optimizer.rounds == 10:
            os.kill(os.getpid(), signal.SIGSTOP)
        train(optimizer, x, problem, rank, 1)
        if 1 in optimizer.lost and not (folder / f"lost-{rank}").exists():
            say(folder, f"lost-{rank}")
        woken = (folder / "woken").exists()
        if 1 in optimizer.lost and not woken:
            time.sleep(0.25)  # else they train at full speed until the test comes to it
        left -= woken
    optimizer.finish()


def parted(folder, rule, travel, stop, rounds, graph="ring", timeout=60):
    """Rank 2 stops itself before some round, and goes on alone when it is woken; each rank is pulled to its number."""
    rank, _ = group()
    x = nn.Parameter(torch.zeros(300, dtype=torch.float64))  # more than a block of int8
    made = klatsch.rules.make(rule, lr=0.1)
    optimizer = klatsch.Gossip([x], made, graph, timeout=timeout, on_failure="continue", **travel)
    checkpointer = klatsch.Checkpointer(folder / "checkpoints", every=1000)
    targets = rank * torch.linspace(1.0, 2.0, 300, dtype=torch.float64)
    for t in range(checkpointer.resume(optimizer) + 1, rounds + 1):
        if (rank, t) == (2, stop):
            os.kill(os.getpid(), signal.SIGSTOP)
        x.grad = x.detach() - targets
        optimizer.step()
    checkpointer.save()
    torch.save({"lost": optimizer.lost, "x": x.detach(), "state": optimizer.vectors()[0]}, folder / f"parted-{rank}")
    say(folder, f"end-{rank}")


def mass(folder):
    """Push-sum without gradients on a directed graph, of which a rank is killed; each starts from its own value."""
    rank, _ = group()
    x = nn.Parameter(torch.full((1,), float(rank), dtype=torch.float64))
    rule = klatsch.rules.make("sgp", lr=0.1)
    optimizer = klatsch.Gossip([x], rule, "exponential", on_failure="continue", start_equal=False)
    kept = []
    for t in range(1, 81):
        if rank == 2 and t == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        x.grad = torch.zeros_like(x)
        optimizer.step()
        (fields,) = optimizer.vectors()
        kept.append(torch.cat([fields["w"], fields["weight"], x.detach()]))
    torch.save(torch.stack(kept), folder / f"mass-{rank}")


def disagree(folder, cases):
    """The last rank makes something else; what every rank is told, by case."""
    rank, size = group()
    told, last = {}, rank == size - 1
    for what in cases:
        odd = what if last else None
        rule = klatsch.rules.make("dsgd" if odd == "rule" else "dat", lr=0.2 if odd == "lr" else 0.1)
        dtype = torch.float64 if odd == "dtypes" else torch.float32
        params = [nn.Parameter(torch.ones((3, 2) if odd == "shapes" else (2, 3), dtype=dtype))]
        params += [nn.Parameter(torch.ones(1))] * (odd == "number")
        graph, wire = "star" if odd == "topology" else "ring", "int8" if odd == "wire" else "float32"
        try:
            klatsch.Gossip(params, rule, graph, wire=wire, timeout=60)
        except ValueError as error:
            told[what] = str(error)
    torch.save(told, folder / f"told-{rank}")


def absent(folder):
    """The last rank makes no optimizer, and ends when the others have."""
    rank, size = group()
    if rank < size - 1:
        klatsch.Gossip([nn.Parameter(torch.ones(2, 3))], klatsch.rules.make("dat", lr=0.1), "ring", timeout=4)
    for other in range(size - 1):
        wait_until((folder / f"code-{other}").exists)


def weighted(folder):
    """Sites of 10, 20 and 70 samples, and f(x) = (x - rank)^2 / 2 on each: where rules come to rest."""
    rank, size = group()
    ring = klatsch.topology.lazy(klatsch.topology.ring(size))
    optim, found = klatsch.optim, {}
    for name, made in {
        "D2": lambda x, **o: optim.D2([x], 0.2, ring, **o),
        "D2 without weights": lambda x, **o: optim.D2([x], 0.2, ring),
        "GradientTracking": lambda x, **o: optim.GradientTracking([x], 0.2, ring, **o),
        "DATD2": lambda x, **o: optim.DATD2([x], 0.2, ring, averaging="fixed(0.5)", beta=0.9, **o),
        "DSGD": lambda x, **o: optim.DSGD([x], 0.2, "complete", **o),
        "GossipAdamW": lambda x, **o: optim.GossipAdamW([x], lambda t: 1 / t, "complete", weight_decay=0.0, **o),
    }.items():
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no rule warns of its defaults
            optimizer = made(x, weight=[10, 20, 70][rank])
        for _ in range(80):
            optimizer.zero_grad()
            ((x - rank).square() / 2).sum().backward()
            optimizer.step()
        found[name] = float(optimizer.output()[0])
    try:
        optim.D2([x], 0.2, ring, weight=None if rank == 1 else 10)
    except ValueError as error:
        found["some have none"] = str(error)
    torch.save(found, folder / f"weighted-{rank}")


def epochs(folder):
    """Epochs of other lengths on every rank: the round in which each of them ends."""
    rank, _ = group()
    found = {}
    for name, options in {"ring": {}, "late": {"every": 2, "late": 1}}.items():
        x = nn.Parameter(torch.zeros(1))
        optimizer = klatsch.optim.DSGD([x], 0.1, "ring", **options)
        found[name] = []
        for epoch in range(4):
            for _ in range((rank + epoch) % 3 * 4):
                optimizer.zero_grad()
                x.sum().backward()
                optimizer.step()
            found[name].append((optimizer.rounds, optimizer.end_epoch(), optimizer.rounds))
        optimizer.finish()
    torch.save(found, folder / f"epochs-{rank}")


def features(folder):
    """What needs several ranks and no fault."""
    rank, size = group()
    found = {}

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    found["own"] = [p.detach().clone() for p in model.parameters()]
    ring = klatsch.topology.lazy(klatsch.topology.ring(size))  # three on a plain ring agree at once
    optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.1, topology=ring, averaging="fixed(0.9)", momentum=0.9)
    found["start"] = [p.detach().clone() for p in model.parameters()]
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)

    def step():
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    found["x"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    found["sent"] = optimizer.bytes_sent
    found["consensus"], found["consensus sent"] = optimizer.consensus(), optimizer.bytes_sent - found["sent"]
    found["statistics"] = model[1].running_mean.clone()
    before = optimizer.bytes_sent
    klatsch.average_(model)
    found["average sent"] = optimizer.bytes_sent - before
    found["averaged"] = model[1].running_mean.clone()

    saved = optimizer.state_dict()  # back to here from a later round, with messages on their way
    for _ in range(3):
        step()
    found["first"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer.load_state_dict(saved)
    for _ in range(3):
        step()
    found["again"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    klatsch.average_(model, parameters=True)
    found["network"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    p = nn.Parameter(torch.ones(3))  # a scaler that finds inf on one rank only
    scaled = klatsch.optim.DSGD([p], lr=0.1, topology="one_peer_exponential")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for t in range(4):
        scaled.zero_grad()
        scaler.scale((p * (torch.inf if t == 2 and rank == 1 else 1.0)).sum()).backward()
        scaler.step(scaled)
        scaler.update()
    found["scaled"] = p.detach().clone()

    q = nn.Parameter(torch.full((2,), float(rank)))  # each from its own start; two dtypes; a group of some ranks
    r = nn.Parameter(torch.full((70_000,), float(rank), dtype=torch.float64))
    apart = klatsch.optim.DSGD([q, r], lr=0.1, topology="complete", start_equal=False)
    apart.step()
    found["mean"] = torch.cat([q.detach().double(), r.detach()])

    even = dist.new_group([0, 2])
    if rank in (0, 2):
        s = nn.Parameter(torch.full((2,), float(rank)))
        some = klatsch.optim.DSGD([s], lr=0.1, topology="complete", start_equal=False, group=even)
        some.step()
        found["some"] = s.detach().clone()
    else:
        try:
            klatsch.optim.DSGD([nn.Parameter(torch.ones(1))], lr=0.1, group=even)
        except ValueError as error:
            found["some"] = str(error)
    torch.save(found, folder / f"features-{rank}")
    dist.destroy_process_group()


def last_words(folder, order):
    """Ranks that end at different times; nobody waits for a round that nobody takes."""
    rank, _ = group()
    x = nn.Parameter(torch.ones(200_000))
    optimizer = klatsch.optim.DATSGD([x], lr=0.1, order=order, topology="directed_ring", beta=0.9)
    for _ in range(5):
        time.sleep(0.2 * rank)
        x.grad = torch.ones(200_000)
        optimizer.step()
    if rank == 0:
        dist.destroy_process_group()


def silent(folder, rule):
    """Local steps: one rank begins them only when all others have ended theirs, which nobody has to wait for."""
    rank, size = group()
    problem = problem_of(size)
    x = nn.Parameter(problem.start().clone())
    optimizer = klatsch.Gossip([x], klatsch.rules.make(rule, lr=LR), "ring/4")
    path, sent = [], []
    for t in range(1, 13):
        turn, step = divmod(t - 1, 4)
        if rank == 0 and step == 0:
            for other in range(1, size):
                wait_until((folder / f"local-{turn}-{other}").exists)
        train(optimizer, x, problem, rank, 1)
        path.append(x.detach().clone())
        sent.append(optimizer.bytes_sent)
        if step == 2:
            say(folder, f"local-{turn}-{rank}")
    torch.save({"path": torch.stack(path), "sent": sent}, folder / f"silent-{rank}")


def nccl(folder, backend):
    """One process on one GPU, which is all that NCCL can do there; the same on the CPU beside it."""
    dist.init_process_group(backend)
    ends = {}
    for device in ("cuda", "cpu") if "gloo" in backend else ("cuda",):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
        inputs = torch.randn(16, 4).to(device)
        optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.1, order="cta", averaging="fixed(0.9)", momentum=0.9)
        checkpointer = klatsch.Checkpointer(folder / f"checkpoints-{device}", every=3)
        checkpointer.resume(optimizer, model=model)
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        for _ in range(10):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            checkpointer.step()
        klatsch.average_(model, parameters=True)
        assert optimizer.consensus() == 0.0
        ends[device] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
    torch.save(ends, folder / "ends")
    dist.destroy_process_group()


class Poisoned(klatsch.problems.Problem):
    """A problem of which node 2 has a gradient that is not a number, in round 37 and in the last column."""

    NODE, ROUND = 2, 37
    matrices = ()

    def __init__(self, nodes):
        self.nodes, self.dim = nodes, 3

    def start(self):
        return torch.ones(3, dtype=torch.float64)

    def grad(self, x, t, nodes=None):
        gradients = x - torch.arange(3, dtype=x.dtype, device=x.device)
        asked = list(range(self.nodes) if nodes is None else nodes)
        if t == self.ROUND and self.NODE in asked:
            gradients[asked.index(self.NODE), -1, 1] = torch.nan
        return gradients

    def metrics(self, x):
        return {"size": x.square().sum(-1).mean(0)}


def diverge(folder):
    """Columns that diverge: by a gradient that is not a number, and by learning rates that are too large."""
    rank, size = group()
    world, ring = dist.group.WORLD, make("ring", size)
    found = []
    for rule in ("dsgd", "dat", "gt"):
        for problem, rates in ((Poisoned(size), [0.1, 0.2]), (problem_of(size), [1e-3, 1e6, 1e300])):
            algorithm = klatsch.rules.make(rule, lr=rates)
            found.append(simulate_on_ranks(problem, algorithm, ring, 60, record=[7, 50], group=world))
    if rank == 0:
        torch.save([result.diverged_at for result in found], folder / "diverged")
    dist.destroy_process_group()
