"""What ranks go through in the tests of hardships: gradients not finite, networks that fall apart, few batches."""

import ctypes
import gc
import os
import signal
import time
from collections import deque
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import klatsch
from klatsch.ranks.assembly import Assembly
from klatsch.ranks.waiting import Transfer
from tests.support.imitation import imitate
from tests.support.lanes import use_lanes
from tests.support.processes import say
from tests.support.rank_scenarios import problem_of
from tests.support.waiting import HANG, wait_until

LR = 1e-3
HARMS = {"nan": torch.nan, "absurd": 1e25}


def begin(graph="ring", rule="dat", dtype=torch.float64, device="cpu", **options):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    problem = problem_of(dist.get_world_size())
    x = nn.Parameter(problem.start().to(device, dtype, copy=True))
    choices = {name: options.pop(name) for name in ("order", "momentum", "shared") if name in options}
    optimizer = klatsch.Gossip([x], klatsch.rules.make(rule, lr=LR, **choices), graph, **options)
    return optimizer, x, problem


def gradient(x, problem, rank, t):
    x.grad = problem.grad(x.detach()[None].double().cpu(), t, [rank])[0].to(x)


def keep(folder, optimizer, x, **more):
    torch.save({"x": x.detach(), "rounds": optimizer.rounds} | more, folder / f"end-{optimizer.rank}")


def one_after_the_other(folder, of, cases):
    """A scenario with several options, in folders by their number, over the same process group."""
    for k, options in enumerate(cases):
        (folder / str(k)).mkdir(exist_ok=True)
        globals()[of](folder / str(k), **options)
        gc.collect()  # the optimizer lets its neighbours go


def poison(folder, harm, on_nonfinite="raise", every=None, at=(10,), rounds=30):
    """Rank 2 has a gradient that is not finite in some rounds."""
    optimizer, x, problem = begin(on_nonfinite=on_nonfinite, dtype=torch.float32, timeout=HANG)
    checkpointer = None if every is None else klatsch.Checkpointer(folder / "checkpoints", every=every)
    resumed = 0 if checkpointer is None else checkpointer.resume(optimizer)
    say(folder, f"resumed-{optimizer.rank}", resumed)
    path = [x.detach().clone()]
    try:
        while optimizer.rounds < rounds:
            t = optimizer.rounds + 1
            gradient(x, problem, optimizer.rank, t)
            if optimizer.rank == 2 and t in at:
                x.grad[1] = HARMS[harm]
            optimizer.step()
            path.append(x.detach().clone())
            if checkpointer is not None:
                checkpointer.step()
    finally:
        keep(folder, optimizer, x, before=path[-1], skipped=optimizer.skipped)


def nonsense(folder, on_failure, device=None):
    """Rank 2 sends what it must not in round 10; on a device with kernels."""
    if device == "cpu":
        imitate()
    kind = {} if device is None else {"dtype": torch.float32, "device": device}
    optimizer, x, problem = begin(on_failure=on_failure, timeout=HANG, **kind)
    before = x.detach().clone()
    send = optimizer._links.send

    def spoilt(tag, t, message):
        if t == 10 and optimizer.rank == 2:
            message[8:16].view(torch.float64)[:] = torch.nan
        send(tag, t, message)

    optimizer._links.send = spoilt
    try:
        for t in range(1, 31):
            gradient(x, problem, optimizer.rank, t)
            before = x.detach().clone()
            optimizer.step()
    finally:
        keep(folder, optimizer, x, lost=optimizer.lost, before=before)


