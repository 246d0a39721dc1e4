"""What peers.py runs in the environments of the peers: their part of each task, and klatsch's beside it.

Not to be run by hand: peers.py makes the environments and calls this with the name of a part. Peers are imported inside
the functions, since each is there in its own environment only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from peers import BATCH, BLOCK, DIM, IMAGES, LR, RANKS, ROUNDS, RULES, STEPS, difference


def decent_bench(task: str, found: str) -> None:
    """In its environment: its algorithms, from 0, without records of earlier states."""
    import networkx as nx
    import numpy as np
    from decent_array import interoperability as iop
    from decent_bench.agents import Agent
    from decent_bench.algorithms import p2p
    from decent_bench.costs import LinearRegressionCost
    from decent_bench.networks import P2PNetwork

    iop.set_backend("numpy")
    given, outputs, seconds = np.load(task), {}, {}
    scale = DIM**0.5  # since its cost is a mean over samples
    for name in RULES:
        agents = []
        for A, b in zip(scale * given["A"], scale * given["b"], strict=True):
            samples = [(iop.from_numpy(row), iop.from_numpy(wanted)) for row, wanted in zip(A, b[:, None], strict=True)]
            agents.append(Agent(LinearRegressionCost(samples), state_snapshot_period=10**9))
        network = P2PNetwork(nx.from_numpy_array(given["P"] - np.diag(np.diag(given["P"]))), agents)
        network.weights = iop.from_numpy(given["P"])
        for agent in agents:
            agent.cost.gradient(iop.from_numpy(np.zeros(DIM)))  # makes and keeps its matrices
        began = time.perf_counter()
        getattr(p2p, name)(step_size=float(given["lr"])).run(network, ROUNDS)
        seconds[name] = time.perf_counter() - began
        outputs[name] = np.stack([iop.to_numpy(agent.x) for agent in network.agents()])
    np.savez(found, **outputs)
    print(json.dumps(seconds))


def decent_dp(turns: str) -> None:
    """A rank in its environment: train with both, by turns."""
    import torch
    import torch.distributed as dist
    from decent_dp.ddp import DecentralizedDataParallel
    from decent_dp.optim import optim_fn_adamw
    from loguru import logger
    from torch import nn

    import klatsch
    from klatsch.problems import dirichlet, fashion_mnist
    from ranks import model_of

    logger.remove()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, data = dist.get_rank(), fashion_mnist.load(None)
    own = torch.from_numpy(dirichlet(data.labels[:IMAGES], RANKS, 10.0, 0)[rank])
    images, labels = data.images[own] / 255, data.labels[own]

    def optimizer_of(way: str, model: nn.Module, graph: str) -> Any:
        if way == "local":
            return torch.optim.SGD(model.parameters(), LR)
        if way == "klatsch SGD":
            return klatsch.optim.DSGD(model.parameters(), LR, graph, order="cta")
        # As Decent-DP: moments are each rank's own, and its example of AdamW lets biases decay and nothing else.
        groups = [{"params": [p], "weight_decay": 0.1 * name.endswith("bias")} for name, p in model.named_parameters()]
        return klatsch.optim.GossipAdamW(groups, 1e-3, graph, order="cta", shared=False)

    def training(way: str, seed: int, steps: int, graph: str = "", dtype: torch.dtype = torch.float32) -> Iterator[Any]:
        """Seconds, and those of the processor, for every block of steps; then accuracy and parameters, once merged."""
        model, optimizer = model_of("lenet").to(dtype), None
        if way.startswith("theirs"):
            sgd = lambda named: torch.optim.SGD([p for _, p in named], LR)  # noqa: E731
            kind = sgd if way == "theirs SGD" else optim_fn_adamw
            model = DecentralizedDataParallel(model, kind, topology=graph or "one-peer-exp")
        else:
            optimizer = optimizer_of(way, model, graph or "base_graph")  # of four nodes: the same pairs
        draws = torch.Generator().manual_seed(100 * seed + rank)
        for _ in range(steps // BLOCK):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                batch = torch.randint(len(labels), (BATCH,), generator=draws)
                if optimizer is not None:
                    optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch].to(dtype)), labels[batch]).backward()
                if optimizer is not None:
                    optimizer.step()
            yield time.perf_counter() - began, time.process_time() - cpu
        if isinstance(model, DecentralizedDataParallel):
            model.global_avg(will_revert=False)
        elif way != "local":
            klatsch.average_(model, parameters=True)
        with torch.no_grad():
            right = model(data.test_images.to(dtype) / 255).argmax(1) == data.test_labels
        yield 100 * float(right.float().mean()), nn.utils.parameters_to_vector(model.parameters()).detach()

    few = {"seed": 0, "steps": 2 * BLOCK, "graph": "complete", "dtype": torch.float64}
    ours, theirs = ([*training(f"{who} SGD", **few)][-1][1] for who in ("klatsch", "theirs"))
    ways = ["local", "theirs SGD", "klatsch SGD", "theirs AdamW", "klatsch AdamW"]
    rows: dict[str, Any] = {way: [] for way in ways} | {"apart": difference(ours, theirs)}
    for seed in range(int(turns)):
        running = {way: training(way, seed, STEPS) for way in (ways if seed % 2 == 0 else ways[::-1])}
        blocks = [{way: next(each) for way, each in running.items()} for _ in range(STEPS // BLOCK)]
        for way, each in running.items():
            rows[way].append({"blocks": [block[way] for block in blocks], "accuracy": next(each)[0]})
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    os._exit(0)


def schedule_free(turns: str) -> None:
    """In its environment: each optimizer, and klatsch's on one rank."""
    import schedulefree
    import torch
    import torch.distributed as dist
    from torch import nn

    from klatsch.optim import DATSGD, DATAdamW, GossipMuon
    from klatsch.problems import fashion_mnist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = fashion_mnist.load(None)
    images, labels = data.images[: 100 * BATCH].flatten(1).double() / 255, data.labels[: 100 * BATCH]

    def trained(make: Callable[[list[nn.Parameter]], list[Any]]) -> tuple[float, torch.Tensor]:
        """Seconds of the processor for step(), and the parameters to evaluate."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10)).double()
        optimizers, took = make([*model.parameters()]), []
        switched = [each for each in optimizers if hasattr(each, "train")]
        for each in switched:
            each.train()
        for batch in torch.arange(len(labels)).split(BATCH):
            model.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            began = time.process_time()
            for each in optimizers:
                each.step()
            took.append(time.process_time() - began)
        for each in switched:
            each.eval()
        return statistics.median(took), nn.utils.parameters_to_vector(model.parameters()).detach()

    def muon(parameters: list[nn.Parameter]) -> list[Any]:
        matrices, rest = parameters[::2], parameters[1::2]
        named = {"lr": 1e-3, "weight_decay": 0.1}
        return [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **named), torch.optim.AdamW(rest, **named)]

    def gossip_muon(parameters: list[nn.Parameter]) -> list[Any]:
        return [GossipMuon(parameters, lr=1e-3, weight_decay=0.1)]

    pairs: dict[str, tuple[Callable[[list[nn.Parameter]], list[Any]], ...]] = {
        "SGDScheduleFree and DATSGD": (
            lambda some: [schedulefree.SGDScheduleFree(some, lr=0.5, momentum=0.9)],
            lambda some: [DATSGD(some, lr=0.5, beta=0.9)],
        ),
        "AdamWScheduleFree and DATAdamW": (
            lambda some: [schedulefree.AdamWScheduleFree(some, lr=0.0025, weight_decay=0.01)],
            lambda some: [DATAdamW(some, lr=0.0025, weight_decay=0.01)],
        ),
        "Muon with AdamW and GossipMuon": (muon, gossip_muon),
    }
    found: dict[str, tuple[float, list[list[float]]]] = {}
    for what, pair in pairs.items():
        both = [[trained(make) for make in pair] for _ in range(int(turns))]
        apart = difference(both[0][1][1], both[0][0][1])
        found[what] = apart, [[turn[way][0] for turn in both] for way in range(2)]
    torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    exact = difference(trained(gossip_muon)[1], trained(muon)[1])
    found["Muon without its own rounding to bfloat16 and GossipMuon"] = exact, []
    print(json.dumps(found))


def meeting_place(way: str) -> None:
    """In a peer's environment: what its members look for."""
    if way == "hivemind":
        import hivemind

        dht = hivemind.DHT(start=True)
        print(json.dumps(str(dht.get_visible_maddrs()[0])), flush=True)
    else:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer("[::]:0", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100)  # its README's
        print(json.dumps(f"http://localhost:{server.address().rsplit(':', 1)[1]}"), flush=True)
    signal.pause()


