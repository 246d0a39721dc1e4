"""Learning rates that change over a run: torch's own schedules, in every engine, column by column."""

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from tests.support.machine import ENGINES

STEPS = 40


@pytest.mark.parametrize(
    "schedule, make",
    [
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS)),
        ("linear", lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS)),
    ],
)
def test_schedules_are_torchs(schedule, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)
    scheduler, found = make(optimizer), rules.Decay(0.3, schedule, STEPS)
    for t in range(1, STEPS + 1):
        assert found(t) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        scheduler.step()
    assert found(STEPS) > 0


@pytest.mark.parametrize("schedule", ["cosine/10", "cosine/25%", "linear/10", "constant/10"])
def test_a_warm_up_grows_to_the_whole_rate_and_the_rest_decays(schedule):
    found, plain = rules.Decay(0.3, schedule, STEPS), rules.Decay(0.3, schedule.partition("/")[0], STEPS - 10)
    assert [found(t) for t in range(1, 11)] == pytest.approx([0.03 * t for t in range(1, 11)])
    assert [found(t) for t in range(11, STEPS + 1)] == pytest.approx([plain(t) for t in range(1, STEPS - 9)])
    assert rules.Decay(0.3, "cosine/100", STEPS)(STEPS) == pytest.approx(0.12)  # longer than the run


@ENGINES
@pytest.mark.parametrize("name", ["dsgd", "dat", "d2", "qg", "diloco"])
def test_columns_have_rates_and_schedules_of_their_own(name, engine):
    problem, graph = problems.LeastSquares(4, dim=5, heterogeneity=2.0), tp.ring(4)

    def run(lr, schedule):
        rule = rules.make(name, lr=rules.Decay(lr, schedule, STEPS))
        return klatsch.simulate(problem, rule, graph, STEPS, record=1, engine=engine).output

    columns = [(1e-3, "cosine"), (5e-4, "linear"), (5e-4, "constant")]
    together = run(*map(list, zip(*columns, strict=True)))
    for c, (lr, schedule) in enumerate(columns):
        torch.testing.assert_close(together[:, [c]], run(lr, schedule), rtol=1e-10, atol=1e-13)
    assert (together[:, 1] - together[:, 2]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0.1, "cosin", 5), "unknown schedule 'cosin'; did you mean cosine"),
        ((0.1, ["cosine", 3], 5), "unknown schedule 3"),
        ((0.1, 3, 5), "unknown schedule 3"),
        ((0.0, "cosine", 5), "lr = 0.0; give a number above 0"),
        (("0.1", "cosine", 5), "lr = '0.1'; give a number above 0"),
        (([0.1, 0.2], ["cosine", "linear", "constant"], 5), "3 schedules for 2 learning rates; give one, or one for"),
        ((0.1, "cosine/ten", 5), "schedule = 'cosine/ten'; write cosine/100 for a warm-up of 100 rounds, or cosine/5%"),
        ((0.1, "cosine/", 5), "schedule = 'cosine/'; write"),
        ((0.1, "cosine", 0), "steps = 0; give a whole number from 1 up"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        rules.Decay(*arguments)
