"""Adam on ranks: alone it is torch's AdamW or Schedule-Free AdamW, with the groups, schedulers and states of both."""

import copy

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import klatsch
from klatsch import rules
from klatsch.optim import DATAdamW, Gossip, GossipAdamW
from klatsch.ranks import node

STEPS = 40


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def groups(model):
    first, last = list(model[0].parameters()), list(model[2].parameters())
    return [{"params": first, "betas": (0.5, 0.9), "weight_decay": 0.0}, {"params": last, "eps": 1e-3}]


def train(model, optimizer, scheduler=None, first=0, last=STEPS):
    for t in range(first, last):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(t), dtype=model[0].weight.dtype)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def close(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def same(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)  # bits: same call


def pair():
    model = make_model()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_averaging_it_is_torchs_adamw(decay):
    model, other = pair()
    train(model, GossipAdamW(model.parameters(), lr=0.01, weight_decay=decay))
    train(other, AdamW(other.parameters(), lr=0.01, weight_decay=decay))
    close(model, other)
    assert not same(model, make_model())


def test_with_the_same_defaults():
    ours, theirs = (kind(make_model().parameters()).defaults for kind in (GossipAdamW, AdamW))
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 10])
def test_with_averaging_it_is_schedule_free_adamw(decay, warmup):
    model, other = pair()
    lr = rules.Decay(0.01, f"constant/{warmup}", STEPS)
    ours = DATAdamW(model.parameters(), lr=lr, weight_decay=decay)
    theirs = schedulefree.AdamWScheduleFree(other.parameters(), lr=0.01, weight_decay=decay, warmup_steps=warmup)
    theirs.train()
    train(model, ours)
    train(other, theirs)
    close(model, other)
    for optimizer in (ours, theirs):
        optimizer.eval()
    close(model, other)


def test_a_scheduler_counts_in_its_weights_as_in_schedule_free_adamw():
    """The largest learning rate so far: a warm-up counts for little, a decay changes nothing."""
    model, other = pair()
    theirs = schedulefree.AdamWScheduleFree(other.parameters(), lr=0.01)
    theirs.train()
    for net, optimizer in ((model, ours := DATAdamW(model.parameters(), lr=0.01)), (other, theirs)):
        train(net, optimizer, LambdaLR(optimizer, lambda k: min((k + 1) / 10, 1 - k / 60)))
        optimizer.eval()
    close(model, other)
    assert ours.param_groups[0]["lr"] < 0.005


def test_groups_have_moments_and_decay_of_their_own(monkeypatch):
    monkeypatch.setitem(node.BLOCK, "cpu", 10)  # several slices, whose borders are not those of the groups
    model, other = pair()
    train(model, GossipAdamW(groups(model), lr=0.01, weight_decay=0.1))
    train(other, AdamW(groups(other), lr=0.01, weight_decay=0.1))
    close(model, other)


@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_a_scheduler_cycles_beta1(beta1):
    """As OneCycleLR does by default, also where there was no first moment."""
    model, other = pair()
    for net, kind in ((model, GossipAdamW), (other, AdamW)):
        optimizer = kind(net.parameters(), lr=0.01, betas=(beta1, 0.99))
        train(net, optimizer, OneCycleLR(optimizer, 0.01, STEPS + 1))
        assert optimizer.param_groups[0]["betas"][0] != beta1
    close(model, other)


@pytest.mark.parametrize("make", [GossipAdamW, DATAdamW])
def test_a_state_goes_on_where_it_was(make):
    def made(model):
        return make(groups(model), lr=rules.Decay(0.01, "constant/10", 30), weight_decay=0.1)

    calm, model, again = make_model(), make_model(), make_model(seed=1)
    train(calm, made(calm), last=30)
    optimizer = made(model)
    train(model, optimizer, last=17)
    other = made(again)
    other.load_state_dict(optimizer.state_dict())
    train(again, other, first=17, last=30)
    assert same(calm, again)


