"""The planner: a race of ways to train beside a clock, and its answer. No time limit decides here."""

import math
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems
from klatsch.clock import Clock, Links
from klatsch.planning import answers, of_any_size, race
from klatsch.planning.answers import curves
from klatsch.planning.race import (
    ABOVE,
    BELOW,
    BELOW_HEAVY,
    FINER,
    FIRST,
    HEAVY,
    LEARNING_RATES,
    MOST,
    PATIENCE,
    Answer,
    Runner,
    Trial,
    crossing,
    fitted,
    smoothed,
)
from klatsch.planning.ways import KINDS, Way

FAR = Links(1e7, 0.05)


def task(clock, machines=4, **options):
    given = {name: options.pop(name) for name in ("target", "params", "seeds") if name in options}
    make, _ = of_any_size("least-squares", machines, **{"dim": 30, "noise": 10.0} | options)
    return race.Task(make, clock, machines=machines, seconds=1e9, **given)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_where_errors_cross_the_target():
    steps, errors = [1, 10, 100], np.array([1.0, 0.1, 0.01])
    assert crossing(steps, errors, 0.1) == 10
    assert crossing(steps, errors, math.sqrt(0.1 * 0.01)) == pytest.approx(math.sqrt(10 * 100))
    assert crossing(steps, errors, 0.001) == math.inf
    assert crossing(steps, np.array([math.inf, 0.1, 0.01]), 0.05) == pytest.approx(10 * 10 ** (math.log10(2)))


def test_where_errors_are_heading():
    steps = [int(t) for t in np.geomspace(1, 1000, 40)]
    falling = np.array([5.0 / t for t in steps])
    assert fitted(steps, falling, 5.0 / 7000) == pytest.approx(7000, rel=0.01)
    assert fitted(steps, np.full(40, 0.5), 0.1) == math.inf
    assert fitted(steps, np.array([0.5 * t**0.1 for t in steps]), 0.1) == math.inf  # away from it
    assert fitted(steps, falling, 1e-9) == math.inf  # too far to say
    assert fitted(steps, np.where(np.arange(40) > 30, math.inf, falling), 0.001) == math.inf


def test_a_dip_by_chance_is_not_there_to_stay():
    errors = np.array([1.0, 1.0, 1.0, 0.01, 1.0, 1.0])[:, None]
    assert crossing([1, 2, 3, 4, 5, 6], errors[:, 0], 0.1) < 4
    assert crossing([1, 2, 3, 4, 5, 6], smoothed(errors)[:, 0], 0.1) == math.inf


# --- the same data on fewer nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options", [("least-squares", {"dim": 3, "noise": 0.0}), ("logistic", {"dim": 3, "samples": 8})]
)
def test_the_same_data_on_fewer_nodes(name, options):
    whole = problems.make(name, 8, **options)
    x = torch.randn(1, 1, 3, dtype=torch.float64)
    of_all = whole.gradient(x.expand(8, 1, 3), None)
    for nodes in (1, 2, 4):
        fewer = whole.on_fewer(nodes, 0)
        assert (fewer.nodes, fewer.dim) == (nodes, 3)
        torch.testing.assert_close(fewer.optimum, whole.optimum)
        found = fewer.gradient(x.expand(nodes, 1, 3), None)
        torch.testing.assert_close(found, of_all.reshape(nodes, -1, 1, 3).mean(1))
        made = problems.make(name, nodes, pool=8, **options)  # by name
        torch.testing.assert_close(made.gradient(x.expand(nodes, 1, 3), None), found)
    with pytest.raises(ValueError, match=r"pool = 8 for 3 nodes; give a multiple of 3"):
        problems.make(name, 3, pool=8, **options)


# --- learning rates -------------------------------------------------------------------------------------------------


class Known:
    """A task whose best learning rate is known, and may change with the rounds; the largest ones diverge."""

    def __init__(self, *best):
        self.best, self.asked = list(best), []

    def run(self, way, problem, rounds, rates, tick):
        self.asked.append((way, rounds, list(rates)))
        best = self.best.pop(0)
        errors = [1 + abs(LEARNING_RATES.index(r) - best) for r in rates]
        errors = [math.nan if LEARNING_RATES.index(r) > best + 2 else e for r, e in zip(rates, errors, strict=True)]
        return [1, rounds], np.array([[9.0] * len(rates), errors])


