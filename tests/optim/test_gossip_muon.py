"""Muon on ranks: alone it is torch's Muon for matrices and its AdamW for the rest, group by group."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import klatsch
from klatsch.optim import DSGD, GossipMuon
from klatsch.ranks import node
from tests.rules.test_muon import MUON, newton_schulz

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    model[3].weight = nn.Parameter(model[3].weight.detach().mT.contiguous().mT)  # which lies column by column
    return model


def train(model, *optimizers, schedule=True):
    schedulers = [LambdaLR(optimizer, lambda k: 1 - k / 20) for optimizer in optimizers if schedule]
    for t in range(STEPS):
        generator = torch.Generator().manual_seed(t)
        images, wanted = (torch.randn(8, *s, generator=generator, dtype=torch.float64) for s in ((2, 4, 4), (3,)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(images) - wanted).square().mean().backward()
        for each in (*optimizers, *schedulers):
            each.step()


@MUON
def test_alone_it_is_torchs_muon_and_adamw(monkeypatch):
    """Kernels as rows, a head for AdamW, groups with their own rates, momentum, betas and decay, and a scheduler."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda G, *_: newton_schulz(G))
    monkeypatch.setitem(node.BLOCK, "cpu", 10)  # to which it does not cut its vectors
    model = make_model()
    other = copy.deepcopy(model)
    own = {"lr": 0.03, "momentum": 0.8, "weight_decay": 0.0}
    groups = [
        {"params": [*model[0].parameters()]},
        {"params": [model[3].weight], **own},
        {"params": [model[3].bias], "betas": (0.5, 0.9)},
        {"params": [*model[5].parameters()], "matrices": False},
    ]
    train(model, GossipMuon(groups, lr=0.02, topology="ring"))

    kernels = nn.Parameter(other[0].weight.detach().reshape(4, -1).clone())
    conv, other[0].forward = other[0], lambda x: conv._conv_forward(x, kernels.view(4, 2, 3, 3), conv.bias)
    matrices = [{"params": [kernels]}, {"params": [other[3].weight], **own}]
    rest = [{"params": [conv.bias, *other[5].parameters()], "weight_decay": 0.1}]
    rest += [{"params": [other[3].bias], "betas": (0.5, 0.9), "weight_decay": 0.1}]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    train(other, muon, torch.optim.AdamW(rest, lr=0.02))
    torch.testing.assert_close(model[0].weight.reshape(4, -1), kernels, rtol=1e-10, atol=1e-12)
    for p, q in zip([*model.parameters()][1:], [*other.parameters()][1:], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda model: GossipMuon([{"params": model.parameters(), "matrices": "no"}]),
            "matrices of a parameter group = 'no'; give False for AdamW, or True",
        ),
        (lambda model: DSGD([{"params": model.parameters(), "matrices": False}], lr=0.1), "matrices"),
        (
            lambda model: GossipMuon([nn.Parameter(torch.ones(2, 3, 4).permute(1, 0, 2))]),
            r"parameter 0 of shape \(3, 2, 4\) has strides \(4, 12, 1\): .*; make it contiguous",
        ),
        (lambda model: GossipMuon(model.parameters(), shared=False, weight=2.0), "weight = 2.0 has no effect on muon"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_model())


def test_hosts_that_share_out_their_vectors_are_refused(monkeypatch):
    monkeypatch.setattr("klatsch.optim.hosts.host_of", lambda *_: SimpleNamespace(size=2))
    with pytest.raises(ValueError, match=r"muon needs whole matrices, and the 2 ranks of a host .*get_group\(0\)"):
        GossipMuon(make_model().parameters())


def test_any_product_with_it_trains_a_model():
    model = make_model()
    before = copy.deepcopy(model)
    rule = klatsch.rules.make("tracked+muon+anytime", lr=0.01, beta=0.9)
    optimizer = klatsch.Gossip(model.parameters(), rule, "complete")
    train(model, optimizer, schedule=False)
    optimizer.eval()
    assert all((p - q).abs().max() > 1e-3 for p, q in zip(model.parameters(), before.parameters(), strict=True))
