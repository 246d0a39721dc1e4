"""A member of a crew that trains nothing: `python -m tests.support.rank_crews LOG ADDRESS TOKEN JSON`.

It writes what it sees to LOG, one JSON object per line, leaves at SIGTERM, and joins again if it is dropped.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch

from klatsch.ranks.crew import Crew, Dropped


def main():
    log, address, token, options = sys.argv[1:]
    options = json.loads(options)
    with open(log, "a", buffering=1) as file:

        def tell(**event):
            file.write(json.dumps(event) + "\n")

        crew = Crew(address, token.encode())
        signal.signal(signal.SIGTERM, lambda *_: crew.leave())
        tell(starts=True)
        facts = {"rule": "dsgd"} | options.get("facts", {})
        try:
            train(crew, crew.join(facts, options.get("rounds", 0)), facts, tell, options)
        except (ValueError, Dropped) as error:
            tell(error=str(error))
        crew.close()


def train(crew, epoch, facts, tell, options):
    tell(joined=crew.member, epoch=epoch, pid=os.getpid(), address=crew.address)
    t = epoch.start
    while True:
        if options.get("edges"):
            meet(crew, epoch)
        try:
            while True:
                if new := crew.before(t):
                    tell(epoch=new, round=t)
                    epoch = new
                    break
                tell(round=t)
                if crew.alone:
                    tell(lost=t)
                crew.report({"loss": 1 / t, "bytes": 100 * t, "neighbours": list(epoch.members)})
                time.sleep(0.02)  # a round
                t += 1
        except Dropped as error:
            tell(dropped=str(error), again=error.again)
            if not error.again:
                return
            epoch = crew.join(facts, t)
            tell(joined=crew.member, epoch=epoch, round=epoch.start)
            t = epoch.start
        if crew.member not in epoch.members:
            tell(left=t)
            return


def meet(crew, epoch):
    """Send a number around the ring of an epoch, over groups of two, made over the crew's store."""
    from torch.distributed import PrefixStore, ProcessGroupGloo

    n, own = len(epoch.members), epoch.members.index(crew.member)
    if n < 2:
        return
    work = []
    for other in {(own + 1) % n, (own - 1) % n}:
        a, b = sorted((own, other))
        store = PrefixStore(f"edge/{epoch.number}/{epoch.members[a]}-{epoch.members[b]}", crew.store)
        try:
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=crew.address)]
            options._threads, options._timeout = 1, timedelta(seconds=60)
            group = ProcessGroupGloo(store, int(own == b), 2, options)
        except RuntimeError:
            continue  # it has died since
        heard = torch.zeros(1)
        work.append((group, other, heard, group.recv([heard], int(own == a), 7)))
        group.send([torch.tensor([float(own)])], int(own == a), 7).wait()
    for _, other, heard, received in work:
        received.wait()
        assert heard.item() == other


if __name__ == "__main__":
    main()