def around(best, below=BELOW):
    return LEARNING_RATES[max(0, best - below) : best + ABOVE + 1]


@pytest.mark.parametrize("dim, below", [(10, BELOW), (HEAVY, BELOW_HEAVY)])
@pytest.mark.parametrize("best", [[7, 7, 7], [7, 6, 4], [7, 8, 9], [0, 0, 0], [len(LEARNING_RATES) - 1] * 3])
def test_rates_around_the_best_stay_in_the_race(best, dim, below):
    """They follow it where it moves as runs get longer; of large problems there are fewer."""
    way, problem = Way(4, "dat", "ring", wire="int8"), SimpleNamespace(dim=dim)
    known, runner = Known(*best), Runner(way, problem, 1.0, LEARNING_RATES)
    for rounds in (64, 256, 1024):
        runner.run(known, rounds)
    exact = Way(4, "dat", "ring")  # rounding to int8 takes time, and is for those that win
    assert known.asked == [
        (exact, 64, LEARNING_RATES),
        (exact, 256, around(best[0], below)),
        (exact, 1024, around(best[1], below)),
    ]
    assert (runner.steps, runner.rates) == ([1, 1024], around(best[1], below))
    assert runner.best_after(1024) == max(LEARNING_RATES[best[2]], runner.rates[0])  # of those that are left


def test_ways_begin_with_the_rates_near_those_of_one_machine():
    asked = task(Clock(0.05, FAR), params=100_000)
    alone, problems_, most = race.starters(asked)
    assert [r.way for r in alone] == [Way(1, "dsgd"), Way(1, "momentum"), Way(1, "dat")]
    assert all(r.rates == LEARNING_RATES for r in alone)
    assert (sorted(problems_), most) == ([1, 2, 4], "")
    known = {"dsgd": 5, "momentum": 3, "dat": 8}
    for runner in alone:
        runner.run(Known(known[runner.way.kind]), FIRST)
    entrants = race.entrants(asked, alone, problems_)
    assert {r.way.machines for r in entrants} == {2, 4}
    for runner in entrants:
        assert set(around(known[KINDS[runner.way.kind].rates])) <= set(runner.rates) < set(LEARNING_RATES)
        assert runner.problem is problems_[runner.way.machines]


# --- who stays ------------------------------------------------------------------------------------------------------

ONE, REDUCED, RING = Way(1), Way(4), Way(4, "dsgd", "ring")


def on_its_way(way, errors, rounds, each=1.0):
    """A runner whose errors are a function of the round."""
    steps = sorted({int(t) for t in np.geomspace(1, rounds, 30)})
    return Runner(way, None, each, [0.1], steps, np.array([[float(errors(t))] for t in steps]))


def staying(runners, rounds, target=0.01):
    return [r.way for r in race.still_racing(runners, runners, target, rounds)]


def test_who_has_arrived_stops():
    assert staying([on_its_way(way, lambda t: 1 / t, 256) for way in (ONE, REDUCED, RING)], 256) == []


def test_a_way_whose_clock_has_passed_the_best_is_dropped():
    """The all-reduce is there after 100 s; after 256 rounds the ring is at 2.6 s, or at 260 s."""
    there = [on_its_way(way, lambda t: 1 / t, 256) for way in (ONE, REDUCED)]
    for each, stays in ((0.01, [RING]), (1.01, [])):
        assert staying([*there, on_its_way(RING, lambda t: 2.6 / t, 256, each)], 256) == stays


def test_a_way_that_is_heading_nowhere_is_dropped_but_not_at_once():
    there = [on_its_way(way, lambda t: 1 / t, 256) for way in (ONE, REDUCED)]
    stuck = on_its_way(RING, lambda t: 0.5, FIRST, 0.01)
    assert staying([*there, stuck], FIRST) == [RING]
    stuck = on_its_way(RING, lambda t: 0.5, 4 * FIRST, 0.01)
    assert staying([*there, stuck], 4 * FIRST) == []


