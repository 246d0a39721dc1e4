"""Image classification: models in a stack are the same as models by themselves; rounds are a function of the seed."""

import math
import re

import pytest
import torch
from torch import nn

import klatsch
from klatsch.problems import FashionMNIST, ImageClassification, Images, lenet
from klatsch.problems.classification import COMPILED, IMAGES_AT_ONCE, ONE_MORE, equal_parts, portions
from klatsch.problems.stacks import Stacked, grouped, rows
from klatsch.simulation import simulate_together
from tests.support.machine import DATA, needs_data

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def toy(samples=240, size=12, classes=4, seed=0):
    """Images that can be told apart: every class has its own pattern, and noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, 1, size, size, generator=generator) * 200
    parts = []
    for count in (samples, samples // 2):
        labels = torch.arange(count) % classes
        noise = torch.randint(0, 55, (count, 1, size, size), generator=generator)
        parts += [(patterns[labels] + noise).to(torch.uint8), labels]
    return Images(*parts)


def small(channels=1, classes=4):
    return nn.Sequential(
        *(nn.Conv2d(channels, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(100, 8), nn.Tanh(), nn.Linear(8, classes)),
    )


class Residual(nn.Module):
    """Not a chain of layers, so that it goes through torch.func."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Linear(4, 4),
        )

    def forward(self, images):
        seen = torch.relu(self.first(images))
        return self.last((seen + self.second(seen)).mean((2, 3)))


def chain(*layers, channels=3, size=9):
    """A model with these layers in it that ends in four numbers."""
    torch.manual_seed(0)
    inner = nn.Sequential(*layers)
    features = inner(torch.zeros(2, channels, size, size)).flatten(1).shape[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 4))


def without_bias(layer):
    """As newer versions of torch make it with bias=False."""
    layer.register_parameter("bias", None)
    return layer


KINDS = {
    "conv": lambda: chain(nn.Conv2d(3, 5, 3)),
    "conv without bias": lambda: chain(nn.Conv2d(3, 5, 3, bias=False)),
    "conv with stride and padding": lambda: chain(nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 2))),
    "dilated conv": lambda: chain(nn.Conv2d(3, 5, 3, dilation=2)),
    "grouped conv": lambda: chain(nn.Conv2d(3, 6, 3, groups=3)),
    "conv, same padding": lambda: chain(nn.Conv2d(3, 5, 3, padding="same")),
    "group norm": lambda: chain(nn.GroupNorm(3, 3)),
    "group norm, not affine": lambda: chain(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4, affine=False)),
    "group norm without bias": lambda: chain(nn.Conv2d(3, 4, 3), without_bias(nn.GroupNorm(2, 4))),
    "max pool": lambda: chain(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)),
    "max pool, padded": lambda: chain(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, stride=2, padding=1)),
    "max pool that leaves something over": lambda: chain(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3)),
    "plain average pool": lambda: chain(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2)),
    "average pool": lambda: chain(nn.Conv2d(3, 4, 3), nn.AvgPool2d(3, stride=2)),
    "layer norm": lambda: chain(nn.LayerNorm(9)),
    "linear without bias": lambda: chain(nn.Flatten(), nn.Linear(243, 7, bias=False), nn.GELU()),
    "activations": lambda: chain(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.ELU()),
    "average pool with a divisor": lambda: chain(nn.AvgPool2d(2, divisor_override=3)),
    "chain in a chain": lambda: chain(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.MaxPool2d(2)),
}


class Block(nn.Sequential):
    """Looks like a chain, and is none."""

    def forward(self, images):
        return images + super().forward(images)


class Standardised(nn.Conv2d):
    """Looks like a convolution, and is none."""

    def forward(self, images):
        return nn.functional.conv2d(images, self.weight - self.weight.mean(), self.bias)


def tied():
    first, second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
    second.bias = first.bias
    return chain(first, second)


def hooked():
    model = chain(nn.Conv2d(3, 4, 3))
    model[0].register_forward_hook(lambda module, given, result: 2 * result)
    return model


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized():
    model = chain(nn.Conv2d(3, 4, 3))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    return model


ODD = {
    "block": lambda: chain(Block(nn.Conv2d(3, 3, 1), nn.ReLU())),
    "own convolution": lambda: chain(Standardised(3, 4, 3)),
    "tied": tied,
    "hooked": hooked,
    "parametrized": parametrized,
}


def twice():
    relu = nn.ReLU()
    return chain(nn.Conv2d(3, 4, 3), relu, nn.Conv2d(4, 4, 3), relu)


