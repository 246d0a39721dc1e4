"""A member of a crew that trains least squares: `python -m tests.support.rank_changes FOLDER NAME JSON`.

It trains up to the round that FOLDER/stop names, or a signal ends it, and keeps what it held after every round. A
member may be a host of several ranks, each a process, which have the same gradients.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import klatsch
from klatsch.optim import gossip, post
from klatsch.ranks import crew
from klatsch.ranks.assembly import Assembly
from tests.support.lanes import use_lanes
from tests.support.processes import say
from tests.support.table import RULES
from tests.support.waiting import HANG

LR = 0.005
NODES = 4


def problem(dim=5):
    return klatsch.problems.LeastSquares(NODES, dim=dim, heterogeneity=2.0, noise=0.5)


def rate(dim):
    """A learning rate that is small enough."""
    return LR * 5 / dim


def main():
    folder, name, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    if os.environ.get("RANK", "0") != "0":
        options |= options.get("second", {})
    task = problem(options.get("dim", 5))
    crew.SILENCE = HANG  # it warns of nothing that is only slow
    if options.get("lanes"):
        use_lanes(**options["lanes"])
    device = options.get("device", "cpu")
    x = nn.Parameter(task.start().to(device, copy=True))
    match options.get("wrong"):
        case "shape":
            x = nn.Parameter(x.detach()[None])
        case "dtype":
            x = nn.Parameter(x.detach().float())
        case "version":
            gossip.VERSION = "0.1.0"
    rule = RULES[options["rule"]](rate(x.numel()))
    moments = {"start": (Assembly, "copy_first"), "handover": (post, "_give"), "settling": (Assembly, "mean_and_debts")}
    for moment, place in moments.items():
        if options.get("dies_at") == moment:
            setattr(*place, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if options.get("asks_in_vain"):  # for a state, the first time
        usual, tries = post.Post.handed_over, itertools.count()
        post.Post.handed_over = lambda *words: usual(*words) if next(tries) else None
    if options.get("apart"):
        x.data += os.getpid()
    if options.get("ranks", 1) > 1:
        options["options"] = options.get("options", {}) | {"mesh": init_device_mesh("cpu", (options["ranks"],))}
        if place := dist.get_rank():
            name = f"{name}.{place}"
    optimizer = klatsch.Gossip([x], rule, options.get("graph", "ring"), **options.get("options", {}))
    member, checkpointer = optimizer.post, None
    cut_at, *cut = options.get("cuts", {}).get(str(optimizer.rank), [0])  # the round in which its edges to some break
    if options.get("dies_first"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "checkpoints" in options:
        checkpointer = klatsch.Checkpointer(folder / options["checkpoints"].format(name), every=10)
        say(folder, f"{name}-resumed", checkpointer.resume(optimizer))
    node = options.get("node", optimizer.rank) if member.is_new else optimizer.rank
    kept = {"node": node, "ids": {}, "epochs": {}, "path": {}, "state": {}, "weight": {}, "lanes": {}}

    def look():
        kept["weight"][optimizer.rounds] = optimizer._weight
        kept["ids"][member.crew.member] = node
        kept["epochs"][member.epoch.number] = tuple(member.epoch)
        kept["lanes"][member.epoch.number] = len(optimizer._links.lanes)
        kept["path"][optimizer.rounds] = optimizer.output()[0].to("cpu", copy=True)
        kept["state"][optimizer.rounds] = {key: v.to("cpu", copy=True) for key, v in optimizer.vectors()[0].items()}
        at = member.epoch.number, len(member.epoch.members), optimizer.rounds, optimizer.rank
        say(folder, f"{name}-at", " ".join(map(str, at)))

    look()
    try:
        while not ((folder / "stop").exists() and optimizer.rounds >= int((folder / "stop").read_text())):
            t = optimizer.rounds + 1
            if t == options.get("leave"):
                optimizer.leave()
                break
            x.grad = task.grad(x.detach().cpu()[None], t, [node])[0].to(device)
            if t == options.get("stops_at"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if t == cut_at:
                for peer in cut:
                    optimizer._links.edges.close(peer)
            time.sleep(0.005)  # a gradient: rounds until something happens are few
            optimizer.log(loss=x.detach().square().sum())
            optimizer.step()
            if checkpointer:
                checkpointer.step()
            look()
        if checkpointer:
            checkpointer.save()
    finally:
        torch.save(kept, folder / f"{name}-keeps")
        os.rename(folder / f"{name}-keeps", folder / f"{name}-kept")


if __name__ == "__main__":
    main()
