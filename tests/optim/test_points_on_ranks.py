"""The query point and x on several ranks: looking at x in between changes nothing, and all agree on what it is."""

import pytest
import torch

from tests.support.processes import Ranks


@pytest.fixture(scope="module")
def found(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("points")
    Ranks(prepared, folder, 3, "rank_points.points").succeed()
    return [torch.load(folder / f"points-{rank}", weights_only=True) for rank in range(3)]


def test_there_and_back_changes_nothing(found):
    for rank in found:
        assert (rank["x"] - rank["query"]).abs().max() > 1e-3
        assert torch.equal(rank["back"], rank["query"])  # bits: same call
        assert torch.equal(rank["end"], rank["calm"])  # bits: same call


def test_gamma_is_that_of_x_in_both_modes(found):
    x = torch.stack([rank["x"] for rank in found])
    gamma = float((x - x.mean(0)).square().sum(-1).mean())
    assert gamma > 1e-6
    for rank in found:
        for mode in ("train", "eval", "merged"):
            assert rank[f"Gamma {mode}"] == pytest.approx(gamma, rel=1e-9)


def test_what_is_merged_is_x_in_both_modes(found):
    mean = torch.stack([rank["x"] for rank in found]).mean(0)
    for rank in found:
        torch.testing.assert_close(rank["merged"], mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(rank["merged again"], mean, rtol=0, atol=1e-14)


def test_buffers_are_merged_inside_and_each_ranks_own_afterwards(found):
    mean = torch.stack([rank["own buffer"] for rank in found]).mean(0)
    for rank in found:
        torch.testing.assert_close(rank["merged buffer"], mean, rtol=0, atol=1e-14)
        assert torch.equal(rank["buffer back"], rank["own buffer"])  # bits: a copy
        assert (rank["own buffer"] - mean).abs().max() > 1e-3


def test_steps_are_refused_in_eval_mode(found):
    for rank in found:
        for call in ("step", "finish"):
            assert "since optimizer.eval(), and takes no steps from there; call optimizer.train()" in rank[call]


def test_statistics_at_x_are_each_ranks_own(found):
    mean = torch.stack([rank["own statistics"] for rank in found]).mean(0)
    for rank in found:
        assert not torch.allclose(rank["own statistics"], mean)
        torch.testing.assert_close(rank["statistics"], mean)


def test_everything_is_said_once(found):
    for rank in found:
        statistics, merged = rank["heard"]
        assert "klatsch.recalibrate(model, batches)" in statistics
        assert "average_ has put the mean of all ranks' x into the model" in merged


def test_a_checkpoint_of_eval_mode_resumes_exactly(found):
    for rank in found:
        assert rank["resumed"] == 4
        assert torch.equal(rank["resumed x"], rank["x"])  # bits: a copy
        assert torch.equal(rank["resumed end"], rank["calm"])  # bits: same call