KINDS |= {"the same activation twice": twice, **ODD}
UNKNOWN = (*ODD, "dilated conv", "grouped conv", "conv, same padding", "layer norm")
WAYS = [
    (kind, way)
    for kind in KINDS
    for way in ("grouped", "rows", "as chosen")
    if way == "as chosen" or kind not in UNKNOWN
]


@pytest.mark.parametrize("kind, way", WAYS)
def test_stacked_equals_separate_for_every_layer(kind, way):
    """Logits and gradients of S models in a stack are those of S modules, whose forward and backward torch wrote."""
    module = KINDS[kind]().double()
    stacked = Stacked(module)
    S, B = 3, 5
    torch.manual_seed(1)
    x = (stacked.start() + 0.3 * torch.randn(S, stacked.dim).double()).requires_grad_()
    images = torch.randn(S, B, 3, 9, 9).double()
    if way == "as chosen":
        logits = stacked(x, images)
    else:
        values = dict(zip(stacked.shapes, torch.split(x, stacked.sizes, dim=1), strict=True))
        logits = {"grouped": grouped, "rows": rows}[way](stacked.layers, values, images)
    (slope,) = torch.autograd.grad(logits.square().sum(), x)
    for s in range(S):
        torch.nn.utils.vector_to_parameters(x[s].detach(), module.parameters())
        alone = module(images[s])
        torch.testing.assert_close(logits[s], alone, rtol=1e-10, atol=1e-10)
        expected = torch.autograd.grad(alone.square().sum(), list(module.parameters()))
        torch.testing.assert_close(slope[s], torch.cat([g.flatten() for g in expected]), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_way_of_a_gpu_is_one_graph_for_the_compiler():
    """Strips of several widths in a LeNet; a break in the graph would cost as many launches as it should save."""
    stacked = Stacked(lenet())
    x = stacked.start() + 0.1 * torch.randn(2, stacked.dim)
    images = torch.randn(2, 3, 1, 28, 28)
    values = dict(zip(stacked.shapes, torch.split(x, stacked.sizes, dim=1), strict=True))
    found = torch.compile(rows, backend="eager", fullgraph=True)(stacked.layers, values, images)
    torch.testing.assert_close(found, stacked(x, images), rtol=1e-4, atol=1e-5)


def test_known_layers_do_not_go_through_torch_func():
    assert Stacked(lenet()).layers is not None
    assert Stacked(KINDS["chain in a chain"]()).layers is not None
    assert Stacked(Residual()).layers is None
    assert {kind for kind in KINDS if Stacked(KINDS[kind]()).layers is None} == set(UNKNOWN)
    for model in ODD.values():
        assert Stacked(model()).layers is None
    assert sum(p.numel() for p in lenet().parameters()) == 44_426 + 44  # LeNet's, and GroupNorm's


@pytest.mark.parametrize("model", [small, Residual])
def test_a_run_equals_one_with_separate_modules(model):
    """Ten rounds of DAT on a ring, against plain modules, plain loops, and a plain matrix product."""
    data, M, lr, gamma, beta = toy(), 4, 0.05, 0.9, 0.9
    problem = ImageClassification(model, data, nodes=M, alpha=0.5, batch=6, seed=3)
    graph = klatsch.topology.ring(M)
    rule = klatsch.rules.make("dat", lr=lr, averaging="fixed(0.9)", momentum=beta)
    found = klatsch.simulate(problem, rule, graph, 10, record=[10])

    torch.manual_seed(3)
    module = model()
    P = torch.tensor(graph.matrix(1).toarray())
    start = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    module.double()
    w = start.double().expand(M, -1).clone()
    x, m = w.clone(), torch.zeros_like(w)
    pixels = data.images.double()
    pixels = (pixels - pixels.mean()) / pixels.std(correction=0)
    for t in range(1, 11):
        drawn = problem.draw(torch.tensor([t]))[0]
        for i in range(M):
            torch.nn.utils.vector_to_parameters(x[i], module.parameters())
            loss = nn.functional.cross_entropy(module(pixels[drawn[i]]), data.labels[drawn[i]])
            slope = torch.autograd.grad(loss, list(module.parameters()))
            m[i] = beta * m[i] + torch.cat([g.flatten() for g in slope])
        half = w - lr * m
        w, x = P @ half, P @ (gamma * x + (1 - gamma) * half)
    torch.testing.assert_close(found.output[:, 0], x, rtol=1e-8, atol=1e-10)


def test_every_node_goes_through_its_own_images_once_per_epoch():
    problem = ImageClassification(small, toy(), nodes=4, alpha=0.3, batch=7, seed=1)
    assert problem.epoch == 60 // 7
    drawn = problem.draw(torch.arange(1, 2 * problem.epoch + 1))  # two epochs
    assert drawn.shape == (2 * problem.epoch, 4, 7)
    for epoch in (drawn[: problem.epoch], drawn[problem.epoch :]):
        for i in range(4):
            seen = epoch[:, i].flatten()
            assert len(set(seen.tolist())) == len(seen)
            assert set(seen.tolist()) <= set(problem.shards[i].tolist())
    assert not torch.equal(drawn[: problem.epoch], drawn[problem.epoch :])
    later = problem.draw(torch.tensor([problem.epoch + 2]))[0]
    assert torch.equal(later, drawn[problem.epoch + 1])  # bits: whole numbers
    alone = problem.part([2]).draw(torch.tensor([5]))[0, 0]
    assert torch.equal(alone, drawn[4, 2])  # bits: whole numbers


def test_a_single_node_gets_what_its_row_sees():
    problem = ImageClassification(small, toy(), nodes=4, batch=5, seed=2)
    x = problem.start() + 0.1 * torch.randn(4, 2, problem.dim)
    whole = problem.grad(x, 7)
    torch.testing.assert_close(whole, problem.gradient(x, problem.draw(torch.tensor([7]))[0]))
    for i in range(4):
        torch.testing.assert_close(problem.grad(x[[i]], 7, [i]), whole[[i]], rtol=1e-5, atol=1e-6)


def test_seeds_change_start_split_and_order():
    one, other = (ImageClassification(small, toy(), nodes=4, seed=seed) for seed in (0, 1))
    again = ImageClassification(small, toy(), nodes=4, seed=0)
    assert torch.equal(one.start(), again.start())  # bits: same call
    assert one.fingerprint() == again.fingerprint() != other.fingerprint()
    assert not torch.equal(one.start(), other.start())
    assert not torch.equal(one.shards, other.shards)
    module = small()
    given = ImageClassification(module, toy(), nodes=4, seed=5)
    torch.testing.assert_close(given.start(), torch.nn.utils.parameters_to_vector(module.parameters()).detach())


def test_metrics_are_those_of_plain_evaluation():
    data = toy()
    problem = ImageClassification(small, data, nodes=3, alpha=5.0, seed=0)
    torch.manual_seed(0)
    x = problem.start() + 0.2 * torch.randn(3, 2, problem.dim)
    found = problem.metrics(x)
    module = small()
    pixels = data.test_images.float()
    pixels = (pixels - data.images.double().mean().float()) / data.images.double().std(correction=0).float()

    def accuracy(vector):
        torch.nn.utils.vector_to_parameters(vector, module.parameters())
        return float((module(pixels).argmax(-1) == data.test_labels).double().mean())

    for c in range(2):
        each = [accuracy(x[i, c]) for i in range(3)]
        assert float(found["accuracy"][c]) == pytest.approx(sum(each) / 3)
        assert float(found["accuracy_min"][c]) == pytest.approx(min(each))
        assert float(found["accuracy_max"][c]) == pytest.approx(max(each))
        assert float(found["accuracy_of_mean"][c]) == pytest.approx(accuracy(x[:, c].mean(0)))
        losses = []
        own = (data.images.float() - data.images.double().mean().float()) / data.images.double().std(
            correction=0
        ).float()
        for i in range(3):
            torch.nn.utils.vector_to_parameters(x[i, c], module.parameters())
            losses.append(nn.functional.cross_entropy(module(own), data.labels).item())
        assert float(found["train_loss"][c]) == pytest.approx(sum(losses) / 3, rel=1e-4)  # all 240 images count


@pytest.mark.parametrize("nodes", [2, 4, 6, 10])
def test_the_training_loss_is_measured_on_images_of_all_nodes(monkeypatch, nodes):
    monkeypatch.setattr("klatsch.problems.classification.LOSS_SAMPLES", 60)
    problem = ImageClassification(small, toy(), nodes=nodes, batch=5)
    seen = set(problem._seen.tolist())
    counts = [len(seen & set(shard.tolist())) for shard in problem.shards]
    assert sum(counts) == 60
    assert max(counts) - min(counts) <= 1


def test_a_brief_look_is_at_some_test_images(monkeypatch):
    monkeypatch.setattr("klatsch.problems.classification.BRIEF", 20)
    data = toy()
    some = slice(None, None, len(data.test_labels) // 20)
    few = data._replace(test_images=data.test_images[some], test_labels=data.test_labels[some])
    whole, fewer = (ImageClassification(small, each, nodes=3, batch=5) for each in (data, few))
    x = whole.start() + torch.randn(3, 2, whole.dim, generator=torch.Generator().manual_seed(0)).to(whole.start())
    found = whole.briefly().metrics(x)
    assert list(found) == ["accuracy"]
    torch.testing.assert_close(found["accuracy"], fewer.metrics(x)["accuracy"])
    assert not torch.allclose(found["accuracy"], whole.metrics(x)["accuracy"])
    whole.headline = whole.headline._replace(metric="train_loss", largest=False)
    assert whole.briefly() is whole


def test_an_odd_number_of_test_images_is_measured_in_few_portions():
    for kind, count, parts in (("cuda", 113, 1), ("cuda", 2001, 2), ("cpu", 113, 1), ("cpu", 2000, 8), ("cpu", 499, 2)):
        assert math.ceil(count / equal_parts(count, IMAGES_AT_ONCE[kind])) == parts


@pytest.mark.parametrize("count", [1, 31, 32, 48, 112, 144, 259, 287, 288, 1000, 5000])
def test_models_train_in_few_sizes_on_a_gpu_and_in_no_more_than_there_are_on_a_cpu(count):
    on_gpu = portions(count, "cuda")
    assert set(on_gpu) <= set(COMPILED)
    assert sum(on_gpu) >= count
    assert sum(portions(count, "cpu")) == count

    def cost(sizes):
        return sum(sizes) + ONE_MORE * len(sizes)

    assert all(cost(on_gpu) <= cost([size] * math.ceil(count / size)) for size in COMPILED)


def test_filling_up_a_portion_changes_no_gradient(monkeypatch):
    problem = ImageClassification(small, toy(), nodes=3, batch=5)
    x, drawn = torch.randn(3, 2, problem.dim), problem.draw(torch.tensor([1]))[0]
    alone = problem.gradient(x, drawn)
    monkeypatch.setattr("klatsch.problems.classification.portions", lambda count, device: [4, 4])
    # Sums of another shape of stack round differently.
    torch.testing.assert_close(problem.gradient(x, drawn), alone, rtol=1e-4, atol=1e-6)


def test_other_models_and_test_sets_are_other_problems():
    def other():
        return nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in small()))

    one = ImageClassification(small, toy(), nodes=4)
    assert one.fingerprint() != ImageClassification(other, toy(), nodes=4).fingerprint()
    assert one.fingerprint() != ImageClassification(small, toy(), nodes=4, test=50).fingerprint()
    data = toy()
    pair = [ImageClassification(model, data, nodes=4) for model in (small, other)]
    rule = klatsch.rules.make("dsgd", lr=0.1)
    with pytest.raises(ValueError, match=r"does not fit .* in one stack"):
        simulate_together(pair, rule, [klatsch.topology.ring(4)] * 2, 2)


