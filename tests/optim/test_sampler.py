"""A data set split over a crew: in every epoch of the data each sample comes once, whoever comes, leaves or dies."""

import itertools
import json
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import klatsch
from klatsch import ElasticSampler

SAMPLES, BATCH = 103, 12


def sequence(rounds, seed=0):
    """What a crew takes in rounds 1, 2, ...: all of it in order."""
    alone = ElasticSampler(SAMPLES, batch=BATCH, seed=seed)
    return [sample for t in range(1, rounds + 1) for sample in alone.share(t, 0, 1)]


class Member:
    """One that draws a batch per round, as a training script does."""

    def __init__(self, start):
        self.round, self.place, self.taken = start, (0, 1), {}
        self.sampler = ElasticSampler(range(SAMPLES), lambda: (self.round, *self.place), batch=BATCH)
        self.batches = iter(())

    def step(self):
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.sampler)
            batch = next(self.batches)
        self.taken[self.round] = batch
        self.round += 1


def test_alone_every_epoch_is_the_whole_data_set_in_another_order():
    sampler = ElasticSampler(TensorDataset(torch.arange(SAMPLES)), batch=BATCH, seed=3)
    assert (sampler.epoch, len(sampler)) == (0, 9)
    passes = [list(sampler) for _ in range(4)]
    assert [len(batches) for batches in passes] == [9, 9, 8, 9]  # a batch of two epochs begins in the first of them
    assert all(len(batch) == BATCH for batches in passes for batch in batches)
    drawn = [sample for batches in passes for batch in batches for sample in batch]
    epochs = [drawn[k : k + SAMPLES] for k in range(0, 4 * SAMPLES, SAMPLES)]
    assert all(sorted(epoch) == [*range(SAMPLES)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert drawn == sequence(35, seed=3)
    assert drawn[:SAMPLES] != sequence(35, seed=4)[:SAMPLES]
    plain = ElasticSampler(SAMPLES, batch=BATCH, shuffle=False)
    assert plain.share(9, 1, 2) == [102, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(8))
def test_crews_that_change_at_random_leave_nothing_out_and_take_nothing_twice(seed):
    chance = random.Random(seed)
    crew, end, start = [Member(1) for _ in range(chance.randint(1, 4))], 150, 1
    taken = []  # all samples in order; None for those that nobody takes
    while start <= end:
        following = start + chance.randint(1, 40)
        for k, member in enumerate(crew):
            member.place = k, len(crew)
        dead = chance.choice(crew) if len(crew) > 1 and chance.random() < 0.4 else None
        last = chance.randint(start, following - 1)  # its last round, if it dies
        late = [*crew]
        while late:  # in any order: nobody waits for the others here
            member = chance.choice(late)
            if member.round == (last + 1 if member is dead else following):
                late.remove(member)
                continue
            member.step()
        for t, (k, member) in itertools.product(range(start, following), enumerate(crew)):
            size = BATCH * (k + 1) // len(crew) - BATCH * k // len(crew)
            taken += [None] * size if member is dead and t > last else member.taken.pop(t)
        assert not any(member.taken for member in crew)
        leavers = chance.sample(crew, chance.randint(0, len(crew) - 1))
        crew = [member for member in crew if member is not dead and member not in leavers] or [Member(following)]
        crew += [Member(following) for _ in range(chance.randint(0, 3))]
        start = following
    for first in range(0, len(taken), SAMPLES):  # in every epoch of the data
        epoch = sequence(start - 1)[first : first + SAMPLES]
        assert len({*epoch}) == len(epoch)
        assert all(sample in (None, due) for sample, due in zip(taken[first : first + SAMPLES], epoch, strict=True))


def test_a_newcomer_goes_on_where_the_others_are():
    first, newcomer = Member(1), Member(14)
    for _ in range(13):
        first.step()
    first.place, newcomer.place = (0, 2), (1, 2)
    for member in (first, newcomer):
        member.step()
    assert newcomer.sampler.epoch == first.sampler.epoch == 1
    assert len(newcomer.sampler) == len(first.sampler) == 18 - 14
    both = first.taken[14] + newcomer.taken[14]
    assert both == sequence(14)[-BATCH:]


def test_with_a_loader_and_an_optimizer():
    """Batches are drawn for the optimizer's next round, with another DataLoader, too, and after a restart."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        data, model = TensorDataset(torch.arange(float(SAMPLES))), torch.nn.Linear(1, 1)
        optimizer = klatsch.optim.DSGD(model.parameters(), lr=0.001)
        sampler = ElasticSampler(data, optimizer, batch=BATCH)
        drawn = []
        for workers, rounds in ((0, 4), (1, 20), (0, 26)):
            while optimizer.rounds < rounds:
                for (x,) in DataLoader(data, batch_sampler=sampler, num_workers=workers):
                    optimizer.zero_grad()
                    model(x[:, None] / SAMPLES).square().mean().backward()
                    optimizer.step()
                    drawn += [int(v) for v in x]
                    if optimizer.rounds == rounds:
                        break  # whatever was drawn ahead
        assert drawn == sequence(26)
    finally:
        dist.destroy_process_group()


PROGRAM = """
import json, sys, torch, torch.distributed as dist, klatsch
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
data, model = TensorDataset(torch.arange(103.0)), torch.nn.Linear(1, 1)
optimizer = klatsch.optim.DSGD(model.parameters(), lr=0.001)
sampler, drawn = klatsch.ElasticSampler(data, optimizer, batch=12), []
while sampler.epoch < 3:
    for x, in DataLoader(data, batch_sampler=sampler):
        optimizer.zero_grad()
        model(x[:, None] / 103).square().mean().backward()
        optimizer.step()
        drawn.append([int(v) for v in x])
json.dump(drawn, open(f"{sys.argv[1]}/{dist.get_rank()}", "w"))
optimizer.finish()
"""


@pytest.mark.slow
def test_ranks_share_every_epoch(torchrun, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = torchrun(2, script, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert [sample for shares in zip(*ranks, strict=True) for share in shares for sample in share] == sequence(26)


def test_it_goes_on_from_a_state():
    first, second = (ElasticSampler(SAMPLES, batch=BATCH) for _ in range(2))
    batches = iter(first)
    before = [next(batches) for _ in range(5)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [sample for batch in [*before, *second] for sample in batch] == sequence(9)
    with pytest.raises(ValueError, match="the state has batch = 12, and this sampler 13; make it the same"):
        ElasticSampler(SAMPLES, batch=13).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="round of the state = -1"):
        second.load_state_dict(first.state_dict() | {"round": -1})


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="which has no length"):
        ElasticSampler(iter(()), batch=1)
    with pytest.raises(ValueError, match="samples of the dataset = 0"):
        ElasticSampler([], batch=1)
    with pytest.raises(ValueError, match="batch = 6; give a whole number from 1 to 5"):
        ElasticSampler(5, batch=6)


def test_one_member_more_than_samples_ends_no_training():
    """Each of them has a sample in every round, and none is left out."""
    sampler = ElasticSampler(SAMPLES, batch=4)
    assert [len(sampler.share(1, k, 4)) for k in range(4)] == [1] * 4
    with pytest.warns(RuntimeWarning, match="batch = 4 for 5 members: some take the same samples; give a larger batch"):
        sampler.share(1, 0, 5)
    for members in (5, 7, 8, 9):  # it has warned
        taken = [sampler.share(2, k, members) for k in range(members)]
        assert all(len(share) == 1 for share in taken)
        assert [*dict.fromkeys(itertools.chain(*taken))] == sampler.share(2, 0, 1)
