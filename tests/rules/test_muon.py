"""Muon: against NumPy on every graph, against torch on one node, and who may run it."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.problems import WeightMatrix
from klatsch.rules.directions import orthogonal
from tests.support.machine import CUDA
from tests.support.table import ALONE, ZeroGradients

STEPS, LR, NODES, DIM = 24, 1e-2, 6, 20
# A tall one, a wide one of the same shape that lies column by column, and a square one; 0, 13 and 14 lie outside.
MATRICES = [WeightMatrix(1, 3, 2), WeightMatrix(7, 2, 3, turned=True), WeightMatrix(15, 2, 2)]


def least_squares(nodes=NODES, **options):
    problem = problems.LeastSquares(nodes, DIM, heterogeneity=2.0, **options)
    problem.matrices = MATRICES
    return problem


def newton_schulz(G):
    """As published, on one matrix of NumPy or torch, in its own precision."""
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / max(float((X * X).sum()) ** 0.5, 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


def by_hand(problem, graph, shared, nesterov, adjust, decay, adam_lr):
    """Node by node, matrix by matrix."""
    w = np.tile(problem.start().double().numpy(), (NODES, 1))
    m, v, mu = np.zeros_like(w), np.zeros_like(w), np.full(DIM, 0.9)
    for matrix in MATRICES:
        mu[matrix.start : matrix.end] = 0.95
    for t in range(1, STEPS + 1):
        P = graph.matrix(t).toarray() if t % graph.every == 0 else np.eye(NODES)
        g = problem.grad(torch.tensor(w)[:, None], t)[:, 0].numpy()
        mixed = P @ g if shared else g
        old, m, v = m, mu * m + (1 - mu) * (g if shared == "momentum" else mixed), 0.999 * v + 0.001 * mixed**2
        if shared == "momentum":
            m = np.where(mu == 0.95, P @ m, 0.9 * old + 0.1 * mixed)
        step = adam_lr * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + decay * w)
        n = m + 0.95 * (m - old) if nesterov else m
        for start, outputs, inputs, turned in MATRICES:
            part = slice(start, start + outputs * inputs)
            scale = 0.2 * math.sqrt(max(outputs, inputs)) if adjust else math.sqrt(max(1, outputs / inputs))
            for i in range(NODES):
                G = n[i, part].reshape(inputs, outputs).T if turned else n[i, part].reshape(outputs, inputs)
                O = newton_schulz(G)  # noqa: E741
                step[i, part] = scale * (O.T if turned else O).reshape(-1) + decay * w[i, part]
        w = P @ (w - LR * step)
    return w


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("graph", [tp.ring, tp.one_peer_exponential, tp.complete])
def test_it_is_what_numpy_says(graph, every):
    problem, graph = least_squares(), tp.every(graph(NODES), every)
    for shared, nesterov, adjust, decay, adam_lr in (
        (False, True, True, 0.1, 0.5),
        (True, True, True, 0.0, 1.0),
        ("momentum", True, False, 0.1, 1.0),
        ("momentum", False, True, 0.0, 1.0),
    ):
        options = {"shared": shared, "nesterov": nesterov, "weight_decay": decay, "adam_lr": adam_lr}
        options["adjust_lr"] = "match_rms_adamw" if adjust else "original"
        found = klatsch.simulate(problem, rules.make("muon", LR, **options), graph, STEPS, record=1)
        expected = by_hand(problem, graph, shared, nesterov, adjust, decay, adam_lr)
        np.testing.assert_allclose(found.output[:, 0], expected, rtol=1e-12, atol=1e-12, err_msg=str(options))


@pytest.mark.parametrize("shared", [True, "momentum"])
def test_on_the_complete_graph_sharing_is_an_all_reduce(shared):
    """Gradients or momenta, all nodes orthogonalise the same: one node with the mean of all gradients."""
    problem = least_squares(noise=0.0)
    rule = rules.make("muon", LR, shared=shared, eps=1e-3)  # larger than rounding
    found = klatsch.simulate(problem, rule, tp.complete(NODES), STEPS, record=1).output
    alone = rule.shaped(MATRICES)
    state = alone.init(problem.start().double())
    for t in range(1, STEPS + 1):
        grad = problem.exact(alone.query(state).expand(NODES, 1, DIM)).mean((0, 1))
        state = alone.update(state, grad, ALONE, t, LR)
    torch.testing.assert_close(found, state["w"].expand_as(found), rtol=1e-9, atol=1e-12)


def trained(make, dtype):
    """The parameters of a small model after some steps of an optimizer, with the same data each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)).to(
        dtype
    )
    inputs, targets = torch.randn(10, 32, 6, dtype=dtype), torch.randn(10, 32, 3, dtype=dtype)
    step = make(model)
    for x, y in zip(inputs, targets, strict=True):
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def ours(model, **options):
    """The rule itself on one node, without an engine."""
    parameters = [*model.parameters()]
    rule = rules.make("muon", 0.02, weight_decay=0.1, **options)
    rule = rule.shaped([WeightMatrix(0, 12, 6), WeightMatrix(84, 5, 12), WeightMatrix(144, 3, 5)])
    state, t = rule.init(torch.cat([p.detach().reshape(-1) for p in parameters])), 0

    def step():
        nonlocal state, t
        t += 1
        state = rule.update(state, torch.cat([p.grad.reshape(-1) for p in parameters]), ALONE, t, 0.02)
        nn.utils.vector_to_parameters(state["w"], parameters)

    return step


