"""Which way messages travel: NCCL between GPUs where the process group has it, gloo otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from klatsch.ranks.gloo import GlooLinks, OnFailure
from klatsch.ranks.nccl import NcclLinks
from klatsch.topology import Topology


def open_links(
    group: Any,
    own: Any,
    topology: Topology,
    device: torch.device,
    timeout: float,
    on_failure: OnFailure,
    quorum: float,
) -> GlooLinks | NcclLinks:
    """The links of this rank.

    Args:
        group: the user's process group, or None for all ranks.
        own: a gloo group of the same ranks, for klatsch alone.
        topology: who talks to whom.
        device: where the parameters are.
        timeout: seconds that a neighbour may keep this rank waiting.
        on_failure: "raise" or "continue".
        quorum: the share of all ranks that must be left within reach to continue.

    Raises:
        ValueError: what is wanted is not possible with NCCL.
    """
    if device.type == "cuda" and uses_nccl(group):
        if on_failure == "continue":
            raise ValueError(
                "on_failure = 'continue' is not possible over NCCL, whose communicator ends with its first failure; "
                "use 'raise' with a Checkpointer, or init_process_group('gloo')"
            )
        return NcclLinks(group, topology, device, timeout)
    return GlooLinks(own, topology, device, timeout, on_failure, quorum)


def uses_nccl(group: Any) -> bool:
    """Whether a process group moves CUDA tensors with NCCL."""
    return "cuda:nccl" in dist.get_backend_config(group) or dist.get_backend(group) == "nccl"
