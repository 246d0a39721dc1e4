"""What ranks go through in the tests of events."""

import os
import signal
import time

import torch
import torch.distributed as dist

import klatsch
from klatsch.ranks.waiting import Transfer
from klatsch.watch import events
from tests.support.rank_hardships import begin, gradient
from tests.support.waiting import HANG, wait_until

ROUNDS, POISONED, KILLED = 24, 3, 11


def story(folder):
    """Rank 2 skips a gradient, all save, and rank 3 is killed once it has told of its last round; the rest goes on.

    Rank 0 has a closure, and the environment says where its events go; the others say so themselves. Every round is
    told, whatever the time.
    """
    events.Log.is_due = lambda log: True
    rank = int(os.environ["RANK"])
    log = [folder / "log", f"tensorboard:{folder / 'board'}"] if rank else None
    options = {"on_failure": "continue", "on_nonfinite": "skip", "timeout": HANG, "dtype": torch.float32}
    optimizer, x, problem = begin(**options, log=log)
    checkpointer = klatsch.Checkpointer(folder / "checkpoints", every=10)
    checkpointer.resume(optimizer)

    def loss():
        gradient(x, problem, rank, optimizer.rounds + 1)
        if (rank, optimizer.rounds + 1) == (2, POISONED):
            x.grad[1] = torch.nan
        return x.detach().square().sum()

    def has_told():
        last = {"event": "round", "member": "3", "round": KILLED - 1}
        return any(last.items() <= event.items() for event in events.Folder(folder / "log").new())

    while optimizer.rounds < ROUNDS:
        if rank == 3 and optimizer.rounds == KILLED - 1:
            wait_until(has_told)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            optimizer.step(loss)
        else:
            optimizer.log(loss=loss(), own=rank)
            optimizer.step()
        checkpointer.step()
    dist.destroy_process_group()


def one_is_late(folder):
    """Rank 1 begins its third round once rank 0 has told that it is late."""
    optimizer, x, problem = begin(timeout=HANG, log=folder / "log")
    if optimizer.rank == 0:
        optimizer._links.step = optimizer._links.long = 0.01  # seconds

    def has_told():
        last = {"event": "late", "member": "0", "neighbour": "1", "round": 3}
        return any(last.items() <= event.items() for event in heard.new())

    heard = events.Folder(folder / "log")
    while optimizer.rounds < 4:
        if (optimizer.rank, optimizer.rounds) == (1, 2):
            wait_until(has_told)
        gradient(x, problem, optimizer.rank, optimizer.rounds + 1)
        optimizer.step()
    dist.destroy_process_group()


SLOW = {2, 3}  # the ends of a link


def slow_down(rank, seconds):
    """Messages over one link take long."""
    finish = Transfer.finish

    def finish_late(transfer):
        if transfer.incoming and {rank, transfer.peer} == SLOW:
            time.sleep(seconds)
        finish(transfer)

    Transfer.finish = finish_late


def slow_link(folder):
    """Every message over one link of a ring takes long. All stop after 20 rounds; when they wake, they train on."""
    rank = int(os.environ["RANK"])
    slow_down(rank, 1.0)  # seconds: far more than what a busy machine does to the other links
    optimizer, x, problem = begin(on_failure="continue", timeout=HANG, log=folder / "log")
    while True:
        gradient(x, problem, rank, optimizer.rounds + 1)
        optimizer.log(loss=x.detach().square().sum())
        optimizer.step()
        if optimizer.rounds == 20:
            os.kill(os.getpid(), signal.SIGSTOP)


def spirals(folder, rounds=150, killed=6):
    """All learn to tell two spirals apart. One link is slow, and after two thirds of the rounds a rank is killed.

    The ends of the slow link compute faster than the others, and so wait longest.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    slow_down(rank, 0.25)
    torch.manual_seed(0)
    labels, angle = torch.randint(2, (4000,)), torch.rand(4000) * 9
    inputs = torch.stack([angle * torch.cos(angle + 3.14 * labels), angle * torch.sin(angle + 3.14 * labels)], 1) / 3
    inputs, labels = inputs[rank :: dist.get_world_size()], labels[rank :: dist.get_world_size()]
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    options = {"on_failure": "continue", "timeout": HANG, "log": folder / "spirals"}
    optimizer = klatsch.optim.GossipSGD(model.parameters(), 0.1, "ring", momentum=0.9, **options)
    while optimizer.rounds < rounds:
        if rank == killed and optimizer.rounds == 2 * rounds // 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        batch = torch.randint(len(inputs), (64,))
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        time.sleep(0.15 if rank in SLOW else 0.3)  # as a larger model would take
        optimizer.log(loss=loss)
        optimizer.step()
    dist.destroy_process_group()
