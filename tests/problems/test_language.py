"""The language problem: stacked GPTs are those of torch.nn, text is split by package, and held-out files stay apart."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import klatsch
from klatsch.problems import Language, prediction
from klatsch.simulation import simulate_together
from tests.support.comparisons import assert_same_to_rounding

PACKAGES = {"ant": 12, "bee": 8, "cat": 5, "dog": 2}  # folders, with so many files each
SMALL = {"context": 12, "width": 8, "depth": 2, "heads": 2, "batch": 3, "test": 20, "pattern": "*.txt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Packages that differ in their words; every line names its file."""
    place = tmp_path_factory.mktemp("text")
    for package, count in PACKAGES.items():
        (place / package / "inner").mkdir(parents=True)
        for k in range(count):
            file = place / package / ("inner" if k % 2 else "") / f"{package}{k:02}.txt"
            file.write_text(f"{package}{k:02} " * (40 + 7 * k))
    for k in range(3):
        (place / f"top{k}.txt").write_text(f"top{k}x " * (60 + k))
    (place / "empty.txt").touch()
    (place / "other.md").write_text("not asked for")
    return str(place)


@pytest.fixture
def small(folder):
    return lambda nodes=4, **options: Language(nodes, folder=folder, **SMALL | options)


class PlainGPT(nn.Module):
    """The same model of torch.nn's parts, one at a time, with attention written out."""

    def __init__(self, context, width, depth, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes) for _ in range(depth))

    def forward(self, given):
        B, T = given.shape
        v = self.bytes(given) + self.places(torch.arange(T))
        for inner, out, up, down in self.blocks:
            q, k, u = inner(self.norm(v)).chunk(3, dim=-1)
            q, k, u = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in (q, k, u))
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf)
            v = v + out((scores.softmax(-1) @ u).transpose(1, 2).reshape(B, T, -1))
            v = v + down(nn.functional.gelu(up(self.norm(v))))
        return self.norm(v) @ self.bytes.weight.T

    def loss(self, windows):
        said = self(windows[:, :-1].long())
        return nn.functional.cross_entropy(said.flatten(0, 1), windows[:, 1:].long().flatten())


def plain(problem, vector):
    """A plain model with these parameters: klatsch keeps a Linear's matrix the other way round."""
    model = PlainGPT(*(SMALL[name] for name in ("context", "width", "depth", "heads"))).double()
    pieces = torch.split(vector, [p.numel() for p in model.parameters()])
    with torch.no_grad():
        for p, piece in zip(model.parameters(), pieces, strict=True):
            linear = p.shape != model.bytes.weight.shape and p is not model.places.weight
            p.copy_(piece.view(p.T.shape).T if linear else piece.view(p.shape))
    return model


def gradient_of(model, windows):
    model.loss(windows).backward()
    grads = [(p.grad if k < 2 else p.grad.T).reshape(-1) for k, p in enumerate(model.parameters())]
    return torch.cat(grads)


def points(problem, columns=1):
    """Points around the start, far enough that every part of the model counts."""
    noise = torch.randn(problem.nodes, columns, problem.dim, generator=torch.Generator().manual_seed(1)).double()
    return problem.start() + 0.3 * noise


def test_the_stack_has_the_gradients_of_plain_models(small):
    problem = small()
    x = points(problem, columns=2)
    drawn = problem.draw(torch.tensor([7]))[0]
    found = problem.gradient(x, drawn)
    for i in range(problem.nodes):
        for c in range(2):
            expected = gradient_of(plain(problem, x[i, c]), problem.data.learnt[drawn[i]])
            torch.testing.assert_close(found[i, c], expected, rtol=1e-10, atol=1e-12)
            assert expected.view(-1, 8).abs().amax(1).count_nonzero() > 200  # rows of every matrix


def test_bits_per_byte_are_those_of_plain_models(small):
    problem = small()
    x = points(problem)
    windows = problem.data.held_out
    assert len(windows) == 20
    bits = [plain(problem, v).loss(windows).item() / math.log(2) for v in (*x[:, 0], x[:, 0].mean(0))]
    found = {name: float(value) for name, value in problem.metrics(x).items()}
    expected = {
        "bits": np.mean(bits[:4]),
        "bits_min": min(bits[:4]),
        "bits_max": max(bits[:4]),
        "bits_of_mean": bits[4],
    }
    assert found == pytest.approx(expected, rel=1e-12)
    assert float(problem.metrics(problem.start().expand(4, 1, -1))["bits"]) == pytest.approx(8, abs=0.2)