def apart(folder, victims, quorum=0.0, lanes=None):
    """Some ranks die after ten rounds, and cut the others off from each other."""
    if lanes:
        use_lanes(lanes)
    optimizer, x, problem = begin(on_failure="continue", quorum=quorum, timeout=HANG)
    model = nn.Module()
    model.x = x
    model.register_buffer("number", torch.tensor([float(optimizer.rank)]))
    paved = [*optimizer._links.lanes]
    try:
        for t in range(1, 31):
            if optimizer.rank in victims and t == 11:
                os.kill(os.getpid(), signal.SIGKILL)
            gradient(x, problem, optimizer.rank, t)
            optimizer.step()
        consensus, own = optimizer.consensus(), x.detach().clone()
        klatsch.average_(model, parameters=True)
        keep(folder, optimizer, x, consensus=consensus, own=own, number=float(model.number), lanes=paved)
    except klatsch.QuorumError:
        keep(folder, optimizer, x)
        raise


def interrupted(folder, victim):
    """A rank dies in the middle of a sum over all of them."""
    optimizer, x, _ = begin(on_failure="continue", start_equal=False, timeout=HANG)
    model = nn.Module()
    model.x = x
    with torch.no_grad():
        x.fill_(1.0)
    x.grad = torch.zeros_like(x)
    optimizer.step()
    mean, asked = Assembly.mean, []

    def dies(self, mine):
        asked.append(mine)
        if optimizer.rank == victim and len(asked) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean(self, mine)

    Assembly.mean = dies
    try:
        klatsch.average_(model, parameters=True)
    except RuntimeError as error:
        say(folder, f"error-{optimizer.rank}", error)
    keep(folder, optimizer, x, again=klatsch.average_(model, parameters=True).x.detach().clone())


def stopped(folder, victim=2, timeout=20):
    """A rank stops itself inside a call of all ranks, after they have come together, until the others have ended."""
    optimizer, x, problem = begin(timeout=timeout)
    model = nn.Module()
    model.x = x
    for t in range(1, 4):
        gradient(x, problem, optimizer.rank, t)
        optimizer.step()
    mean = Assembly.mean

    def stops(self, mine):
        if optimizer.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        return mean(self, mine)

    Assembly.mean = stops
    klatsch.average_(model, parameters=True)


def one_batch_less(folder):
    """The last rank has a batch less, between two mixes; all ask, are refused, finish, and ask again."""
    optimizer, x, problem = begin("ring/4", rule="dsgd", timeout=HANG)
    model, told = nn.Module(), {}
    model.x = x
    for t in range(1, 38 if optimizer.rank == optimizer.topology.size - 1 else 39):
        gradient(x, problem, optimizer.rank, t)
        optimizer.step()
    for name, ask in (("consensus", optimizer.consensus), ("average_", partial(klatsch.average_, model))):
        try:
            ask()
        except ValueError as error:
            told[name] = str(error)
    optimizer.finish()
    own = x.detach().clone()
    consensus, sent = optimizer.consensus(), optimizer.bytes_sent
    klatsch.average_(model, parameters=True)
    keep(folder, optimizer, x, told=told, consensus=consensus, own=own, sent=optimizer.bytes_sent - sent)


def hub_leaves(folder, quorum):
    """The centre of a star goes, and the others hear nothing of each other any more."""
    optimizer, x, problem = begin("star", on_failure="continue", quorum=quorum, timeout=HANG)
    for t in range(1, 6 if optimizer.rank == 0 else 31):
        gradient(x, problem, optimizer.rank, t)
        optimizer.step()
    optimizer.finish(leave=optimizer.rank == 0)


def uneven(
    folder, steps, graph="ring", rule="dat", join=False, leave=(), every=None, deaths=(), travel=None, **options
):
    """Every rank has its own number of batches."""
    optimizer, x, problem = begin(graph, rule, timeout=HANG, **options, **travel or {})
    checkpointer = None if every is None else klatsch.Checkpointer(folder / "checkpoints", every=every)
    done = 0 if checkpointer is None else checkpointer.resume(optimizer)
    say(folder, f"resumed-{optimizer.rank}-{done}")

    def train():
        for t in range(done + 1, steps[optimizer.rank] + 1):
            if [optimizer.rank, t] in deaths and done == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            gradient(x, problem, optimizer.rank, t)
            optimizer.step()
            if checkpointer is not None:
                checkpointer.step()

    if join:
        with Join([optimizer]):
            train()
        idle = optimizer.rounds - steps[optimizer.rank]
    else:
        train()
        idle = optimizer.finish(leave=optimizer.rank in leave)
        assert optimizer.finish() == 0
    say(folder, f"idle-{optimizer.rank}", idle)
    keep(folder, optimizer, x, consensus=optimizer.consensus() if not leave else 0.0, lost=optimizer.lost)


