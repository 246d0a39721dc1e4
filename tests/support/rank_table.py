"""A member of one crew after the other, one for each rule: `python -m tests.support.rank_table FOLDER NAME RULE ...`.

In every crew a, b, c and x train; d joins, b leaves, and x dies after a known round whose messages have all arrived.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import klatsch
from klatsch.ranks.node import Node
from tests.support.processes import say
from tests.support.table import RULES
from tests.support.waiting import HANG, wait_until

LR, NODES, MORE = 0.005, 5, 4  # MORE rounds in every epoch before something happens
LASTING = "abcd"


def problem():
    return klatsch.problems.LeastSquares(NODES, dim=5, heterogeneity=2.0, noise=0.5)


def main():
    folder, name, *rules = sys.argv[1:]
    for rule in rules:
        live(Path(folder) / rule, name, rule)
        gc.collect()


def live(folder, name, rule):
    if name == "d":
        wait_until((folder / "a-at").exists)
    task = problem()
    x = nn.Parameter(task.start().clone())
    optimizer = klatsch.Gossip([x], RULES[rule](LR), "ring")
    post = optimizer.post
    node = NODES - 1 if name == "d" else optimizer.rank
    first = post.epoch.number - (name == "d")
    kept = {"node": node, "epochs": {}, "path": {}, "state": {}}

    def look():
        kept["epochs"][post.epoch.number - first] = tuple(post.epoch)
        kept["path"][optimizer.rounds] = optimizer.output()[0].clone()
        kept["state"][optimizer.rounds] = {key: v.clone() for key, v in optimizer.vectors()[0].items()}
        say(folder, f"{name}-at", optimizer.rounds)

    def is_time(number):
        return post.epoch.number - first == number and optimizer.rounds >= post.epoch.start + MORE - 1

    def keep():
        torch.save(kept | {"member": post.crew.member}, folder / f"{name}-kept")

    if name == "x":
        begin = Node._begin

        def die(self, t):
            if post.epoch.number - first == 2 and t == post.epoch.start + MORE:
                for other in "acd":
                    wait_until(lambda other=other: int((folder / f"{other}-at").read_text()) >= t - 1)
                keep()
                os.kill(os.getpid(), signal.SIGKILL)
            begin(self, t)

        Node._begin = die
    look()
    while not is_time(3) and not post.left:
        x.grad = task.grad(x.detach()[None], optimizer.rounds + 1, [node])[0]
        optimizer.step()
        if not post.left:
            look()
        if name == "b" and is_time(1):
            post.crew.leave()  # as a signal does: with gradients to the end
        if optimizer.lost:
            post.crew.expects_change(HANG)  # it would train on until the registry knows
    keep()
    if not post.left:
        optimizer.leave()
    say(folder, f"{name}-left")
    for other in LASTING:
        wait_until((folder / f"{other}-left").exists)


if __name__ == "__main__":
    main()
