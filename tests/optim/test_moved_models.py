"""A model that is copied within its device, as model.to("cpu:0") does, is trained on as if nothing had happened."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch.optim import DATSGD


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 16, 3))


def no_move(model):
    pass


def to_cpu_0(model):
    before = [p.data_ptr() for p in model.parameters()]
    model.to("cpu:0")
    assert all(p.data_ptr() != place for p, place in zip(model.parameters(), before, strict=True))


def train(model, optimizer, place, move, rounds=4):
    """Rounds, with the move at one place of each of them."""
    for t in range(rounds):
        images = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(t))
        if place == "first":
            move(model)
        optimizer.zero_grad()
        if place == "before the forward pass":
            move(model)
        loss = model(images).square().mean()
        loss.backward()
        if place == "before the step":
            move(model)
        optimizer.step()


def values(model):
    return [v.detach().clone() for v in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    "rule, place",
    [("dat", "first"), ("dat", "before the forward pass"), ("dat", "before the step"), ("gt", "before the step")],
)
def test_to_cpu_0_is_no_move(rule, place):
    ends = []
    for move in (no_move, to_cpu_0):
        model = make_model()
        optimizer = klatsch.Gossip(model.parameters(), klatsch.rules.make(rule, lr=0.1))
        train(model, optimizer, place, move)
        ends.append(values(model))
    assert all(map(torch.equal, *ends))
    assert all(optimizer.owns(p) for p in model.parameters())


def test_values_that_come_with_it_before_training_are_where_it_starts():
    model, reference = make_model(), make_model()
    optimizer = DATSGD(model.parameters(), lr=0.01, beta=0.9)
    for net in (model, reference):
        for p in net.parameters():
            p.data = p.data.clone() + 1
    train(model, optimizer, None, no_move)
    train(reference, DATSGD(reference.parameters(), lr=0.01, beta=0.9), None, no_move)
    assert all(map(torch.equal, values(model), values(reference)))


def test_other_values_during_training_are_refused_as_ever():
    model = make_model()
    optimizer = DATSGD(model.parameters(), lr=0.01, beta=0.9)
    train(model, optimizer, None, no_move)
    model[3].bias.data = model[3].bias.data + 1
    with pytest.raises(ValueError, match=r"the parameters were changed after round 4, but not by this optimizer"):
        optimizer.step()


def test_states_and_checkpoints_of_a_copied_model(tmp_path):
    calm = make_model()
    train(calm, first := DATSGD(calm.parameters(), lr=0.01, beta=0.9), None, no_move)
    saved, buffers = first.state_dict(), copy.deepcopy(dict(calm.named_buffers()))
    train(calm, first, None, no_move)

    model = make_model()
    optimizer = DATSGD(model.parameters(), lr=0.01, beta=0.9)
    to_cpu_0(model)
    optimizer.load_state_dict(saved)
    model.load_state_dict(buffers, strict=False)
    train(model, optimizer, None, no_move)
    assert all(map(torch.equal, values(calm), values(model)))

    for rounds in (0, 4):
        model = make_model()
        optimizer = DATSGD(model.parameters(), lr=0.01, beta=0.9)
        to_cpu_0(model)
        checkpointer = klatsch.Checkpointer(tmp_path, every=4)
        assert checkpointer.resume(optimizer, model=model) == rounds
        train(model, optimizer, None, no_move)
        to_cpu_0(model)
        checkpointer.step()
    assert all(map(torch.equal, values(calm), values(model)))


@pytest.mark.parametrize(
    "move, where",
    [
        (lambda model: model.to(torch.float64), r"from torch.float32 on cpu to torch.float64 on cpu"),
        (lambda model: model.to(memory_format=torch.channels_last), r"on cpu with strides \(18, 1, 6, 2\)"),
        pytest.param(
            lambda model: model.cuda(),
            r"from torch.float32 on cpu to torch.float32 on cuda:0",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ),
    ],
    ids=["dtype", "format", "device"],
)
@pytest.mark.parametrize("names", [False, True])
def test_a_real_move_names_the_parameter_the_place_and_the_remedy(move, where, names):
    model = make_model()
    optimizer = DATSGD(model.named_parameters() if names else model.parameters(), lr=0.1, beta=0.9)
    move(model)
    known = "0.weight" if names else "0"
    remedy = r"move the model first \(model.to\(...\)\), then make the optimizer"
    with pytest.raises(ValueError, match=rf"parameter {known} of shape \(4, 2, 3, 3\) was moved .*{where}.*{remedy}"):
        optimizer.step()