def test_one_machine_and_one_all_reduce_are_kept_to_compare_with():
    """The better of each, however slow they are."""
    runners = [
        on_its_way(RING, lambda t: 1 / t, 256),
        on_its_way(Way(1, "dsgd"), lambda t: 8 / t, 256),
        on_its_way(Way(1, "dat"), lambda t: 4 / t, 256),
        on_its_way(Way(2), lambda t: 4 / t, 256, 10.0),
        on_its_way(Way(4), lambda t: 4 / t, 256, 7.0),
        on_its_way(Way(4, "dsgd", "hypercube"), lambda t: 4 / t, 256),
    ]
    assert staying(runners, 256) == [Way(1, "dat"), Way(4)]
    # One of each has arrived: no other has to.
    runners += [on_its_way(Way(1, "dat-d2"), lambda t: 1 / t, 256), on_its_way(Way(8), lambda t: 1 / t, 256)]
    assert staying(runners, 256) == []


def test_nothing_runs_for_ever():
    stuck = [on_its_way(way, lambda t: 0.5, PATIENCE) for way in (ONE, REDUCED, RING)]
    assert staying(stuck, PATIENCE) == []
    assert ONE in staying(stuck, PATIENCE - 1)
    slow = [on_its_way(way, lambda t: 2 / t**0.25, MOST) for way in (ONE, REDUCED, RING)]
    assert staying(slow, MOST) == []


# --- who wins -------------------------------------------------------------------------------------------------------


def trial(way, seconds, rounds=100.0):
    return Trial(way, 0.1, rounds, seconds / rounds, 0.01, rounds, rounds, 3, 200)


NEVER = Trial(ONE, 0.1, math.inf, 1.0, 0.5, math.inf, math.inf, tried=4096)


def test_machines_must_pay():
    """Fewer machines are taken where more are hardly faster, or bring less than a tenth of a machine each."""
    one = trial(ONE, 100.0)
    assert race.enough([one, trial(RING, 50.0)], one).way == RING
    assert race.enough([one, trial(RING, 50.0), trial(Way(2), 52.0)], one).way == Way(2)
    assert race.enough([one, trial(RING, 50.0), trial(Way(2), 53.0)], one).way == RING
    assert race.enough([one, trial(RING, 50.0), trial(Way(64), 20.0)], one).way == RING
    assert race.enough([one, trial(RING, 50.0), trial(Way(64), 15.0)], one).way == Way(64)
    assert race.enough([], one) is None
    assert race.enough([trial(Way(64), 1e6)], NEVER).way == Way(64)


# --- races ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return race.race(task(Clock(0.05, FAR), params=100_000, target=0.008))


@pytest.mark.slow
def test_more_machines_pay_where_noise_is_large(found):
    best = found.best
    assert best.way.machines > 1
    assert best.seconds < found.alone.seconds
    assert all(best.seconds <= race.ENOUGH * trial.seconds for trial in found.others if trial.seeds > 1)
    assert found.reduced.way.reduces
    assert (found.most, found.stopped) == ("", False)
    assert len({trial.way for trial in found.trials}) == len(found.trials)
    assert best.low <= best.rounds <= best.high
    assert best.seeds == 3


@pytest.mark.slow
def test_what_is_promised_comes_true(found):
    """Simulated in full, with seeds that the race has not seen: within the interval, widened as for so few seeds."""
    best, clock = found.best, Clock(0.05, FAR)
    make, _ = of_any_size("least-squares", 4, dim=30, noise=10.0)
    for seed in (7, 8):
        rule, graph = best.way.made([best.lr])
        rounds = math.ceil(4 * best.high)
        result = klatsch.simulate(
            make(best.way.machines, seed), rule, graph, rounds, 60, any_graph=True, progress=False, clock=clock
        )
        errors = smoothed(result.metrics["distance"].numpy())[:, 0]
        t = crossing(result.steps, errors, found.target)
        assert best.low / 3 <= t <= 3 * best.high
        params = task(clock, params=100_000).params
        assert clock.seconds(rule, graph, params, [round(t)])[0] == pytest.approx(t * best.each, rel=0.1, abs=0.2)


