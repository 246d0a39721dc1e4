"""DDP's communication hooks as rules: torch's own, on real ranks, and what their messages take."""

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.clock import Clock
from klatsch.columns import WeightMatrix
from klatsch.rules import Flow
from tests.support.processes import Ranks
from tests.support.rank_hooks import LAYERS, NUMBERS, RANK, gradients

MATRICES = (WeightMatrix(0, *LAYERS[0]), WeightMatrix(260, *LAYERS[1]))


@pytest.mark.parametrize("hook", ["fp16", f"powersgd({RANK})"])
def test_a_hook_is_torchs(prepared, tmp_path, hook):
    Ranks(prepared, tmp_path, 2, "rank_hooks.hooked", hook=hook).succeed()
    theirs, drawn = torch.load(tmp_path / f"{hook}-0")
    rule = rules.make("plain+hooked", lr=1.0, hook=hook).shaped(MATRICES)
    state = rule.init(torch.zeros(2, 1, NUMBERS, dtype=torch.float64))
    for q in drawn:  # by its rows one knows whose it is
        (matrix,) = (each for each in MATRICES if each.inputs == q.shape[1])
        state["q"][..., matrix.start : matrix.start + q.numel()] = q.flatten()
    flow = Flow(lambda *tensors: tuple(v.mean(0, keepdim=True) - v for v in tensors))
    for t, (grad, expected) in enumerate(zip(zip(gradients(0), gradients(1), strict=True), theirs, strict=True), 1):
        before = state["w"]
        state = rule.update(state, torch.stack(grad)[:, None], flow, t, 1.0)
        torch.testing.assert_close(before - state["w"], expected.expand(2, 1, -1), rtol=1e-9, atol=1e-12)


def test_what_travels_is_what_is_timed():
    """PowerSGD sends two factors of each matrix that they make shorter, one after the other, and the rest whole."""
    complete, numbers = tp.complete(8), 1000 * 1000 + 1000
    fp16, low = (rules.make("plain+hooked", lr=0.1, hook=hook) for hook in ("fp16", "powersgd(4)"))
    low = low.shaped([WeightMatrix(0, 1000, 1000)])
    assert (fp16.hook.bytes(numbers), low.hook.bytes(numbers)) == (2 * numbers, 4 * (4 * 2000 + 1000))
    assert rules.make("plain+hooked", lr=0.1, hook="powersgd(4)").shaped([WeightMatrix(0, 9, 9)]).hook.bytes(81) == 324
    slow = Clock(1e-3, "wan", handling=0.0)
    three = (rules.make("dsgd", 0.1), fp16, low)
    plain, half, factors = (slow.seconds(rule, complete, numbers, [1])[0] for rule in three)
    assert half < plain
    one_of_two = slow._all_reduce(8, 4 * (4 * 2000 + 1000) / 2, hides=False)
    assert factors == pytest.approx(1e-3 + 2 * one_of_two)


def test_bad_hooks_are_refused():
    with pytest.raises(ValueError, match=r"hook = 'powersgd\(0\)'; give fp16, or powersgd"):
        rules.make("plain+hooked", lr=0.1, hook="powersgd(0)")
    for product in ("tracked+hooked", "plain+hooked+outer"):
        with pytest.raises(ValueError, match="a hook is for an all-reduce of gradients alone; use plain"):
            rules.make(product, lr=0.1)
    rule = rules.make("plain+hooked", lr=0.1)
    for graph in (tp.ring(4), tp.every(tp.complete(4), 2)):
        with pytest.raises(ValueError, match="use complete, or another rule with wire = 'int8'"):
            rule.check_graph(graph)


@pytest.mark.parametrize("hook", ["fp16", "powersgd(1)"])
def test_a_hooked_all_reduce_keeps_nodes_equal(hook):
    problem = problems.LeastSquares(4, dim=60, noise=0.0)
    problem.matrices = [WeightMatrix(5, 5, 10)]
    rule = rules.make("plain+hooked", lr=0.3 / problem.L, momentum=0.5, hook=hook)
    found = klatsch.simulate(problem, rule, tp.complete(4), 400, record=[1, 400])
    assert found.metrics["distance"][1] < 0.01 * found.metrics["distance"][0]
    torch.testing.assert_close(found.output, found.output[:1].expand_as(found.output))
