"""Links over NCCL, one process per GPU: each exchange is one batch, in the same order on all ranks.

The process group's watchdog notices a neighbour that is gone or late, after the group's own timeout. Waiting times are
unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.agreement import Group
from klatsch.ranks.assembly import Assembly
from klatsch.ranks.gloo import GlooLinks
from klatsch.ranks.links import Links
from klatsch.topology import Topology


class NcclLinks(Links):
    """The links of one rank over NCCL; `beside` are others over gloo, where all ranks come together."""

    def __init__(
        self, group: Group, topology: Topology, device: torch.device, timeout: float, beside: GlooLinks
    ) -> None:
        if torch.cuda.current_device() != (device.index or 0):
            raise ValueError(
                f"the parameters are on {device} but the current device is cuda:{torch.cuda.current_device()}, which "
                f"NCCL would use; call torch.cuda.set_device({device.index or 0}) first"
            )
        super().__init__(group, topology, device, timeout)
        self._beside, self._beside.membership = beside, self.membership
        self._incoming: dict[int, list[tuple[int, Tensor]]] = {}
        self._running: dict[int, list[dist.Work]] = {}
        # The first operation makes the communicator with all ranks; not all of them speak in every round.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def expect(self, tag: int, t: int, like: Tensor) -> None:
        self._incoming[tag] = self._room(tag, t, like)  # posted in one batch with the sends

    def send(self, tag: int, t: int, message: Tensor) -> None:
        targets = self._present(self._targets, t)
        self.membership.tell(message[-self.tail :])
        operations = [dist.P2POp(dist.irecv, v, self._global[peer], self.group) for peer, v in self._incoming[tag]]
        operations += [dist.P2POp(dist.isend, message, self._global[peer], self.group) for peer in targets]
        self._running[tag] = dist.batch_isend_irecv(operations) if operations else []
        self.bytes_sent += len(targets) * message.nbytes

    @contextmanager
    def together(self, t: int, what: str, leavers: bool = False) -> Iterator[Assembly]:
        before = self._beside.bytes_sent
        try:
            with self._beside.together(t, what, leavers) as everyone:
                yield everyone
        finally:
            self.bytes_sent += self._beside.bytes_sent - before

    def close(self) -> None:
        super().close()
        self._beside.close()

    def reopened(self, group: dist.ProcessGroup) -> NcclLinks:
        self._beside = self._beside.reopened(group)
        self._beside.membership = self.membership
        return self

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def _arrived(self, tag: int, t: int) -> list[tuple[int, Tensor]]:
        for work in self._running.pop(tag, []):  # later work on the current stream waits for the whole batch
            work.wait()
        return self._incoming[tag]