def test_a_brief_look_is_at_some_windows_from_everywhere(small, monkeypatch):
    problem = small(3)
    x, windows = points(problem, columns=2), problem.data.held_out
    monkeypatch.setattr(prediction, "BRIEF", 2)
    found = problem.briefly().metrics(x)
    assert_same_to_rounding(problem.briefly().by_node(x)["bits"], problem.by_node(x)["bits"])  # on all text
    some = windows[[0, len(windows) // 2]]
    assert list(found) == ["bits"]
    assert_same_to_rounding(found["bits"], problem.bits(x.view(-1, problem.dim), some).view(3, 2).mean(0))
    monkeypatch.setattr(prediction, "BRIEF", 10**6)
    assert_same_to_rounding(problem.briefly().metrics(x)["bits"], problem.metrics(x)["bits"])


def test_portions_do_not_matter(small, monkeypatch):
    problem = small(5)
    x = points(problem, columns=3)
    slope, measured, alone = problem.grad(x, 2), problem.metrics(x), problem.portions(x[:, 0], problem.batch)
    monkeypatch.setattr(prediction, "KEPT_AT_ONCE", 80 * problem.gpt.depth * problem.gpt.width)
    monkeypatch.setattr(prediction, "EVALUATED_AT_ONCE", 7)
    assert len(problem.portions(x[:, 0], problem.batch)) > len(alone)
    assert_same_to_rounding(problem.grad(x, 2), slope)
    for name, value in problem.metrics(x).items():
        assert_same_to_rounding(value, measured[name])


def test_autocast_rounds_products(small):
    exact, rough = small(), small(autocast=True)
    x = points(exact).float()
    slope, rounded = exact.grad(x, 1), rough.grad(x, 1)
    assert rounded.dtype == torch.float32
    assert 1e-4 < float((slope - rounded).norm() / slope.norm()) < 0.1
    assert exact.fingerprint() != rough.fingerprint()


def test_training_lowers_bits_per_byte(small):
    problem, ring = small(alpha=0.05), klatsch.topology.ring(4)
    result = klatsch.simulate(problem, klatsch.rules.make("dsgd", 0.5), ring, 60, record=[1, 60], dtype=torch.float32)
    bits = result.metrics["bits"][:, 0].tolist()
    assert bits[0] > 7
    assert bits[1] < 5
    smallest, largest = (float(result.metrics[name][-1]) for name in ("bits_min", "bits_max"))
    assert smallest < bits[1] < largest < 6


def names_in(windows):
    """The names of files in windows of text."""
    return {name for row in windows for name in re.findall(rb"\b[a-z]{3}\d\d|top\d", row.numpy().tobytes())}


def test_whole_files_of_every_folder_are_held_out(small):
    problem = small(test=10_000)
    learnt, apart = names_in(problem.data.learnt), names_in(problem.data.held_out)
    assert learnt & apart == set()
    assert len(learnt | apart) == sum(PACKAGES.values()) + 3
    assert {name[:3] for name in apart} == {name[:3] for name in learnt} == {b"ant", b"bee", b"cat", b"dog", b"top"}
    share = len(problem.data.held_out) / (len(problem.data.held_out) + len(problem.data.learnt))
    assert 0.05 < share < 0.2
    torch.testing.assert_close(problem.data.held_out, small(test=10_000, seed=3).data.held_out)  # whatever the seed


@pytest.mark.parametrize("alpha", [0.01, 1.0, 1000.0])
def test_text_is_split_by_package(small, folder, alpha):
    problem, packages = small(alpha=alpha), prediction.load(folder, "*.txt", 13)[1]
    shards, windows = problem.shards, problem.data.learnt
    assert packages.max() == 5  # four folders and two files, as the third is held out
    for k in range(6):
        (name,) = {name[:3] if name[:3] != b"top" else name for name in names_in(windows[packages == k])}
        assert name in (b"ant", b"bee", b"cat", b"dog", b"top0", b"top1", b"top2")
    assert shards.shape == (4, len(windows) // 4)  # as much text for each
    assert len(torch.unique(shards)) == shards.numel()
    assert torch.equal(shards, small(alpha=alpha).shards)  # bits: whole numbers
    assert not torch.equal(shards, small(alpha=alpha, seed=1).shards)
    ants = [float((packages[own] == 0).mean()) for own in shards]
    assert max(ants) - min(ants) < 0.02 if alpha == 1000 else max(ants) - min(ants) > 0.2


def test_networks_in_one_stack_are_those_alone(small):
    problems, rule = [small(3), small(4, alpha=5.0, seed=1)], klatsch.rules.make("dat", lr=[0.1, 0.3])
    graphs = [klatsch.topology.ring(3), klatsch.topology.ring(4)]
    together = simulate_together(problems, rule, graphs, 5)
    for problem, graph, found in zip(problems, graphs, together, strict=True):
        alone = klatsch.simulate(problem, rule, graph, 5)
        assert_same_to_rounding(found.output, alone.output)
        assert_same_to_rounding(found.metrics["bits"], alone.metrics["bits"])
    with pytest.raises(ValueError, match=r"does not fit .* in one stack: give all the same model, data and batch"):
        simulate_together([small(4), small(4, heads=4)], rule, [graphs[1]] * 2, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_rounds_are_captured_on_a_gpu(small, autocast):
    problem = small(autocast=autocast, batch=100)  # as many bytes as torch needs to choose its kernels for many
    rule, graph = klatsch.rules.make("dat", lr=[0.1, 0.3]), klatsch.topology.ring(4)
    choices = {"record": [1, 70], "dtype": torch.float32, "device": "cuda"}
    fast, slow = (klatsch.simulate(problem, rule, graph, 70, engine=e, **choices) for e in ("cuda graph", "torch"))
    torch.testing.assert_close(fast.metrics["bits"], slow.metrics["bits"], rtol=0.02 if autocast else 1e-3, atol=0)


def test_all_installed_packages_are_one_folder(folder, monkeypatch):
    monkeypatch.setattr(prediction.sysconfig, "get_paths", lambda: {"purelib": folder})
    prediction._read.cache_clear()
    assert Language.content("site-packages", "*.txt") == Language.content(folder, "*.txt")
    prediction._read.cache_clear()


@pytest.mark.slow
def test_the_standard_library_needs_no_download():
    problem = Language(3, context=64, width=8, depth=1, heads=1, test=50)
    assert problem.data.learnt.numel() > 3_000_000
    assert len(problem.data.held_out) == 50
    parts = {part for file in prediction._read(None, "*.py") for part in file.path.parts}
    assert {"argparse.py", "json", "email"} <= parts
    assert not parts & {"test", "tests", "site-packages"}
    assert Language.content() == Language.content(None, "*.py") != Language.content(pattern="a*.py")
    assert problem.dim == Language.dim_of(3, context=64, width=8, depth=1)
    assert Language.dim_of(8) == 380_928


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nodes": 0}, "nodes = 0; give a whole number from 1 up"),
        ({"alpha": 0}, "alpha = 0; give a number above 0"),
        ({"heads": 3}, "heads = 3 do not divide width = 8; give a multiple, such as 96"),
        ({"depth": 0}, "depth = 0; give a whole number from 1 up"),
        ({"autocast": 1}, "autocast = 1; give true or false"),
        ({"batch": 10_000}, "nodes = 4 and batch = 10000, but there are [0-9,]+ windows of 13 bytes .*; give fewer"),
        ({"context": 20_000}, "has no 20,001 bytes of text to learn from, .*; give more or longer files, or a shorter"),
        ({"context": 3000}, "has no 3,001 bytes of text held out"),
        ({"folder": "/nowhere"}, "folder = /nowhere is not a folder; give one with text, or none for Python's own"),
        ({"pattern": "*.c"}, r"has no text in files named \*.c; give another pattern or folder"),
        ({"pattern": "empty*"}, r"has no text in files named empty\*; give"),
        ({"pattern": "top0*"}, "has no 13 bytes of text held out, of 1 and 0 files"),
        ({"pattern": ""}, r"pattern = ''; give names of files, such as \*.txt"),
        ({"pattern": "/etc/*"}, r"pattern = '/etc/\*'; give names of files, such as \*.txt"),
        ({"pattern": 3}, r"pattern = 3; give names of files, such as \*.txt"),
    ],
)
def test_bad_input(small, folder, options, message):
    with pytest.raises(ValueError, match=message):
        Language(**{"nodes": 4, "folder": folder} | SMALL | options)
