"""The optimizers keep torch's conventions: on one rank D-SGD is torch's SGD, whatever a script does around it."""

import copy
import io
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import klatsch
from klatsch.optim import (
    D2,
    DATD2,
    DATSGD,
    DSGD,
    DATAdamW,
    Gossip,
    GossipAdamW,
    GossipMuon,
    GossipSGD,
    GradientTracking,
)
from klatsch.optim.groups import settings_of
from klatsch.ranks import node
from klatsch.ranks.failures import LinkError


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_data(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 7), nn.Linear(7, 3))
    return model.to(**options), torch.randn(16, 1, 8, 8).to(**options), torch.randint(3, (16,))


def equal(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=name)


def train(model, optimizer, images, labels, steps=5, after=lambda: None, before=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        before()
        optimizer.step()
        after()


def pair():
    """The same model twice."""
    model, images, labels = model_and_data()
    return model, copy.deepcopy(model), images, labels


def test_dsgd_on_one_rank_is_sgd_with_momentum_and_weight_decay():
    model, other, images, labels = pair()
    train(model, DSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), images, labels)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), images, labels)
    equal(model, other)


@pytest.mark.parametrize("order", ["atc", "cta"])
@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_gossip_sgd_on_one_rank_is_sgd_with_its_rates_momenta_and_schedule(order, momentum):
    model, other, images, labels = pair()
    options = {} if momentum == 0.9 else {"momentum": momentum}
    ours = GossipSGD(groups(model), lr=0.1, order=order, weight_decay=0.01, **options)
    theirs = torch.optim.SGD(groups(other), lr=0.1, momentum=momentum, weight_decay=0.01)
    for net, optimizer in ((model, ours), (other, theirs)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        train(net, optimizer, images, labels, after=scheduler.step)
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    equal(model, other)


def test_the_model_of_gossip_sgd_always_holds_what_to_evaluate():
    model, images, labels = model_and_data()
    optimizer = GossipSGD(model.parameters(), lr=0.1)
    train(model, optimizer, images, labels, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    with optimizer.averaged(), torch.no_grad():
        assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))  # bits: a copy
        model(images)
    assert all(torch.equal(p, q) for p, q in zip(before, optimizer.output(), strict=True))  # bits: a copy
    train(model, optimizer, images, labels, 1)  # there is nothing to switch back
    assert optimizer.rounds == 3


def test_without_momentum_there_is_nothing_to_share():
    x = [nn.Parameter(torch.ones(2))]
    assert settings_of(GossipSGD(x, 0.1, momentum=0).rule) == settings_of(klatsch.rules.make("dsgd", lr=0.1))
    with pytest.raises(ValueError, match="shared = True with momentum = 0: nothing to share; give a momentum"):
        GossipSGD(x, 0.1, momentum=0, shared=True)


def test_dat_on_one_rank_is_sgd_with_momentum():
    """x' - x = gamma (x - x_prev) - (1 - gamma) lr g: averaging with fixed weights is a momentum."""
    for order in ("atc", "cta"):
        model, other, images, labels = pair()
        train(model, DATSGD(model.parameters(), lr=1.0, order=order, averaging="fixed(0.9)", beta=1.0), images, labels)
        train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), images, labels)
        equal(model, other)


def test_dat_with_beta_on_one_rank_is_schedule_free_sgd():
    """Defazio et al. 2024: z' = z - lr g(y), x' = (1 - 1/t) x + z'/t, y = 0.1 z + 0.9 x."""
    model, other, images, labels = pair()
    optimizer = DATSGD(model.parameters(), lr=0.1, beta=0.9)
    train(model, optimizer, images, labels)
    z, x = ([p.detach().clone() for p in other.parameters()] for _ in range(2))
    for t in range(1, 6):
        other.zero_grad()
        cross_entropy(other(images), labels).backward()
        with torch.no_grad():
            for k, p in enumerate(other.parameters()):
                z[k] -= 0.1 * p.grad
                x[k] += (z[k] - x[k]) / t
                p.copy_(0.1 * z[k] + 0.9 * x[k])
    equal(model, other)
    torch.testing.assert_close(optimizer.output(), x, rtol=1e-6, atol=1e-7)