@pytest.mark.slow
def test_a_network_that_is_too_slow_is_not_used():
    slow = race.race(task(Clock(1e-4, Links(1e6, 0.5)), params=1_000_000, target=0.02))
    assert slow.best.way.machines == 1
    text = answers.lines(task(Clock(1e-4, FAR)), slow)
    assert text[0].startswith("one machine is enough: ")
    assert "the network is too slow, a round takes" in "\n".join(text)


@pytest.mark.slow
def test_it_says_no_to_a_target_below_the_noise():
    asked = task(Clock(0.05, FAR), machines=1, dim=5, target=1e-30)
    never = race.race(asked)
    assert never.best is None
    text = answers.lines(asked, never)
    assert text[0] == "no: nothing reaches distance 1e-30"
    assert "nearest: " in text[1]


@pytest.mark.slow
def test_not_more_machines_than_samples():
    def make(nodes, seed):
        problem = problems.LeastSquares(nodes, dim=5, noise=5.0)
        problem.samples = 3
        return problem

    few = race.race(race.Task(make, Clock(0.05, FAR), 0.2, machines=64, seconds=1e9))
    assert max(trial.way.machines for trial in few.trials) == 2
    assert few.most == "there are 3 samples, not one for each of 4 machines"


@pytest.mark.slow
def test_a_target_of_its_own():
    """By default it is what one machine has in the last rounds of 1,024."""
    asked = task(Clock(0.05, FAR), machines=1, dim=5)
    alone = race.race(asked)
    assert alone.best.way.machines == 1
    assert 1 < alone.best.low < 1024
    (first, *_), _, _ = race.starters(asked)
    steps, errors = asked.run(first.way, first.problem, 1024, LEARNING_RATES)
    last = errors[[step > 800 for step in steps]]
    assert last.min() <= alone.target <= np.nanmin(last.max(0))
    assert "  only one machine is allowed" in answers.lines(asked, alone)
    assert race.race(task(Clock(0.05, FAR), machines=1, dim=5, target=0.02)).target == 0.02


@pytest.mark.slow
def test_accuracy_is_to_grow():
    """An error is 1 - accuracy inside; what is said is the metric itself."""

    class Accurate(problems.LeastSquares):
        headline = problems.Headline("accuracy", "a number that grows to 1", largest=True)
        worst = MappingProxyType({"accuracy": 0.0})

        def metrics(self, x):
            return {"accuracy": 1 - super().metrics(x)["distance"].clamp(max=1.0)}

    asked = race.Task(lambda nodes, seed: Accurate(nodes, 10), Clock(0.05, FAR), 0.9, 1, seconds=1e9)
    found = race.race(asked)
    assert (found.metric, found.largest) == ("accuracy", True)
    assert found.target == pytest.approx(0.9)
    assert found.best.error <= 0.1
    never = race.race(race.Task(asked.make, asked.clock, 1.5, 1, seconds=1e9))
    assert answers.lines(asked, never)[0] == "no: nothing reaches accuracy 1.5"