def theirs(model, adam_lr=1.0, nesterov=True, adjust_lr="match_rms_adamw"):
    """torch's Muon for matrices and its AdamW for the rest."""
    named = {"weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr}
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02, **named)
    rest = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(rest, lr=0.02 * adam_lr, weight_decay=0.1)
    return lambda: (muon.step(), adam.step())


MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
OPTIONS = [{}, {"nesterov": False, "adjust_lr": "original"}, {"adam_lr": 0.3, "shared": True}, {"shared": "momentum"}]


@MUON
@pytest.mark.parametrize("options", OPTIONS)
def test_on_one_node_it_is_torchs_muon(options, monkeypatch):
    """To rounding, with torch's Newton-Schulz in the precision of the parameters, which it makes bfloat16."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda G, *_: newton_schulz(G))
    given = {name: value for name, value in options.items() if name != "shared"}
    found, expected = (
        trained(lambda model: ours(model, **options), torch.float64),
        trained(lambda model: theirs(model, **given), torch.float64),
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@MUON
def test_on_one_node_it_is_torchs_muon_in_bfloat16_but_for_that():
    """bfloat16 has 8 bits, and 5 Newton-Schulz steps lift its errors: 3 % of the length of each of the 10 steps."""
    found, expected = trained(ours, torch.float32), trained(theirs, torch.float32)
    start = trained(lambda model: lambda: None, torch.float32)
    assert (expected - start).abs().max() > 0.05
    torch.testing.assert_close(found, expected, rtol=0, atol=10 * 0.02 * 0.2 * 12**0.5 * 0.03)


@pytest.mark.parametrize("device", [CUDA])
def test_a_gpu_records_it_as_a_graph_with_newton_schulz_in_bfloat16(device):
    problem, graph, rule = least_squares(), tp.ring(NODES), rules.make("muon", LR, shared="momentum")
    for dtype, atol in ((torch.float64, 1e-10), (torch.float32, 64 * LR * 0.2 * 3**0.5 * 0.03)):
        found, expected = (
            klatsch.simulate(problem, rule, graph, 64, record=1, dtype=dtype, device=where, engine=engine).output.cpu()
            for where, engine in ((device, "cuda graph"), ("cpu", "torch"))
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_it_orthogonalises():
    G = torch.randn(3, 2, 8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sizes = torch.linalg.svdvals(orthogonal(G))
    assert 0.6 < sizes.min() < sizes.max() < 1.3
    assert not orthogonal(torch.zeros(1, 2, 3)).any()  # no gradient, no step


def test_columns_and_networks_run_together():
    problem, lrs = least_squares(), [1e-2, 3e-3]
    together = klatsch.simulate(problem, rules.make("muon", lrs, momentum=[0.9, 0.95]), tp.ring(NODES), 10, record=1)
    for c, (lr, momentum) in enumerate(zip(lrs, [0.9, 0.95], strict=True)):
        alone = klatsch.simulate(problem, rules.make("muon", lr, momentum=momentum), tp.ring(NODES), 10, record=1)
        torch.testing.assert_close(together.output[:, [c]], alone.output, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("channel", [{}, {"wire": "int8"}, {"every": 2, "late": 1}])
def test_it_is_right_on_skewed_data_if_it_is_tracked(channel):
    """As in DeMuon; a node's own gradients, orthogonalised one by one, do not cancel at the optimum."""
    problem, graph = least_squares(noise=0.0), tp.channel(tp.ring(NODES), **channel)
    gaps = {}
    for name in ("plain+muon", "tracked+muon"):
        rule = rules.make(name, rules.Decay(0.1, "linear", 300), momentum=0.5)
        gaps[name] = klatsch.simulate(problem, rule, graph, 300, record=1, dtype=torch.float32).metrics["loss_gap"][0]
    assert gaps["tracked+muon"] < 0.1 * gaps["plain+muon"]