def member(way: str, number: str, every: str) -> None:
    """In a peer's environment: train until killed, and tell of every step."""
    import torch
    from torch import nn

    from ranks import model_of

    torch.set_num_threads(1)
    model, images, labels = model_of("lenet"), torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    make = {"hivemind": hivemind_member, "LocalSGD": torchft_member, "DiLoCo": torchft_member}.get(way, gossip_member)
    optimizer, mixes = make(way, model, int(number), int(every))
    for step in range(1, 1 << 60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        print(json.dumps([time.monotonic(), step, mixes()]), flush=True)


def loaded() -> None:
    """The first line of a member."""
    print(json.dumps([time.monotonic(), 0, 0]), flush=True)


Member = tuple[Any, Callable[[], int]]  # what steps, and how many exchanges it has done


def gossip_member(way: str, model: Any, number: int, every: int) -> Member:
    import torch

    from klatsch.optim import GossipSGD

    loaded()
    if way == "local":
        steps = iter(range(1 << 60))
        return torch.optim.SGD(model.parameters(), LR), lambda: next(steps)
    if way == "klatsch int8":
        optimizer = GossipSGD(model.parameters(), LR, wire="int8")
        return optimizer, lambda: optimizer.rounds
    optimizer = GossipSGD(model.parameters(), LR, every=every)
    return optimizer, lambda: optimizer.rounds // every


def torchft_member(way: str, model: Any, number: int, every: int) -> Member:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    loaded()
    inner, limit = torch.optim.SGD(model.parameters(), LR), timedelta(seconds=10)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    held = {"model": model, "inner": inner}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: [held[name].load_state_dict(value) for name, value in state.items()],
        state_dict=lambda: {name: each.state_dict() for name, each in held.items()},
        min_replica_size=2,
        use_async_quorum=False,  # which DiLoCo asks for
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=os.environ["MEETING_PLACE"],
        replica_id=f"member{number}",
        hostname="localhost",
    )
    if way == "DiLoCo":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        training: Any = DiLoCo(manager, [model], inner, outer, every)
    else:
        training = LocalSGD(manager, model, inner, every)
    training.__enter__()
    return inner, lambda: manager.current_step() if store and training else 0  # which keeps both


def hivemind_member(way: str, model: Any, number: int, every: int) -> Member:
    import logging

    import hivemind
    import torch

    loaded()
    averaged: list[int] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if met := re.search(r"Averaged parameters with (\d+) peers", record.getMessage()):
                averaged.append(int(met[1]))

    logging.getLogger("hivemind.optim.state_averager").addHandler(Heard())
    optimizer = hivemind.Optimizer(
        dht=hivemind.DHT(initial_peers=[os.environ["MEETING_PLACE"]], start=True),
        run_id="peers",
        batch_size_per_step=BATCH,
        target_batch_size=RANKS * BATCH * every,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, LR),
        use_local_updates=True,
        matchmaking_time=3.0,  # its advice for small local runs
        averaging_timeout=10.0,
        verbose=True,
    )
    return optimizer, lambda: len(averaged)


PARTS: dict[str, Callable[..., None]] = {
    "decent-bench": decent_bench,
    "decent-dp": decent_dp,
    "schedulefree": schedule_free,
    "meeting-place": meeting_place,
    "member": member,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
