"""The model holds the query point while it trains, and x when it is asked for; a mistake about it is loud."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module

import klatsch
from klatsch.optim import DATD2, DATSGD, Gossip, GossipSGD
from klatsch.ranks import node
from tests.support.rank_points import held, step

IN_EVAL = r"the model holds x, to evaluate or save, since optimizer.eval\(\).*call optimizer.train\(\) before"
WRONG_POINT = r"while it holds the point at which gradients are taken, and not x"


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Own(klatsch.rules.Rule):
    """A rule of somebody's own that gives out something else than where it takes gradients."""

    lr = 0.1

    def init(self, x):
        return {"w": x, "half": x}

    def output(self, s):
        return s["half"]

    def update(self, s, grad, flow, t, lr):
        (w,) = flow.mix(s["w"] - lr * grad)
        return {"w": w, "half": (s["half"] + w) / 2}


APART = {
    "dat": lambda p: DATSGD(p, 0.1, beta=0.9, momentum=0.5),
    "dat cta": lambda p: DATSGD(p, 0.1, beta=0.5, order="cta", averaging="linear"),
    "dat-d2": lambda p: DATD2(p, 0.1, beta=0.9),
    "dat-sgp": lambda p: Gossip(p, klatsch.rules.make("dat-sgp", lr=0.1, beta=0.0)),
    "averaged": lambda p: Gossip(p, klatsch.rules.make("gt", lr=0.1, average="constant")),
    "own": lambda p: Gossip(p, Own()),
}


def make_model(*norm, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), *norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 1))


def train(model, optimizer, first=0, last=4, after=lambda: None):
    for t in range(first, last):
        torch.manual_seed(t)
        step(model, optimizer, torch.randn(8, 5))
        after()


def x_of(optimizer):
    return torch.cat([v.reshape(-1) for v in optimizer.output()])


@pytest.mark.parametrize("name", APART)
def test_there_and_back_to_the_bit(name, monkeypatch):
    monkeypatch.setitem(node.BLOCK, "cpu", 13)  # several slices
    model, calm = make_model(), make_model()
    optimizer, other = APART[name](model.parameters()), APART[name](calm.parameters())
    train(model, optimizer)
    query, x = held(model), x_of(optimizer)
    assert (query - x).abs().max() > 1e-4
    assert optimizer.eval() is None
    assert torch.equal(held(model), x)  # bits: a copy
    optimizer.eval()
    with optimizer.averaged():  # entered in eval mode: stays
        assert torch.equal(held(model), x)  # bits: a copy
    assert torch.equal(held(model), x)  # bits: a copy
    assert optimizer.train() is None
    assert torch.equal(held(model), query)  # bits: same call
    optimizer.train()
    with optimizer.averaged():
        assert torch.equal(held(model), x)  # bits: a copy
    train(model, optimizer, 4, 7)
    train(calm, other, 0, 7)
    assert torch.equal(held(model), held(calm))  # bits: same call


HOLDS_X = [lambda p: GossipSGD(p, 0.1), lambda p: DATSGD(p, 0.1, beta=1.0), lambda p: DATD2(p, 0.1, beta=1.0)]


@pytest.mark.parametrize("make", HOLDS_X)
def test_where_gradients_are_taken_at_x_it_is_a_no_op(make, recwarn):
    model, calm = make_model(nn.BatchNorm1d(7)), make_model(nn.BatchNorm1d(7))
    optimizer = make(model.parameters())
    train(model, optimizer)
    versions = [p._version for p in model.parameters()]
    optimizer.eval()
    with optimizer.averaged(), torch.no_grad():
        copy.deepcopy(model).eval()(torch.randn(3, 5))
        model.state_dict()
    assert versions == [p._version for p in model.parameters()]
    assert not model._forward_pre_hooks
    train(model, optimizer, 4, 6)  # a step after eval() works
    train(calm, make(calm.parameters()), 0, 6)
    assert torch.equal(held(model), held(calm))  # bits: same call
    with optimizer.averaged():
        klatsch.average_(model, parameters=True)
    train(model, optimizer, 6, 7)
    assert not recwarn.list