def test_a_language_model_learns_with_it(tmp_path):
    for name, text in {"words": "def more(number):\n    return number\n", "digits": "5 * 2 = 10, 6 * 2 = 12;"}.items():
        (tmp_path / name).mkdir()  # a package of which one node knows nothing, nor of its bytes
        for k in range(12):
            (tmp_path / name / f"{k}.py").write_text(text * 12)
    options = {"alpha": 1e-3, "context": 16, "width": 16, "depth": 1, "heads": 2, "batch": 4, "folder": str(tmp_path)}
    problem = problems.make("language", 2, **options)
    assert [(m.outputs, m.inputs) for m in problem.matrices] == [(48, 16), (16, 16), (64, 16), (16, 64)]
    assert problem.matrices[-1].end == problem.dim
    for shared in (True, "momentum"):
        rule = rules.make("muon", 0.02, shared=shared)
        bits = klatsch.simulate(problem, rule, tp.ring(2), 40, record=[1, 40], dtype=torch.float32).metrics["bits"]
        assert bits[1] < 0.5 * bits[0]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rules.make("muon", 0.1, shared="v"), "shared = 'v'; give true to gossip gradients first, false, or"),
        (lambda: rules.make("muon", 0.1, adjust_lr="rms"), "adjust_lr = 'rms'; choose match_rms_adamw or original"),
        (lambda: rules.make("muon", 0.1, nesterov=1), "nesterov = 1; give true or false"),
        (lambda: rules.make("muon", 0.1, momentum=1.0), "momentum = 1.0; give a number from 0"),
        (lambda: rules.make("muon", 0.1, adam_lr=0.0), "adam_lr = 0.0; give a number above 0"),
        (lambda: rules.make("push+muon", 0.1, shared=True), "push.muon with shared = true"),
        (
            lambda: klatsch.simulate(ZeroGradients(4), rules.make("muon", 0.1), tp.ring(4), 5),
            r"muon .* ZeroGradients does not say where they are in its 3 parameters; give it `matrices`, such as",
        ),
        (
            lambda: klatsch.simulate(least_squares(), rules.make("muon", 0.1), tp.ring(NODES), 5, engine="fused"),
            "engine = 'fused' cannot run this: .*; use engine='auto'",
        ),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_matrices_lie_inside_the_parameters():
    problem = least_squares()
    problem.matrices = [WeightMatrix(15, 2, 3)]
    with pytest.raises(ValueError, match=r"LeastSquares has WeightMatrix\(start=15, .*but 20 parameters"):
        klatsch.simulate(problem, rules.make("muon", 0.1), tp.ring(NODES), 5)