NAMED = {DATSGD: "dat", DSGD: "dsgd", D2: "d2", GradientTracking: "gt", DATD2: "dat-d2", DATAdamW: "dat-adam"}
OURS = {
    GossipSGD: ("dsgd", {"momentum": 0.9, "shared": True}),
    GossipAdamW: ("dadam", {"weight_decay": 0.01, "shared": True}),
}
OURS[GossipMuon] = ("muon", {"weight_decay": 0.1, "shared": True})


@pytest.mark.parametrize(
    "kind, name, own", [*((k, n, {}) for k, n in NAMED.items()), *((k, *v) for k, v in OURS.items())]
)
def test_a_name_has_one_set_of_defaults(kind, name, own):
    rule = kind([nn.Parameter(torch.ones(2))], 0.1).rule
    assert settings_of(rule) == settings_of(klatsch.rules.make(name, lr=0.1, **own))


def groups(model):
    return [
        {"params": list(model[0].parameters()), "lr": 0.05},
        {"params": list(model[1].parameters()), "weight_decay": 0.0},
        {"params": [*model[3].parameters(), *model[4].parameters()]},
    ]


def test_parameter_groups_and_schedulers(monkeypatch):
    monkeypatch.setitem(node.BLOCK, "cpu", 100)  # several slices, whose borders are not those of the groups
    model, other, images, labels = pair()
    ours = DSGD(groups(model), lr=0.2, weight_decay=0.1)
    theirs = torch.optim.SGD(groups(other), lr=0.2, weight_decay=0.1)
    for net, optimizer in ((model, ours), (other, theirs)):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(net, optimizer, images, labels, after=scheduler.step)
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    equal(model, other)


def test_a_learning_rate_as_function_of_the_round():
    model, other, images, labels = pair()
    ours = DSGD(model.parameters(), lr=lambda t: 0.1 / t)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lambda k: 1 / (k + 1))
    train(model, ours, images, labels)
    train(other, theirs, images, labels, after=scheduler.step)
    assert ours.param_groups[0]["lr"] == 0.1 / 5
    equal(model, other)


def test_a_function_of_the_round_and_a_scheduler_do_not_go_together():
    model, images, labels = model_and_data()
    optimizer = DSGD(model.parameters(), lr=lambda t: 0.1 / t)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match=r"lr is a function of the round, and something set it to \[0.05\]"):
        train(model, optimizer, images, labels, after=scheduler.step)


def test_a_graph_of_before_the_step_is_refused_as_ever():
    model, images, labels = model_and_data()
    optimizer = DSGD(model.parameters(), lr=0.1)
    loss = cross_entropy(model(images), labels)
    train(model, optimizer, images, labels, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closures_clipping_and_accumulation():
    model, other, images, labels = pair()
    for net, optimizer in (
        (model, DSGD(model.parameters(), lr=0.1)),
        (other, torch.optim.SGD(other.parameters(), lr=0.1)),
    ):
        for _ in range(3):

            def closure(net=net, optimizer=optimizer):
                optimizer.zero_grad()
                for half in (slice(0, 8), slice(8, 16)):
                    loss = cross_entropy(net(images[half]), labels[half])
                    loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.3)
                return loss

            assert optimizer.step(closure) > 0
    equal(model, other)


@pytest.mark.parametrize("how", ["model", "optimizer", "set to zero"])
def test_every_way_to_zero_gradients(how):
    model, other, images, labels = pair()
    for net, optimizer in (
        (model, DSGD(model.parameters(), lr=0.1)),
        (other, torch.optim.SGD(other.parameters(), lr=0.1)),
    ):
        for _ in range(3):
            cross_entropy(net(images), labels).backward()
            optimizer.step()
            net.zero_grad() if how == "model" else optimizer.zero_grad(set_to_none=how == "optimizer")
    equal(model, other)


