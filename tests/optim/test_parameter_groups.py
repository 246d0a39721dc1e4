"""Options of parameter groups: none is ignored, and the momentum that a group or a scheduler sets acts as in torch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import klatsch
from klatsch.optim import DATSGD, DSGD, Gossip, GossipSGD
from klatsch.ranks import node

STEPS = 12
SCHEDULERS = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
    "cyclic": lambda optimizer: CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3),
}


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def groups(model):
    first, last = list(model[0].parameters()), list(model[2].parameters())
    return [{"params": first, "momentum": 0.5}, {"params": last, "momentum": 0.0}]


def train(model, optimizer, scheduler=None, first=0, last=STEPS, after=lambda: None):
    for t in range(first, last):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        after()


def close(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # torch's SGD adds in another order


def same(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)  # bits: same call


@pytest.mark.parametrize(
    "option, hint",
    [
        ("weightdecay", "did you mean weight_decay"),
        ("learning_rate", "here are lr, weight_decay, momentum"),
        ("betas", "here are lr, weight_decay, momentum"),
        ("nesterov", "here are lr, weight_decay, momentum"),
    ],
)
def test_an_unknown_option_is_refused_with_those_there_are(option, hint):
    parameters = list(make_model().parameters())
    with pytest.raises(ValueError, match=f"unknown option of a parameter group '{option}'.*{hint}"):
        DSGD([{"params": parameters, option: 0.1}], lr=0.1)


def test_what_torch_and_its_schedulers_write_into_groups_is_no_unknown_option():
    model = make_model()
    optimizer = DSGD([{"params": list(model.parameters()), "name": "all"}], lr=0.1)
    SCHEDULERS["one cycle"](optimizer)
    again = [{"params": list(make_model().parameters())} | {k: v for k, v in g.items() if k != "params"}
             for g in optimizer.param_groups]  # fmt: skip
    assert DSGD(again, lr=0.1).param_groups[0]["max_momentum"] == 0.95
    named = DSGD(make_model().named_parameters(), lr=0.1)
    assert named.param_groups[0]["param_names"][0] == "0.weight"


@pytest.mark.parametrize("value", [1.0, -0.1, "much", [0.5, 0.9]])
def test_a_momentum_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"momentum of a parameter group = .*; give a number from 0 up to but not"):
        DSGD([{"params": list(make_model().parameters()), "momentum": value}], lr=0.1)


class Plain(klatsch.rules.Rule):
    lr = 0.1

    def update(self, s, grad, flow, t, lr):
        (w,) = flow.mix(s["w"] - lr * grad)
        return {"w": w}


def test_a_rule_without_momentum_refuses_one():
    parameters = list(make_model().parameters())
    with pytest.raises(
        ValueError, match=r"unknown option of a parameter group 'momentum'; there are lr, weight_decay$"
    ):
        Gossip([{"params": parameters, "momentum": 0.9}], Plain())
    optimizer = Gossip(parameters, Plain())
    for scheduler in SCHEDULERS.values():
        with pytest.raises(ValueError, match="optimizer must support momentum"):  # torch's own words
            scheduler(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="something gave a parameter group a momentum, but Plain has none"):
        optimizer.step()


@pytest.mark.parametrize("kind, momentum", [(DSGD, 0.0), (DSGD, 0.9), (GossipSGD, 0.9)])
def test_each_group_has_its_own_momentum(monkeypatch, kind, momentum):
    monkeypatch.setitem(node.BLOCK, "cpu", 10)  # several slices, whose borders are not those of the groups
    model = make_model()
    other = copy.deepcopy(model)
    train(model, kind(groups(model), lr=0.1, momentum=momentum))
    train(other, SGD(groups(other), lr=0.1, momentum=momentum))
    close(model, other)


@pytest.mark.parametrize("ours, momentum", [(DSGD, 0.0), (DSGD, 0.6), (GossipSGD, 0.0), (GossipSGD, 0.6)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_cycle_the_momentum(name, ours, momentum):
    """With their defaults, which set a momentum also where the optimizer was made without one."""
    model = make_model()
    other, still = copy.deepcopy(model), copy.deepcopy(model)
    for net, kind in ((model, ours), (other, SGD)):
        optimizer = kind(net.parameters(), lr=0.1, momentum=momentum)
        train(net, optimizer, SCHEDULERS[name](optimizer))
        assert optimizer.param_groups[0]["momentum"] != momentum
    close(model, other)
    lr_alone = OneCycleLR(plain := DSGD(still.parameters(), lr=0.1), 0.1, STEPS + 1, cycle_momentum=False)
    train(still, plain, lr_alone)
    assert "m" not in plain.vectors()[0]  # memory that nothing needs is not taken
    assert not same(model, still)


@pytest.mark.parametrize("rule", ["dsgd", "dat", "decentlam"])
def test_a_momentum_of_all_groups_is_that_of_the_rule(rule):
    model = make_model()
    other = copy.deepcopy(model)
    set_by_group = [{"params": list(model.parameters()), "momentum": 0.7}]
    train(model, Gossip(set_by_group, klatsch.rules.make(rule, lr=0.05, momentum=0.2)))
    train(other, Gossip(other.parameters(), klatsch.rules.make(rule, lr=0.05, momentum=0.7)))
    assert same(model, other)


def later(optimizer, t):
    """A momentum that comes in the middle of a training, and goes again."""
    optimizer.param_groups[0]["momentum"] = 0.9 if 3 <= t < 9 else 0.0


def cycle(model, optimizer, first, last):
    for t in range(first, last):
        later(optimizer, t)
        train(model, optimizer, first=t, last=t + 1)


@pytest.mark.parametrize("pause", [0, 5])
def test_a_state_takes_the_momentum_along(pause):
    calm = make_model()
    cycle(calm, DATSGD(calm.parameters(), lr=0.1, beta=0.9), 0, STEPS)
    model, again = make_model(), make_model(seed=1)
    optimizer = DATSGD(model.parameters(), lr=0.1, beta=0.9)
    cycle(model, optimizer, 0, pause)
    saved = optimizer.state_dict()
    assert ("m" in saved["state"][0]) == (pause > 3)
    other = DATSGD(again.parameters(), lr=0.1, beta=0.9)
    other.load_state_dict(saved)
    cycle(again, other, pause, STEPS)
    assert same(calm, again)
    cycle(model, optimizer, pause, STEPS)
    optimizer.load_state_dict(saved)  # and back, in the same optimizer
    cycle(model, optimizer, pause, STEPS)
    assert same(calm, model)


@pytest.mark.parametrize("pause", [0, 5])
def test_a_checkpoint_takes_the_momentum_along(tmp_path, pause):
    calm = make_model()
    cycle(calm, DATSGD(calm.parameters(), lr=0.1, beta=0.9), 0, STEPS)
    for begin, end in ((0, pause), (pause, STEPS)):
        model = make_model()
        optimizer = DATSGD(model.parameters(), lr=0.1, beta=0.9)
        checkpointer = klatsch.Checkpointer(tmp_path, every=1)
        assert checkpointer.resume(optimizer, model=model) == begin
        cycle(model, optimizer, begin, end)
        checkpointer.save()
    assert same(calm, model)


def test_a_state_of_a_rule_with_momentum_brings_it():
    calm, model = make_model(), make_model(seed=1)
    first = DSGD(calm.parameters(), lr=0.1, momentum=0.9)
    train(calm, first, last=5)
    optimizer = DSGD(model.parameters(), lr=0.1)
    optimizer.load_state_dict(first.state_dict())
    for net, each in ((calm, first), (model, optimizer)):
        train(net, each, first=5)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert same(calm, model)
