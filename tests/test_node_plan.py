"""What a rule sends in a round is found by running it: fields that need no gradient travel early, in one message."""

from dataclasses import dataclass

import pytest
import torch

from klatsch import rules
from klatsch.engine.plan import MOST_MESSAGES, plan

X = torch.zeros(5)
# By rule: the fields that travel early, and what the other messages of a round carry: fields, numbers, needed before.
PLANS = {
    "dsgd": (("dsgd", {}), (), [((), [5], ())]),
    "dsgd cta": (("dsgd", {"order": "cta"}), ("w",), []),
    "dsgd momentum": (("dsgd", {"momentum": 0.9, "average": "linear"}), (), [((), [5], ())]),
    "dat": (("dat", {}), ("x",), [((), [5], ())]),
    "dat beta": (("dat", {"beta": 0.9}), ("x",), [((), [5], ())]),
    "dat cta": (("dat", {"order": "cta", "momentum": 0.9}), ("x", "w"), []),
    "d2": (("d2", {}), (), [((), [5], ())]),
    "dat-d2": (("dat-d2", {}), ("x",), [((), [5], ())]),
    "gt": (("gt", {}), ("y",), [((), [5], (0,))]),
    "dat-gt": (("dat-gt", {}), ("x", "y"), [((), [5], (0,))]),
    "sgp": (("sgp", {}), (), [(("weight",), [5, 1], ())]),
    "dat-sgp": (("dat-sgp", {}), ("x", "weight"), [((), [5], ())]),
    "decentlam": (("decentlam", {}), (), [((), [5], ())]),
}


@pytest.mark.parametrize("label", PLANS)
def test_what_travels_early(label):
    (name, options), early, late = PLANS[label]
    found = plan(rules.make(name, lr=0.1, **options), X)
    assert found.early == early
    messages = found.messages[1:] if early else found.messages
    assert [(m.fields, [s.numel() for s in m.shapes], m.needs) for m in messages] == late
    if early:  # all of them in one message
        numbers = {"weight": 1}
        assert [s.numel() for s in found.messages[0].shapes] == [numbers.get(field, 5) for field in early]


class Own(rules.Rule):
    """Two fields travel as they are in one call, together with a step; another call needs what came of them."""

    lr = 0.1

    def init(self, x):
        return {"w": x, "u": x, "v": x}

    def update(self, s, grad, flow, t, lr):
        u, v, w = flow.mix(s["u"], s["v"], s["w"] - lr * grad)
        (w,) = flow.mix(w + u)
        return {"w": w, "u": u, "v": v + grad}


def test_a_rule_of_ones_own():
    found = plan(Own(), X)
    assert found.early == ("u", "v")
    assert [(m.fields, len(m.shapes), m.needs) for m in found.messages] == [
        (("u", "v"), 2, ()),
        ((), 1, ()),
        ((), 1, (0, 1)),
    ]
    assert found.calls == (((0, 0), (0, 1), (1, 0)), ((2, 0),))


def test_fields_that_start_as_one_tensor_are_told_apart():
    found = plan(rules.make("dat", lr=0.1, order="cta"), X)
    assert found.calls == (((0, 0),), ((0, 1),))


@dataclass(frozen=True)
class Chatty(rules.Rule):
    """A rule that calls flow several times."""

    times: int
    lr: float = 0.1

    def update(self, s, grad, flow, t, lr):
        w = s["w"] - lr * grad
        for _ in range(self.times):
            (w,) = flow.mix(2.0 * w)
        return {"w": w}


def test_silent_and_chatty_rules():
    assert plan(Chatty(0), X).messages == ()
    assert [m.needs for m in plan(Chatty(3), X).messages] == [(), (0,), (0, 1)]
    with pytest.raises(ValueError, match=rf"Chatty sends {MOST_MESSAGES + 1} messages per round; {MOST_MESSAGES} at"):
        plan(Chatty(MOST_MESSAGES + 1), X)