def test_parameters_lie_side_by_side_in_storages_of_their_own_and_gradients_in_one():
    model, images, labels = model_and_data()
    optimizer = GossipSGD(model.parameters(), lr=0.1)
    train(model, optimizer, images, labels, 2)
    storages = [p.untyped_storage() for p in model.parameters()]
    assert [s.nbytes() for s in storages] == [p.nbytes for p in model.parameters()]
    gaps = [second.data_ptr() - first.data_ptr() - first.nbytes() for first, second in pairwise(storages)]
    assert max(gaps) in range(1, 16)
    assert all(s.data_ptr() % 16 == 0 for s in storages)  # kernels that torch.compile makes rely on it
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    before = [p.grad.data_ptr() for p in model.parameters()]
    train(model, optimizer, images, labels, 2)
    assert before == [p.grad.data_ptr() for p in model.parameters()]


def test_channels_last_models_keep_their_memory_format():
    model, images, labels = model_and_data()
    other = copy.deepcopy(model)
    model = model.to(memory_format=torch.channels_last)
    train(model, DSGD(model.parameters(), lr=0.1), images, labels)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), images, labels)
    assert model[0].weight.stride() == model[0].weight.to(memory_format=torch.channels_last).stride()
    equal(model, other)


def test_frozen_parameters_stay_and_idle_ones_count_as_gradient_zero():
    model, other, images, labels = pair()
    for net in (model, other):
        net[0].weight.requires_grad_(False)
        net.idle = nn.Parameter(torch.ones(3))
    start = model[0].weight.clone()
    ours = DSGD(model.parameters(), lr=0.1, momentum=0.9)
    for net, optimizer in ((model, ours), (other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))):
        train(lambda x, net=net: nn.Sequential(*list(net)[:5])(x), optimizer, images, labels)
    equal(model, other)
    assert torch.equal(model[0].weight, start)  # bits: a copy
    torch.testing.assert_close(model.idle, torch.ones(3))
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen when the optimizer was made"):
        train(model, ours, images, labels, 1)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = GossipSGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"\(10, 3\) has a sparse gradient.*sparse=False"):
        optimizer.step()


@pytest.mark.slow
def test_compiled_models():
    model, other, images, labels = pair()
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, DSGD(model.parameters(), lr=0.1), images, labels)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), images, labels)
    equal(model, other)


