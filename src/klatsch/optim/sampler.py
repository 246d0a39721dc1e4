"""A data set that is split over a crew, whoever is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Sampler

from klatsch.arguments import kind_of, whole
from klatsch.problems import draws
from klatsch.ranks.failures import warn

if TYPE_CHECKING:
    from klatsch.optim.gossip import Gossip

Place = tuple[int, int, int]  # the next round, from 1; which member of the crew this is, from 0; how many there are


class ElasticSampler(Sampler[list[int]]):
    """Batches for DataLoader(dataset, batch_sampler=...), split over those who are in the crew in each round.

        sampler = klatsch.ElasticSampler(dataset, optimizer, batch=256)
        while sampler.epoch < 10:
            for batch in DataLoader(dataset, batch_sampler=sampler):
                ...                                         # one step of the optimizer

    In round t the crew takes the samples (t - 1) batch, ..., t batch - 1 of an endless sequence, random orders of the
    data set one after the other, and every member its share of them. Where the crew is follows from the round alone:
    members agree without a message, a newcomer goes on where the others are, and after a restart the round, which the
    optimizer saves, is enough, also for another number of members.

    In every epoch of the data each sample comes once, but for those that nobody takes: the shares of a member that was
    killed or leaves, from its last gradient to the change of the crew, and of one that catches up or skips. With
    `num_workers`, a DataLoader draws some batches ahead, which a change of the crew comes too late for: in so many
    rounds, samples may be left out or come twice.

    Take one batch per round. To accumulate gradients, cut it into pieces.

    Args:
        dataset: the data set, or its length; the same on all members.
        crew: the optimizer; or a function that returns the next round, from 1, which member this is, from 0, and how
            many there are; by default there is only this one.
        batch: samples per round of the whole crew. A member's share is within one of batch / members. Where there are
            more members than that, each takes one sample, which it may share with another; a warning says so once.
        seed: of the random orders, on all members the same.
        shuffle: whether orders are random.
    """

    def __init__(
        self,
        dataset: Sized | int,
        crew: Gossip | Callable[[], Place] | None = None,
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not isinstance(dataset, Sized | int):
            raise ValueError(f"dataset is {kind_of(dataset)}, which has no length; give one that has, or its length")
        self.samples = whole(dataset if isinstance(dataset, int) else len(dataset), "samples of the dataset", 1)
        self.batch, self.seed = whole(batch, "batch", 1, self.samples), whole(seed, "seed", 0)
        self._order = lru_cache(maxsize=2)(self._drawn if shuffle else lambda epoch: torch.arange(self.samples))
        self._crew, self._last = crew, 0  # the last round of which a batch was taken
        self._has_warned = False  # of more members than samples
        self._facts = {"samples": self.samples, "batch": self.batch, "seed": self.seed, "shuffle": bool(shuffle)}

    @property
    def epoch(self) -> int:
        """The epoch of the data, from 0, in which the next batch begins."""
        return (self._place()[0] - 1) * self.batch // self.samples

    def __len__(self) -> int:
        """Batches from the next one to the end of this epoch of the data."""
        following = self._place()[0] - 1
        return -(-(self.epoch + 1) * self.samples // self.batch) - following

    def __iter__(self) -> Iterator[list[int]]:
        """The batches that are left of this epoch of the data, from the next round on."""
        if self._crew is not None:
            self._last = 0  # what was drawn ahead, and not used
        epoch = self.epoch
        while self.epoch == epoch:
            self._last, member, members = self._place()
            yield self.share(self._last, member, members)

    def share(self, t: int, member: int, members: int) -> list[int]:
        """The samples of a member in round t."""
        first, last = (self.batch * k // members for k in (member, member + 1))
        if members > self.batch and not self._has_warned:  # a newcomer must not end the training of the others
            self._has_warned = True
            warn(f"batch = {self.batch} for {members} members: some take the same samples; give a larger batch")
        places = range((t - 1) * self.batch + first, (t - 1) * self.batch + max(last, first + 1))
        return [int(self._order(k // self.samples)[k % self.samples]) for k in places]

    def state_dict(self) -> dict[str, int]:
        """Where it is. Whoever saves an optimizer, whose rounds it follows, need not save this."""
        return {"round": self._last} | self._facts

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in self._facts.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state has {name} = {state.get(name)}, and this sampler {value}; make it the same"
                )
        self._last = whole(state.get("round"), "round of the state", 0)

    def _place(self) -> Place:
        """The round of the next batch, which member this is, and of how many."""
        if self._crew is None:
            return self._last + 1, 0, 1
        t, member, members = self._crew() if callable(self._crew) else _place_of(self._crew)
        return max(t, self._last + 1), member, members  # a DataLoader may draw ahead

    def _drawn(self, epoch: int) -> Tensor:
        """A random order, by numbers that are the same on every machine."""
        once = torch.zeros(1, dtype=torch.long)
        keys = draws.whole_numbers(self.seed, draws.BATCHES, once + epoch, once, self.samples, 1 << 32)
        return keys[0, 0].argsort(stable=True)


def _place_of(optimizer: Gossip) -> Place:
    host = optimizer.host  # of several ranks, maybe, each with a share of its own
    return optimizer.rounds + 1, optimizer.rank * host.size + host.place, optimizer.topology.size * host.size
