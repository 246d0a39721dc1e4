"""DDP and FSDP around a model that gossips on the same ranks are refused; in nodes they stay."""

import json

import pytest
import torch

import klatsch
from tests.support import rank_frameworks
from tests.support.processes import Ranks

NO_PARAMETERS = "no parameter of the optimizer has a gradient: FSDP has put others in their place"
REFUSED = {
    "ddp_before": "DistributedDataParallel is around this model",
    "ddp_before_and_the_model_evaluated_first": "DistributedDataParallel is around this model",
    "ddp_after": "DistributedDataParallel is around this model",
    "ddp_late": "DistributedDataParallel is around this model",
    "ddp_late_and_silent": "DistributedDataParallel is around this model",
    "ddp_compiled": "DistributedDataParallel is around this model",
    "fsdp_before": "FullyShardedDataParallel is around this model",
    "fsdp_before_with_own_parameters": "FullyShardedDataParallel is around this model",
    "fsdp_after": NO_PARAMETERS,
    "fsdp_after_with_own_parameters": "FullyShardedDataParallel is around this model",
    "fsdp2_before": "fully_shard (FSDP2) has cut the model into pieces over ranks that gossip",
    "fsdp2_after": NO_PARAMETERS,
}
ALLOWED = ("plain", "ddp_of_another_model", "ddp_that_is_gone", "ddp_that_is_gone_since", "ddp_of_one_rank")


@pytest.fixture(scope="module")
def answers(prepared, tmp_path_factory):
    """What every rank is answered, by case."""
    cases = [*REFUSED, *ALLOWED, "momentum_of_a_group"]
    ranks = Ranks(prepared, tmp_path_factory.mktemp("wrapped"), 3, "rank_frameworks.wrapped", cases=cases)
    ranks.succeed()
    return [json.loads(ranks.wait_for(f"found-{rank}")) for rank in range(3)]


def test_wrappers_that_average_before_gossip_are_refused_and_others_are_not(answers):
    for own in answers:
        for case, start in REFUSED.items():
            assert str(own[case]).startswith(start), (case, own[case])
            assert "train the model without it" in own[case] or "shard it over the GPUs of a host" in own[case]
        assert all(own[case] > 1e-6 for case in ALLOWED), own  # ranks with other data stay apart


def test_ranks_agree_on_the_momentum_of_groups(answers):
    for own in answers:
        said = own["momentum_of_a_group"]
        assert said.startswith("the ranks do not agree on the parameter groups: ranks 0, 1 have 4 tensors with lr 0.05")
        assert "momentum 0.9; rank 2 has 4 tensors with lr 0.05, weight_decay 0, momentum 0.5" in said


def inside_nodes_one_by_one():
    """The same training with plain algebra: two nodes, whose gradients are the means of two ranks."""
    P = torch.tensor(klatsch.topology.lazy(klatsch.topology.ring(2)).matrices[0].toarray(), dtype=torch.float32)
    models = [rank_frameworks.make_model(seed=0) for _ in range(2)]
    for t in range(rank_frameworks.ROUNDS):
        moved = []
        for node, model in enumerate(models):
            model.zero_grad()
            for rank in (2 * node, 2 * node + 1):
                inputs, targets = rank_frameworks.batch(rank, t)
                ((model(inputs) - targets).square().mean() / 2).backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            moved.append(rank_frameworks.flat(model) - rank_frameworks.LR * gradient)
        for model, x in zip(models, P @ torch.stack(moved), strict=True):
            torch.nn.utils.vector_to_parameters(x, model.parameters())
    return [rank_frameworks.flat(model) for model in models]


def test_inside_a_node_they_do_what_they_are_made_for(launch, tmp_path):
    launch(4, "rank_frameworks.inside_nodes", kinds=["ddp before", "ddp after", "fsdp"]).succeed()
    expected = inside_nodes_one_by_one()
    for rank in range(4):
        for kind, (x, consensus) in torch.load(tmp_path / f"inside-{rank}", weights_only=True).items():
            assert consensus > 1e-6, kind
            torch.testing.assert_close(x, expected[rank // 2], rtol=1e-5, atol=1e-6)  # sums are in another order