def test_autocast_in_bfloat16_and_a_grad_scaler():
    model, other, images, labels = pair()
    for net, optimizer in (
        (model, DSGD(model.parameters(), lr=0.1)),
        (other, torch.optim.SGD(other.parameters(), lr=0.1)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for k in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(net(images), labels)
            scaler.scale(loss).backward()
            if k % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    equal(model, other)


def test_a_grad_scaler_that_finds_inf_makes_a_round_without_gradient():
    x = nn.Parameter(torch.ones(3))
    optimizer = DSGD([x], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((x * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.rounds == 1  # neighbours would wait for a round that is left out
    torch.testing.assert_close(x.detach(), torch.ones(3))
    assert scaler.get_scale() == 4.0


def test_half_precision_keeps_its_state_in_float32():
    """Averages with small weights stand still in bfloat16; x must not."""
    x, y = nn.Parameter(torch.ones(5, dtype=torch.bfloat16)), nn.Parameter(torch.ones(5))
    for p in (x, y):
        optimizer = DATSGD([p], lr=1e-3, averaging="constant", beta=0.9)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert optimizer.vectors()[0]["x"].dtype == torch.float32
    assert x.dtype == torch.bfloat16
    torch.testing.assert_close(x.detach().float(), y.detach(), rtol=0, atol=0.005)


def test_several_dtypes_in_one_model():
    x, y = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = DATSGD([{"params": [x], "lr": 0.5}, {"params": [y]}], lr=0.1, averaging="constant", beta=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        (x.sum() + y.sum()).backward()
        optimizer.step()
    # w: 1 - lr, 1 - 2 lr; x is their mean
    assert torch.allclose(x, torch.full((3,), 0.25))
    assert torch.allclose(y, torch.full((2,), 0.85, dtype=torch.float64))


RULES = {
    "dsgd": lambda p: DSGD(p, 0.1, momentum=0.9),
    "shared": lambda p: GossipSGD(p, 0.1),
    "dat": lambda p: DATSGD(p, 0.1, momentum=0.9, beta=0.9),
    "cta": lambda p: DATSGD(p, 0.1, order="cta", averaging="linear", beta=0.9),
    "d2": lambda p: D2(p, 0.1),
    "gt": lambda p: GradientTracking(p, 0.1),
    "dat-d2": lambda p: DATD2(p, 0.1, beta=0.9),
    "sgp": lambda p: Gossip(p, klatsch.rules.make("sgp", lr=0.1)),
}


@pytest.mark.filterwarnings("ignore:the model's state_dict")  # to resume, any point will do
@pytest.mark.parametrize("name", RULES)
def test_a_state_dict_resumes_exactly(name):
    model, images, labels = model_and_data()
    optimizer = RULES[name](model.parameters())
    train(model, optimizer, images, labels, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, images, labels, 4)

    other, _, _ = model_and_data(seed=1)
    resumed = RULES[name](other.parameters())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.rounds == 3
    train(other, resumed, images, labels, 4)
    for p, q in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(p, q)  # bits: same call


def test_going_back_to_an_earlier_state():
    model, images, labels = model_and_data()
    optimizer = RULES["dat"](model.parameters())
    train(model, optimizer, images, labels, 2)
    saved, buffers = optimizer.state_dict(), copy.deepcopy(list(model.buffers()))
    train(model, optimizer, images, labels, 3)
    first = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(saved)
    for buffer, old in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(old)
    train(model, optimizer, images, labels, 3)
    assert all(torch.equal(p, q) for p, q in zip(first, model.parameters(), strict=True))  # bits: same call


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda p: DSGD(p, 0.1), "of another optimizer: rule is dat there and dsgd here; make it with the same"),
        (
            lambda p: DATSGD(p, 0.1, beta=1.0),
            r"options is beta=0\.9 there and beta=1\.0 here; make it",
        ),
        (
            lambda p: DATSGD(p, 0.1, averaging="fixed(0.9)", beta=0.9, order="cta"),
            r"options is order=atc, averaging=constant there and order=cta, averaging=fixed\(0\.9\) here; make",
        ),
        (lambda p: DATSGD(list(p)[:4], 0.1, beta=0.9), r"sizes of parameter groups is \[8\] there and \[4\] here"),
        (
            lambda p: DATSGD([torch.nn.Parameter(torch.ones(2)) for _ in p], 0.1, beta=0.9),
            r"has {'w': \(4, 1, 3, 3\), 'x': .* this optimizer keeps {'w': \(2,\)",
        ),
        (
            lambda p: DATSGD(p, 0.1, momentum=0.9, beta=0.9),
            r"has {'w': .* of a parameter, this optimizer keeps {'m': .*momentum",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(make, error):
    model, _, _ = model_and_data()
    saved = DATSGD(model.parameters(), 0.1, beta=0.9).state_dict()
    other, _, _ = model_and_data(seed=1)
    before = [p.detach().clone() for p in other.parameters()]
    optimizer = make(other.parameters())
    with pytest.raises(ValueError, match=error):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(p, q) for p, q in zip(before, other.parameters(), strict=True))  # bits: a copy


def test_a_state_with_an_average_is_refused_without():
    x = nn.Parameter(torch.ones(2))
    saved = Gossip([x], klatsch.rules.make("dsgd", lr=0.1, average="linear")).state_dict()
    with pytest.raises(ValueError, match=r"options is base=Plain, average=linear there and none here"):
        DSGD([x], 0.1).load_state_dict(saved)


class Halving(klatsch.averaging.Averaging):
    """Weights of one's own, which are no dataclass."""

    def alpha(self, t):
        return 1.0

    def delta(self, t):
        return 0.5


def test_a_state_with_weights_of_ones_own_can_be_loaded():
    saved = DATSGD([nn.Parameter(torch.ones(2))], 0.1, averaging=Halving()).state_dict()
    DATSGD([nn.Parameter(torch.ones(2))], 0.1, averaging=Halving()).load_state_dict(saved)
    with pytest.raises(ValueError, match="averaging=Halving there and averaging=constant here;"):
        DATSGD([nn.Parameter(torch.ones(2))], 0.1).load_state_dict(saved)


@pytest.mark.parametrize("make", [D2, DATD2])
def test_a_state_goes_from_graph_to_graph(make):
    """D2's y grows with the rounds between two mixes."""
    optimizer = make([nn.Parameter(torch.ones(2))], 0.1, "ring")
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["y"].fill_(0.5)
    other = make([nn.Parameter(torch.zeros(2))], 0.1, "ring/4")
    other.load_state_dict(state)
    assert other.rounds == 1
    assert other.vectors()[0]["y"].tolist() == [2.0, 2.0]


def test_a_state_of_another_rank_is_refused():
    optimizer = DATD2([nn.Parameter(torch.ones(2))], 0.1)
    saved = optimizer.state_dict()
    saved["gossip"] |= {"rank": 2, "size": 4}
    with pytest.raises(ValueError, match=r"of rank 2 of 4, but this is rank 0 of 1; .* each rank its own, or .*Checkp"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda optimizer: torch.save(optimizer, io.BytesIO())])
def test_an_optimizer_cannot_be_copied(copied):
    with pytest.raises(ValueError, match=r"GossipSGD cannot be copied or pickled.*state_dict\(\).*Checkpointer"):
        copied(GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1))


def test_a_state_of_sgd_is_refused():
    model, _, _ = model_and_data()
    with pytest.raises(ValueError, match="not a state_dict of a Gossip optimizer"):
        GossipSGD(model.parameters(), 0.1).load_state_dict(torch.optim.SGD(model.parameters(), 0.1).state_dict())


def test_a_model_that_is_loaded_before_training_is_where_it_starts():
    model, images, labels = model_and_data()
    other, _, _ = model_and_data(seed=1)
    reference = copy.deepcopy(other)
    optimizer = DATSGD(model.parameters(), lr=0.1, beta=0.9)
    model.load_state_dict(other.state_dict())
    train(model, optimizer, images, labels, 3)
    train(reference, DATSGD(reference.parameters(), lr=0.1, beta=0.9), images, labels, 3)
    equal(model, reference)


def test_parameters_that_change_behind_its_back_are_noticed():
    model, images, labels = model_and_data()
    optimizer = DATSGD(model.parameters(), lr=0.1)
    train(model, optimizer, images, labels, 2)
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved)  # the same values do no harm
    train(model, optimizer, images, labels, 1)
    model.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"changed after round 3, but not by this optimizer.*load_state_dict"):
        train(model, optimizer, images, labels, 1)
    model.to(torch.float64)
    with pytest.raises(ValueError, match=r"parameter 0 of shape .* was moved .*float32 on cpu to torch.float64 on cpu"):
        optimizer.step()


def test_an_optimizer_makes_no_process_group():
    before = len(dist.distributed_c10d._world.pg_map)
    optimizer = GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    assert len(dist.distributed_c10d._world.pg_map) == before


def test_an_optimizer_that_could_not_be_made_leaves_the_model_usable():
    model, images, _ = model_and_data()
    with pytest.raises(ValueError, match="ring has 4 nodes") as kept:
        GossipSGD(model.parameters(), lr=0.1, topology=klatsch.topology.ring(4))
    with torch.no_grad():
        model.eval()(images)
    assert model.state_dict()
    assert kept.value.__traceback__ is not None  # which keeps the optimizer alive


def test_hooks_of_torch_are_called():
    model, images, labels = model_and_data()
    optimizer = GossipSGD(model.parameters(), lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("step"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("state"))
    train(model, optimizer, images, labels, 1)
    optimizer.state_dict()
    assert called == ["step", "state"]


def test_what_it_knows():
    one = nn.Parameter(torch.ones(2))
    model, images, labels = model_and_data()
    optimizer = GossipSGD(model.parameters(), lr=0.1)
    train(model, optimizer, images, labels, 2)
    assert (optimizer.rounds, optimizer.bytes_sent, optimizer.lost, optimizer.consensus()) == (2, 0, (), 0.0)
    assert optimizer.seconds_waited >= 0
    assert "GossipSGD" in repr(optimizer)
    assert "direction shared=True, outer=None, order=atc) on rank 0 of base_graph(k=1), 1 node, round 2" in repr(
        optimizer
    )
    assert "averaging=constant, beta=0.9) on rank 0 of ring, 1 node" in repr(DATSGD([one], 0.1, "ring", beta=0.9))
    other = GossipSGD(model_and_data()[0].parameters(), lr=0.2)
    other.load_state_dict(optimizer.state_dict())
    assert "lr: 0.1" in repr(other)
    assert "0.2" not in repr(other)


def test_average_on_one_rank_changes_nothing():
    model, images, _ = model_and_data()
    model(images)
    before = copy.deepcopy(model.state_dict())
    assert klatsch.average_(model, parameters=True) is model
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # bits: a copy


class WithoutRate(klatsch.rules.Rule):
    def update(self, s, grad, flow, t, lr):
        return s


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: GossipSGD([], lr=0.1), "empty parameter list"),
        (lambda: GossipSGD([torch.ones(3)], lr=0.1), "no parameter requires a gradient"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1), "complex64.*dense real"),
        (lambda: GossipSGD(Meta().parameters(), lr=0.1), "on cpu and meta; move the model to one device"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=-1), "lr = -1; give a number above 0"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=[0.1, 0.2]), "several columns"),
        (
            lambda: GossipSGD([{"params": [nn.Parameter(torch.ones(2))], "lr": -2}], lr=1),
            "lr of a parameter group = -2",
        ),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=-1), "weight_decay = -1"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1, timeout=0), "timeout = 0; give a number of seconds"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1, on_failure="retry"), "choose from raise, continue"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1, topology="rings"), "did you mean ring"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1, topology=4), "topology is a int; give a Topology"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], 0.1, 0.9), "topology is a float; .* by name: momentum=0.9"),
        (lambda: GossipSGD([nn.Parameter(torch.ones(2))], 0.1, topolgy="ring"), "'topolgy'; did you mean topology?"),
        (lambda: DSGD([nn.Parameter(torch.ones(2))], 0.1, weightdecay=0.1), "'weightdecay'; did you mean weight_decay"),
        (
            lambda: DSGD([nn.Parameter(torch.ones(2))], 0.1, nesterov=True),
            "DSGD has no option 'nesterov'; leave it out",
        ),
        (lambda: DSGD([nn.Parameter(torch.ones(2))], 0.1, dampening=0.1), "no option 'dampening'; leave it out"),
        (
            lambda: DATD2([nn.Parameter(torch.ones(2))], 0.1, order="cta"),
            "DATD2 has no option 'order'; .*here are lr, lazy, momentum, shared, averaging, beta, topology, group,",
        ),
        (
            lambda: GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1, topology=klatsch.topology.ring(4)),
            r"ring has 4 nodes but there are 1 ranks.*--nproc-per-node 4",
        ),
        (lambda: Gossip([nn.Parameter(torch.ones(2))], "dat"), "the rule is a str; give one, such as"),
        (
            lambda: Gossip([nn.Parameter(torch.ones(2))], WithoutRate()),
            "the rule is a WithoutRate without lr; give one",
        ),
        (lambda: DSGD([nn.Parameter(torch.ones(2))], lr=0.1, timeout=[1, 2]), r"timeout = \[1, 2\]; give a number"),
        (lambda: DSGD([nn.Parameter(torch.ones(2))], lr=0.1, timeout=1e18), "at most 2,592,000"),
        (lambda: DSGD([{"params": [nn.Parameter(torch.ones(2))], "lr": [1, 2]}], lr=0.1), r"= \[1, 2\]; give a number"),
        (lambda: DSGD([nn.Parameter(torch.ones(2))], lr=lambda t: [0.1, 0.2]), r"lr\(1\) = .*; give a number"),
        (lambda: DSGD([nn.Parameter(torch.ones(2, device="meta"))], lr=0.1), "device meta, without memory"),
    ],
)
def test_bad_input(make, error):
    with pytest.raises(ValueError, match=error):
        make()


