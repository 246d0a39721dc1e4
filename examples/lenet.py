"""LeNet on Fashion-MNIST, every machine with its own skewed share of the classes.

    torchrun --nproc-per-node 4 examples/lenet.py

Fashion-MNIST is downloaded if this machine does not have it; `--data FOLDER` names its folder. GossipSGD and DSGD decay
along a cosine; DATSGD and DATD2 do without, and are evaluated at x. Compare `--optimizer DATSGD`, `--topology ring`,
`--order cta`, or the paper: `--optimizer paper`. With `--checkpoints DIR`, `torchrun --max-restarts 3` and
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment (docs/cluster.md says why) the training survives kill -9.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch.problems import dirichlet, fashion_mnist
from klatsch.problems.sharded import check_alpha

OPTIMIZERS = {  # by name: its learning rate, whether that decays, and options
    "GossipSGD": (klatsch.optim.GossipSGD, 0.03, True, {}),
    "DATSGD": (klatsch.optim.DATSGD, 0.3, False, {"beta": 0.9}),
    "DSGD": (klatsch.optim.DSGD, 0.03, True, {"momentum": 0.9}),
    "D2": (klatsch.optim.D2, 0.3, False, {}),
    "GradientTracking": (klatsch.optim.GradientTracking, 0.3, False, {}),
    "DATD2": (klatsch.optim.DATD2, 0.3, False, {"beta": 0.9}),
    "paper": (
        klatsch.optim.DATSGD,
        0.01,
        False,
        {"averaging": "fixed(0.9)", "momentum": 0.9},
    ),  # how it trains networks
}


def lenet():
    """GroupNorm instead of BatchNorm, since running statistics do not gossip."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def main():
    """Train, and report now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of Fashion-MNIST's four files")
    parser.add_argument("--optimizer", default="GossipSGD", choices=[*OPTIMIZERS])
    parser.add_argument("--order", default="atc", choices=["atc", "cta"])
    parser.add_argument("--topology", help="such as ring; by default what the optimizer takes")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--alpha", type=float, default=0.1, help="0.1: few classes per machine; 10: all alike")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--report", type=int, default=250, help="rounds between two reports")
    parser.add_argument("--checkpoints", help="folder for checkpoints, from which a restart resumes")
    given = parser.parse_args()
    make, lr, decays, options = OPTIMIZERS[given.optimizer]
    if given.order == "cta" and "order" not in make.own_options:
        parser.error(f"{given.optimizer} has no other order than atc")
    try:
        check_alpha(given.alpha)
        data = fashion_mnist.load(given.data)
    except ValueError as error:
        parser.error(str(error))

    # One process per GPU where there are enough of them: messages then go over NCCL.
    local, beside = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local) if torch.cuda.device_count() >= beside else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    own = torch.from_numpy(dirichlet(data.labels, size, given.alpha)[rank])
    images, labels = data.images[own].to(device) / 255, data.labels[own].to(device)
    test_images, test_labels = data.test_images.to(device) / 255, data.test_labels.to(device)

    torch.manual_seed(0)
    model = lenet().to(device)
    options |= {"order": "cta"} if given.order == "cta" else {}
    optimizer = make(model.parameters(), given.lr or lr, given.topology, **options)
    schedule = klatsch.rules.Decay(1.0, "cosine" if decays else "constant", given.rounds)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: schedule(done + 1))
    torch.manual_seed(rank)  # from here on every machine draws its own batches
    checkpointer = klatsch.Checkpointer(given.checkpoints, every=100) if given.checkpoints else None
    done = checkpointer.resume(optimizer, model=model, scheduler=scheduler) if checkpointer else 0
    if rank == 0 and done:
        print(f"resuming after round {done}" if done < given.rounds else f"round {done} is done already", flush=True)

    for t in range(done + 1, given.rounds + 1):
        batch = torch.randint(len(labels), (given.batch,)).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        scheduler.step()
        if checkpointer:
            checkpointer.step()
        if t % given.report == 0 or t == given.rounds:
            with torch.no_grad(), optimizer.averaged():  # the model holds x in here, and trains on afterwards
                accuracy = (model(test_images).argmax(1) == test_labels).float().mean().cpu()
                klatsch.average_(model, parameters=True)  # the merged model
                merged = (model(test_images).argmax(1) == test_labels).float().mean().cpu()
            worst, mean = accuracy.clone(), accuracy.clone()
            dist.all_reduce(worst, dist.ReduceOp.MIN)
            dist.all_reduce(mean)
            gamma = optimizer.consensus()
            if rank == 0:
                reached = f"accuracy {mean / size:.3f} (worst machine {worst:.3f}, merged {merged:.3f})"
                cost = f"sent {optimizer.bytes_sent / 1e6:.0f} MB, waited {optimizer.seconds_waited:.1f} s"
                print(f"round {t}: {reached}, consensus {gamma:.1e}, {cost}", flush=True)
    if checkpointer:
        checkpointer.save()  # the last round
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