def test_a_step_in_eval_mode_is_refused_in_every_form():
    model = make_model()
    optimizer = APART["dat"](model.parameters())
    train(model, optimizer)
    x = x_of(optimizer)
    optimizer.eval()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 5)).sum()).backward()
    idle = optimizer.join_hook().main_hook
    calls = [
        optimizer.step,
        optimizer.finish,
        idle,
        lambda: scaler.step(optimizer),
        lambda: optimizer.step(lambda: 1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=IN_EVAL):
            call()
    optimizer.train()
    with pytest.raises(ValueError, match=IN_EVAL):
        optimizer.step(optimizer.eval)  # a closure that forgets
    assert optimizer.rounds == 4
    assert torch.equal(held(model), x)  # bits: a copy
    optimizer.train()
    train(model, optimizer, 4, 5)
    assert optimizer.finish() == 0
    optimizer.eval()


def test_gradients_at_x_are_refused():
    model, inputs = make_model(), torch.randn(2, 5)
    optimizer = APART["dat"](model.parameters())
    optimizer.eval()
    model(inputs).sum().backward()
    optimizer.train()
    optimizer.step()  # at the start all points are one
    train(model, optimizer, 1, 4)

    for clear in (optimizer.zero_grad, model.zero_grad, lambda: None):
        before, rounds = held(model), optimizer.rounds
        optimizer.eval()
        clear()
        model(inputs).sum().backward()
        optimizer.train()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"taken while the model held x.*train\(\) before the forward pass"):
                optimizer.step()
        assert torch.equal(held(model), before)  # bits: a copy
        assert optimizer.rounds == rounds
        train(model, optimizer, rounds, rounds + 1)


def test_gradients_around_an_evaluation_add_up():
    """Those of the query point are kept, those of x dropped."""
    inputs, found = torch.randn(2, 5), []
    for look in (lambda model: None, lambda model: model(inputs), lambda model: model(inputs).sum().backward()):
        model = make_model()
        optimizer = APART["dat"](model.parameters())
        train(model, optimizer)
        optimizer.zero_grad()
        with optimizer.averaged():
            look(model)
        torch.manual_seed(1)  # of dropout
        model(inputs).sum().backward()
        with optimizer.averaged():
            model(inputs)
        model(inputs).sum().backward()
        optimizer.step()
        found.append(held(model))
    assert torch.equal(found[0], found[1])  # bits: same call
    assert torch.equal(found[0], found[2])  # bits: same call


def test_one_rank_is_schedule_free_sgd():
    """z is stepped from gradients at y = (1 - beta) z + beta x, and x is the mean of all z."""
    beta, lr, decay, momentum = 0.9, 0.05, 0.01, 0.5
    rates = {0: 1.0, 1: 0.5}
    target = torch.linspace(-1, 1, 12, dtype=torch.float64)
    parts = [nn.Parameter(torch.zeros(6, dtype=torch.float64)) for _ in range(2)]
    groups = [{"params": [parts[k]], "lr": lr * rates[k], "momentum": momentum * k} for k in range(2)]
    rule = klatsch.rules.make("dat", lr=lr, beta=beta)
    optimizer = Gossip(groups, rule, weight_decay=decay)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    z = x = y = m = torch.zeros(12, dtype=torch.float64)
    step, inertia = torch.tensor([rates[0], rates[1]]).double().repeat_interleave(6) * lr, torch.zeros(12).double()
    inertia[6:] = momentum
    for t in range(1, 41):
        torch.testing.assert_close(torch.cat([p.detach() for p in parts]), y, rtol=0, atol=1e-14)
        optimizer.zero_grad()
        loss = ((torch.cat(list(parts)) - target).square() * (1 + torch.arange(12) / 12)).sum() / 2
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        m = inertia * m + (y - target) * (1 + torch.arange(12) / 12) + decay * y
        z = z - step * m
        x = (1 - 1 / t) * x + z / t
        y = (1 - beta) * z + beta * x
    with optimizer.averaged():
        torch.testing.assert_close(torch.cat([p.detach() for p in parts]), x, rtol=0, atol=1e-13)
    assert (x - y).abs().max() > 1e-3


def test_half_precision():
    x = nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
    optimizer = DATSGD([x], 0.1, beta=0.9)
    for t in range(5):
        x.grad = torch.full_like(x, 1.0 + t)
        optimizer.step()
    query = x.detach().clone()
    with optimizer.averaged():
        assert torch.equal(x.detach(), optimizer.output()[0])  # bits: a copy
        assert not torch.equal(x.detach(), query)
    assert torch.equal(x.detach(), query)  # bits: same call


