"""Ranks that are killed or stopped: real signals to real processes."""

import re
import signal

import torch

from tests.rank_scenarios import ENDURE_LR, problem_of
from tests.ranks import Ranks

SIZE, VICTIM = 5, 2
SURVIVORS = [0, 1, 3, 4]


def going(ranks):
    """Once all are in the middle of their rounds."""
    for rank in range(ranks.size):
        ranks.wait_for(f"going-{rank}")


def folded():
    """The ring of five without the victim: what its neighbours gave to it they keep."""
    P = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for i in range(SIZE):
        for j in ((i - 1) % SIZE, (i + 1) % SIZE):
            if VICTIM not in (i, j):
                P[i, j] = 1 / 3
    P += torch.diag(1 - P.sum(1))
    return P[SURVIVORS][:, SURVIVORS]


def test_the_others_go_on_without_a_killed_rank(tmp_path):
    ranks = Ranks(tmp_path, SIZE, "endure", on_failure="continue")
    going(ranks)
    ranks.kill(VICTIM)
    codes = ranks.codes()
    assert [codes[rank] for rank in SURVIVORS] == [0, 0, 0, 0], [ranks.errors(rank) for rank in SURVIVORS]
    assert codes[VICTIM] == -signal.SIGKILL
    found = {rank: torch.load(tmp_path / f"path-{rank}") for rank in SURVIVORS}

    P = folded()
    assert torch.allclose(P.sum(0), torch.ones(4, dtype=torch.float64))
    assert torch.equal(P, P.T)
    known = [t for t in range(401) if all(VICTIM in found[rank]["lost"][t] for rank in (1, 3))]
    assert 20 <= known[0] < 350  # it was killed in the middle
    problem = problem_of(SIZE)
    points = torch.stack([found[rank]["path"] for rank in SURVIVORS])  # (4, rounds + 1, d)
    for t in known[:-1]:
        g = problem.grad(points[:, t], t + 1, SURVIVORS)
        expected = P @ (points[:, t] - ENDURE_LR * g)
        torch.testing.assert_close(points[:, t + 1], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(points[:, t + 1].mean(0), (points[:, t] - ENDURE_LR * g).mean(0))

    at_once, later = (loss(problem, points[:, t].mean(0)) for t in (known[0], 400))
    assert later < 0.9 * at_once  # the survivors' own loss falls
    for rank in (1, 3):
        (warning,) = re.findall(r"RuntimeWarning: (.*)", ranks.errors(rank))
        assert re.fullmatch(
            rf"rank {rank}, round \d+: neighbour 2 is gone \(.+\); waited [\d.]+ s on edge .+; going on without it, "
            "its weight is this rank's own now",
            warning,
        )
    assert not ranks.errors(0)
    assert not ranks.errors(4)


def loss(problem, x):
    """Of the survivors: the mean of their f_i at x, by the gradient without noise."""
    calm = type(problem)(SIZE, dim=problem.dim, noise=0.0, heterogeneity=1.0, seed=3)
    return float(calm.grad(x.expand(4, -1), 1, SURVIVORS).mean(0).square().sum())


def test_a_killed_rank_ends_its_neighbours_with_a_reason(tmp_path):
    ranks = Ranks(tmp_path, SIZE, "endure", on_failure="raise", timeout=20)
    going(ranks)
    ranks.kill(VICTIM)
    assert ranks.codes(20) == [1, 1, -signal.SIGKILL, 1, 1]
    for rank in (1, 3):
        assert re.search(
            rf"LinkError: rank {rank}, round \d+: neighbour 2 is gone \(.*(closed|reset).*\); "
            rf"waited [\d.]+ s on edge (2 -> {rank}|{rank} -> 2)\n",
            ranks.errors(rank),
        )


def test_a_stopped_rank_is_late_and_not_gone(tmp_path):
    ranks = Ranks(tmp_path, SIZE, "endure", on_failure="raise", timeout=3)
    going(ranks)
    ranks.kill(VICTIM, signal.SIGSTOP)
    for rank in (1, 3):
        ranks.wait_for(f"code-{rank}", 30)
        assert re.search(
            rf"LinkError: rank {rank}, round \d+: neighbour 2 is late: its connection is open, but nothing moves; "
            rf"waited 3.\d s on edge",
            ranks.errors(rank),
        )
    ranks.kill(VICTIM)
    assert ranks.codes() == [1, 1, -signal.SIGKILL, 1, 1]  # and none crashes on its way out
    for rank in (0, 4):
        assert re.search(r"neighbour (1|3|0|4) is gone", ranks.errors(rank))


def test_a_late_rank_is_left_behind_and_ends_alone(tmp_path):
    ranks = Ranks(tmp_path, SIZE, "endure", on_failure="continue", timeout=2)
    going(ranks)
    ranks.kill(VICTIM, signal.SIGSTOP)
    for rank in SURVIVORS:
        ranks.wait_for(f"end-{rank}")
    ranks.kill(VICTIM, signal.SIGCONT)
    assert ranks.codes() == [0] * SIZE
    assert re.search(r"neighbour 2 is late", ranks.errors(1))
    for rank in (1, 3):
        assert torch.load(tmp_path / f"path-{rank}")["lost"][-1] == (2,)
    assert torch.load(tmp_path / f"path-{VICTIM}")["lost"][-1] in ((1, 3), (3, 1))


def test_push_sum_keeps_its_mass_when_a_rank_is_killed(tmp_path):
    """On a directed ring what a rank pushed to the dead one it keeps; those behind it are heard by nobody new."""
    ranks = Ranks(tmp_path, SIZE, "endure", rule="sgp", graph="directed_ring", on_failure="continue")
    going(ranks)
    ranks.kill(VICTIM)
    codes = ranks.codes()
    assert [codes[rank] for rank in SURVIVORS] == [0, 0, 0, 0], [ranks.errors(rank) for rank in SURVIVORS]
    for rank in SURVIVORS:
        found = torch.load(tmp_path / f"path-{rank}")
        assert torch.isfinite(found["path"]).all()