def crew(folder, cases=({},), **options):
    """Trainings side by side over the same process group, in folders by their number if there are several."""
    dist.init_process_group("gloo")
    folders = [folder / str(k) for k in range(len(cases))] if len(cases) > 1 else [folder]
    trainings = [rounds_of_a_crew(own, **options | case) for own, case in zip(folders, cases, strict=True)]
    deque(zip_longest(*trainings), maxlen=0)


def rounds_of_a_crew(
    folder,
    rounds,
    rule="d2",
    graph="complete",
    die=(),
    leave=(),
    every=4,
    lr=0.05,
    files="checkpoints",
    fresh=False,
    **options,
):
    """f_i(x) = (x - i)^2 / 2 on rank i, from its checkpoints; ranks die or leave in some rounds, as (rank, round)."""
    folder.mkdir(exist_ok=True)
    rank, die, leave = dist.get_rank(), dict(die), dict(leave)
    model = nn.Linear(300, 1, bias=False)
    nn.init.constant_(model.weight, 9.0)
    options = {"timeout": HANG, "on_failure": "continue"} | options
    optimizer = klatsch.Gossip(model.named_parameters(), klatsch.rules.make(rule, lr=lr), graph, **options)
    (folder / files.format(rank)).mkdir(parents=True, exist_ok=True)
    checkpointer = klatsch.Checkpointer(folder / files.format(rank), every=every, fresh=fresh)
    done = checkpointer.resume(optimizer, model=model)
    say(folder, f"resumed-{rank}", f"{done} {float(optimizer.output()[0].mean()):.3f}")
    for t in range(done + 1, rounds + 1):
        yield
        if t == die.get(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if t == leave.get(rank):
            optimizer.finish(leave=True)
            break
        model.weight.grad = model.weight.detach() - rank
        optimizer.step()
        checkpointer.step()
    sums = {name: v.clone() for name, v in optimizer.vectors()[0].items() if name in ("y", "z")}
    keep(folder, optimizer, optimizer.output()[0], sums=sums, lost=optimizer.lost)


def ends_first(folder):
    """Messages of cta leave at the end of a round. The last one of rank 0 leaves late, when rank 1 is at its end.

    Only once rank 1 waits for it, or is gone.
    """
    optimizer, x, problem = begin(order="cta", timeout=HANG)
    rank, links = optimizer.rank, optimizer._links
    send, ended = links.send, Transfer.ended

    def hesitant(tag, t, message):
        if t == 4 and rank == 0:
            wait_until(lambda: (folder / "waits").exists() or (folder / "gone-1").exists())
            say(folder, "last")
        send(tag, t, message)

    def waits(transfer, seconds):
        if transfer.incoming and rank == 1 and seconds > 0 and not ended(transfer, 0.0):
            say(folder, "waits")
        return ended(transfer, seconds)

    links.send = hesitant
    for t in range(1, 4):
        gradient(x, problem, rank, t)
        optimizer.step()
    Transfer.ended = waits
    optimizer = None
    gc.collect()
    say(folder, f"gone-{rank}", (folder / "last").exists())


def slow_links(folder, timeout, numbers):
    """Every rank behind a slow link of its own: the start, a round and a mean each take longer than the timeout."""
    rank = int(os.environ["RANK"])
    with open(f"/run/netns/klatsch-test{rank}") as place:
        assert ctypes.CDLL(None).setns(place.fileno(), 0) == 0  # before there are threads
    os.environ |= {"MASTER_ADDR": "10.79.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
    dist.init_process_group("gloo")
    model = nn.Module()
    model.x = nn.Parameter(torch.full((numbers,), float(rank)))
    optimizer = klatsch.optim.DSGD([model.x], lr=1.0, topology="ring", timeout=timeout)
    took = {}
    for name, what in (("step", optimizer.step), ("mean", partial(klatsch.average_, model, parameters=True))):
        model.x.grad = torch.full((numbers,), float(rank))
        began = time.monotonic()
        what()
        took[name] = time.monotonic() - began
    say(folder, f"end-{rank}", f"{model.x.detach().min()} {model.x.detach().max()} {took}")


def departures(folder, cases, rounds, killed=False, every=None):
    """Node i minimises (x - i)^2 / 2. Some leave or die after ten rounds; what the others end with is kept by case."""
    dist.init_process_group("gloo")
    rank, kept = dist.get_rank(), {}
    for label, case in cases.items():
        x, model = nn.Parameter(torch.zeros(3, dtype=torch.float64)), nn.Module()
        model.x = x
        rule = klatsch.rules.make(case["rule"], **case["options"])
        optimizer = klatsch.Gossip([x], rule, case["graph"], timeout=HANG, **case["travel"])
        checkpointer = klatsch.Checkpointer(folder / label, every=every or rounds)
        done = checkpointer.resume(optimizer) if every else 0
        goes = rank in case["gone"] and not done
        for _ in range(done, 10 if goes else rounds):
            x.grad = x.detach() - rank
            optimizer.step()
            if every:
                checkpointer.step()
        if goes and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        kept[label] = {name: v.clone() for name, v in optimizer.vectors()[0].items()}
        kept[label]["output"] = optimizer.output()[0]
        if not goes:
            kept[label]["consensus"] = optimizer.consensus()
            with klatsch.merged(model):
                kept[label]["merged"] = x.detach().clone()
        optimizer.finish(leave=goes)
    torch.save(kept, folder / f"kept-{rank}")


def behind(folder, slow, rounds, travel, rule="dat", graph="ring", every=None, death=None, **options):
    """The neighbours of slow ranks do four rounds in the time of one gradient there; all others are about as fast."""
    optimizer, x, problem = begin(graph, rule, timeout=HANG, catch_up=True, **travel, **options)
    checkpointer = None if every is None else klatsch.Checkpointer(folder / "checkpoints", every=every)
    resumed = 0 if checkpointer is None else checkpointer.resume(optimizer)
    before = optimizer.caught_up
    done = optimizer._links._pace.done  # by neighbour that is there, its rounds
    taken = {}  # by own round with a gradient, what that counts
    others = [peer for peer in done if peer not in slow]

    def all_have(needed):
        return all(done.get(peer, needed) >= needed for peer in others)

    def news_have_come():
        return all(optimizer._links._pace.taken()[slow] < 0.5)

    while (t := optimizer.rounds + 1) <= rounds:
        gradient(x, problem, optimizer.rank, t)
        ahead = min(max(done.values(), default=rounds) + 4, t + travel["late"] - 1, rounds)  # as far as they can go
        if optimizer.rank not in slow or taken:  # what was on its way is sent again with the first round
            wait_until(partial(all_have, ahead if optimizer.rank in slow else t - 2))
        if t > rounds - 8 and resumed == 0:  # so that the last gradients make up for those that slow ranks left out
            wait_until(news_have_come)
        if death == [optimizer.rank, len(taken)] and resumed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        taken[t] = optimizer.stretch
        optimizer.step()
        if checkpointer is not None:
            checkpointer.step()
    left_out = optimizer.caught_up - before
    assert left_out == optimizer.rounds - resumed - len(taken)
    optimizer.finish()
    keep(folder, optimizer, x, taken=taken, left_out=left_out, resumed=resumed, lost=optimizer.lost)
