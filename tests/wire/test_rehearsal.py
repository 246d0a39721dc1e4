"""What a rule sends in a round is found by running it: fields that need no gradient travel early, in one message."""

from dataclasses import dataclass

import pytest
import torch

import klatsch
from klatsch import rules
from klatsch.wire.rehearsal import MOST_MESSAGES, Rehearsal, vectors

X = torch.zeros(5)
# By rule: the fields that travel early, and what the other messages of a round carry: fields, numbers, needed before.
TRAFFIC = {
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


@pytest.mark.parametrize("label", TRAFFIC)
def test_what_travels_early(label):
    (name, options), early, late = TRAFFIC[label]
    found = Rehearsal(rules.make(name, lr=0.1, **options), X).traffic
    assert found.early == early
    messages = found.messages[1:] if early else found.messages
    assert [(m.fields, [s.numel() for s in m.shapes], m.needs) for m in messages] == late
    if early:  # all of them in one message
        numbers = {"weight": 1}
        assert [s.numel() for s in found.messages[0].shapes] == [numbers.get(field, 5) for field in early]


@pytest.mark.parametrize("label", TRAFFIC)
def test_whole_vectors_are_counted_and_weights_are_not(label):
    (name, options), early, late = TRAFFIC[label]
    expected = len([field for field in early if field != "weight"]), sum(sizes.count(5) for _, sizes, _ in late)
    assert vectors(rules.make(name, lr=0.1, **options)) == expected


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
    found = Rehearsal(Own(), X).traffic
    assert found.early == ("u", "v")
    assert [(m.fields, len(m.shapes), m.needs) for m in found.messages] == [
        (("u", "v"), 2, ()),
        ((), 1, ()),
        ((), 1, (0, 1)),
    ]
    assert found.calls == (((0, 0, "u"), (0, 1, "v"), (1, 0, None)), ((2, 0, None),))


def test_fields_that_start_as_one_tensor_are_told_apart():
    found = Rehearsal(rules.make("dat", lr=0.1, order="cta"), X).traffic
    assert found.calls == (((0, 0, "x"),), ((0, 1, "w"),))


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
    assert Rehearsal(Chatty(0), X).traffic.messages == ()
    assert [m.needs for m in Rehearsal(Chatty(3), X).traffic.messages] == [(), (0,), (0, 1)]
    with pytest.raises(ValueError, match=rf"Chatty sends {MOST_MESSAGES + 1} messages per round; {MOST_MESSAGES} at"):
        _ = Rehearsal(Chatty(MOST_MESSAGES + 1), X).traffic


class Later(rules.Rule):
    """What it does in the first round is not what it does later."""

    lr = 0.1

    def init(self, x):
        return {"w": x, "y": x, "g": x}


class LaterNeeds(Later):
    def update(self, s, grad, flow, t, lr):
        (y,) = flow.mix(s["y"])
        y = grad if t == 1 else y + grad - s["g"]
        (w,) = flow.mix(s["w"] - lr * y)
        return {"w": w, "y": y, "g": grad}


class LaterTouched(Later):
    def update(self, s, grad, flow, t, lr):
        (w,) = flow.mix(s["w"] if t == 1 else 2 * s["w"] - s["y"])
        return {"w": w - lr * grad, "y": s["w"], "g": grad}


class Signs(Later):
    def update(self, s, grad, flow, t, lr):
        (y,) = flow.mix(s["y"])
        (w,) = flow.mix(s["w"] - lr * torch.where(y > 0, y.sign(), 0.5))
        return {"w": w, "y": y + grad, "g": grad}


def test_what_only_later_rounds_need_is_waited_for():
    assert Rehearsal(LaterNeeds(), X).traffic.messages[1].needs == (0,)


def test_what_is_not_untouched_in_every_round_does_not_travel_early():
    found = Rehearsal(LaterTouched(), X).traffic
    assert found.early == ()
    assert len(found.messages) == 1


def test_a_need_is_seen_through_any_operation():
    assert Rehearsal(Signs(), X).traffic.messages[1].needs == (0,)


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"y": None}, "returns a dictionary of w, g where the state is a dictionary of w, y, g; return all"),
        ({"more": X}, "returns a dictionary of w, y, g, more where"),
        ({"y": (X,)}, r"returns a tuple as y, which began as shape \(5,\); .* \(f,\) = flow\(v\)"),
        ({"y": X[:1]}, r"returns shape \(1,\) as y, which began as shape \(5,\)"),
    ],
)
def test_a_state_that_changes_its_fields_is_refused(changed, error):
    class Forgetful(Later):
        def update(self, s, grad, flow, t, lr):
            return {name: v for name, v in (s | changed).items() if v is not None}

    graph = klatsch.topology.ring(3)
    with pytest.raises(ValueError, match=error):
        _ = Rehearsal(Forgetful(), X).traffic
    with pytest.raises(ValueError, match=error.split(", which")[0]):
        klatsch.simulate(klatsch.problems.LeastSquares(3, dim=5), Forgetful(), graph, 5)


@pytest.mark.parametrize("name", rules.RULES)
def test_sums_of_flows(name):
    """Corrections and tracked gradients, which are zero over the network; push-sum's weight starts at 1 and is not."""
    wanted = {"d2": ("y", -0.5), "dat-d2": ("y", -0.5), "gt": ("z", 1.0), "dat-gt": ("z", 1.0), "kgt": ("z", 1.0)}
    wanted |= {f"{name}-adam": entry for name, entry in wanted.items()}
    found = Rehearsal(rules.make(name, lr=0.1), X).sums
    assert [(entry.field, entry.factor) for entry in found] == ([wanted[name]] if name in wanted else [])


def test_scheduled_rates_of_several_columns_join_the_vectors():
    """They are made as float64 on the CPU, whatever the vectors are; on a GPU torch would refuse to mix them."""
    rule = rules.make("dsgd", rules.Decay([0.1, 0.2], "cosine", 10))
    (sent,) = Rehearsal(rule, torch.zeros(3, 2, 5)).rounds[0][0]
    assert sent.dtype == torch.float32


def test_a_field_that_changes_by_more_than_flows_is_no_sum_of_them():
    class Leaning(rules.Rule):
        lr = 0.1

        def init(self, x):
            return {"w": x, "y": x * 0.0}

        def update(self, s, grad, flow, t, lr):
            return {"w": s["w"] - lr * grad, "y": s["y"] + flow(s["w"])[0] + 0.1 * s["w"]}

    assert Rehearsal(Leaning(), X).sums == []
