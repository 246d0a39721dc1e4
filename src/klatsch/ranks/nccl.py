"""Messages between ranks over NCCL, one process per GPU: each exchange is one batch, in the same order on all ranks.

A neighbour that is gone or late is noticed by the watchdog of the process group, after the group's own timeout, and not
here; and seconds waited are not known.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.failures import MessageError
from klatsch.ranks.membership import Membership
from klatsch.topology import Topology


class NcclLinks:
    """The links of one rank to its neighbours; the same calls as `GlooLinks`."""

    def __init__(self, group: Any, topology: Topology, device: torch.device, timeout: float) -> None:
        if torch.cuda.current_device() != (device.index or 0):
            raise ValueError(
                f"the parameters are on {device} but the current device is cuda:{torch.cuda.current_device()}, which "
                f"NCCL would use; call torch.cuda.set_device({device.index or 0}) first"
            )
        self.group, self.topology, self.device, self.timeout = group, topology, device, timeout
        self.rank = dist.get_rank(group)
        self.lost: dict[int, Any] = {}
        self.membership = Membership(topology, self.rank)
        self.tail = len(self.membership)  # as in `GlooLinks`
        self.bytes_sent, self.seconds_waited = 0, 0.0
        self._global = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._wanted: dict[int, tuple[int, torch.dtype]] = {}
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._running: dict[int, tuple[list[Any], list[tuple[int, Tensor]]]] = {}
        # The communicator is made by the first operation, in which all ranks must take part; not all do in each round.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def absent(self, t: int) -> set[int]:
        """Ranks that have left before round t; all of them if this rank has."""
        ranks = range(self.topology.size) if self.membership.anyone_leaves else ()
        return {peer for peer in ranks if any(self.membership.gone_by(end, t) for end in (peer, self.rank))}

    def refuse(self, source: int, t: int) -> None:
        """Complain of a neighbour that has sent numbers that are not finite.

        Raises:
            LinkError: always.
        """
        raise MessageError(self.rank, source, t)

    def expect(self, tag: int, t: int, length: int, dtype: torch.dtype) -> None:
        """Remember what will come: NCCL wants receives in one batch with the sends."""
        self._wanted[tag] = length, dtype

    def send(self, tag: int, t: int, message: Tensor) -> None:
        """Exchange vectors with all neighbours of round t, in one batch."""
        length, dtype = self._wanted[tag]
        self.membership.tell(message[len(message) - self.tail :])
        operations, incoming, absent = [], [], self.absent(t)
        for k, source in enumerate(self.topology.neighbors(self.rank, t).tolist()):
            if source in absent:
                continue
            if (tag, k) not in self._memory:
                self._memory[tag, k] = torch.empty(length + self.tail, dtype=dtype, device=self.device)
            incoming.append((source, self._memory[tag, k]))
            operations.append(dist.P2POp(dist.irecv, self._memory[tag, k], self._global[source], self.group))
        for target in self.topology.receivers(self.rank, t).tolist():
            if target in absent:
                continue
            operations.append(dist.P2POp(dist.isend, message, self._global[target], self.group))
            self.bytes_sent += message.numel() * message.element_size()
        self._running[tag] = dist.batch_isend_irecv(operations) if operations else [], incoming

    def received(self, tag: int, t: int) -> list[tuple[int, Tensor]]:
        """What came under a tag; later work on the current stream waits for it, and for what was sent."""
        works, incoming = self._running.pop(tag)
        for work in works:
            work.wait()
        self.membership.learn(memory[len(memory) - self.tail :] for _, memory in incoming)
        return [(source, memory[: len(memory) - self.tail]) for source, memory in incoming]

    def sent(self, tag: int, t: int) -> None:
        """Nothing to do: `received` has waited for the whole batch."""

    def drain(self) -> None:
        """Wait until the GPU has done all exchanges."""
        torch.cuda.synchronize(self.device)

    def excused(self) -> AbstractContextManager[None]:
        """Nothing to say: the watchdog does not ask."""
        return nullcontext()

    def close(self) -> None:
        """The same as drain: there are no threads."""
        self.drain()

    def reopened(self, group: Any) -> NcclLinks:
        """The same links: a batch that has begun ends by itself on all ranks."""
        return self