def test_a_checkpoint_goes_on_where_it_was(tmp_path):
    calm = make_model()
    train(calm, DATAdamW(calm.parameters(), lr=0.01), last=30)
    for begin, end in ((0, 17), (17, 30)):
        model = make_model()
        optimizer = DATAdamW(model.parameters(), lr=0.01)
        checkpointer = klatsch.Checkpointer(tmp_path, every=1)
        assert checkpointer.resume(optimizer, model=model) == begin
        train(model, optimizer, first=begin, last=end)
        checkpointer.save()
    assert same(calm, model)


def test_a_grad_scaler_and_half_precision():
    """A GradScaler divides gradients inside the step; states are float32 whatever the model."""
    model, other = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ours, theirs = GossipAdamW(model.parameters(), lr=0.01), AdamW(other.parameters(), lr=0.01)
    for t in range(5):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(t)).double()
        for net, optimizer, scale in ((model, ours, scaler.scale), (other, theirs, lambda loss: loss)):
            optimizer.zero_grad()
            scale((net(inputs) - inputs.sum(1, keepdim=True)).square().mean()).backward()
        scaler.step(ours)
        scaler.update()
        theirs.step()
    close(model, other)
    half = make_model(dtype=torch.bfloat16)
    optimizer = DATAdamW(half.parameters(), lr=0.01)
    train(half, optimizer, last=3)
    assert {v.dtype for v in optimizer.vectors()[0].values()} == {torch.float32}


def test_weight_decay_of_the_optimizer_is_decoupled_where_the_rule_is_an_adam():
    model, other = pair()
    train(model, Gossip(model.parameters(), rules.make("dadam", 0.01), weight_decay=0.1), last=20)
    train(other, AdamW(other.parameters(), lr=0.01, weight_decay=0.1), last=20)
    close(model, other)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"betas": 0.9}, r"betas = 0.9; give two numbers, such as \(0.9, 0.999\)"),
        ({"betas": (0.9, 1.0)}, "beta2 = 1.0; give a number from 0 up to but not including 1"),
        ({"eps": 0}, "eps = 0; give a number above 0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1; give a number from 0 up"),
        ({"momentum": 0.9}, "GossipAdamW has no option 'momentum'"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        GossipAdamW(make_model().parameters(), **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"betas": (0.9,)}, r"betas = \(0.9,\); give two numbers"),
        ({"betas": (1.0, 0.9)}, "a beta of a parameter group = 1.0; give a number from 0 up to but not including 1"),
        ({"eps": -1.0}, "eps of a parameter group = -1.0; give a number above 0"),
        (
            {"momentum": 0.9},
            "unknown option of a parameter group 'momentum'.*here are lr, weight_decay, eps, betas",
        ),
    ],
)
def test_options_of_groups_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        GossipAdamW([{"params": list(make_model().parameters()), **options}])


def test_weights_cannot_follow_several_learning_rates():
    model = make_model()
    parameters = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters())}]
    with pytest.raises(ValueError, match=r"averaging = lr\(2\): groups of parameters have different learning rates"):
        train(model, DATAdamW(parameters), last=1)
    train(model, DATAdamW(parameters, averaging="constant"), last=1)


def test_a_weight_that_would_have_no_effect_is_refused():
    for rule in (rules.make("dadam", 0.1), rules.make("dat-adam", 0.1), rules.make("d2-adam", 0.1, shared=False)):
        with pytest.raises(ValueError, match=rf"weight = 2 has no effect on {rule.name}, .* \(shared=True\)"):
            klatsch.Gossip(make_model().parameters(), rule, weight=2)
    for rule in (
        rules.make("gt-adam", 0.1),
        rules.make("dadam", 0.1, shared="v"),
        rules.make("dadam", 0.1, shared=True),
        rules.make("dsgd", 0.1),
    ):
        klatsch.Gossip(make_model().parameters(), rule, weight=2)
    with pytest.raises(ValueError, match="weight = 0; give a number above 0, such as this rank's number of samples"):
        GossipAdamW(make_model().parameters(), weight=0)