@pytest.fixture
def looked_at(monkeypatch):
    """A clock on the wall that moves a second whenever somebody looks, and the race of a small problem by it."""
    make, _ = of_any_size("least-squares", 4, dim=5, noise=10.0)

    def run(seconds, told=None, machines=4):
        looks = iter(range(10**6))
        monkeypatch.setattr(race, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
        asked = race.Task(make, Clock(0.05, FAR), 0.2, machines, seconds=seconds)
        return asked, race.race(asked, told)

    return run


@pytest.mark.slow
def test_a_race_keeps_to_its_time_and_says_so(looked_at):
    heard = []
    asked, found = looked_at(480.0, lambda text, share: heard.append((text, share)))
    assert found.stopped
    assert any(
        "not sure: time was short, and not all ran to the end; give --minutes 40" in line
        for line in answers.lines(asked, found)
    )
    assert [share for _, share in heard] == sorted(share for _, share in heard)
    assert heard[-1][1] <= 0.99
    assert len(heard) < race.OVERTIME * asked.seconds + 10  # a run that is not done is given up


def test_what_had_no_time_is_said(looked_at):
    """One machine has just done its first rounds, and some ways with two of them, of which the promising ones go on."""
    asked, found = looked_at(170.0)
    assert found.untried == (4,)
    first, *_, last = answers.lines(asked, found)
    assert first.startswith("take 2 machines, ")
    assert last == "  not sure: time was short, and 4 machines or more were not tried; give --minutes 15"


@pytest.mark.slow
def test_time_that_is_left_is_for_what_was_put_off(looked_at):
    _, found = looked_at(199.0)
    assert found.untried == ()
    assert found.stopped


def test_what_was_put_off_begins_with_what_was_not_tried():
    """What was interrupted comes last; if all were tried, those go on that were given up early."""
    tried, early, late, hopeless = (
        race.Runner(Way(2, "dsgd", "ring", every), None, each, [0.1], [*steps], np.full((len(steps), 1), 0.5))
        for every, each, steps in ((1, 0.1, (16, 64, 256)), (4, 0.1, (16, 64)), (16, 0.1, ()), (64, 1e9, (16, 64)))
    )
    arrived = race.Runner(Way(1), None, 0.1, [0.1], [160, 2000], np.array([[0.5], [0.01]]))
    other = race.Runner(Way(4), None, 0.1, [0.1])
    runners = [arrived, tried, early, late, hopeless, other]
    assert race._put_off(runners, 0.1) == ([other, late], race.FIRST)
    assert race._put_off([*runners[:3], hopeless], 0.1) == ([early], race.FIRST * race.LONGER)


@pytest.mark.slow
def test_no_time_ends_a_race_that_has_enough(looked_at):
    _, found = looked_at(1e5)
    assert not found.stopped
    assert (found.best.seeds, found.alone.seeds) == (race.SEEDS, race.SEEDS)


def test_seeds_that_are_done_in_time_count(monkeypatch):
    """The timer stops the third one, or all of them."""
    asked, way = task(Clock(0.05, FAR), target=0.05), Way(2, "dat", "ring")
    trial = Trial(way, 0.01, 100.0, 0.05, 0.05, 100.0, 100.0, tried=128)

    def again(seeds):
        runs = iter(range(seeds))

        def run(self, *given):
            if next(runs, None) is None:
                raise race.TimeUpError
            return run_(self, *given)

        monkeypatch.setattr(race.Task, "run", run)
        return race.again(asked, trial, asked.problem(2), 0.05)

    run_ = race.Task.run
    assert again(9).seeds == race.SEEDS
    assert again(2).seeds == 2
    with pytest.raises(race.TimeUpError):
        again(0)


@pytest.mark.parametrize(
    "crossings, lr, rounds",
    [
        ([[5.0, 9.0, 7.0]] * 3, 1.0, (5, 5, 5)),
        ([[9.0, 4.0, math.inf], [9.0, 8.0, 3.0]], FINER[1], (4, 8, 8)),  # of two the slower
        ([[math.inf, math.inf, 6.0], *[[math.inf] * 3] * 2], FINER[2], (6, math.inf, math.inf)),  # one got there
        ([[math.inf] * 3] * 3, 1.0, (math.inf,) * 3),
    ],
)
def test_of_the_seeds_the_middle_one_counts(crossings, lr, rounds, monkeypatch):
    asked = task(Clock(0.05, FAR), target=0.05, seeds=len(crossings))
    given = iter([np.array(row) for row in crossings] * 2)
    monkeypatch.setattr(race.Task, "run", lambda self, *_: ([1], next(given)[None]))
    monkeypatch.setattr(race, "crossing", lambda steps, column, target: float(column[0]))
    trial = Trial(Way(2, "dat", "ring"), 1.0, 100.0, 0.05, 0.05, 100.0, 100.0, tried=128)
    found = race.again(asked, trial, asked.problem(2), 0.05)
    assert (found.lr, (found.low, found.rounds, found.high)) == (lr, rounds)


def test_winners_have_all_the_time_that_is_left(looked_at):
    """With one machine alone there are few of them."""
    _, found = looked_at(400.0, machines=1)
    assert (found.stopped, found.alone.seeds) == (False, race.SEEDS)


@pytest.mark.slow
def test_winners_run_again_also_without_seeds(monkeypatch):
    """At finer learning rates, and with the messages that they have."""
    ran, again = [], race.again
    monkeypatch.setattr(
        race, "again", lambda asked, trial, *given: ran.append(trial.way) or again(asked, trial, *given)
    )
    found = race.race(task(Clock(0.05, FAR), machines=2, target=0.05, seeds=1))
    assert found.best.way in ran
    assert len(ran) == len(set(ran))
    assert not found.stopped


@pytest.mark.slow
def test_all_sizes_and_rules_take_turns():
    asked = task(Clock(0.05, FAR), machines=8, params=100_000)
    alone, problems_, _ = race.starters(asked)
    for runner in alone:
        runner.run(Known(7), FIRST)
    ways = [r.way for r in race.entrants(asked, alone, problems_)]
    expected = {(way.machines, way.kind) for way in ways}
    assert {machines for machines, _ in expected} == {2, 4, 8}
    assert {kind for _, kind in expected} == set(KINDS)
    assert {(way.machines, way.kind) for way in ways[: len(expected)]} == expected


def test_what_talks_as_often_as_is_cheap_comes_first():
    """H = 4 hides what a round of gossip costs here, and H = 16 what an all-reduce does; the slowest needs 64."""
    costs = {1: 2.0, 4: 1.2, 16: 1.1, 64: 1.0}
    gossip = {Way(4, "dat", "ring", H): 0.1 * cost for H, cost in costs.items()}
    reduced = {Way(4, "dat", every=H): 0.1 * cost * (1 + (H == 4)) for H, cost in costs.items()}
    slow = {Way(4, "dsgd", every=H): 0.5 * cost for H, cost in costs.items()}
    ways = [*race.promising_first(gossip | reduced | slow, 0.1)]
    assert {*ways} == {*gossip, *reduced, *slow}
    assert {*ways[:3]} == {Way(4, "dat", "ring", 4), Way(4, "dat", every=16), Way(4, "dsgd", every=64)}


def test_a_problem_that_is_too_slow_is_refused(looked_at):
    with pytest.raises(
        ValueError, match=r"LeastSquares is too slow for a plan in 20 s here: .*give --minutes 6, or --dev"
    ):
        looked_at(20.0)


@pytest.mark.slow
def test_one_machine_is_shown_with_what_its_seeds_found(monkeypatch):
    """Of its rules one runs again; the single seed of another one was perhaps lucky."""
    monkeypatch.setattr(race, "again", lambda asked, trial, *_: replace(trial, rounds=9 * trial.rounds, seeds=3))
    monkeypatch.setattr(race, "chosen", lambda trials: trials[:1])
    found = race.race(task(Clock(0.05, FAR), machines=1, target=0.05))
    assert [t.seeds for t in found.trials] == [1, 1, 3]
    assert found.alone.seeds == 3


# --- the picture ----------------------------------------------------------------------------------------------------


def test_every_way_has_a_line_in_the_picture():
    ways = [
        Way(m, name, graph, H) for name, kind in KINDS.items() for graph in kind.graphs for m in (8, 16) for H in (1, 4)
    ]
    trials = [trial(ONE, 100.0), *(trial(way, 10.0 * way.every) for way in ways)]
    best = trials[1]
    figure = curves(Answer("distance", 0.01, best, trials[0], trials[2], (), tuple(trials)))
    (axis,) = figure.axes
    labels = axis.get_legend_handles_labels()[1]
    assert len(labels) == len(set(labels)) == len(ways) / 2 + 2  # and one machine, and what is recommended
    assert {"dsgd, ring", "dat, all-reduce/4", "one machine", "recommended"} <= set(labels)


def test_a_picture_of_a_target_that_nothing_reaches():
    (axis,) = curves(Answer("distance", 0.01, None, NEVER, None, (), (NEVER,))).axes
    assert not axis.lines
