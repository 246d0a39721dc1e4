"""How messages travel: the interface for nodes, optimizers and studies; `gloo` and `nccl` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from klatsch.ranks.agreement import Group, members
from klatsch.ranks.assembly import Assembly
from klatsch.ranks.failures import LinkError, MessageError
from klatsch.ranks.membership import Membership
from klatsch.topology import Topology

OnFailure = Literal["raise", "continue"]


class Links(ABC):
    """One rank's links to its neighbours, over a process group with one rank per node.

    A message is bytes (uint8), of which links understand only the tail. Every message of a round has its own tag;
    messages with one tag between two ranks arrive in the order in which they were sent. Receives of a round are posted
    (`expect`) before anything of it is sent, and only `received` and `sent` block, so no order of ranks can lock up. A
    neighbour may keep this rank waiting for `timeout` seconds.
    """

    survives = False  # whether this rank goes on without neighbours that fail

    def __init__(self, group: Group, topology: Topology, device: torch.device, timeout: float) -> None:
        self.group, self.topology, self.device, self.timeout = group, topology, device, timeout
        self.rank = dist.get_rank(group)
        self.membership = Membership(topology, self.rank)
        self.tail = len(self.membership)  # bytes at the end of every message: what its sender knows of the network
        self.lost: dict[int, LinkError] = {}  # neighbours that this rank goes on without
        self.bytes_sent, self.seconds_waited = 0, 0.0
        self._global = members(group)
        rounds = range(1, topology.period + 1)
        self._sources = [topology.neighbors(self.rank, t).tolist() for t in rounds]
        self._targets = [topology.receivers(self.rank, t).tolist() for t in rounds]
        self._memory: dict[tuple[int, int], Tensor] = {}

    @abstractmethod
    def expect(self, tag: int, t: int, like: Tensor) -> None:
        """Get ready for what the neighbours send in round t under a tag: as many bytes as this rank sends."""

    @abstractmethod
    def send(self, tag: int, t: int, message: Tensor) -> None:
        """Send a message to all that hear this rank in round t; it must not change until `sent(tag, t)`.

        Its last `tail` bytes are filled in here.
        """

    def sent(self, tag: int, t: int) -> None:
        """Wait until the message of round t under a tag has left, so that its memory can be reused."""

    def received(self, tag: int, t: int) -> list[tuple[int, Tensor]]:
        """What the neighbours sent under a tag, without the tails, once all of it is there.

        It is valid until the next `expect` of the tag.
        """
        arrived = self._arrived(tag, t)
        if self.membership.learn(memory[-self.tail :] for _, memory in arrived):
            self.take_stock(t)
        there = [(source, memory) for source, memory in arrived if source not in self.lost]
        return [(source, self._at_hand(source, memory[: -self.tail])) for source, memory in there]

    def absent(self, t: int) -> set[int]:
        """Ranks that are lost or left before round t; all of them if this rank left."""
        gone = self.membership.gone_by(t)
        return set(range(self.topology.size)) if self.rank in gone else gone | self.lost.keys()

    def refuse(self, source: int, t: int) -> None:
        """Fail, or go on without a neighbour, because it sent numbers that are not finite."""
        raise MessageError(self.rank, source, t)

    def give_up(self, source: int, t: int) -> None:
        """Go on without a neighbour, since another rank of this host does."""

    def take_stock(self, t: int) -> None:
        """Look at what is left of the network after a link is lost or a rank leaves."""

    @abstractmethod
    def together(self, t: int, what: str, leavers: bool = False) -> AbstractContextManager[Assembly]:
        """All ranks within reach, for means over them: all ask after the same round t, for the same thing.

        Also those that leave after the next round or later, if they are in it.
        """

    def tell_pace(self, rounds: int) -> None:
        """Tell the neighbours how many rounds this rank has done, where ranks catch up with each other."""

    def foremost(self, t: int) -> int:
        """The most rounds that a neighbour that is not absent in round t has told; 0 where nobody tells."""
        return 0

    @abstractmethod
    def drain(self) -> None:
        """Wait, at most for the timeout, until every message has left or its receiver is gone. Raises nothing."""

    def close(self) -> None:
        """Let the last messages leave, and end what runs in the background."""
        self.drain()

    def reopened(self, group: dist.ProcessGroup) -> Links:
        """Links over a fresh group, with no messages in flight."""
        return self

    @abstractmethod
    def _arrived(self, tag: int, t: int) -> list[tuple[int, Tensor]]:
        """Wait for the whole messages under a tag, by neighbour."""

    def _at_hand(self, source: int, message: Tensor) -> Tensor:
        """A message that has arrived, on the device of the state."""
        return message

    def _present(self, peers: list[list[int]], t: int) -> list[int]:
        absent = self.absent(t)
        return [peer for peer in peers[(t - 1) % len(peers)] if peer not in absent]

    def _room(self, tag: int, t: int, like: Tensor) -> list[tuple[int, Tensor]]:
        """Memory for the messages of round t under a tag, by neighbour; reused in every round."""
        sources = self._present(self._sources, t)
        for key in [(tag, k) for k in range(len(sources)) if (tag, k) not in self._memory]:
            self._memory[key] = torch.empty_like(like)
        return [(source, self._memory[tag, k]) for k, source in enumerate(sources)]


def backend(group: Group, device: torch.device) -> str:
    """What carries messages of states on a device; over gloo, some ranks may have a GPU and others not."""
    has_nccl = "cuda:nccl" in dist.get_backend_config(group) or dist.get_backend(group) == "nccl"
    return "nccl" if device.type == "cuda" and has_nccl else "gloo"


def open_links(
    group: Group,
    own: dist.ProcessGroup,
    topology: Topology,
    device: torch.device,
    timeout: float,
    on_failure: OnFailure,
    quorum: float,
    catch_up: bool = False,
) -> Links:
    """Links over NCCL between GPUs where the user's group has it, else over klatsch's own gloo group."""
    from klatsch.ranks.gloo import GlooLinks  # both kinds derive from Links
    from klatsch.ranks.nccl import NcclLinks

    if backend(group, device) == "gloo":
        return GlooLinks(own, topology, device, timeout, on_failure, quorum, catch_up)
    if on_failure == "continue":
        raise ValueError(
            "on_failure = 'continue' is not possible over NCCL, whose communicator ends with its first failure; "
            "use 'raise' with a Checkpointer, or init_process_group('gloo')"
        )
    if catch_up:
        raise ValueError(
            "catch_up = True is not possible over NCCL, where each exchange waits for both ends; use "
            "init_process_group('gloo'), or leave it out"
        )
    beside = GlooLinks(own, topology, torch.device("cpu"), timeout, "raise")
    return NcclLinks(group, topology, device, timeout, beside)