def test_it_learns_and_what_diverges_has_accuracy_0():
    problem = ImageClassification(small, toy(), nodes=4, alpha=0.5, batch=10, seed=0)
    rule = klatsch.rules.make("dat", lr=[0.1, 1e30], averaging="fixed(0.9)")
    result = klatsch.simulate(problem, rule, klatsch.topology.ring(4), 60, record=[1, 60], dtype=torch.float32)
    assert result.diverged.tolist() == [False, True]
    accuracy = result.metrics["accuracy"]
    assert accuracy[1, 0] > 0.9 > accuracy[0, 0]
    assert accuracy[1, 1] == 0.0
    assert torch.isinf(result.metrics["train_loss"][1, 1])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # which torch.compile itself makes use of
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_networks_in_one_stack_are_the_same_networks(device):
    """Several sizes, graphs, alphas and seeds side by side come to what each of them comes to by itself."""
    data = toy()
    problems = [
        ImageClassification(small, data, nodes=M, alpha=alpha, batch=6, seed=seed)
        for M, alpha, seed in ((4, 0.3, 0), (2, 5.0, 1), (4, 5.0, 2))
    ]
    graphs = [klatsch.topology.ring(4), klatsch.topology.ring(2), klatsch.topology.base_graph(4, 1)]
    rule = klatsch.rules.make("dsgd", lr=[0.01, 0.1], momentum=0.9)
    choices = {"record": [5, 40], "dtype": torch.float32, "device": device}
    together = simulate_together(problems, rule, graphs, 40, **choices)
    each = list(zip(problems, graphs, together, strict=True))
    for problem, graph, found in each if device == "cpu" else each[:1]:  # every other size is compiled for a minute
        alone = klatsch.simulate(problem, rule, graph, 40, **choices)
        torch.testing.assert_close(found.output, alone.output, rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(found.metrics["train_loss"], alone.metrics["train_loss"], rtol=1e-3, atol=1e-4)
        assert found.output.shape == alone.output.shape


class Pair(Residual):
    def forward(self, images):
        return super().forward(images), images


def frozen():
    model = small()
    model[0].weight.requires_grad_(False)
    return model


BAD = [
    (lambda: ImageClassification(small, toy(), nodes=4, alpha=0), "alpha = 0", "number above 0"),
    (lambda: ImageClassification(small, toy(), nodes=4, alpha=-1.0), "alpha = -1.0", "number above 0"),
    (lambda: ImageClassification(small, toy(), nodes=241), "nodes = 241", "give fewer nodes"),
    (lambda: ImageClassification(small, toy(), nodes=8, batch=31), "batch = 31", "give fewer nodes or a smaller batch"),
    (lambda: ImageClassification(small, toy(), nodes=8, batch=0), "batch = 0", "from 1 up"),
    (lambda: ImageClassification(small, toy(), nodes=4, test=1000), "test = 1000", "at most that many"),
    (
        lambda: ImageClassification(lenet, toy(), nodes=4),
        "does not take images of 1 by 12 by 12 numbers",
        "give one that does",
    ),
    (lambda: ImageClassification(lambda: small(classes=3), toy(), nodes=4), "4 classes", "one output per class"),
    (lambda: ImageClassification("lenet", toy(), nodes=4), "model = 'lenet'", "torch.nn.Module"),
    (lambda: ImageClassification(nn.Flatten(), toy(), nodes=4), "no parameters", "can learn"),
    (
        lambda: ImageClassification(chain(nn.BatchNorm2d(1), channels=1, size=12), toy(), nodes=4),
        "BatchNorm2d (0): its running statistics",
        "use nn.GroupNorm",
    ),
    (
        lambda: ImageClassification(chain(nn.Dropout(0.5), channels=1, size=12), toy(), nodes=4),
        "Dropout (0)",
        "leave it out",
    ),
    (
        lambda: ImageClassification(small, toy()._replace(labels=torch.zeros(3).long()), nodes=4),
        "labels of shape (3,)",
        "one label for each",
    ),
    (
        lambda: ImageClassification(small, toy()._replace(labels=torch.zeros(240)), nodes=4),
        "torch.float32",
        "torch.int64 from 0 up",
    ),
    (lambda: ImageClassification(Pair, toy(), nodes=4), "AttributeError", "give one that does"),
    (lambda: ImageClassification(frozen(), toy(), nodes=4), "'0.weight' of the model is frozen", "unfreeze it"),
    (lambda: ImageClassification(nn.LazyLinear(3), toy(), nodes=4), "has no shape yet", "call the model once"),
    (lambda: ImageClassification(small, 7, nodes=4), "data is a int", "give Images"),
    (lambda: ImageClassification(small, Images(*(t.numpy() for t in toy())), nodes=4), "numpy", "torch.from_numpy"),
    (
        lambda: ImageClassification(small, toy()._replace(test_images=torch.zeros(120, 1, 9, 9)), nodes=4),
        "(1, 9, 9)",
        "same shape",
    ),
    (
        lambda: ImageClassification(small, toy()._replace(images=torch.full((240, 1, 12, 12), torch.nan)), nodes=4),
        "not finite",
        "finite numbers only",
    ),
    (lambda: ImageClassification(small, "/nowhere", nodes=4), "/nowhere is not a folder", "KLATSCH_DATA"),
]


@pytest.mark.parametrize("call, value, remedy", BAD)
def test_bad_input(call, value, remedy):
    with pytest.raises(ValueError, match=re.escape(value)) as refusal:
        call()
    assert remedy in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_with_a_buffer_is_refused():
    module = small()
    module.register_buffer("mask", torch.ones(3))
    with pytest.raises(ValueError, match=r"buffer 'mask'.*does not gossip"):
        ImageClassification(module, toy(), nodes=4)


@pytest.mark.slow
@needs_data
def test_lenet_learns_fashion_mnist(monkeypatch):

    monkeypatch.setenv("KLATSCH_DATA", str(DATA))
    problem = FashionMNIST(4, alpha=10.0, test=1_000)
    assert problem.dim == 44_470
    assert problem.epoch == problem.rounds_per_epoch(4) == 468
    rule = klatsch.rules.make("dat", lr=0.01, averaging="fixed(0.9)", momentum=0.9)
    result = klatsch.simulate(problem, rule, klatsch.topology.ring(4), 60, record=[60], dtype=torch.float32)
    assert result.metrics["accuracy"][0, 0] > 0.55