@pytest.mark.parametrize("saved_in", ["train", "eval"])
@pytest.mark.parametrize("loaded_in", ["train", "eval"])
@pytest.mark.parametrize("how", ["state_dict", "Checkpointer"])
@pytest.mark.slow
def test_states_do_not_know_the_mode(saved_in, loaded_in, how, tmp_path):
    model, calm = make_model(nn.BatchNorm1d(7, affine=False)), make_model(nn.BatchNorm1d(7, affine=False))
    optimizer, other = APART["dat"](model.parameters()), APART["dat"](calm.parameters())
    train(calm, other, 0, 7)
    keeper = klatsch.Checkpointer(tmp_path, every=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a state_dict() that klatsch takes itself
        keeper.resume(optimizer, model=model)
        train(model, optimizer)
        optimizer.watch.said.add("statistics")
        getattr(optimizer, saved_in)()
        keeper.save()
    state = optimizer.state_dict()

    again = make_model(nn.BatchNorm1d(7, affine=False), seed=1)
    resumed = APART["dat"](again.parameters())
    train(again, resumed, 0, 2)
    resumed.watch.said.add("statistics")
    getattr(resumed, loaded_in)()
    if how == "state_dict":
        resumed.load_state_dict(state)
    else:
        assert klatsch.Checkpointer(tmp_path).resume(resumed, model=again) == 4
    if loaded_in == "eval":
        assert torch.equal(held(again), x_of(optimizer))  # bits: a copy
        with pytest.raises(ValueError, match=IN_EVAL):
            resumed.step()
    resumed.train()
    train(again, resumed, 4, 7)
    assert torch.equal(held(again), held(calm))  # bits: same call


def test_edits_are_noticed_in_both_modes():
    model = make_model()
    optimizer = APART["dat"](model.parameters())
    train(model, optimizer)
    state = optimizer.state_dict()
    for before, after in ((optimizer.train, optimizer.eval), (optimizer.eval, optimizer.train)):
        before()
        with torch.no_grad():
            model[0].weight.add_(1.0)
        for _ in range(2):
            with pytest.raises(ValueError, match="changed after round 4, but not by this optimizer"):
                after()
        optimizer.load_state_dict(state)
        after()


def test_a_model_that_is_loaded_before_training_is_where_it_starts_in_both_modes():
    for mode in ("train", "eval"):
        model, other = make_model(), make_model(seed=1)
        optimizer = APART["dat"](model.parameters())
        getattr(optimizer, mode)()
        model.load_state_dict(other.state_dict())
        optimizer.eval()
        assert torch.equal(held(model), held(other))  # bits: a copy
        optimizer.train()
        train(model, optimizer)
        train(other, APART["dat"](other.parameters()))
        assert torch.equal(held(model), held(other))  # bits: same call


def test_merging_puts_x_into_the_model_and_says_so_once():
    model = make_model()
    optimizer = APART["dat"](model.parameters())
    train(model, optimizer)
    query, x = held(model), x_of(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        klatsch.average_(model)  # of buffers alone: nothing to say
        assert torch.equal(held(model), query)  # bits: a copy
        with optimizer.averaged():
            klatsch.average_(model, parameters=True)
            assert optimizer.consensus() == 0
        assert torch.equal(held(model), query)  # bits: same call
        train(model, optimizer, 4, 5)
    x = x_of(optimizer)
    with pytest.warns(RuntimeWarning, match=r"average_ has put the mean of all ranks' x into the model.*train\(\)"):
        klatsch.average_(model, parameters=True)
    assert torch.equal(held(model), x)  # bits: a copy
    with pytest.raises(ValueError, match=r"since average_\(model, parameters=True\), and takes no steps"):
        train(model, optimizer, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.train()
        klatsch.average_(model, parameters=True)
        optimizer.train()
        train(model, optimizer, 5, 6)


def evaluate(model):
    model.eval()
    model(torch.randn(2, 5))
    model.train()


def without_gradients(model):
    with torch.no_grad():
        model(torch.randn(2, 5))


MISTAKES = {
    "evaluated": (evaluate, "run for evaluation"),
    "without gradients": (without_gradients, "run for evaluation"),
    "a part": (lambda model: without_gradients(model[0]), "run for evaluation"),
    "state_dict": (lambda model: model.state_dict(), r"state_dict\(\) was taken"),
    "copy": (copy.deepcopy, "copied or pickled"),
    "pickle": (lambda model: torch.save(model, io.BytesIO()), "copied or pickled"),
}


@pytest.mark.parametrize(
    "name, rule", [*((name, "dat") for name in MISTAKES), ("state_dict", "averaged"), ("a part", "own")]
)
@pytest.mark.slow
def test_the_wrong_point_is_loud_once(name, rule):
    mistake, text = MISTAKES[name]
    model = make_model()
    optimizer = APART[rule](model.parameters() if rule == "dat" else list(model.parameters()))  # found when it runs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mistake(model)  # at the start all points are one
        train(model, optimizer)
        with optimizer.averaged():
            mistake(model)
    with pytest.warns(RuntimeWarning, match=f"{text}.*{WRONG_POINT}.*optimizer.averaged") as found:
        mistake(model)
    assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mistake(model)


def test_copies_and_models_without_their_optimizer_are_free():
    model = make_model()
    optimizer = APART["dat"](model.parameters())
    train(model, optimizer)
    with pytest.warns(RuntimeWarning, match="copied or pickled"):
        twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(twin)
        twin.state_dict()
        values = {name: p.detach() + 1 for name, p in model.named_parameters()}
        model.eval()
        torch.func.functional_call(model, values, torch.randn(2, 5))  # with others' values
        model.train()
        with optimizer.averaged():
            assert b"klatsch" not in pickle.dumps(model)
        del optimizer
        gc.collect()
        evaluate(model)
        assert not any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


def test_models_are_found_when_they_run_and_not_looked_for_any_more():
    parts, other = [make_model(nn.BatchNorm1d(7), seed=k) for k in range(2)], make_model()
    optimizer = APART["dat"]([{"params": list(part.parameters())} for part in parts])
    for k in range(3):
        assert bool(module._global_forward_pre_hooks) == (k == 0)
        optimizer.zero_grad()
        other(torch.randn(4, 5))
        sum(part(torch.randn(4, 5)).sum() for part in parts).backward()
        optimizer.step()
    with pytest.warns(RuntimeWarning, match="BatchNorm1d '1' were gathered"):
        optimizer.eval()
    optimizer.train()
    for part, mistake in zip(parts, (lambda part: part.state_dict(), without_gradients), strict=True):
        with pytest.warns(RuntimeWarning, match=WRONG_POINT):
            mistake(nn.Sequential(part))  # also around it


@pytest.mark.slow
def test_models_compiled_in_place():
    model = make_model()
    optimizer = APART["dat"](model.parameters())
    model.compile(backend="eager")
    train(model, optimizer)
    with pytest.warns(RuntimeWarning, match=rf"state_dict\(\) was taken {WRONG_POINT}"):
        model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models(fullgraph):
    model = make_model()
    optimizer = APART["dat"](model.parameters())
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(compiled, optimizer)
    with pytest.warns(RuntimeWarning, match="run for evaluation"):
        evaluate(compiled)


def test_statistics_are_gathered_at_x():
    model = make_model(nn.BatchNorm1d(7, affine=False, momentum=0.3))
    optimizer = APART["dat"](model.parameters())
    batches = [torch.randn(16, 5, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.eval()  # at the start they belong to x
        optimizer.train()
    train(model, optimizer)
    with pytest.warns(
        RuntimeWarning, match=r"BatchNorm1d '1' were gathered at .*klatsch.recalibrate\(model, batches\)"
    ):
        optimizer.eval()
    optimizer.train()
    query = held(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.averaged():
            hidden = [model[0](batch).detach() for batch in batches]
        model[3].eval()
        assert klatsch.recalibrate(model, ((batch, "label") for batch in batches)) is model
    torch.testing.assert_close(model[1].running_mean, torch.stack([v.mean(0) for v in hidden]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([v.var(0) for v in hidden]).mean(0))
    assert [m.training for m in model] == [True, True, True, False, True]
    assert (model.training, model[1].momentum, model[1].num_batches_tracked) == (True, 0.3, 3)
    assert torch.equal(held(model), query)  # bits: same call

    before = copy.deepcopy(list(model.buffers()))
    for wrong, error in (([], "batches is empty, or was used up"), ([batches[0], torch.randn(2, 3)], "shapes cannot")):
        with pytest.raises((ValueError, RuntimeError), match=error):
            klatsch.recalibrate(model, wrong)
        assert all(torch.equal(b, old) for b, old in zip(model.buffers(), before, strict=True))  # bits: a copy
        assert (model[1].momentum, model[3].training, optimizer._holds) == (0.3, False, "query")


def test_recalibrate_needs_no_optimizer_and_no_batchnorm():
    model = make_model()
    assert klatsch.recalibrate(model, []) is model
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    klatsch.recalibrate(model, [torch.tensor([[0.0, 2.0], [2.0, 4.0]])])
    torch.testing.assert_close(model[0].running_mean, torch.tensor([1.0, 3.0]))


def test_recalibrate_warns_nobody():
    model = make_model(nn.BatchNorm1d(7))
    optimizer = APART["averaged"](model.parameters())
    train(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        klatsch.recalibrate(model, [torch.randn(4, 5)])
        optimizer.eval()  # who knows of it needs no warning