def test_parameters_cannot_be_added_later():
    optimizer = GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="cannot be added to a Gossip optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_without_a_process_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"init_process_group\('gloo'\) first.*torchrun"):
        klatsch.average_(nn.Linear(2, 2))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"no network to train in; start the script with torchrun .*, or join a crew"):
        GossipSGD([nn.Parameter(torch.ones(2))], lr=0.1)


def test_a_link_error_says_who_when_and_how_long():
    late = LinkError(2, 3, 17, None, 10.04)
    assert str(late) == (
        "rank 2, round 17: neighbour 3 is late: its connection is open, but nothing moves; waited 10.0 s on edge "
        "3 -> 2; check that it takes as many steps as the others, give it more time (timeout=...), end uneven training "
        "with optimizer.finish(), or go on without it (on_failure='continue')"
    )
    assert (late.rank, late.neighbor, late.round, late.gone) == (2, 3, 17, False)


def test_fields_that_change_places():
    """A rule whose new field is the memory of an old one, which must not be overwritten before it is read."""

    class Heavy(klatsch.rules.Rule):
        lr = 1.0

        def init(self, x):
            return {"w": x, "previous": x}

        def update(self, s, grad, flow, t, lr):
            (w,) = flow.mix(2 * s["w"] - s["previous"] - lr * grad)
            return {"w": w, "previous": s["w"]}

    x = nn.Parameter(torch.zeros(2))
    optimizer = Gossip([x], Heavy())
    for _ in range(3):
        x.grad = torch.ones(2)
        optimizer.step()
    torch.testing.assert_close(x.detach(), torch.full((2,), -6.0))  # -1, -3, -6
    torch.testing.assert_close(optimizer.vectors()[0]["previous"], torch.full((2,), -3.0))


class Odd(klatsch.rules.Rule):
    """A rule that gossips in some rounds only, which neighbours cannot know."""

    lr = 1.0

    def __init__(self, odd, early):
        self.odd, self.early = odd, early

    def update(self, s, grad, flow, t, lr):
        v = s["w"] if self.early else s["w"] - grad
        return {"w": v if self.odd(t) else flow.mix(v)[0]}


@pytest.mark.parametrize("early", [False, True])
def test_a_rule_that_gossips_in_some_rounds_only_is_refused(early):
    x = nn.Parameter(torch.zeros(2))
    for first in (0, 1):
        with pytest.raises(ValueError, match=r"Odd does not call flow in round 2 as in round 1; .* topology\.every"):
            Gossip([x], Odd(lambda t, first=first: t % 2 == first, early))
    optimizer = Gossip([x], Odd(lambda t: t == 7, early))  # which no rehearsal shows
    for _ in range(6):
        optimizer.step()
    for _ in range(2):  # nothing has moved
        with pytest.raises(ValueError, match="Odd does not call flow the same way in every round"):
            optimizer.step()
    assert optimizer.rounds == 6
